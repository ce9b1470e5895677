"""The instance table: what each inference server holds, what runs on it, and how much room is left.

Invariant (C1): an instance changes its version only while nothing is resident or reserved on it; it gets work only
while SERVING a version that a push has confirmed. Called by tables.py, moves.py and state.py; placement.py reads.
"""

from __future__ import annotations

import enum
import math
from typing import Final

from dora.core.groups import Trajectory
from dora.core.ids import InstanceId, TrajectoryId


class InstancePhase(enum.Enum):
    """What an instance may be used for."""

    LOADING = "loading"  #: up, no version confirmed since it came up
    SERVING = "serving"  #: holds a confirmed version and takes its requests
    DRAINING = "draining"  #: holds a confirmed version, takes nothing new; its residents are being moved away
    UPDATING = "updating"  #: a push is under way on an instance that held another version
    QUARANTINED = "quarantined"  #: a push failed: no work until one is confirmed
    LOST = "lost"


TRANSITIONS: Final = {
    InstancePhase.LOADING: {InstancePhase.SERVING, InstancePhase.QUARANTINED, InstancePhase.LOST},
    InstancePhase.SERVING: {InstancePhase.DRAINING, InstancePhase.UPDATING, InstancePhase.LOST},
    InstancePhase.DRAINING: {InstancePhase.SERVING, InstancePhase.UPDATING, InstancePhase.LOST},
    InstancePhase.UPDATING: {InstancePhase.SERVING, InstancePhase.QUARANTINED, InstancePhase.LOST},
    InstancePhase.QUARANTINED: {InstancePhase.UPDATING, InstancePhase.LOST},
    InstancePhase.LOST: {InstancePhase.LOADING},
}

_SERVING: Final = InstancePhase.SERVING  # member access on an Enum class costs ten times a global's on Python 3.11

#: Back-off of failed pushes, seconds; after the last one fails the instance counts as lost.
PUSH_BACKOFF_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


class Instance:
    """One inference server. Counters follow every change; `invariants.check` recomputes them."""

    __slots__ = (
        "attempt",
        "barred",
        "condemned",
        "failures",
        "id",
        "incarnation",
        "kv_load",
        "kv_tokens",
        "leaving",
        "look_at",
        "num_requests",
        "num_training",
        "phase",
        "pressed",
        "progress_at",
        "pushing",
        "reported",
        "reserved",
        "residents",
        "retry_at",
        "room_key",
        "slots",
        "version",
    )

    def __init__(self, id: InstanceId) -> None:
        self.id = id
        self.incarnation = 0
        self.phase = InstancePhase.LOST
        self.version: int | None = None  #: confirmed version; None unless SERVING, DRAINING or UPDATING
        self.pushing: int | None = None  #: version of the push under way
        self.attempt = 0  #: number of the latest push
        self.failures = 0  #: failed pushes in a row
        self.retry_at = 0.0  #: no push before this time
        self.slots = 0
        self.kv_tokens = 0
        self.residents: dict[TrajectoryId, Trajectory] = {}
        self.num_training = 0  #: residents that are not evaluation
        self.reserved: dict[TrajectoryId, Trajectory] = {}  #: moves on their way here
        self.num_requests = 0  #: slots taken, by residents and by moves on their way here
        self.kv_load = 0  #: sum of footprints of residents and reserved
        self.room_key = math.inf  #: its key in the version's heap of rooms, never above its load; inf: not in it
        self.reported: dict[TrajectoryId, int] = {}  #: its residents' token counts, from its latest report
        self.look_at = 0.0  #: when they are taken in
        self.progress_at = 0.0  #: when any of them was last seen to have grown, or the first one began
        self.pressed = False  #: KV nearly full: no new work
        self.condemned = False  #: waits for the shell to say that it is lost
        self.barred = False  #: drained on request: no work and no weights until it is recalled
        self.leaving = False  #: barred, and to leave the run once it is empty

    def move(self, phase: InstancePhase) -> None:
        """Change the phase; an illegal move is a missing entry of TRANSITIONS."""
        if phase not in TRANSITIONS[self.phase]:
            raise ValueError(f"instance {self.id}: {self.phase.value} -> {phase.value}")
        self.phase = phase

    @property
    def is_empty(self) -> bool:
        """No resident and no reserved move: the only state in which its version may change."""
        return not self.num_requests

    @property
    def may_be_paused(self) -> bool:
        """A push is under way, or has failed: its health check may fail though it is well."""
        return self.pushing is not None or self.phase is InstancePhase.QUARANTINED

    @property
    def takes_work(self) -> bool:
        """It may be given requests of its version."""
        return self.phase is _SERVING and not self.pressed and not self.condemned

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
