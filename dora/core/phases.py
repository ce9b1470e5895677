"""Phases and their permitted transitions, drawn in docs/STATES.md. Any other transition is a bug and raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Final, TypeVar


class GroupPhase(enum.Enum):
    """Phase of a prompt group."""

    GENERATING = "generating"  #: at least one sibling is unfinished
    GRADING = "grading"  #: all siblings are finished, at least one is ungraded
    COMPLETE = "complete"  #: all siblings are graded, not committed yet
    COMMITTED = "committed"  #: assigned to a step
    TRAINED = "trained"  #: its step is trained
    FILTERED = "filtered"  #: its rewards are equal, so there is no advantage
    FAILED = "failed"  #: a sibling could not be generated, or too few could be graded
    DISCARDED = "discarded"  #: over-sampled: its step was full before it was complete


class TrajectoryPhase(enum.Enum):
    """Phase of a trajectory."""

    WAITING = "waiting"  #: queued for a slot on an instance of its version
    RESIDENT = "resident"  #: being decoded
    STOPPING = "stopping"  #: being decoded, its stop is ordered: it moves or makes room
    CALLING = "calling"  #: not being decoded: a call of its environment is under way
    GRADING = "grading"  #: finished, its grading is ordered
    GRADED = "graded"  #: has a reward, or grading failed (`reward` is None)
    ABANDONED = "abandoned"  #: its group failed or was discarded


class WeightsPhase(enum.Enum):
    """Phase of an instance's weights."""

    BLANK = "blank"  #: up, holds no version of this run
    LOADING = "loading"  #: its first push is in flight
    SERVING = "serving"  #: holds a confirmed version
    DRAINING = "draining"  #: holds a confirmed version and gets no new work, as it will load another
    UPDATING = "updating"  #: a push is in flight, and not the first
    QUARANTINED = "quarantined"  #: a push failed: no work until one is confirmed
    LOST = "lost"  #: down, or not up yet


class Membership(enum.Enum):
    """An instance's part in the run; a lost instance keeps it."""

    MEMBER = "member"  #: gets weights and work
    DRAINED = "drained"  #: gets neither weights nor work until a user recalls it
    LEAVING = "leaving"  #: drained, and leaves the run once it is empty
    DISMISSED = "dismissed"  #: its dismissal is ordered


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

#: What may follow the end of a request.
_ENDED: Final = {TrajectoryPhase.WAITING, TrajectoryPhase.GRADING, TrajectoryPhase.ABANDONED}

TRAJECTORY: Final[Table[TrajectoryPhase]] = {
    TrajectoryPhase.WAITING: {TrajectoryPhase.RESIDENT, TrajectoryPhase.ABANDONED},
    TrajectoryPhase.RESIDENT: {TrajectoryPhase.STOPPING, TrajectoryPhase.CALLING, *_ENDED},
    TrajectoryPhase.STOPPING: {TrajectoryPhase.RESIDENT, TrajectoryPhase.CALLING, *_ENDED},
    TrajectoryPhase.CALLING: {TrajectoryPhase.CALLING, TrajectoryPhase.RESIDENT, *_ENDED},  # calling again: a replay
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
    Membership.DISMISSED: {Membership.MEMBER},  # by a new controller, which forgets drain requests
}

#: The group has left the ledger, but siblings may still be generating or being graded.
GIVEN_UP: Final = frozenset({GroupPhase.FAILED, GroupPhase.DISCARDED})
#: The group belongs to the U of rule F.
UNCONSUMED: Final = frozenset({GroupPhase.GENERATING, GroupPhase.GRADING, GroupPhase.COMPLETE})
#: The trajectory has a request in flight.
DECODING: Final = frozenset({TrajectoryPhase.RESIDENT, TrajectoryPhase.STOPPING})
#: The trajectory is not fully generated.
UNFINISHED: Final = DECODING | {TrajectoryPhase.WAITING, TrajectoryPhase.CALLING}
#: A push is in flight.
PUSHING: Final = frozenset({WeightsPhase.LOADING, WeightsPhase.UPDATING})
#: The instance holds a version that a push has confirmed.
HOLDS_VERSION: Final = frozenset({WeightsPhase.SERVING, WeightsPhase.DRAINING})
