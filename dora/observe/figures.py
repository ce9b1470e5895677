"""Figures: what a field of a record means, declared beside its type, once.

    reward_mean: Annotated[float, Figure("reward", "mean over the answers trained", metric="reward_mean")]

The rows of metrics.jsonl, the metrics of /metrics (`status/metrics.py`) and docs/METRICS.md are derived from these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of /metrics. Its type is counter if the name ends in `_total`, otherwise gauge."""

    name: str  #: without `dora_`
    text: str  #: the HELP line
    label: str = ""  #: of the keys of a mapping, or of the positions in a sequence


@dataclass(frozen=True, slots=True)
class Figure:
    """A field of a row."""

    unit: str
    meaning: str
    metric: str = ""  #: the metric of /metrics that shows it, or from which it can be computed; "" if there is none


def figures(record: type) -> dict[str, Figure]:
    """Return the figures of a record by field, in order; a field with a metric of its own is shown by that."""
    shown = metrics(record)
    return {
        name: replace(figure, metric=shown[name].name) if name in shown else figure
        for name, figure in _marks(record, Figure).items()
    }


def metrics(record: type) -> dict[str, Metric]:
    """Return the metrics of a record by field, in order."""
    return _marks(record, Metric)


def _marks(record: type, kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(record, include_extras=True)
    return {name: mark for name, hint in hints.items() for mark in get_args(hint)[1:] if isinstance(mark, kind)}
