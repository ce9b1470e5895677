// The page: fetches what is new every two seconds, and shows it. If the run does not respond, everything stays.

import { showActs } from "./acts.js";
import { setNeighbors } from "./colors.js";
import { Cards } from "./curves.js";
import { alarmText, showDetails } from "./details.js";
import { byId, changed, element, say } from "./dom.js";
import { count, percent, time } from "./format.js";
import { showForming } from "./forming.js";
import { showEvidence, showLedger } from "./ledger.js";
import { Samples } from "./samples.js";
import { Refused, Rows, get } from "./source.js";
import { Timeline } from "./timeline.js";

const PAUSE_MS = 2000, MAX_PAUSE_MS = 30_000, SAMPLES_EVERY = 5, ENDED = ["finished", "interrupted", "failed"];

const timeline = new Timeline(), cards = new Cards(), samples = new Samples();
const steps = new Rows("data/steps"), spans = new Rows("data/timeline");
let shown = null; // the latest status
let info = null, answeredAt = null, failures = 0, rounds = 0;

function showHeader(s) {
  setNeighbors(s.max_staleness + 2);
  document.title = `${percent(s.progress)} · ${s.run_id}`;
  say("run", s.run_id);
  say("settings", `${s.strategy}, K = ${s.max_staleness}`);
  say("sentence", s.sentence);
  say("task", s.task);
  byId("progress").value = s.progress;
  const left = s.eta_s === null || ENDED.includes(s.phase) ? "" : `, about ${time(s.eta_s)} left`;
  say("progress-text", `${s.num_steps ? `${count(s.steps_trained)} of ${count(s.num_steps)} steps trained` : `${percent(s.progress)} of the answers graded`} · ${time(s.uptime_s)} elapsed${left}`);
  byId("down").replaceChildren(...s.down.map((text) => element("div", {}, text))); // no alert: the times change
  const raised = s.alarms.filter((a) => a.cleared === null).map(alarmText);
  if (changed("warnings", [s.problems, raised])) byId("warnings").replaceChildren(...[...raised, ...s.problems].map((text) => element("div", {}, text)));
}

function show(s, groups) {
  shown = s;
  showHeader(s);
  timeline.show(s.uptime_s);
  cards.status(s);
  showForming(s, groups);
  showLedger(s);
  showEvidence(s, info);
  showActs(s, info);
  if (byId("details").open) showDetails(s, info?.live ?? true);
}

function connection(kind, text) {
  const node = byId("connection");
  node.className = kind;
  say("connection", text);
}

/** Fetch and show what is new; return whether there will be more. */
async function round() {
  const [s, groups, told] = await Promise.all([get("data/status").then((found) => found ?? get("status")), get("data/groups"), get("data/info")]);
  if (shown && s.run_id !== shown.run_id) location.reload(); // another run has this address now
  info = told;
  await Promise.all([steps.more(), spans.more()]);
  const start = performance.now(), rows = steps.take(), buckets = spans.take();
  cards.add(rows);
  timeline.addSteps(rows.filter((x) => x.kind === "step"));
  timeline.add(buckets);
  show(s, groups);
  await null; // charts are drawn in microtasks
  if (!rounds) performance.mark("shown");
  performance.measure("update", { start });
  if (rounds++ % SAMPLES_EVERY === 0 || ENDED.includes(s.phase)) await samples.refresh();
  const isOver = ENDED.includes(s.phase);
  connection(isOver ? "" : "live", isOver ? s.phase : info?.live === false ? "not running; this is its record" : "live");
  return !isOver || info?.live !== false;
}

async function loop() {
  let goesOn = true;
  try {
    if (!document.hidden || !shown) goesOn = await round();
    if (!document.hidden) answeredAt = new Date();
    failures = 0;
  } catch (error) {
    failures += 1;
    lost(error);
  }
  if (goesOn) setTimeout(loop, Math.min(MAX_PAUSE_MS, PAUSE_MS * 2 ** Math.min(failures, 4)));
}

/** Show that the run is not responding. What was shown before stays. */
function lost(error) {
  console.warn(error);
  if (!(error instanceof Refused)) return connection("lost", `The page failed: ${error.message}. Trying again.`);
  if (error.said) return connection("lost", `${error.said.replace(/\.$/, "")}. Trying again.`);
  if (shown && ENDED.includes(shown.phase)) return connection("", `${shown.phase}; this was its last status`);
  const since = answeredAt ? ` It last responded at ${answeredAt.toLocaleTimeString()}.` : "";
  connection("lost", `The run is not responding: it has ended, or cannot be reached.${since} Trying again.`);
}

byId("details").addEventListener("toggle", () => shown && byId("details").open && showDetails(shown, info?.live ?? true));
document.addEventListener("visibilitychange", () => shown && !document.hidden && timeline.draw());
loop();
