"""A snapshot in Prometheus's text format (version 0.0.4).

Most metrics are declared beside their figures (`dora.observe.figures.Metric`, in the snapshot and its rows); those here
are computed from several. Invariant: one HELP and one TYPE line per metric, before its samples; names begin with
`dora_`, totals end in `_total`, times are in seconds. The labels `quantile` and `le`, and the ending `_count`, belong
to summaries and histograms alone (promtool refuses them elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import accumulate
from typing import Any

from dora.observe.drift import CAUSES
from dora.observe.durations import BOUNDS_S, TIMED
from dora.observe.episodes import EpisodeStats
from dora.observe.figures import Metric, figures, metrics
from dora.observe.snapshot import InstanceRow, Snapshot, VersionRow
from dora.observe.steps import StepFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Labels of a sample, and its value.
Sample = tuple[Mapping[str, object], float]


def render(snapshot: Snapshot) -> str:
    """Return all metrics."""
    parts = (_run, _declared, _versions, _learning, _trainer, _episodes, _durations, _health)
    return "".join(line for part in parts for line in part(snapshot))


def _run(s: Snapshot) -> Iterator[str]:
    yield from _family(Metric("run_info", "The run, as labels."), [({"run": s.run_id, "strategy": s.strategy}, 1)])


def _declared(record: Any) -> Iterator[str]:
    """The metrics of a record's fields, and of the records in it."""
    declared = metrics(type(record))
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        if (metric := declared.get(name)) is not None:
            yield from _family(metric, samples(value, label=metric.label))
        elif is_dataclass(value):
            yield from _declared(value)


def _versions(s: Snapshot) -> Iterator[str]:
    live = sum(v.is_live for v in s.versions)
    yield from _family(Metric("live_versions", "Policy versions alive; at most K + 1."), samples(live))
    yield from _table(VersionRow, s.versions, key="version")
    yield from _table(InstanceRow, s.instances, key="instance")


def _table(kind: type, rows: Iterable[Any], *, key: str) -> Iterator[str]:
    """The metrics of a table: a sample for each row."""
    for name, metric in metrics(kind).items():
        values = [(row, getattr(row, name)) for row in rows]
        yield from _family(metric, [({key: getattr(row, key)}, value) for row, value in values if value is not None])


def _learning(s: Snapshot) -> Iterator[str]:
    for name, figure in figures(StepFacts).items():
        if figure.metric == name:
            value = getattr(s.steps[-1], name) if s.steps else None
            yield from _family(Metric(name, f"Of the last step: {figure.meaning}."), samples(value))
    latest = {score.name: score for score in s.scores if score.mean is not None}.values()
    yield from _family(Metric("heldout_mean", "Mean@n of the latest evaluation of a held-out set."),
                       [({"set": x.name}, x.mean) for x in latest if x.mean is not None])  # fmt: skip
    yield from _family(Metric("heldout_version", "Policy version of that evaluation."),
                       [({"set": x.name}, x.version) for x in latest])  # fmt: skip


def trainer_name(key: str) -> str:
    """Return the name in /metrics, without `dora_`, of a metric of the trainer."""
    name = key.replace("/", "_").replace("nonfinite_count", "nonfinite_tokens")
    return f"trainer_{name.removesuffix('_s')}_seconds" if name.endswith("_s") else f"trainer_{name}"


def _trainer(s: Snapshot) -> Iterator[str]:
    for key, value in s.trainer_metrics.items():  # names come from a rank: an invalid one could forge lines
        if trainer_name(key).isascii() and trainer_name(key).isidentifier():
            yield from _family(
                Metric(trainer_name(key), f"`{key}` of the last step, see docs/METRICS.md."), samples(value)
            )


def _episodes(s: Snapshot) -> Iterator[str]:
    if s.environment is None:
        return
    last = s.steps[-1].episodes if s.steps else None
    for name, figure in figures(EpisodeStats).items():
        text = f"Of the last step: {figure.meaning[0].lower()}{figure.meaning[1:]}"
        label = {"turn_rewards": "turn", "truncated": "cause", "forks": "cause", "metrics": "name"}.get(name, "")
        yield from _family(Metric(episode_name(name), text), samples(getattr(last, name, None), label=label, first=1))


def episode_name(key: str) -> str:
    """Return the name in /metrics, without `dora_`, of a figure of episodes."""
    return "episodes" if key == "count" else f"episode_{key.replace('_s_', '_seconds_')}"


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
    yield from _family(Metric("drift_alarm", "1 while a drift alarm is raised."), alarms)
    allowed = [({"constraint": name}, 1) for name in s.by_design]
    yield from _family(Metric("broken_by_design", "1 for a constraint that the strategy does not keep."), allowed)
    lags = [({"quantile": "0.5"}, s.lag_p50_s), ({"quantile": "0.99"}, s.lag_p99_s)]
    yield from _family(Metric("event_loop_lag_seconds", "Lag of the controller's event loop."), lags, kind="summary")


def samples(value: Any, *, label: str = "", first: int = 0) -> list[Sample]:
    """Return the samples of a value: one, or one for each key of a mapping or position in a sequence, from `first`
    on; none for None."""
    if isinstance(value, Mapping):
        return [({label: key}, one) for key, one in value.items()]
    if isinstance(value, tuple):
        return [({label: place}, one) for place, one in enumerate(value, start=first)]
    return [] if value is None else [({}, value)]


def _family(metric: Metric, found: Iterable[Sample], *, kind: str = "") -> Iterator[str]:
    yield from _head(metric.name, kind or ("counter" if metric.name.endswith("_total") else "gauge"), metric.text)
    for labels, value in found:
        pairs = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
        yield f"dora_{metric.name}{{{pairs}}} {value!r}\n" if pairs else f"dora_{metric.name} {value!r}\n"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP dora_{name} {text}\n# TYPE dora_{name} {kind}\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
