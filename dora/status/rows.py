"""What the keys of a row of metrics.jsonl mean: (unit, meaning, name in /metrics or "")."""

from __future__ import annotations

from typing import Final

#: Of a row of kind `step`. `trainer` and `episodes` have tables of their own.
STEP_ROW: Final[dict[str, tuple[str, str, str]]] = {
    "at": ("s", "time since the run began", "uptime_seconds"),
    "step": ("", "the step that was trained, from 0", "steps_trained_total"),
    "reward_mean": ("reward", "mean over the answers trained", "reward_mean"),
    "reward_all_mean": ("reward", "mean over all answers of the groups graded since the last row", ""),
    "all_right": ("fraction", "of these groups: every reward is 1", ""),
    "all_wrong": ("fraction", "of these groups: every reward is 0", ""),
    "all_same": ("fraction", "of these groups: every reward is the same number, other than 0 and 1", ""),
    "mixed": ("fraction", "of these groups: the rewards are not all equal", ""),
    "num_groups": ("groups", "groups trained", ""),
    "num_tokens": ("tokens", "response tokens trained", "trained_tokens_total"),
    "response_len_mean": ("tokens", "of a trained answer, mean", ""),
    "response_len_p90": ("tokens", "of a trained answer: nine of ten are at most as long", ""),
    "response_len_max": ("tokens", "of the longest trained answer", ""),
    "staleness_mean": ("steps", "mean over the groups trained", ""),
    "duration_s": ("s", "since the previous step was trained", "step_duration_seconds"),
    "idle_s": ("s", "the part of `duration_s` in which the trainer had nothing to do", "trainer_idle_share"),
    "waited_for": ("text", "what the trainer last waited for; empty if it never did", ""),
    "rollout_idle_share": ("fraction", "share of the slots of all instances that were free, since the last step", ""),
    "tokens_per_s": ("tokens/s", "tokens sampled, over the last ten seconds", "tokens_total"),
    "staleness": ("groups", "groups committed since the start, at staleness 0, 1, ...", "groups_committed_total"),
    "live_versions": ("versions", "the newest, and those with untrained groups", "live_versions"),
    "window": ("versions", "most versions that may be alive", ""),
    "dropped": ("groups", "filtered or failed since the start, by reason", "groups_dropped_total"),
    "zero_variance_groups": ("groups", "with equal rewards: filtered since the last step, or trained in this one", ""),
    "version_conflicts": ("answers", "C1: with tokens of a version other than their tag", "version_conflicts_total"),
    "scheduling_aborts": ("answers", "C2: stopped and not resumed with all tokens", "scheduling_aborts_total"),
    "staleness_violations": ("groups", "C3: committed outside the bound", "staleness_violations_total"),
    "late_completions": ("events", "completions of an old attempt, which are ignored", "late_completions_total"),
    "migrations": (
        "answers",
        "stopped and continued on another instance of their version, evaluation samples included",
        "migrations_total",
    ),
    "recovered": ("answers", "continued elsewhere after the loss of their instance", "recovered_total"),
    "environment_failed": ("episodes", "that could not go on, by cause, since the start", "environment_failed_total"),
    "lag_p99_s": (
        "s",
        "delay of the controller's event loop: 99th percentile, two minutes",
        "event_loop_lag_seconds",
    ),
    "controller_cpu_s": ("s", "CPU time of the controller since the last step", ""),
    "rank_s": ("s", "time of all ranks since the last row, by activity", ""),
    "instance_s": ("s", "time of all instances since the last row, by activity", ""),
    "tokens": ("tokens", "sampled = trained + dropped + in_flight, since the start; evaluation is separate", ""),
    "alarms": ("names", "drift alarms that are raised", "drift_alarm"),
}
#: Of a row of kind `evaluation`: one for each held-out set.
EVALUATION_ROW: Final[dict[str, tuple[str, str, str]]] = {
    "at": ("s", "time since the run began", ""),
    "version": ("", "the policy version evaluated", "heldout_version"),
    "name": ("text", "the held-out set", ""),
    "mean": ("reward", "mean@n: over all its answers", "heldout_mean"),
    "pass_at": ("fraction", "pass@k for k = 1, 2, 4, ... n (arXiv 2107.03374)", ""),
    "pass_at_n": ("fraction", "prompts with at least one right answer of n", ""),
    "is_accuracy": ("true/false", "every reward was 0 or 1: the mean is a share of right answers", ""),
    "num_samples": ("answers", "that were graded", ""),
    "num_failed": ("answers", "left out, as their grading or environment failed", ""),
    "mean_tokens": ("tokens", "length of an answer, mean", ""),
    "median_tokens": ("tokens", "the same, median", ""),
    "max_tokens": ("tokens", "the same, maximum", ""),
}
