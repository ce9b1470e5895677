"""Prompt groups, trajectories, instances, and the ledger of all groups.

Invariants: every admitted group is in exactly one phase, and `Ledger.counts` adds up to `Ledger.admitted`
(conservation, C2). An instance changes its version only while nothing is resident or reserved on it, unless the
strategy updates in flight (C1). `invariants.check` recomputes all counters.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Final

from dora.core.ids import GroupId, InstanceId, StepId, Subject, TrajectoryId, Truncation, VersionId
from dora.core.phases import (
    GROUP,
    IN_FLIGHT,
    MEMBERSHIP,
    TRAJECTORY,
    WEIGHTS,
    Cause,
    GroupPhase,
    ImpossibleChange,
    Membership,
    TrajectoryPhase,
    WeightsPhase,
)

_WAITING: Final = TrajectoryPhase.WAITING  # on Python 3.11, Enum members are ten times slower to read than globals
_SERVING: Final = WeightsPhase.SERVING
_LOST: Final = WeightsPhase.LOST
_MEMBER: Final = Membership.MEMBER


@dataclass(slots=True, eq=False, repr=False)
class Trajectory:
    """One sampled sequence. `group` is None for an evaluation sample."""

    id: TrajectoryId
    _: KW_ONLY
    group: Group | None
    version: VersionId  #: the group's tag or, with updates in flight, the newest until it is finished
    num_prompt_tokens: int
    num_tokens: int = 0  #: produced, as of the last report processed or the last completion
    phase: TrajectoryPhase = _WAITING
    instance: Server | None = None  #: where it is decoded or, if CALLING, keeps its slot; else None
    last: Server | None = None  #: where its last turn was decoded; set by a call, until it is dispatched again
    left: InstanceId | None = None  #: where its request was stopped; set until it is dispatched again
    target: Server | None = None  #: where a slot and KV are reserved for its move; only while STOPPING
    attempt: int = 0  #: of its latest command
    failures: int = 0  #: failed requests, not counting lost instances
    seen_at: float = 0.0  #: when its token count was last seen to grow, or its latest request began
    footprint: int = 0  #: KV tokens accounted for while it is resident: prompt + max(produced, expected)
    turn_rewards: tuple[float, ...] = ()  #: rewards of the environment, one for each call after a turn
    turn_tokens: int = 0  #: limit of the present turn; 0: that of the answer
    reward: float | None = None
    truncated: Truncation = ""  #: the budget that ended it; known once it is finished
    repeated: int = 0  #: tokens that the trainer computes again because the conversation forked
    is_mixed: bool = False  #: a span has another version than its group's tag (C1)

    def move(self, phase: TrajectoryPhase, cause: Cause) -> None:
        """Change the phase; ImpossibleChange unless `phases.TRAJECTORY` lists the change with its cause."""
        if cause not in TRAJECTORY[self.phase].get(phase, ()):
            raise ImpossibleChange(Subject("trajectory", self.id), self.phase, phase, cause, self)
        self.phase = phase

    def __str__(self) -> str:
        where = f", on instance {self.instance.id}" if self.instance is not None else ""
        group = f"group {self.group.id}, " if self.group is not None else ""
        return f"{group}version {self.version}, {self.num_tokens} tokens, attempt {self.attempt}{where}"


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """A prompt and its siblings, which all have the group's version."""

    id: GroupId
    _: KW_ONLY
    version: VersionId  #: the tag, never changed: staleness counts from it
    deadline: int
    num_prompt_tokens: int
    group_size: InitVar[int]
    admitted_at: float
    phase: GroupPhase = GroupPhase.GENERATING
    step: StepId | None = None  #: the step it is committed to
    home: Server | None = None  #: where a sibling was last dispatched: its cache has the prompt
    current: VersionId = field(init=False)  #: version to continue under: the tag or, with updates in flight, the newest
    waiting: list[Trajectory] = field(default_factory=list)  #: siblings queued for a slot; the last one is next
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

    def __str__(self) -> str:
        left = f"{self.unfinished} siblings unfinished, {self.ungraded} ungraded"
        return f"version {self.version}, deadline {self.deadline}, {left}"

    def let_go(self) -> None:
        """Drop the siblings. This breaks the reference cycle, so that no garbage collection is needed."""
        self.trajectories.clear()

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of the siblings; None if ungraded or if grading failed."""
        return tuple([t.reward for t in self.trajectories])


@dataclass(slots=True, eq=False, repr=False)
class Holding:
    """A place for one version on a server: its full weights, or one of several adapters."""

    phase: WeightsPhase = WeightsPhase.LOST
    version: VersionId | None = None  #: confirmed version; None unless SERVING or DRAINING
    pushing: VersionId | None = None  #: version of the push in flight; None unless LOADING or UPDATING
    adapter: VersionId | None = None  #: the adapter that it has or may have: from its push until it is unloaded
    load: int = 0  #: attempt of the push of `adapter`
    attempt: int = 0  #: of its latest push or unload
    push_at: float = 0.0  #: when it was ordered
    push_area_s: float = 0.0  #: `PushLimit.under_way_s` at that time
    failures: int = 0  #: pushes and unloads that failed since a push was confirmed
    retry_at: float = 0.0  #: no push or unload before this time
    room_key: float = math.inf  #: its key in the version's heap of rooms, never above the load; inf: not in it
    number: int = 0  #: among the holdings of its server

    def move(self, phase: WeightsPhase, cause: Cause, *, instance: Server) -> None:
        """Change the phase; ImpossibleChange unless `phases.WEIGHTS` lists the change with its cause."""
        if cause not in WEIGHTS[self.phase].get(phase, ()):
            raise ImpossibleChange(Subject("instance", instance.id), self.phase, phase, cause, instance)
        self.phase = phase

    def __str__(self) -> str:
        holds = f"version {self.version}" if self.pushing is None else f"push {self.attempt} of {self.pushing}"
        return f"{self.phase.value}, {holds}"


@dataclass(slots=True, eq=False, repr=False)
class Server:
    """One inference server. All versions that it holds share its slots and its KV."""

    id: InstanceId
    holdings: list[Holding] = field(default_factory=lambda: [Holding()])
    attempt: int = 0  #: of the latest push or unload
    incarnation: int = 0  #: counts its starts
    membership: Membership = _MEMBER
    slots: int = 0
    kv_tokens: int = 0
    residents: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    num_training: int = 0  #: residents that are not evaluation samples
    reserved: dict[TrajectoryId, Trajectory] = field(default_factory=dict)  #: trajectories that move here
    num_requests: int = 0  #: slots taken, by residents and reserved
    kv_load: int = 0  #: sum of footprints of residents and reserved
    reported: dict[TrajectoryId, int] = field(default_factory=dict)  #: residents' token counts, as last reported
    check_at: float = 0.0  #: when `reported` is processed next
    progress_at: float = 0.0  #: when any of the counts was last seen to grow, or the first request began
    pressed: bool = False  #: KV nearly full: no new work
    condemned: bool = False  #: a CondemnInstance is in flight
    full: Holding = field(init=False)  #: the holding of a server of full weights, which has only this one
    is_shared: bool = field(init=False)  #: it holds several versions side by side, as adapters

    def __post_init__(self) -> None:
        self.full = self.holdings[0]
        self.is_shared = len(self.holdings) > 1

    def change(self, membership: Membership, cause: Cause) -> None:
        """Change the membership; ImpossibleChange unless `phases.MEMBERSHIP` lists the change with its cause."""
        if cause not in MEMBERSHIP[self.membership].get(membership, ()):
            raise ImpossibleChange(Subject("instance", self.id), self.membership, membership, cause, self)
        self.membership = membership

    def __str__(self) -> str:
        phases = f"incarnation {self.incarnation}, {self.membership.value}"
        holdings = ", ".join(map(str, self.holdings))
        return f"{phases}, {holdings}, {len(self.residents)} residents, {len(self.reserved)} moving here"

    @property
    def is_lost(self) -> bool:
        """Whether it is down, or not up yet: all of its holdings are LOST."""
        return self.full.phase is _LOST

    @property
    def is_empty(self) -> bool:
        """Whether nothing is resident or reserved on it."""
        return not self.num_requests

    @property
    def is_updating(self) -> bool:
        """Whether a push is in flight that may hold up its requests. The push of an adapter does not."""
        return self.full.pushing is not None and not self.is_shared

    @property
    def may_be_paused(self) -> bool:
        """Whether an update is in flight or has failed, so that health checks may fail although the server is well."""
        return self.is_updating or (self.full.phase is WeightsPhase.QUARANTINED and not self.is_shared)

    @property
    def has_orders(self) -> bool:
        """Whether a push or an unload is in flight."""
        return any(holding.phase in IN_FLIGHT for holding in self.holdings)

    @property
    def is_member(self) -> bool:
        """Whether it takes part in the run."""
        return self.membership is _MEMBER

    def takes_work(self, version: VersionId | None) -> bool:
        """Whether it may get requests for this version."""
        if self.pressed or self.condemned or self.membership is not _MEMBER:
            return False
        for holding in self.holdings:
            if holding.version == version:
                return holding.phase is _SERVING
        return False

    def serves(self, version: VersionId | None) -> bool:
        """Whether a trajectory of this version may stay on it: like `takes_work`, but under KV pressure too."""
        if self.membership is not _MEMBER or self.condemned:
            return False
        holding = self.holding_of(version)
        return holding is not None and holding.phase is _SERVING

    def holding_of(self, version: VersionId | None) -> Holding | None:
        """Return the holding that has this version, confirmed."""
        for holding in self.holdings:
            if holding.version == version:
                return holding
        return None

    def load(self) -> float:
        """Return the share of slots or of KV in use, whichever is larger."""
        slots = self.num_requests / self.slots
        kv = self.kv_load / self.kv_tokens
        return slots if slots > kv else kv

    def has_room(self, footprint: int) -> bool:
        """Whether a slot is free and `footprint` KV tokens fit; an empty instance always has room."""
        held = self.num_requests
        return held == 0 or (held < self.slots and self.kv_load + footprint <= self.kv_tokens)

    def add(self, trajectory: Trajectory) -> None:
        """Add a resident."""
        self.residents[trajectory.id] = trajectory
        self.num_requests += 1
        self.kv_load += trajectory.footprint
        if trajectory.group is not None:
            self.num_training += 1

    def remove(self, trajectory: Trajectory) -> None:
        """Remove a resident."""
        del self.residents[trajectory.id]
        self.num_requests -= 1
        self.kv_load -= trajectory.footprint
        if trajectory.group is not None:
            self.num_training -= 1

    def reserve(self, trajectory: Trajectory) -> None:
        """Reserve a slot and KV for a trajectory that moves here."""
        self.reserved[trajectory.id] = trajectory
        self.num_requests += 1
        self.kv_load += trajectory.footprint

    def unreserve(self, trajectory: Trajectory) -> None:
        """Release a reservation."""
        del self.reserved[trajectory.id]
        self.num_requests -= 1
        self.kv_load -= trajectory.footprint


@dataclass(slots=True, eq=False, repr=False)
class Ledger:
    """All groups that are not trained, filtered, failed or discarded, and counts of all groups ever admitted."""

    groups: dict[GroupId, Group] = field(default_factory=dict)
    admitted: int = 0
    counts: dict[GroupPhase, int] = field(default_factory=lambda: dict.fromkeys(GroupPhase, 0))
    reasons: dict[str, int] = field(default_factory=dict)  #: `DropGroup.why` -> number of groups

    def admit(self, group: Group) -> None:
        """Add a group."""
        self.groups[group.id] = group
        self.admitted += 1
        self.counts[GroupPhase.GENERATING] += 1

    def move(self, group: Group, phase: GroupPhase, cause: Cause) -> None:
        """Change a group's phase; ImpossibleChange unless `phases.GROUP` lists the change with its cause."""
        if cause not in GROUP[group.phase].get(phase, ()):
            raise ImpossibleChange(Subject("group", group.id), group.phase, phase, cause, group)
        self.counts[group.phase] -= 1
        self.counts[phase] += 1
        group.phase = phase
        if not GROUP[phase]:
            del self.groups[group.id]

    @property
    def num_untrained(self) -> int:
        """Number of groups admitted and neither trained nor dropped, which W limits."""
        return len(self.groups)
