"""Phases, their permitted changes, and the causes of each change, drawn in docs/STATES.md.

Invariant: a change is made only if its table lists it together with its cause; any other change is a bug and raises.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Final, TypeVar

from dora.core import events as ev
from dora.core.ids import Subject
from dora.errors import InvariantViolation


class Phase(enum.Enum):
    """A phase, hashed by identity: the hash of Enum is a Python function, and every change looks phases up."""

    __hash__ = object.__hash__


class GroupPhase(Phase):
    """Phase of a prompt group."""

    GENERATING = "generating"  #: at least one sibling is unfinished
    GRADING = "grading"  #: all siblings are finished, at least one is ungraded
    COMPLETE = "complete"  #: all siblings are graded, not committed yet
    COMMITTED = "committed"  #: assigned to a step
    TRAINED = "trained"  #: its step is trained
    FILTERED = "filtered"  #: its rewards are equal, so there is no advantage
    FAILED = "failed"  #: a sibling could not be generated, or too few could be graded
    DISCARDED = "discarded"  #: over-sampled: its step was full before it was complete


class TrajectoryPhase(Phase):
    """Phase of a trajectory."""

    WAITING = "waiting"  #: queued for a slot on an instance of its version
    RESIDENT = "resident"  #: being decoded
    STOPPING = "stopping"  #: being decoded, its stop is ordered: it moves or makes room
    CALLING = "calling"  #: not being decoded: a call of its environment is under way
    GRADING = "grading"  #: finished, its grading is ordered
    GRADED = "graded"  #: has a reward, or grading failed (`reward` is None)
    ABANDONED = "abandoned"  #: its group failed or was discarded


class WeightsPhase(Phase):
    """Phase of a holding: a place for one version on an instance."""

    BLANK = "blank"  #: up, holds no version of this run
    LOADING = "loading"  #: a push is in flight, the first or, of adapters, one after an unload
    SERVING = "serving"  #: holds a confirmed version
    DRAINING = "draining"  #: holds a confirmed version and gets no new work, as it will load another
    UPDATING = "updating"  #: a push is in flight, and not the first
    UNLOADING = "unloading"  #: its adapter is being unloaded, as nothing needs the version or the load failed
    QUARANTINED = "quarantined"  #: a push or an unload failed: no work until a push is confirmed
    LOST = "lost"  #: down, or not up yet


class Membership(Phase):
    """An instance's part in the run; a lost instance keeps it."""

    MEMBER = "member"  #: gets weights and work
    DRAINED = "drained"  #: gets neither weights nor work until a user recalls it
    LEAVING = "leaving"  #: drained, and leaves the run once it is empty
    DISMISSED = "dismissed"  #: its dismissal is ordered


class Decision(enum.StrEnum):
    """A decision of `decide.settle` that changes phases. One event may make several of them due."""

    COMMIT = "commit"  #: complete groups are committed, and a full step is closed: CommitGroup, CloseStep
    DISPATCH = "dispatch"  #: free slots of a version are filled: Generate, CallEnvironment
    PLACE = "place"  #: instances are given another version: PushWeights, UnloadVersion
    CONSOLIDATE = "consolidate"  #: an old version is packed onto fewer instances: StopRequest
    DISMISS = "dismiss"  #: empty instances leave the run: DismissInstance


#: What makes a change: an event, if its handler makes the change at once, or a decision after the handler.
Cause = type[ev.Event] | Decision
P = TypeVar("P", bound=Phase)
#: Phase -> the phases that may follow -> the causes.
Table = Mapping[P, Mapping[P, Set[Cause]]]

#: The instance is lost, or treated as lost: it left the run, or a new controller does not know its state.
_LOST: Final[Set[Cause]] = {ev.InstanceLost, ev.InstanceRemoved, ev.ControllerRestarted}
#: A call has ended the episode, or a new controller cannot replay its environment.
_EPISODE_ENDED: Final[Set[Cause]] = {ev.CallFinished, ev.ControllerRestarted}
#: A trajectory gets its reward, or none because its environment failed.
_GRADED: Final = {ev.TrajectoryGraded, *_EPISODE_ENDED}

GROUP: Final[Table[GroupPhase]] = {
    GroupPhase.GENERATING: {
        GroupPhase.GRADING: {ev.GenerationFinished, *_EPISODE_ENDED},
        GroupPhase.FAILED: {ev.GenerationFailed},
        GroupPhase.DISCARDED: {Decision.COMMIT},
    },
    GroupPhase.GRADING: {
        GroupPhase.COMPLETE: _GRADED,
        GroupPhase.FILTERED: _GRADED,
        GroupPhase.FAILED: _GRADED,
        GroupPhase.DISCARDED: {Decision.COMMIT},
    },
    GroupPhase.COMPLETE: {
        GroupPhase.COMMITTED: {Decision.COMMIT},
        GroupPhase.DISCARDED: {Decision.COMMIT},
    },
    GroupPhase.COMMITTED: {
        GroupPhase.TRAINED: {ev.StepTrained, ev.TrainerReady},  # a StepTrained may be lost with an earlier controller
    },
    GroupPhase.TRAINED: {},
    GroupPhase.FILTERED: {},
    GroupPhase.FAILED: {},
    GroupPhase.DISCARDED: {},
}

