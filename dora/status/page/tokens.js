// The tokens of an answer: what engine and trainer gave each, and where the two differ.

import { element } from "./dom.js";
import { count, number, plural, time } from "./format.js";

const VISIBLE = 0.01, STRONG = 1; // |difference| at which the tint begins, and is full
const EXACT = 6; // digits of a log-prob beside a difference
const LISTED = 5, SKIPPED = 8; // characters of the text that no token may show: specials, parts of characters

/** Each token: its place, text and log-probs; those of observations have none, and few answers have the trainer's. */
function tokensOf(k) {
  const isObserved = (i) => (k.observed ?? []).some(([start, end]) => start <= i && i < end);
  let sampled = 0;
  return (k.pieces ?? []).map((text, i) => {
    if (isObserved(i)) return { i, text };
    const engine = k.logprobs[i], trainer = k.trainer_logprobs?.[sampled++];
    return { i, text, engine, trainer, differs: trainer === undefined ? undefined : Math.abs(trainer - engine) };
  });
}

/** The answer cut at its tokens, as [text, token]. A token by itself may lack a space, or be part of a character. */
function cut(text, tokens) {
  const found = [];
  let at = 0;
  for (const token of tokens) {
    const word = token.text.trim(), start = word ? text.indexOf(word, at) : at;
    const end = word ? start + word.length : text.startsWith(token.text, at) ? at + token.text.length : at;
    if (start < 0 || start - at > SKIPPED || end === at) continue;
    found.push([text.slice(at, end), token]);
    at = end;
  }
  return [found, text.slice(at)];
}

function tinted([text, token]) {
  if (token.engine === undefined) return text;
  const trainer = token.trainer === undefined ? "" : `, trainer ${number(token.trainer)}, difference ${number(token.differs)}`;
  const node = element("span", { title: `log-prob: engine ${number(token.engine)}${trainer}` }, text);
  const share = Math.min(1, Math.log(token.differs / VISIBLE) / Math.log(STRONG / VISIBLE));
  if (share > 0) node.style.background = `color-mix(in srgb, var(--wrong) ${Math.round(10 + 35 * share)}%, transparent)`;
  return node;
}

/** The text of an answer, or of its tokens from `start` to `end`, tinted where engine and trainer differ. */
export function answerText(k, text = k.text, start = 0, end = undefined) {
  const [found, rest] = cut(text, tokensOf(k).slice(start, end));
  return [...found.map(tinted), rest];
}

/** An episode by its turns: what the policy said and called, its reward, and what the environment answered. */
export function transcript(k) {
  let start = 0, turn = 0;
  const isTimed = k.calls_s?.length === k.turn_rewards?.length; // a resumed run does not know the earlier times
  const parts = k.parts.map((u) => {
    const own = element("pre", {}, answerText(k, u.text, start, u.end)), size = plural(u.end - start, "token");
    start = u.end;
    if (u.role === "environment") return element("li", { class: "observed" }, element("p", {}, `Environment: ${size} observed, not trained`), own);
    const reward = k.turn_rewards?.[turn], seconds = isTimed ? k.calls_s?.[turn] : undefined;
    turn += 1;
    const said = [`Turn ${turn}: ${size}`, reward !== undefined && `reward ${number(reward)}`, seconds !== undefined && `answered in ${time(seconds)}`];
    const calls = (u.calls ?? []).map(([name, given]) => element("li", {}, name ? `${name}(${given})` : `not a valid call: ${given}`));
    return element("li", {}, element("p", {}, said.filter(Boolean).join(", ")), own, ...(calls.length ? [element("ul", { "aria-label": "Calls" }, calls)] : []));
  });
  const more = k.num_parts - k.parts.length;
  return element("ol", { class: "transcript" }, parts, ...(more > 0 ? [element("li", { class: "quiet" }, `and ${count(more)} more`)] : []));
}

/** What the reward is made of, if it has several parts. */
export function termsText(k) {
  const turns = (k.turn_rewards ?? []).reduce((sum, x) => sum + x, 0);
  const parts = [...(k.terms ?? []), ...(turns ? [["turns", turns]] : [])];
  return parts.length > 1 ? parts.map(([name, x]) => `${name} ${number(x)}`).join(", ") : "";
}

/** What the environment measured. */
export const metricsText = (k) => (k.metrics ?? []).map(([name, x]) => `${name} ${number(x)}`).join(", ");

/** The log-probs in figures: where they differ most, or the least likely tokens. */
export function logprobs(k) {
  const tokens = tokensOf(k).filter((token) => token.engine !== undefined), compared = tokens.filter((token) => token.differs !== undefined);
  if (!tokens.length) return null;
  const mean = (rows, of) => rows.reduce((sum, token) => sum + of(token), 0) / rows.length;
  const differs = (token) => token.differs, isCompared = compared.length > 0;
  const rows = (isCompared ? compared.sort((one, other) => other.differs - one.differs) : tokens.sort((one, other) => one.engine - other.engine)).slice(0, LISTED);
  const said = isCompared
    ? `engine and trainer differ by ${number(mean(compared, differs))} on average, ${number(rows[0].differs)} at most`
    : `${number(mean(tokens, (token) => token.engine))} on average, lowest ${number(rows[0].engine)}`;
  const headings = ["token", "position", "engine", ...(isCompared ? ["trainer", "difference"] : [])];
  const cells = (token) => [JSON.stringify(token.text), count(token.i + 1), number(token.engine, EXACT), ...(isCompared ? [number(token.trainer, EXACT), number(token.differs)] : [])];
  const align = (i) => (i ? { class: "number" } : {});
  return element("details", { class: "logprobs" },
    element("summary", {}, `Log-probs of ${plural(isCompared ? compared.length : tokens.length, "token")}: ${said}`),
    element("p", { class: "quiet" }, isCompared ? `The largest differences between the engine, under v${k.version}, and the trainer, under v${k.step}. In the answer, tokens with a difference of at least ${VISIBLE} are tinted.` : "The least likely tokens. The trainer sends its log-probs of one answer per micro-batch."),
    element("table", {},
      element("tr", {}, headings.map((text, i) => element("th", { scope: "col", ...align(i) }, text))),
      ...rows.map((token) => element("tr", {}, cells(token).map((text, i) => element("td", align(i), text)))),
    ),
  );
}
