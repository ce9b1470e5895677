// The step being formed: what is committed, what is missing, oldest first, and why nothing more is admitted.

import { color, onColor } from "./colors.js";
import { byId, changed, element, say } from "./dom.js";
import { count, plural, time } from "./format.js";

const MANY = 48, ENDED = ["finished", "interrupted", "failed"];

export function chip(version) {
  const node = element("span", { class: "chip" }, `v${version}`);
  node.style.background = color(version);
  node.style.color = onColor(color(version));
  return node;
}

const slackText = (slack) => (slack <= 0 ? "due now" : `slack ${plural(slack, "step")}`);

function missing(g) {
  if (g.unfinished) return `${plural(g.unfinished, "answer")} to come${g.queued ? `, ${count(g.queued)} queued` : ""}`;
  return { grading: "being graded", complete: "complete", committed: "committed" }[g.phase] ?? g.phase;
}

function cell(g) {
  const title = `group ${g.group}: version ${g.version}, ${slackText(g.slack)}; ${missing(g)}; ${count(g.graded)} graded; ${time(g.oldest_s)} old`;
  const isDone = g.phase === "committed", kind = isDone ? "done" : g.slack <= 0 ? "due" : "";
  return element("li", { class: kind, title }, chip(g.version), element("span", {}, ` group ${count(g.group)}`), element("small", {}, `${isDone ? "✓ " : ""}${missing(g)}`), element("small", {}, `${isDone ? "" : `${slackText(g.slack)}, `}${time(g.oldest_s)} old`));
}

/** `groups`: rows of data/groups, oldest first; null if this server does not have them. */
export function showForming(s, groups) {
  const isOver = ENDED.includes(s.phase) || s.step_forming >= s.num_steps;
  byId("forming-section").hidden = byId("to-forming").hidden = isOver;
  if (isOver) return;
  say("forming-title", `Step ${count(s.step_forming + 1)} is being formed`);
  say("forming-count", `${count(s.step_committed)} of ${plural(s.groups_per_step, "group")} committed`);
  const rows = groups ?? [], g = rows.find((row) => row.phase !== "committed");
  const oldest = g ? ` The oldest is group ${count(g.group)} of v${g.version}: ${missing(g)} after ${time(g.oldest_s)}.` : "";
  say("forming-waits", (s.trainer.waits_for ? `Training waits for ${s.trainer.waits_for}.` : "The trainer is working.") + oldest);
  say("forming-admission", s.not_admitting ? `No new group is admitted: ${s.not_admitting}.` : "New groups are admitted.");
  if (!changed("forming", rows)) return;
  byId("groups").className = rows.length > MANY ? "cells small" : "cells";
  byId("groups").replaceChildren(...rows.map(cell));
}
