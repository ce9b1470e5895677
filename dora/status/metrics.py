"""A snapshot in Prometheus's text format (version 0.0.4).

Invariant: one HELP and one TYPE line per metric, before its samples; names begin with `dora_`, totals end in `_total`,
times are in seconds. The labels `quantile` and `le`, and the ending `_count`, belong to summaries and histograms alone
(promtool refuses them elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Literal

from dora.status.drift import CAUSES
from dora.status.durations import BOUNDS_S, TIMED
from dora.status.episodes import MEASURED as EPISODES
from dora.status.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Labels of a sample, and its value.
Sample = tuple[Mapping[str, object], float]

_COUNTER_HELP = {
    "version_conflicts": "C1: answers with tokens of a version other than their tag; 0 unless the strategy is partial.",
    "scheduling_aborts": "C2: trajectories stopped and not resumed with all their tokens; 0 unless oversample.",
    "staleness_violations": "C3: groups committed outside the staleness bound; must stay 0.",
    "late_completions": "Completions of an old attempt, which are ignored.",
    "migrations": "Trajectories stopped and continued on another instance of their version.",
    "recovered": "Trajectories continued elsewhere after the loss of their instance.",
}


def render(snapshot: Snapshot) -> str:
    """Return all metrics."""
    parts = (_progress, _fleet, _groups, _learning, _trainer, _environment, _durations, _health)
    return "".join(line for part in parts for line in part(snapshot))


def _progress(s: Snapshot) -> Iterator[str]:
    yield from _metric("run_info", "gauge", "The run, as labels.", [({"run": s.run_id, "strategy": s.strategy}, 1)])
    yield from _one("uptime_seconds", "gauge", "Time since the run began.", s.uptime_s)
    yield from _one("eta_seconds", "gauge", "Estimated time left.", s.eta_s)
    yield from _one("steps", "gauge", "T: number of steps of the job.", s.num_steps)
    yield from _one("steps_trained_total", "counter", "Steps trained.", s.steps_trained)
    yield from _one("step_forming", "gauge", "Step being formed, from 0.", s.step_forming)
    yield from _one("step_committed_groups", "gauge", "Groups committed to the step being formed.", s.step_committed)
    yield from _one("newest_version", "gauge", "Newest published policy version.", s.newest_version)
    yield from _one("trainer_idle_share", "gauge", "Share of the last step in which the trainer had nothing to do.",
                    s.trainer.idle_share)  # fmt: skip


def _fleet(s: Snapshot) -> Iterator[str]:
    phases = [({"phase": phase}, count) for phase, count in s.instances_by_phase.items()]
    yield from _metric("instances", "gauge", "Instances by phase.", phases)
    live = sum(v.is_live for v in s.versions)
    yield from _one("live_versions", "gauge", "Policy versions alive; at most K + 1.", live)
    serving = [({"version": v.version}, v.serving) for v in s.versions]
    yield from _metric("version_instances", "gauge", "Instances that serve a policy version.", serving)
    unfinished = [({"version": v.version}, v.unfinished) for v in s.versions]
    yield from _metric("version_unfinished", "gauge", "Unfinished trajectories of a policy version.", unfinished)
    residents = [({"instance": i.instance}, i.residents) for i in s.instances]
    yield from _metric("instance_residents", "gauge", "Requests being decoded by an instance.", residents)


def _groups(s: Snapshot) -> Iterator[str]:
    yield from _one("groups_admitted_total", "counter", "Prompt groups admitted.", s.groups_admitted)
    phases = [({"phase": phase}, count) for phase, count in s.groups_by_phase.items()]
    yield from _metric("groups", "gauge", "Prompt groups by phase; they add up to those admitted.", phases)
    dropped = [({"reason": reason}, count) for reason, count in s.dropped.items()]
    yield from _metric("groups_dropped_total", "counter", "Groups filtered or failed, by reason.", dropped)
    yield from _one("prompts_skipped_total", "counter", "Groups whose prompt is over the limit.", s.prompts_skipped)
    staleness = [({"staleness": i}, count) for i, count in enumerate(s.staleness)]
    yield from _metric("groups_committed_total", "counter", "Groups committed, by staleness.", staleness)


def _learning(s: Snapshot) -> Iterator[str]:
    yield from _one(
        "reward_mean", "gauge", "Mean reward of the last step.", s.steps[-1].reward_mean if s.steps else None
    )
    latest = {score.name: score for score in s.scores if score.mean is not None}.values()
    yield from _metric("heldout_mean", "gauge", "Mean@n of the latest evaluation of a held-out set.",
                       [({"set": x.name}, x.mean) for x in latest if x.mean is not None])  # fmt: skip
    yield from _metric("heldout_version", "gauge", "Policy version of that evaluation.",
                       [({"set": x.name}, x.version) for x in latest])  # fmt: skip
    yield from _one("tokens_total", "counter", "Tokens sampled.", s.num_tokens)
    yield from _one("trained_tokens_total", "counter", "Response tokens trained.", s.num_trained_tokens)


def trainer_name(key: str) -> str:
    """Return the name in /metrics, without `dora_`, of a metric of the trainer."""
    name = key.replace("/", "_").replace("nonfinite_count", "nonfinite_tokens")
    return f"trainer_{name.removesuffix('_s')}_seconds" if name.endswith("_s") else f"trainer_{name}"


def _trainer(s: Snapshot) -> Iterator[str]:
    for key, value in s.trainer_metrics.items():  # names come from a rank: an invalid one could forge lines
        if not (trainer_name(key).isascii() and trainer_name(key).isidentifier()):
            continue
        yield from _one(trainer_name(key), "gauge", f"`{key}` of the last step, see docs/METRICS.md.", value)


def _environment(s: Snapshot) -> Iterator[str]:
    if s.environment is None:
        return
    yield from _one("episodes_calling", "gauge", "Episodes with a call under way.", s.environment.calling)
    failed = [({"cause": cause}, count) for cause, count in s.environment.failed.items()]
    yield from _metric("environment_failed_total", "counter", "Episodes whose environment could not go on.", failed)
    last = s.steps[-1].episodes if s.steps else None
    for name, (_, text) in EPISODES.items():
        value = getattr(last, name, None)
        help_text = f"Of the last step: {text[0].lower()}{text[1:]}"
        yield from _metric(episode_name(name), "gauge", help_text, list(_samples(value)))


def episode_name(key: str) -> str:
    """Return the name in /metrics, without `dora_`, of a figure of episodes."""
    return "episodes" if key == "count" else f"episode_{key.replace('_s_', '_seconds_')}"


def _samples(value: float | tuple[float, ...] | dict[str, int] | None) -> Iterator[Sample]:
    if isinstance(value, dict):
        yield from (({"cause": cause}, count) for cause, count in value.items())
    elif isinstance(value, tuple):
        yield from (({"turn": turn}, reward) for turn, reward in enumerate(value, start=1))
    elif value is not None:
        yield {}, value


def _durations(s: Snapshot) -> Iterator[str]:
    for key, text in TIMED.items():
        if (histogram := s.durations.get(key)) is None:  # of a folder that was received
            continue
        name = f"{key}_duration_seconds"
        yield from _head(name, "histogram", text)
        for bound, count in zip((*BOUNDS_S, "+Inf"), accumulate(histogram.counts), strict=True):
            yield f'dora_{name}_bucket{{le="{bound}"}} {count}\n'
        yield f"dora_{name}_sum {histogram.total_s!r}\ndora_{name}_count {sum(histogram.counts)}\n"


def _health(s: Snapshot) -> Iterator[str]:
    active = {alarm.name for alarm in s.alarms if alarm.cleared is None}
    alarms = [({"alarm": name}, int(name in active)) for name in CAUSES]
    yield from _metric("drift_alarm", "gauge", "1 while a drift alarm is raised.", alarms)
    allowed = [({"constraint": name}, 1) for name in s.by_design]
    yield from _metric("broken_by_design", "gauge", "1 for a constraint that the strategy does not keep.", allowed)
    for name, count in asdict(s.counts).items():
        yield from _one(f"{name}_total", "counter", _COUNTER_HELP[name], count)
    lags = [({"quantile": "0.5"}, s.lag_p50_s), ({"quantile": "0.99"}, s.lag_p99_s)]
    yield from _metric("event_loop_lag_seconds", "summary", "Lag of the controller's event loop.", lags)
    yield from _one("event_loop_lag_max_seconds", "gauge", "Largest event-loop lag since the start.", s.lag_max_s)


def _one(name: str, kind: Literal["gauge", "counter"], text: str, value: float | None) -> Iterator[str]:
    """A metric without labels; no sample while there is no value."""
    return _metric(name, kind, text, [] if value is None else [({}, value)])


def _metric(
    name: str, kind: Literal["gauge", "counter", "summary"], text: str, samples: Sequence[Sample]
) -> Iterator[str]:
    yield from _head(name, kind, text)
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
        yield f"dora_{name}{{{pairs}}} {value!r}\n" if pairs else f"dora_{name} {value!r}\n"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP dora_{name} {text}\n# TYPE dora_{name} {kind}\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
