// What users ask of the run, with its token: each request is asked back once, and has an id under which it is done once.

import { byId, changed, element, fill, say } from "./dom.js";
import { count, plural, time } from "./format.js";
import { Refused, send, setToken } from "./source.js";

const MAX_SERVERS = 200, ENDED = ["finished", "interrupted", "failed"];
const VERBS = { add: "add", recall: "take back server", drain: "drain server", remove: "remove server", evaluate: "evaluate", stop: "stop the run" };

let shown = null; // the latest status
let pending = null; // the request that is asked back: where it is sent, and its body

/** What was asked, by whom, and what came of it. */
function showRequests(s) {
  byId("requests-section").hidden = !s.requests.length;
  if (!changed("requests", s.requests)) return;
  fill("requests", ["at", "who", "what", "result"], [...s.requests].reverse().map((q) => [
    time(q.at), q.by || "not known", `${VERBS[q.verb] ?? q.verb} ${q.target}`, q.refused ? `refused: ${q.refused}` : "granted",
  ]));
}

function showServers(s) {
  const rows = s.instances.slice(0, MAX_SERVERS).map((i) => [i.instance, i.url, i.asked]);
  if (!changed("acts-servers", rows)) return; // a button that is being clicked stays
  fill("acts-servers", ["server", "address", "asked for", "to do"], rows.map(([number, url, asked]) => {
    const acts = asked ? ["recall", ...(asked === "drain" ? ["remove"] : [])] : ["drain", "remove"];
    return [number, url || "none while it is down", asked || "–", element("span", { class: "buttons" }, acts.map((act) => button(act, number)))];
  }));
  if (s.instances.length > MAX_SERVERS) byId("acts-servers").append(element("caption", {}, `the first ${MAX_SERVERS} of ${count(s.instances.length)}: dora instances acts on the others`));
}

function button(act, number) {
  const [name] = SERVER_ACTS[act], node = element("button", { "aria-label": `${name} server ${number} …` }, `${name} …`);
  node.addEventListener("click", () => askAboutServer(act, number));
  return node;
}

/** `info`: whether this server takes requests to the run. */
export function showActs(s, info) {
  shown = s;
  showRequests(s);
  byId("acts").hidden = !info?.takes_requests || ENDED.includes(s.phase);
  if (!byId("acts-panel").hidden) showServers(s);
}

// -- asking -----------------------------------------------------------------------------------------------------------

const SERVER_ACTS = {
  drain: ["Drain", (i) => `It gets no new answers to write. Of its ${plural(i.residents, "answer")} under way, those for which other servers have room move there; the others are completed where they are. It keeps running with its weights, until you take it back.`],
  recall: ["Take back", () => "It gets weights and new answers to write again."],
  remove: ["Remove", (i) => `It is drained: of its ${plural(i.residents, "answer")} under way, those for which other servers have room move there, and the others are completed where they are. Once it is empty it leaves the run. The run ends its process if it has started it; otherwise the process is left running.`],
};

function askAboutServer(act, number) {
  const i = shown.instances.find((row) => row.instance === number), [name, text] = SERVER_ACTS[act];
  if (i) ask(`${name} server ${number}?`, text(i), name, `instances/${act === "recall" ? "add" : act}`, { instance: String(number) });
}

/** Show what a request will do. It has its id from here on, so that it is done once, however often it is sent. */
function ask(title, text, yes, path, body) {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  pending = { path, body: { ...body, id, by: byId("acts-by").value.trim() } };
  say("ask-title", title);
  say("ask-text", text);
  say("ask-said", "");
  say("ask-yes", yes);
  byId("ask-yes").disabled = false;
  byId("ask").showModal();
}

async function confirmed() {
  const request = pending;
  if (!request) return;
  byId("ask-yes").disabled = true;
  say("ask-said", "Sending …");
  try {
    answered(request, `The run says: ${await send(request.path, request.body)}.`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status === 401) forget();
    if (error.status) return answered(request, `Refused: ${error.said || error.message}.`);
    say("ask-said", "No answer came, so it may have been done or not. You can send it again: it is done once.");
    byId("ask-yes").disabled = false;
  }
}

function answered(request, text) {
  say("acts-said", text);
  if (pending === request) byId("ask").close();
}

function forget() {
  setToken("");
  byId("acts-panel").hidden = true;
  byId("acts-form").hidden = false;
}

byId("acts-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setToken(byId("acts-token").value);
  try {
    await send("run/token");
    byId("acts-token").value = "";
    byId("acts-form").hidden = true;
    byId("acts-panel").hidden = false;
    say("acts-said", "");
    showServers(shown);
  } catch (error) {
    forget();
    say("acts-said", error.status === 401 ? "That is not the token of this run." : "The run is not responding. Try again.");
  }
});
byId("act-forget").addEventListener("click", forget);
byId("act-evaluate").addEventListener("click", () => ask(
  `Evaluate ${shown.newest_version === null ? "the newest version" : `v${shown.newest_version}`} now?`,
  "The newest version answers the held-out prompts, beside the training and within its share of the servers, as in an evaluation that is due. If another version is being evaluated, it comes next; an older version that waits for its turn is then skipped.",
  "Evaluate", "run/evaluate", {}));
byId("act-stop").addEventListener("click", () => ask(
  "Stop the run?",
  "It ends as with Ctrl-C: nothing new is begun, the trainer writes a checkpoint, and then all processes of the run end, this page included. Everything in flight is kept: dora run --resume with the folder of the run continues it.",
  "Stop the run", "run/stop", {}));
byId("add-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const url = byId("add-url").value.trim();
  ask("Add this server?", `${url} is examined: it must answer, hold a model of the same shapes, and take requests as long as those of this run. Then it is given the newest version, and work. It is sent the prompts, and the key DORA_ENGINE_API_KEY if the run has one.`, "Add", "instances/add", { instance: url });
});
byId("ask-yes").addEventListener("click", confirmed);
byId("ask-no").addEventListener("click", () => byId("ask").close());
byId("ask").addEventListener("close", () => { if (!byId("ask").open) pending = null; }); // it may be open again: the event comes late
