"""Every phase there is, and which may follow which: a change that a table does not list is a bug, and raises.

docs/STATES.md draws these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Final, TypeVar


class GroupPhase(enum.Enum):
    """Where a prompt group stands."""

    GENERATING = "generating"  #: at least one sibling is unfinished
    GRADING = "grading"  #: all siblings are finished, at least one is ungraded
    COMPLETE = "complete"  #: graded, waits for a place in a step
    COMMITTED = "committed"  #: has a place in a step
    TRAINED = "trained"  #: its step is closed and trained
    FILTERED = "filtered"  #: its siblings' rewards give no advantage
    FAILED = "failed"  #: a sibling could not be generated, or too few could be graded
    DISCARDED = "discarded"  #: over-sampled: its step was full before it was complete


class TrajectoryPhase(enum.Enum):
    """Where one generated sequence stands."""

    WAITING = "waiting"  #: for a slot on an instance of its version
    RESIDENT = "resident"  #: being decoded
    STOPPING = "stopping"  #: being decoded, asked to stop: it moves or makes room
    GRADING = "grading"  #: finished, waits for its reward
    GRADED = "graded"  #: rewarded, or grading failed (`reward` is None)
    ABANDONED = "abandoned"  #: its group failed or was discarded


class WeightsPhase(enum.Enum):
    """What the weights of an instance allow."""

    BLANK = "blank"  #: up, holds no version of this run
    LOADING = "loading"  #: its first push is under way
    SERVING = "serving"  #: holds a confirmed version
    DRAINING = "draining"  #: holds a confirmed version and takes nothing new, so that it can have another
    UPDATING = "updating"  #: a push is under way on an instance that has held a version
    QUARANTINED = "quarantined"  #: a push failed: no work until one is confirmed
    LOST = "lost"  #: down, or not yet up


class Membership(enum.Enum):
    """Whether an instance takes part in the run; it survives a loss."""

    MEMBER = "member"  #: it is given weights and work
    DRAINED = "drained"  #: on request: it gets neither work nor weights until it is recalled
    LEAVING = "leaving"  #: drained, and to leave the run once it is empty
    DISMISSED = "dismissed"  #: asked to leave the run


Phase = TypeVar("Phase", bound=enum.Enum)
Table = Mapping[Phase, Set[Phase]]

GROUP: Final[Table[GroupPhase]] = {
    GroupPhase.GENERATING: {GroupPhase.GRADING, GroupPhase.FAILED, GroupPhase.DISCARDED},
    GroupPhase.GRADING: {GroupPhase.COMPLETE, GroupPhase.FILTERED, GroupPhase.FAILED, GroupPhase.DISCARDED},
    GroupPhase.COMPLETE: {GroupPhase.COMMITTED, GroupPhase.DISCARDED},
    GroupPhase.COMMITTED: {GroupPhase.TRAINED},
    GroupPhase.TRAINED: set(),
    GroupPhase.FILTERED: set(),
    GroupPhase.FAILED: set(),
    GroupPhase.DISCARDED: set(),
}

_ENDED: Final = {TrajectoryPhase.WAITING, TrajectoryPhase.GRADING, TrajectoryPhase.ABANDONED}  # its request has

TRAJECTORY: Final[Table[TrajectoryPhase]] = {
    TrajectoryPhase.WAITING: {TrajectoryPhase.RESIDENT, TrajectoryPhase.ABANDONED},
    TrajectoryPhase.RESIDENT: {TrajectoryPhase.STOPPING, *_ENDED},
    TrajectoryPhase.STOPPING: {TrajectoryPhase.RESIDENT, *_ENDED},
    TrajectoryPhase.GRADING: {TrajectoryPhase.GRADING, TrajectoryPhase.GRADED},  # a new controller grades again
    TrajectoryPhase.GRADED: set(),
    TrajectoryPhase.ABANDONED: set(),
}

WEIGHTS: Final[Table[WeightsPhase]] = {
    WeightsPhase.BLANK: {WeightsPhase.LOADING, WeightsPhase.LOST},
    WeightsPhase.LOADING: {WeightsPhase.SERVING, WeightsPhase.QUARANTINED, WeightsPhase.LOST},
    WeightsPhase.SERVING: {WeightsPhase.DRAINING, WeightsPhase.UPDATING, WeightsPhase.LOST},
    WeightsPhase.DRAINING: {WeightsPhase.SERVING, WeightsPhase.UPDATING, WeightsPhase.LOST},
    WeightsPhase.UPDATING: {WeightsPhase.SERVING, WeightsPhase.QUARANTINED, WeightsPhase.LOST},
    WeightsPhase.QUARANTINED: {WeightsPhase.UPDATING, WeightsPhase.LOST},
    WeightsPhase.LOST: {WeightsPhase.BLANK},
}

MEMBERSHIP: Final[Table[Membership]] = {
    Membership.MEMBER: {Membership.DRAINED},
    Membership.DRAINED: {Membership.MEMBER, Membership.LEAVING},
    Membership.LEAVING: {Membership.MEMBER, Membership.DISMISSED},
    Membership.DISMISSED: {Membership.MEMBER},  # by a new controller, whom nobody has asked to drain it
}

#: Phases of a group that left although siblings of it may still run, or wait for their grades.
GIVEN_UP: Final = frozenset({GroupPhase.FAILED, GroupPhase.DISCARDED})
#: Phases of an unconsumed group: the U of rule F.
UNCONSUMED: Final = frozenset({GroupPhase.GENERATING, GroupPhase.GRADING, GroupPhase.COMPLETE})
#: A request of the trajectory is under way.
DECODING: Final = frozenset({TrajectoryPhase.RESIDENT, TrajectoryPhase.STOPPING})
#: The trajectory has tokens to come.
UNFINISHED: Final = DECODING | {TrajectoryPhase.WAITING}
#: A push is under way.
PUSHING: Final = frozenset({WeightsPhase.LOADING, WeightsPhase.UPDATING})
#: The instance holds a version that a push has confirmed.
HOLDS_VERSION: Final = frozenset({WeightsPhase.SERVING, WeightsPhase.DRAINING})
