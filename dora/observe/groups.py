"""The groups that the step being formed waits for, as plain data.

Invariant: pure, and bounded: a step may have thousands of groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

from dora.core.phases import GroupPhase
from dora.core.state import State
from dora.core.tables import Group

MAX_GROUPS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One untrained group that is not committed to an earlier step."""

    group: int
    version: int  #: its tag
    phase: str  #: generating, grading, complete, committed
    slack: int  #: number of steps after the one being formed to which the group may still be committed
    unfinished: int  #: siblings that are queued or being sampled
    queued: int  #: unfinished siblings that are queued
    graded: int  #: siblings with a reward
    oldest_s: float  #: time since the group was admitted


def forming(state: State) -> list[GroupRow]:
    """Return the groups that may be in the step being formed, in order of admission; O(groups of earlier steps)."""
    step = state.formation.step
    found = (g for g in state.ledger.groups.values() if g.phase is not GroupPhase.COMMITTED or g.step == step)
    return [_row(group, state) for group in islice(found, MAX_GROUPS)]


def _row(group: Group, state: State) -> GroupRow:
    return GroupRow(
        group=group.id,
        version=group.version,
        phase=group.phase.value,
        slack=group.deadline - state.formation.step,
        unfinished=group.unfinished,
        queued=len(group.waiting),
        graded=len(group.trajectories) - group.ungraded,
        oldest_s=round(state.now - group.admitted_at, 3),
    )
