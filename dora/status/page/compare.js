// The page of `dora compare`: figures and curves of several runs.

import { Card } from "./curves.js";
import { byId, element, fill } from "./dom.js";
import { count, number, percent, time } from "./format.js";

const found = await (await fetch("data/comparison")).json();
const letters = found.runs.map((_, i) => String.fromCharCode(65 + i));
const signed = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(3)}`;
const score = (one) => one && `${number(one.mean)} (v${one.version})`;

const names = [...new Set(found.runs.flatMap((run) => run.held_out.map((one) => one.name)))];
fill("runs", ["", "Run", "", "Steps", "Time", "Trained tokens/s", "Staleness", "Trainer idle", ...names.flatMap((name) => [`${name}: final`, "best"])],
  found.runs.map((run, i) => [
    letters[i], run.run_id, run.phase, run.steps, time(3600 * run.hours), { number: run.steps ? count(run.trained_tokens_per_s) : "–" },
    { number: run.staleness === null ? "–" : run.staleness.toFixed(2) }, { number: percent(run.idle_share) },
    ...names.flatMap((name) => {
      const own = run.held_out.find((one) => one.name === name);
      return [score(own?.final), score(own?.best)];
    }),
  ]));
fill("differences", ["Set", "", "Difference", "95 % interval", "Prompts", ""],
  found.differences.map((one) => [
    one.name, `${letters[one.run]} (v${one.versions[1]}) − A (v${one.versions[0]})`, { number: signed(one.mean) },
    `${signed(one.interval.low)} to ${signed(one.interval.high)}`, one.prompts, one.interval.method,
  ]));
byId("not-paired").replaceChildren(...found.not_paired.map((text) => element("p", {}, text)));
fill("settings", ["", ...letters], found.settings.map((one) => [one.key, ...one.values]));

/** The curves of one kind: the x of any run, with null where another run has no value; lines are drawn across. */
function show(heading, at) {
  const axis = at ? "minutes" : "steps", own = found.runs.map((run) => new Map((run.curves[heading] ?? []).map((point) => [point[at], point[2]])));
  const x = [...new Set(own.flatMap((points) => [...points.keys()]))].sort((a, b) => a - b);
  const series = own.map((points, i) => [letters[i], x.map((one) => points.get(one) ?? null)]);
  const latest = own.flatMap((points, i) => (points.size ? [`${letters[i]} ${number([...points.values()].at(-1))} `] : []));
  const card = new Card(heading, `${heading}, over ${axis}`, { axis });
  card.show(x, series, latest);
  return card;
}

function draw() {
  const at = byId("axis").value === "minutes" ? 1 : 0;
  const headings = [...new Set(found.runs.flatMap((run) => Object.keys(run.curves)))];
  byId("cards").replaceChildren(...headings.map((heading) => show(heading, at).node));
}

byId("axis").addEventListener("change", draw);
draw();