TRAJECTORY: Final[Table[TrajectoryPhase]] = {
    TrajectoryPhase.WAITING: {
        TrajectoryPhase.RESIDENT: {Decision.DISPATCH},
        TrajectoryPhase.CALLING: {Decision.DISPATCH},  # for a prompt of its own
        TrajectoryPhase.ABANDONED: {ev.GenerationFailed, Decision.COMMIT},
    },
    TrajectoryPhase.RESIDENT: {
        TrajectoryPhase.WAITING: {ev.GenerationStopped, ev.GenerationFailed, *_LOST},
        TrajectoryPhase.STOPPING: {
            ev.KvPressureReported,
            ev.InstanceDrainRequested,
            ev.Ticked,  # its request gets no tokens, or there is room for it beside a drained instance
            ev.GenerationFailed,  # of a sibling
            ev.WeightPushFinished,  # with another version than ordered, like a failure
            ev.WeightPushFailed,
            Decision.COMMIT,
            Decision.PLACE,
            Decision.CONSOLIDATE,
        },
        TrajectoryPhase.CALLING: {ev.CallStarted},
        TrajectoryPhase.GRADING: {ev.GenerationFinished, ev.GenerationFailed},  # failed: an evaluation sample
        TrajectoryPhase.ABANDONED: {ev.GenerationFailed},
    },
    TrajectoryPhase.STOPPING: {
        TrajectoryPhase.WAITING: {ev.GenerationStopped, ev.GenerationFailed, *_LOST},
        TrajectoryPhase.RESIDENT: {ev.GenerationStopped},
        TrajectoryPhase.CALLING: {ev.CallStarted},
        TrajectoryPhase.GRADING: {ev.GenerationFinished, ev.GenerationFailed},
        TrajectoryPhase.ABANDONED: {
            ev.GenerationFinished,
            ev.GenerationStopped,
            ev.GenerationFailed,
            ev.CallStarted,
            *_LOST,
        },
    },
    TrajectoryPhase.CALLING: {
        TrajectoryPhase.WAITING: {ev.CallFinished},
        TrajectoryPhase.RESIDENT: {ev.CallFinished},
        TrajectoryPhase.CALLING: {ev.ControllerRestarted},  # again: a replay
        TrajectoryPhase.GRADING: _EPISODE_ENDED,
        TrajectoryPhase.ABANDONED: _EPISODE_ENDED,
    },
    TrajectoryPhase.GRADING: {
        TrajectoryPhase.GRADING: {ev.ControllerRestarted},  # a new controller grades again
        TrajectoryPhase.GRADED: {*_GRADED, ev.GenerationFailed},  # without a reward: an evaluation sample
        TrajectoryPhase.ABANDONED: {ev.ControllerRestarted},
    },
    TrajectoryPhase.GRADED: {},
    TrajectoryPhase.ABANDONED: {},
}

#: The push failed, or the server reads back another version than ordered.
_PUSH_FAILED: Final[Set[Cause]] = {ev.WeightPushFailed, ev.WeightPushFinished}

WEIGHTS: Final[Table[WeightsPhase]] = {
    WeightsPhase.BLANK: {
        WeightsPhase.LOADING: {Decision.PLACE},
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.LOADING: {
        WeightsPhase.SERVING: {ev.WeightPushFinished},
        WeightsPhase.QUARANTINED: _PUSH_FAILED,
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.SERVING: {
        WeightsPhase.DRAINING: {Decision.PLACE, Decision.CONSOLIDATE},
        WeightsPhase.UPDATING: {Decision.PLACE},
        WeightsPhase.UNLOADING: {Decision.PLACE},
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.DRAINING: {
        WeightsPhase.SERVING: {ev.InstanceDrainRequested, Decision.PLACE},  # a request: see Membership.DRAINED
        WeightsPhase.UPDATING: {Decision.PLACE},
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.UPDATING: {
        WeightsPhase.SERVING: {ev.WeightPushFinished},
        WeightsPhase.QUARANTINED: _PUSH_FAILED,
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.UNLOADING: {
        WeightsPhase.BLANK: {ev.VersionUnloaded},
        WeightsPhase.QUARANTINED: {ev.VersionUnloadFailed},
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.QUARANTINED: {
        WeightsPhase.UPDATING: {Decision.PLACE},
        WeightsPhase.UNLOADING: {Decision.PLACE},
        WeightsPhase.LOST: _LOST,
    },
    WeightsPhase.LOST: {
        WeightsPhase.BLANK: {ev.InstanceUp},
        WeightsPhase.SERVING: {ev.InstanceUp},  # taken over with a version that is needed
    },
}

MEMBERSHIP: Final[Table[Membership]] = {
    Membership.MEMBER: {
        Membership.DRAINED: {ev.InstanceDrainRequested},
    },
    Membership.DRAINED: {
        Membership.MEMBER: {ev.InstanceRecalled, ev.ControllerRestarted},  # a new controller forgets drain requests
        Membership.LEAVING: {ev.InstanceDrainRequested},
    },
    Membership.LEAVING: {
        Membership.MEMBER: {ev.InstanceRecalled, ev.ControllerRestarted},
        Membership.DISMISSED: {Decision.DISMISS},
    },
    Membership.DISMISSED: {
        Membership.MEMBER: {ev.ControllerRestarted},
    },
}


class ImpossibleChange(InvariantViolation):
    """A change of phases that its table does not list with its cause."""

    def __init__(self, subject: Subject, before: Phase, after: Phase, cause: Cause, known: object) -> None:
        """`known`: what the core knows about the subject."""
        super().__init__(f"{subject}: {before.value} --> {after.value} by {name_of(cause)} is impossible ({known})")
        self.subject = subject


def name_of(cause: Cause) -> str:
    """Return the name of a cause: `TrajectoryGraded`, or `dispatch`."""
    return cause.value if isinstance(cause, Decision) else cause.__name__


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
#: A push or an unload is in flight.
IN_FLIGHT: Final = PUSHING | {WeightsPhase.UNLOADING}
#: The instance holds a version that a push has confirmed, of this controller or of an earlier one.
HOLDS_VERSION: Final = frozenset({WeightsPhase.SERVING, WeightsPhase.DRAINING})
