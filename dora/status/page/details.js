// Everything else, for those who look for it.

import { chip } from "./forming.js";
import { byId, element, fill } from "./dom.js";
import { count, number, percent, plural, short, time } from "./format.js";
import { words } from "./words.js";

/** A cell that is set to the right. */
const right = (text) => ({ number: text });

const SHOWN = { steps: 20, instances: 200 };

export const alarmText = (a) => `${a.name} at step ${count(a.step + 1)}${a.cleared === null ? "" : `, cleared at step ${count(a.cleared + 1)}`}: ${a.quantity} is ${number(a.value)}, limit ${number(a.threshold)}; ${a.cause}`;

const listed = (counts, none = "none") => Object.entries(counts).filter(([, n]) => n).map(([name, n]) => `${count(n)} ${name}`).join(", ") || none;

function spent(seconds) {
  const total = Object.values(seconds).reduce((sum, s) => sum + s, 0);
  return Object.entries(seconds).slice(0, 8).map(([activity, s]) => `${words(activity)} ${percent(s / total)}`).join(", ") || "–";
}

function episodes(s) {
  const r = s.environment, p = s.steps.findLast((x) => x.episodes)?.episodes;
  if (!r) return {};
  return {
    "episodes calling": count(r.calling),
    "environment failed": listed(r.failed),
    ...(p && {
      "turns of an episode": `${number(p.turns_mean)} (at most ${p.turns_max}), ${count(p.sampled_tokens_mean)} tokens sampled and ${count(p.observation_tokens_mean)} observed`,
      "reward by turn": p.turn_rewards.map((reward) => reward.toFixed(2)).join(" ") || "–",
      "calls of an episode": `${number(p.calls_mean)} (at most ${p.calls_max})${p.call_share === null ? "" : `, ${time(p.call_s_mean)} each (p90 ${time(p.call_s_p90)}), ${percent(p.call_share)} of its time`}`,
      "episodes cut off": listed(p.truncated),
      ...(Object.keys(p.metrics ?? {}).length && { "measured by the environment": Object.entries(p.metrics).map(([name, x]) => `${name} ${number(x)}`).join(", ") }),
      "forks of episodes": `${listed(p.forks)}; ${count(p.repeated_tokens_mean)} tokens of an episode repeated`,
    }),
  };
}

function judges(s) {
  const j = s.judges;
  if (!j) return {};
  return { "judged by models": `${plural(j.answers, "answer")}, ${count(j.failed)} of them not graded; ${plural(j.requests, "request")}, ${count(j.prompt_tokens)} tokens read and ${count(j.sampled_tokens)} written` };
}

function figures(s) {
  return {
    "run": `${s.run_id}, ${s.phase}${s.reason ? `: ${s.reason}` : ""}`,
    "trainer": `${count(s.trainer.ranks_ready)} of ${plural(s.trainer.ranks, "rank")} ready${s.counts.trainer_losses ? `, lost ${plural(s.counts.trainer_losses, "time")} and started again` : ""}; idle for ${s.trainer.mean_idle_share === null ? "" : `${percent(s.trainer.mean_idle_share)} of steps 2 to ${count(s.steps_trained)}; `}${percent(s.trainer.idle_share)} of the last step${s.trainer.idle_reason ? `, waiting for ${s.trainer.idle_reason}` : ""}`,
    "time of the ranks": spent(s.rank_s),
    "time of the servers": spent(s.instance_s),
    "servers": listed(s.instances_by_phase),
    "groups": `${count(s.groups_admitted)} admitted: ${listed(s.groups_by_phase)}`,
    "groups left out": listed(s.dropped),
    ...(s.rows_passed ? { "rows passed over": `${count(s.rows_passed)}, as the rewards of their last groups were equal` } : {}),
    "tokens": `${short(s.num_tokens)} sampled, ${short(s.num_trained_tokens)} trained; now ${short(s.tokens_per_s)} and ${short(s.trained_tokens_per_s)} tokens/s`,
    ...(s.accept_length ? { "speculative decoding": `${s.accept_length.toFixed(2)} tokens a step` } : {}),
    "evaluations skipped": s.evaluations_skipped.length ? `of versions ${s.evaluations_skipped.join(", ")}: newer ones were due before their turn` : "none",
    "moves": `${count(s.counts.migrations)} answers moved, ${count(s.counts.recovered)} recovered after a loss, ${count(s.counts.late_completions)} late completions ignored`,
    ...episodes(s),
    ...judges(s),
    "drift alarms": s.alarms.length ? s.alarms.map((a) => element("div", { class: a.cleared === null ? "wrong" : "" }, alarmText(a))) : "none",
    "problems": s.down.length + s.problems.length ? [...s.down, ...s.problems].map((text) => element("div", {}, text)) : "none",
    "controller's delay": `median ${number(1000 * s.lag_p50_s)} ms, p99 ${number(1000 * s.lag_p99_s)} ms, longest ${number(1000 * s.lag_max_s)} ms`,
  };
}

