// The token ledger, and C1, C2, C3 with their evidence.

import { theme } from "./colors.js";
import { byId, changed, element, fill, say } from "./dom.js";
import { count, percent, plural, short } from "./format.js";

/** What each constraint says, and the counter that must stay 0. */
const CONSTRAINTS = {
  C1: ["Every answer is sampled by one version", "version_conflicts", "answers with tokens of several versions"],
  C2: ["No answer is stopped half-way by the scheduler", "scheduling_aborts", "answers stopped and not resumed in full"],
  C3: ["No group is staler than K when it is trained", "staleness_violations", "groups committed outside the bound"],
};

export function showLedger(s) {
  if (!changed("ledger", s.tokens)) return;
  const colors = theme().series, { sampled, trained, dropped, in_flight: inFlight, evaluation } = s.tokens;
  const parts = [["trained", trained], ...Object.entries(dropped).sort((a, b) => b[1] - a[1]).map(([why, n]) => [`left out, ${why}`, n]), ["in flight", inFlight]];
  const key = (i) => {
    const node = element("span", { class: "key" });
    node.style.background = colors[i % colors.length];
    node.style.display = "inline-block";
    return node;
  };
  byId("ledger-bar").replaceChildren(...parts.map(([name, n], i) => {
    const part = element("div", { title: name });
    part.style.flexGrow = String(n);
    part.style.background = colors[i % colors.length];
    return part;
  }));
  fill("ledger", null, [
    ...parts.map(([name, n], i) => [element("span", {}, key(i), ` ${name}`), { number: `${count(n)} tokens` }, { number: percent(sampled ? n / sampled : null) }]),
    [element("strong", {}, "sampled for training"), { number: `${count(sampled)} tokens` }, { number: "100 %" }],
    ["evaluation, counted separately", { number: `${count(evaluation)} tokens` }, { number: "" }],
  ]);
  byId("ledger-bar").title = `${short(sampled)} tokens`;
}

/** `info`: data/info, or null. */
export function showEvidence(s, info) {
  const bound = Object.keys(CONSTRAINTS).filter((name) => !(name in s.by_design));
  const broken = bound.filter((name) => s.counts[CONSTRAINTS[name][1]] > 0);
  const verdict = byId("verdict"), free = Object.keys(s.by_design);
  const holds = bound.length ? `${bound.join(" ")} ${bound.length === 1 ? "holds" : "hold"}` : "";
  const text = broken.length ? `${broken.join(" ")} ${broken.length === 1 ? "is" : "are"} violated` : holds;
  say("verdict", [text, free.length && `${free.join(" ")} not kept by this strategy`].filter(Boolean).join("; "));
  say("promise", `Each answer comes from one version, the scheduler drops none half-way, and none is trained more than ${plural(s.max_staleness, "step")} after its version. The counters:`);
  verdict.className = broken.length ? "wrong" : "good";
  if (!changed("evidence", [s.counts, s.by_design, info])) return;
  fill("constraints", ["constraint", "what it means", "counted"], Object.entries(CONSTRAINTS).map(([name, [meaning, counter, what]]) => [
    name, meaning, name in s.by_design ? `by design: ${s.by_design[name]}` : `${count(s.counts[counter])} ${what}`,
  ]));
  const audit = info?.audit;
  byId("audit").replaceChildren(...(audit ? ["Proved again from the journal alone by ", element("code", {}, audit)] : []));
}
