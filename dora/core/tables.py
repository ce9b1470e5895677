"""The tables: prompt groups and their trajectories, inference servers, and the ledger of all groups.

Invariants: every admitted group is in exactly one phase, and `Ledger.counts` holds how many are in each: admitted = the
sum of the counts (conservation, C2). An instance changes its version only while nothing is resident or reserved on it,
unless weights may reach live requests (C1). Counters follow every change; `invariants.check` recomputes them.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Final

from dora.core.ids import GroupId, InstanceId, StepId, TrajectoryId, VersionId
from dora.core.phases import (
    GROUP,
    MEMBERSHIP,
    TRAJECTORY,
    WEIGHTS,
    GroupPhase,
    Membership,
    TrajectoryPhase,
    WeightsPhase,
)

_WAITING: Final = TrajectoryPhase.WAITING  # member access on an Enum class costs ten times a global's on Python 3.11
_SERVING: Final = WeightsPhase.SERVING
_MEMBER: Final = Membership.MEMBER


@dataclass(slots=True, eq=False, repr=False)
class Trajectory:
    """One generated sequence. `group` is None for a sample of an evaluation."""

    id: TrajectoryId
    _: KW_ONLY
    group: Group | None
    version: VersionId  #: the group's tag; where updates reach live requests, the newest as long as it runs
    num_prompt_tokens: int
    num_tokens: int = 0  #: produced, as last taken in from a report or a completion
    phase: TrajectoryPhase = _WAITING
    instance: Instance | None = None  #: where it is decoded; None unless RESIDENT or STOPPING
    target: Instance | None = None  #: where a slot and KV are reserved for its move; only while STOPPING
    attempt: int = 0  #: number of its latest command
    failures: int = 0  #: failed requests, instances lost apart
    seen_at: float = 0.0  #: when its token count was last seen to have grown, or its latest request began
    footprint: int = 0  #: tokens of KV accounted for it while it is resident: prompt + max(produced, expected)
    reward: float | None = None
    is_mixed: bool = False  #: a span of it names another version than its group's tag (C1)

    def move(self, phase: TrajectoryPhase) -> None:
        """Change the phase; ValueError if `phases.TRAJECTORY` does not allow it."""
        if phase not in TRAJECTORY[self.phase]:
            raise ValueError(f"trajectory {self.id}: {self.phase.value} -> {phase.value}")
        self.phase = phase


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """A prompt with its siblings; all carry the group's version."""

    id: GroupId
    _: KW_ONLY
    version: VersionId  #: the tag, never changed: staleness counts from it
    deadline: int
    num_prompt_tokens: int
    group_size: InitVar[int]
    admitted_at: float
    phase: GroupPhase = GroupPhase.GENERATING
    step: StepId | None = None  #: the step it is committed to
    home: Instance | None = None  #: where a sibling was dispatched last: it holds the prompt's prefix
    current: VersionId = field(init=False)  #: its tag; the newest where updates reach live requests
    waiting: list[Trajectory] = field(default_factory=list)  #: siblings that wait for a slot; the last is served first
    unfinished: int = field(init=False)
    ungraded: int = field(init=False)
    trajectories: list[Trajectory] = field(init=False)

    def __post_init__(self, group_size: int) -> None:
        self.current = self.version
        self.unfinished = self.ungraded = group_size
        self.trajectories = [
            Trajectory(TrajectoryId(t), group=self, version=self.version, num_prompt_tokens=self.num_prompt_tokens)
            for t in range(self.id * group_size, (self.id + 1) * group_size)
        ]

    def let_go(self) -> None:
        """Its siblings are needed no longer. They and the group name each other: so no search must free them."""
        self.trajectories.clear()

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of the siblings; None where grading failed (or has not happened)."""
        return tuple([t.reward for t in self.trajectories])


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """One inference server."""

    id: InstanceId
    incarnation: int = 0  #: number of its start
    weights: WeightsPhase = WeightsPhase.LOST
    membership: Membership = _MEMBER
    version: VersionId | None = None  #: confirmed version; None unless SERVING or DRAINING
    pushing: VersionId | None = None  #: version of the push under way; None unless LOADING or UPDATING
    attempt: int = 0  #: number of the latest push
    failures: int = 0  #: failed pushes in a row
    retry_at: float = 0.0  #: no push before this time
    slots: int = 0
    kv_tokens: int = 0
    residents: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    num_training: int = 0  #: residents that are not evaluation
    reserved: dict[TrajectoryId, Trajectory] = field(default_factory=dict)  #: moves on their way here
    num_requests: int = 0  #: slots taken, by residents and by moves on their way here
    kv_load: int = 0  #: sum of footprints of residents and reserved
    room_key: float = math.inf  #: its key in the version's heap of rooms, never above its load; inf: not in it
    reported: dict[TrajectoryId, int] = field(default_factory=dict)  #: residents' token counts, as reported last
    look_at: float = 0.0  #: when they are taken in
    progress_at: float = 0.0  #: when any of them was last seen to have grown, or the first one began
    pressed: bool = False  #: KV nearly full: no new work
    condemned: bool = False  #: waits for the shell to say that it is lost

    def move(self, phase: WeightsPhase) -> None:
        """Change what the weights allow; ValueError if `phases.WEIGHTS` does not."""
        if phase not in WEIGHTS[self.weights]:
            raise ValueError(f"instance {self.id}: {self.weights.value} -> {phase.value}")
        self.weights = phase

    def change(self, membership: Membership) -> None:
        """Change the part that it takes in the run; ValueError if `phases.MEMBERSHIP` does not allow it."""
        if membership not in MEMBERSHIP[self.membership]:
            raise ValueError(f"instance {self.id}: {self.membership.value} -> {membership.value}")
        self.membership = membership

    @property
    def is_empty(self) -> bool:
        """No resident and no reserved move: the only state in which its version may change."""
        return not self.num_requests

    @property
    def may_be_paused(self) -> bool:
        """A push is under way, or has failed: its health check may fail though it is well."""
        return self.pushing is not None or self.weights is WeightsPhase.QUARANTINED

    @property
    def is_member(self) -> bool:
        """It takes part in the run: nobody has asked to drain it."""
        return self.membership is _MEMBER

    @property
    def takes_work(self) -> bool:
        """It may be given requests of its version."""
        can = self.weights is _SERVING and self.membership is _MEMBER
        return can and not self.pressed and not self.condemned

    def load(self) -> float:
        """Share of slots or KV in use, whichever is larger."""
        slots = self.num_requests / self.slots
        kv = self.kv_load / self.kv_tokens
        return slots if slots > kv else kv

    def has_room(self, footprint: int) -> bool:
        """A slot is free and `footprint` tokens of KV fit; an empty instance always has room."""
        held = self.num_requests
        return held == 0 or (held < self.slots and self.kv_load + footprint <= self.kv_tokens)

    def add(self, trajectory: Trajectory) -> None:
        """A request becomes resident."""
        self.residents[trajectory.id] = trajectory
        self.num_requests += 1
        self.kv_load += trajectory.footprint
        if trajectory.group is not None:
            self.num_training += 1

    def remove(self, trajectory: Trajectory) -> None:
        """A request has ended here."""
        del self.residents[trajectory.id]
        self.num_requests -= 1
        self.kv_load -= trajectory.footprint
        if trajectory.group is not None:
            self.num_training -= 1

    def reserve(self, trajectory: Trajectory) -> None:
        """Keep a slot and KV for a move before its source is stopped."""
        self.reserved[trajectory.id] = trajectory
        self.num_requests += 1
        self.kv_load += trajectory.footprint

    def unreserve(self, trajectory: Trajectory) -> None:
        """The move has arrived, or is off."""
        del self.reserved[trajectory.id]
        self.num_requests -= 1
        self.kv_load -= trajectory.footprint


@dataclass(slots=True, eq=False, repr=False)
class Ledger:
    """All groups that are not trained, filtered, failed or discarded, and the counts of all that ever were."""

    groups: dict[GroupId, Group] = field(default_factory=dict)
    admitted: int = 0
    counts: dict[GroupPhase, int] = field(default_factory=lambda: dict.fromkeys(GroupPhase, 0))
    reasons: dict[str, int] = field(default_factory=dict)  #: "filtered: ...", "failed: ..." -> groups

    def admit(self, group: Group) -> None:
        """Enter a group."""
        self.groups[group.id] = group
        self.admitted += 1
        self.counts[GroupPhase.GENERATING] += 1

    def move(self, group: Group, phase: GroupPhase) -> None:
        """Change a group's phase; ValueError if `phases.GROUP` does not allow it."""
        if phase not in GROUP[group.phase]:
            raise ValueError(f"group {group.id}: {group.phase.value} -> {phase.value}")
        self.counts[group.phase] -= 1
        self.counts[phase] += 1
        group.phase = phase
        if not GROUP[phase]:
            del self.groups[group.id]

    @property
    def num_untrained(self) -> int:
        """Groups admitted and not yet trained; dropped ones have left. What the window W counts."""
        return len(self.groups)
