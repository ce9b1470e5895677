"""What a tracker is: a class that writes the rows of metrics.jsonl into a record that others display.

A user's own class is named as `FILE.py:Class` or `module:Class` in `tracking.trackers` and is made as
`Class(run, position)`. An error that it raises ends the tracker's process, never the run. Invariant: a new object
continues the record at the position; it must drop rows that were logged after the position, because they are logged
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

#: What a tracker needs to continue its record; JSON.
Mark = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run whose rows are logged."""

    run_id: str
    project: str
    folder: Path  #: folder of this tracker, inside the run folder; it exists
    config: dict[str, Any]  #: without secrets
    began: float  #: Unix time


@dataclass(frozen=True, slots=True)
class Position:
    """How far a record has come."""

    rows: int = 0  #: number of rows of metrics.jsonl that the record has
    mark: Mark = field(default_factory=dict)  #: what `save` or `close` returned after these rows


@dataclass(frozen=True, slots=True)
class TrackedRow:
    """A row of metrics.jsonl."""

    number: int  #: number of its line, from 0
    axis: Literal["step", "version"]
    value: int  #: on this axis
    at: float  #: Unix time
    scalars: dict[str, float]  #: by name; at least one


class Tracker(Protocol):
    """The record of one run in one tracker."""

    rows: int  #: number of the first row that the record lacks

    def log(self, row: TrackedRow) -> None:
        """Add a row."""

    def save(self) -> Mark | None:
        """Store what was logged; None if only `close` can tell whether it is stored."""

    def close(self) -> Mark:
        """Store what was logged and complete the record."""
