"""The version window: which policy versions are live, what needs each, and which can be released.

A version is live while it is the newest or has an untrained group. It is also kept, without being live, while an
evaluation or a push in flight needs it, and while a server has its adapter or may have it.

`invariants.check` recomputes all counters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from dora.core.ids import GroupId, InstanceId, VersionId
from dora.core.phases import Membership, WeightsPhase
from dora.core.tables import Group, Holding, Server, Trajectory

_SERVING: Final = WeightsPhase.SERVING  # globals: see tables.py
_MEMBER: Final = Membership.MEMBER

#: Hex digits of the digest of a version's bytes.
DIGITS: Final = 8


def digest_of(files: Mapping[str, str]) -> str:
    """Return what tells a version's bytes from others of the same number: a digest of the checksums of its files.

    Labels on servers have it, so that a server with bytes of a lost history or of another run is recognized.
    """
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:DIGITS]


@dataclass(slots=True, eq=False, repr=False)
class Version:
    """A published version that is needed."""

    number: VersionId
    digest: str = ""  #: of its bytes, as first published
    groups: int = 0  #: untrained groups
    unfinished: int = 0  #: training trajectories that are queued, resident, moving or calling
    away: int = 0  #: training trajectories that are calling and hold no slot
    away_tokens: int = 0  #: tokens of their prompts and answers
    quiet_since: float = 0.0  #: when `away` last became equal to `unfinished`: no trajectory holds a slot or waits
    num_waiting: int = 0  #: training trajectories that are queued for a slot
    evaluating: bool = False  #: its evaluation is due or in progress
    kv_load: int = 0  #: footprints of its residents
    loading: int = 0  #: pushes of this version in flight
    held: int = 0  #: servers that have its adapter, or may have it
    serving: dict[InstanceId, Server] = field(default_factory=dict)  #: members that hold it
    _waiting: list[tuple[int, GroupId, Group]] = field(default_factory=list)  # lazy heap, see reprioritize
    #: Lazy heap, see `offer`.
    _rooms: list[tuple[float, InstanceId, int, Server, Holding]] = field(default_factory=list)

    @property
    def needs_instance(self) -> bool:
        """Whether an instance has to hold it for an unfinished training trajectory."""
        return self.unfinished > 0

    # -- queued trajectories: the group with the fewest unfinished siblings first, then in admission order ----------

    def enqueue(self, group: Group, waiting: list[Trajectory]) -> None:
        """Queue siblings of a group for a slot."""
        self.num_waiting += len(waiting)
        group.waiting += waiting
        self.reprioritize(group)

    def reprioritize(self, group: Group) -> None:
        """Update a group with queued siblings whose number of unfinished siblings has changed."""
        heappush(self._waiting, (group.unfinished, group.id, group))

    def first_waiting(self) -> Group:
        """Return the group whose queued siblings are served first; there must be one."""
        heap = self._waiting
        while not heap[0][2].waiting or heap[0][2].unfinished != heap[0][0]:
            heappop(heap)
        return heap[0][2]

    def inherit(self, older: Version) -> None:
        """Take over the groups of an older version (updates in flight)."""
        self.groups += older.groups
        self.unfinished += older.unfinished
        self.away += older.away
        self.away_tokens += older.away_tokens
        self.num_waiting += older.num_waiting
        self._waiting += older._waiting
        heapify(self._waiting)
        older.groups = older.unfinished = older.away = older.away_tokens = older.num_waiting = 0
        older._waiting.clear()

    def dequeue(self, group: Group) -> None:
        """Remove the group's next sibling from the queue."""
        group.waiting.pop()
        self.num_waiting -= 1

    def forget_waiting(self, group: Group) -> None:
        """Remove all siblings of a group from the queue."""
        self.num_waiting -= len(group.waiting)
        group.waiting.clear()

    # -- instances with room: least loaded first --------------------------------------------------------------------

    def offer(self, instance: Server, holding: Holding) -> None:
        """Add an instance that takes work again or has more room; a heap entry with a higher key becomes stale.

        `holding` is where it has this version.
        """
        key = instance.load()
        if key < holding.room_key:
            holding.room_key = key
            heappush(self._rooms, (key, instance.id, holding.number, instance, holding))
            if len(self._rooms) > 64 + 4 * len(self.serving):  # mostly stale entries
                held = [(i, h) for i in self.serving.values() for h in i.holdings if h.version == self.number]
                self._rooms = sorted((h.room_key, i.id, h.number, i, h) for i, h in held if h.room_key < inf)

    def roomiest(self) -> Server | None:
        """Return the least loaded instance that takes work of this version (`Server.takes_work`, in line)."""
        heap = self._rooms
        while heap:
            key, id, number, instance, holding = heap[0]
            if key != holding.room_key or holding.version != self.number:
                heappop(heap)
            elif (
                holding.phase is not _SERVING
                or instance.pressed
                or instance.condemned
                or instance.membership is not _MEMBER
            ):
                heappop(heap)
                holding.room_key = inf  # not in the heap: `offer` must be called when it takes work again
            elif (load := instance.load()) > key:
                holding.room_key = load  # an increased load is updated only here
                heapreplace(heap, (load, id, number, instance, holding))
            else:
                return instance
        return None

    def roomiest_few(self, count: int) -> list[Server]:
        """Return up to `count` instances that take work of this version, least loaded first."""
        few: list[tuple[Server, Holding]] = []
        while len(few) < count and (instance := self.roomiest()) is not None:
            holding = self._rooms[0][-1]
            holding.room_key = inf  # makes its entry stale
            few.append((instance, holding))
        for instance, holding in few:
            self.offer(instance, holding)
        return [instance for instance, _ in few]


@dataclass(slots=True, eq=False, repr=False)
class Window:
    """All versions that are needed, oldest first (keys are added in order)."""

    entries: dict[VersionId, Version] = field(default_factory=dict)
    newest: VersionId | None = None  #: v*; None before version 0 is published

    def publish(self, number: VersionId, *, digest: str = "") -> Version:
        """Add a published version as the newest."""
        entry = self.entries[number] = Version(number, digest)
        self.newest = number
        return entry

    def live(self) -> list[VersionId]:
        """Return the newest version and all with an untrained group."""
        return [v for v, e in self.entries.items() if v == self.newest or e.groups]

    def releasable(self) -> list[VersionId]:
        """Return the versions that are not live, are not to be evaluated, have no push in flight, and have left all
        servers of adapters."""
        return [
            v
            for v, e in self.entries.items()
            if v != self.newest and not (e.groups or e.unfinished or e.evaluating or e.loading or e.held)
        ]
