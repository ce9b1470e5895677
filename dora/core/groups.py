"""The ledger: prompt groups, their trajectories, and where each stands.

Invariant: every admitted group is in exactly one phase, `Ledger.counts` holds how many are in each, and a phase
changes only along TRANSITIONS. That is conservation (C2): admitted = the sum of the counts. Called by the handlers and
decisions of state.py and its bases; others read.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from dora.core.ids import GroupId, TrajectoryId

if TYPE_CHECKING:
    from dora.core.instances import Instance


class GroupPhase(enum.Enum):
    """Where a prompt group stands."""

    GENERATING = "generating"  #: at least one sibling is unfinished
    GRADING = "grading"  #: all siblings are finished, at least one is ungraded
    COMPLETE = "complete"  #: graded, waits for a place in a step
    COMMITTED = "committed"  #: has a place in a step
    TRAINED = "trained"
    FILTERED = "filtered"  #: no advantage in it
    FAILED = "failed"
    DISCARDED = "discarded"  #: over-sampled: its step was full before it was complete


TRANSITIONS: Final = {
    GroupPhase.GENERATING: {GroupPhase.GRADING, GroupPhase.FAILED, GroupPhase.DISCARDED},
    GroupPhase.GRADING: {GroupPhase.COMPLETE, GroupPhase.FILTERED, GroupPhase.FAILED, GroupPhase.DISCARDED},
    GroupPhase.COMPLETE: {GroupPhase.COMMITTED, GroupPhase.DISCARDED},
    GroupPhase.COMMITTED: {GroupPhase.TRAINED},
    GroupPhase.TRAINED: set(),
    GroupPhase.FILTERED: set(),
    GroupPhase.FAILED: set(),
    GroupPhase.DISCARDED: set(),
}

#: Phases of a group that left although siblings of it may still run, or wait for their grades.
GIVEN_UP: Final = frozenset({GroupPhase.FAILED, GroupPhase.DISCARDED})

#: Phases of an unconsumed group: the U of rule F.
UNCONSUMED: Final = frozenset({GroupPhase.GENERATING, GroupPhase.GRADING, GroupPhase.COMPLETE})


class TrajectoryPhase(enum.Enum):
    """Where one generated sequence stands."""

    WAITING = "waiting"  #: for a slot on an instance of its version
    RESIDENT = "resident"  #: being decoded
    STOPPING = "stopping"  #: being decoded, asked to stop: it moves or makes room
    GRADING = "grading"
    GRADED = "graded"  #: rewarded, or grading failed (`reward` is None)
    ABANDONED = "abandoned"  #: its group failed or was discarded


_WAITING: Final = TrajectoryPhase.WAITING  # member access on an Enum class costs ten times a global's on Python 3.11


class Trajectory:
    """One generated sequence. `group` is None for a sample of an evaluation."""

    __slots__ = (
        "attempt",
        "failures",
        "footprint",
        "group",
        "id",
        "instance",
        "is_mixed",
        "num_prompt_tokens",
        "num_tokens",
        "phase",
        "reward",
        "seen_at",
        "target",
        "version",
    )

    def __init__(self, id: TrajectoryId, *, group: Group | None, version: int, num_prompt_tokens: int) -> None:
        self.id = id
        self.group = group
        self.version = version  #: the group's tag; where updates reach live requests, the newest as long as it runs
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0  #: produced, as last taken in from a report or a completion
        self.phase = _WAITING
        self.instance: Instance | None = None  #: where it is decoded; None unless RESIDENT or STOPPING
        self.target: Instance | None = None  #: where a slot and KV are reserved for its move; only while STOPPING
        self.attempt = 0  #: number of its latest command
        self.failures = 0  #: failed requests, instances lost apart
        self.seen_at = 0.0  #: when its token count was last seen to have grown, or its latest request began
        self.footprint = 0  #: tokens of KV accounted for it while it is resident: prompt + max(produced, expected)
        self.reward: float | None = None
        self.is_mixed = False  #: a span of it names another version than its group's tag (C1)


class Group:
    """A prompt with its siblings; all carry the group's version."""

    __slots__ = (
        "admitted_at",
        "current",
        "deadline",
        "home",
        "id",
        "num_prompt_tokens",
        "phase",
        "step",
        "trajectories",
        "unfinished",
        "ungraded",
        "version",
        "waiting",
    )

    def __init__(
        self, id: GroupId, *, version: int, deadline: int, num_prompt_tokens: int, group_size: int, at: float
    ) -> None:
        self.id = id
        self.version = version  #: the tag, never changed: staleness counts from it
        self.current = version  #: what it goes on under: the tag, or the newest where updates reach live requests
        self.deadline = deadline
        self.num_prompt_tokens = num_prompt_tokens
        self.phase = GroupPhase.GENERATING
        self.step: int | None = None  #: the step it is committed to
        self.admitted_at = at
        self.home: Instance | None = None  #: where a sibling was dispatched last: it holds the prompt's prefix
        self.waiting: list[Trajectory] = []  #: siblings that wait for a slot; the last one is served first
        self.unfinished = group_size
        self.ungraded = group_size
        first = id * group_size
        self.trajectories = [
            Trajectory(TrajectoryId(first + i), group=self, version=version, num_prompt_tokens=num_prompt_tokens)
            for i in range(group_size)
        ]

    def let_go(self) -> None:
        """Nobody asks for its siblings any more. Group and siblings name each other: so no search must free them."""
        self.trajectories.clear()

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of the siblings; None where grading failed (or has not happened)."""
        return tuple([t.reward for t in self.trajectories])


class Ledger:
    """All groups that are not trained, filtered, failed or discarded, and the counts of all that ever were."""

    __slots__ = ("admitted", "counts", "groups", "reasons")

    def __init__(self) -> None:
        self.groups: dict[GroupId, Group] = {}
        self.admitted = 0
        self.counts = dict.fromkeys(GroupPhase, 0)
        self.reasons: dict[str, int] = {}  #: "filtered: ...", "failed: ..." or "discarded: ..." -> groups

    def admit(self, group: Group) -> None:
        """Enter a group."""
        self.groups[group.id] = group
        self.admitted += 1
        self.counts[GroupPhase.GENERATING] += 1

    def move(self, group: Group, phase: GroupPhase) -> None:
        """Change a group's phase; an illegal move is a missing entry of TRANSITIONS."""
        if phase not in TRANSITIONS[group.phase]:
            raise ValueError(f"group {group.id}: {group.phase.value} -> {phase.value}")
        self.counts[group.phase] -= 1
        self.counts[phase] += 1
        group.phase = phase
        if not TRANSITIONS[phase]:
            del self.groups[group.id]

    @property
    def num_untrained(self) -> int:
        """Groups admitted and not yet trained; dropped ones have left. What the window W counts."""
        return len(self.groups)


def advantage_free(rewards: tuple[float | None, ...], *, filter_zero_variance: bool) -> tuple[str, str] | None:
    """(outcome, reason) when a graded group cannot be trained, else None.

    Judged over graded siblings; fewer than two graded siblings is a failure of grading, not a lack of variance.
    """
    graded = [r for r in rewards if r is not None]
    if len(graded) < 2:
        return "failed", "grading"
    if filter_zero_variance and max(graded) == min(graded):
        return "filtered", "zero variance"
    return None
