// Sampled answers, newest first: prompt, answer, reference, reward and what it is made of, version, log-probs.
// Everything in them is text.

import { byId, element, say } from "./dom.js";
import { chip } from "./forming.js";
import { count, number, plural } from "./format.js";
import { Refused, Rows, setToken } from "./source.js";
import { answerText, logprobs, metricsText, termsText, transcript } from "./tokens.js";

const AT_ONCE = 5, KEPT = 500, EXAMPLE_LENGTH = 240;

/** trained, evaluation or left out. */
const kindOf = (k) => (["trained", "evaluation"].includes(k.outcome ?? "trained") ? (k.outcome ?? "trained") : "left out");

function outcomeText(k) {
  if (kindOf(k) === "trained") return `trained in step ${count(k.step + 1)}`;
  return kindOf(k) === "evaluation" ? "held-out" : `left out: ${k.outcome.replace(/^\w+: /, "")}`;
}

function sampleNode(k) {
  const field = (name, text) => [element("dt", {}, name), element("dd", {}, element("pre", {}, text))];
  const answer = k.parts?.length ? [element("dt", {}, "Episode"), element("dd", {}, transcript(k))] : field("Answer", answerText(k));
  const reward = k.reward === null ? "not graded" : `reward ${number(k.reward)}`;
  const cut = k.truncated ? `cut off (${k.truncated})` : "";
  return element("article", { class: "sample" },
    element("div", { class: "what" }, chip(k.version), element("strong", {}, reward), element("span", {}, termsText(k)), element("span", {}, outcomeText(k)), element("span", { class: "quiet" }, [plural(k.num_tokens ?? k.tokens.length, "token"), cut].filter(Boolean).join(", "))),
    element("dl", {}, ...field("Prompt", k.prompt), ...answer, ...(k.answer ? field("Reference", k.answer) : []), ...(metricsText(k) ? field("Measured", metricsText(k)) : []), ...(k.verdicts ?? []).flatMap(([judge, text]) => field(`Judge ${judge}`, text))),
    ...[logprobs(k)].filter(Boolean),
  );
}

/** A text in one short line, without the marks of a chat template. */
function inWords(text) {
  const words = text.replace(/<\|[^|<>]*\|>/g, " ").replace(/\s+/g, " ").trim();
  return words.length > EXAMPLE_LENGTH ? `${words.slice(0, EXAMPLE_LENGTH)} …` : words;
}

/** One prompt of the task. */
function exampleText(k) {
  return `One of its prompts: “${inWords(k.prompt)}”${k.answer ? `; the expected answer: “${inWords(k.answer)}”` : ""}.`;
}

export class Samples {
  constructor() {
    this.source = new Rows("data/samples");
    this.kept = []; // newest first
    this.first = 0; // index of the first one shown
    byId("sample-filter").addEventListener("change", () => this.turn(0));
    byId("newer").addEventListener("click", () => this.turn(this.first - AT_ONCE));
    byId("older").addEventListener("click", () => this.turn(this.first + AT_ONCE));
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setToken(byId("token").value);
      this.refresh().catch(() => say("samples-note", "The run is not responding. Try again."));
    });
  }

  /** Fetch what is new. */
  async refresh() {
    try {
      await this.source.more();
      const rows = this.source.take();
      byId("token-form").hidden = true;
      if (!rows.length && this.kept.length) return;
      this.kept = [...rows.reverse(), ...this.kept].slice(0, KEPT);
      if (this.kept.length && !byId("example").textContent) say("example", exampleText(this.kept[this.kept.length - 1]));
      this.turn(this.first && this.first + rows.length);
    } catch (error) {
      if (!(error instanceof Refused) || ![401, 403].includes(error.status)) throw error;
      byId("token-form").hidden = false;
      say("samples-note", byId("token").value ? "That is not the status token of this run." : "");
    }
  }

  turn(first) {
    const filter = byId("sample-filter").value, chosen = this.kept.filter((k) => filter === "all" || kindOf(k) === filter);
    this.first = Math.max(0, Math.min(first, chosen.length - 1));
    const shown = chosen.slice(this.first, this.first + AT_ONCE);
    byId("samples").replaceChildren(...shown.map(sampleNode));
    byId("newer").disabled = this.first === 0;
    byId("older").disabled = this.first + AT_ONCE >= chosen.length;
    say("samples-note", shown.length ? `${this.first + 1} to ${this.first + shown.length} of the latest ${chosen.length}, newest first` : "No answers are kept.");
  }
}
