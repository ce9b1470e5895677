"""The rows that sources came to, and those of which the last group had equal rewards (`task.revisit_share`).

Invariant: folded from events and commands alone, so that a replay gives the same. What is known of rows changes only
when prompts are ordered: whatever ends while they are read does not affect which rows are chosen.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId
from dora.core.phases import GroupPhase

#: (source, row), both counted from 0.
RowKey = tuple[int, int]


@dataclass(slots=True)
class Visits:
    """The visits of a run; none unless rows may be passed over."""

    places: Counter[int] = field(default_factory=Counter)  #: visits of each source: its next place
    counts: Counter[RowKey] = field(default_factory=Counter)  #: visits of each row
    equal: set[RowKey] = field(default_factory=set)  #: rows whose last group had equal rewards
    num_passed: int = 0  #: visits at which the row was passed over
    _sources: array[int] = field(default_factory=lambda: array("H"))  # by group
    _rows: array[int] = field(default_factory=lambda: array("q"))  # by group
    _since: dict[RowKey, bool] = field(default_factory=dict)  # since prompts were ordered: whether rewards were equal

    def __len__(self) -> int:
        """Return the number of groups that have a row."""
        return len(self._rows)

    def row_of(self, group: GroupId) -> RowKey | None:
        """Return the row of a group's prompt; None if nothing is recorded of it."""
        return (self._sources[group], self._rows[group]) if group < len(self._rows) else None

    def apply(self, event: ev.Event, commands: Iterable[cmd.Command]) -> None:
        """Take in an event and the commands it led to."""
        if isinstance(event, ev.PromptsArrived):
            for visit in event.visits[max(0, len(self) - event.first) :]:  # the others were chosen before a resume
                self._take(visit)
        if not self._rows:
            return
        for command in commands:
            match command:
                case cmd.DropGroup(group=group, outcome=GroupPhase.FILTERED):
                    self._since[self._sources[group], self._rows[group]] = True
                case cmd.CommitGroup(group=group):
                    self._since[self._sources[group], self._rows[group]] = False
                case cmd.FetchPrompts():
                    self.equal.difference_update(self._since)
                    self.equal.update(key for key, is_equal in self._since.items() if is_equal)
                    self._since.clear()

    def _take(self, visit: ev.Visit) -> None:
        self._sources.append(visit.source)
        self._rows.append(visit.row)
        self.places[visit.source] += len(visit.passed) + 1
        self.counts.update((visit.source, row) for row in (*visit.passed, visit.row))
        self.num_passed += len(visit.passed)