function showScores(s) {
  const sets = new Map();
  for (const e of s.scores) sets.set(e.name, [...(sets.get(e.name) ?? []), e]);
  const mean = (e) => (e.mean === null ? "nothing was graded" : `${number(e.mean)} (v${e.version})`);
  fill("scores", ["set", "first reward", "latest reward", "right at least once", "answers", "failed"], [...sets].map(([name, own]) => {
    const e = own[own.length - 1];
    return [name, mean(own[0]), mean(e), e.pass_at_n === null ? null : percent(e.pass_at_n), e.num_samples, e.num_failed];
  }));
}

/** What a server holds: of several adapters, each with its requests. */
function held(i) {
  if (!i.holdings.length) return i.version === null ? null : chip(i.version);
  const parts = i.holdings.map((h) => element("span", {}, chip(h.version), ` ${h.phase === "serving" ? count(h.requests) : h.phase} `));
  return element("span", {}, ...parts);
}

/** Fill the details; called only while they are open. */
export function showDetails(s, isLive) {
  byId("figures").replaceChildren(...Object.entries(figures(s)).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  fill("versions", ["version", "serving", "loading", "groups", "answers to come", "queued", "state"], s.versions.map((v) => [
    chip(v.version), v.serving, v.loading, v.groups, v.unfinished, v.waiting,
    [v.is_newest && "newest", v.evaluating && "being evaluated", v.unloading > 0 && `unloaded by ${plural(v.unloading, "server")}`, !v.is_live && "not live"].filter(Boolean).join(", "),
  ]));
  showScores(s);
  fill("steps", ["step", "reward of trained", "reward of all", "staleness", "duration", "trainer idle", "tokens"], s.steps.slice(-SHOWN.steps).reverse().map((x) => [
    x.step + 1, right(number(x.reward_mean)), right(number(x.reward_all_mean)), right(x.staleness_mean.toFixed(2)), right(time(x.duration_s)), right(percent(x.duration_s ? x.idle_s / x.duration_s : null)), right(count(x.num_tokens)),
  ]));
  fill("instances", ["server", "address", "phase", "version", "requests", "KV cache", "starts", "request"], s.instances.slice(0, SHOWN.instances).map((i) => [
    i.instance, i.url, i.phase + (i.pushing === null ? "" : `, v${i.pushing} is loaded`), held(i), `${i.residents} of ${i.slots}`, percent(i.kv_tokens ? i.kv_load / i.kv_tokens : null), i.incarnation, i.asked || "–",
  ]));
  if (s.instances.length > SHOWN.instances) byId("instances").append(element("caption", {}, `the first ${SHOWN.instances} of ${count(s.instances.length)}`));
  byId("links")?.toggleAttribute("hidden", !isLive); // a report has none
}
