"""The version window: which policy versions are alive, who needs each, and when one is released.

A version is live while it is the newest or a group tagged with it is not yet trained, and it is held,
without being live, while an evaluation or a push in flight needs it. Entry counters follow every change;
`invariants.check` recomputes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from dora.core.ids import GroupId, InstanceId, VersionId
from dora.core.tables import Group, Instance, Trajectory


@dataclass(slots=True, eq=False, repr=False)
class Version:
    """One published version that something needs."""

    number: VersionId
    groups: int = 0  #: groups with this tag that are not trained, filtered or failed
    unfinished: int = 0  #: training trajectories that are waiting, resident or being moved
    num_waiting: int = 0  #: training trajectories that wait for a slot
    evaluating: bool = False  #: its evaluation is under way
    kv_load: int = 0  #: footprints of its residents
    loading: int = 0  #: pushes of this version in flight
    serving: dict[InstanceId, Instance] = field(default_factory=dict)  #: members that hold it
    _waiting: list[tuple[int, GroupId, Group]] = field(default_factory=list)  # lazy heap, see reprioritize
    _rooms: list[tuple[float, InstanceId, Instance]] = field(default_factory=list)  # lazy heap, see offer

    @property
    def needs_instance(self) -> bool:
        """A training trajectory of it is unfinished: an instance must hold it, sooner or later."""
        return self.unfinished > 0

    # -- waiting trajectories: of the group with the fewest unfinished siblings, then in admission order ------------

    def enqueue(self, group: Group, waiting: list[Trajectory]) -> None:
        """Siblings of a group wait for a slot."""
        self.num_waiting += len(waiting)
        group.waiting += waiting
        self.reprioritize(group)

    def reprioritize(self, group: Group) -> None:
        """A group with waiting siblings has another number of unfinished ones; the older entry turns stale."""
        heappush(self._waiting, (group.unfinished, group.id, group))

    def first_waiting(self) -> Group:
        """The group whose waiting siblings are served first; there must be one."""
        heap = self._waiting
        while not heap[0][2].waiting or heap[0][2].unfinished != heap[0][0]:
            heappop(heap)
        return heap[0][2]

    def inherit(self, older: Version) -> None:
        """Updates reach live requests: what belonged to an older version belongs to this one from now on."""
        self.groups += older.groups
        self.unfinished += older.unfinished
        self.num_waiting += older.num_waiting
        self._waiting += older._waiting
        heapify(self._waiting)
        older.groups = older.unfinished = older.num_waiting = 0
        older._waiting.clear()

    def dequeue(self, group: Group) -> None:
        """The group's next sibling has its slot."""
        group.waiting.pop()
        self.num_waiting -= 1

    def forget_waiting(self, group: Group) -> None:
        """The group has failed: its siblings wait no longer."""
        self.num_waiting -= len(group.waiting)
        group.waiting.clear()

    # -- instances with room: least loaded first --------------------------------------------------------------------

    def offer(self, instance: Instance) -> None:
        """An instance takes work again, or has more room than before; an entry with a higher key turns stale."""
        key = instance.load()
        if key < instance.room_key:
            instance.room_key = key
            heappush(self._rooms, (key, instance.id, instance))
            if len(self._rooms) > 64 + 4 * len(self.serving):
                self._compact()

    def _compact(self) -> None:
        self._rooms = sorted((i.room_key, i.id, i) for i in self.serving.values() if i.room_key < inf)

    def roomiest(self) -> Instance | None:
        """The least loaded instance that takes work of this version."""
        heap = self._rooms
        while heap:
            key, id, instance = heap[0]
            if key != instance.room_key or instance.version != self.number:
                heappop(heap)
            elif not instance.takes_work:
                heappop(heap)
                instance.room_key = inf  # it is out of the heap: whoever makes it take work again must offer it
            elif (load := instance.load()) > key:
                instance.room_key = load  # a load that rises is entered only when it is looked at
                heapreplace(heap, (load, id, instance))
            else:
                return instance
        return None

    def roomiest_few(self, count: int) -> list[Instance]:
        """The `count` least loaded instances that take work of this version, least loaded first."""
        few: list[Instance] = []
        while len(few) < count and (instance := self.roomiest()) is not None:
            instance.room_key = inf  # out of the heap, so that the next one shows
            few.append(instance)
        for instance in few:
            self.offer(instance)
        return few


@dataclass(slots=True, eq=False, repr=False)
class Window:
    """All versions that something needs, oldest first (keys are added in order)."""

    entries: dict[VersionId, Version] = field(default_factory=dict)
    newest: VersionId | None = None  #: v*; None before version 0 is published

    def publish(self, number: VersionId) -> Version:
        """A version is complete in the store; it becomes the newest."""
        entry = self.entries[number] = Version(number)
        self.newest = number
        return entry

    def live(self) -> list[VersionId]:
        """The newest, and versions with a group that is not yet trained."""
        return [v for v, e in self.entries.items() if v == self.newest or e.groups]

    def releasable(self) -> list[VersionId]:
        """Versions that nothing needs: not live, not under evaluation, no push in flight."""
        return [
            v
            for v, e in self.entries.items()
            if v != self.newest and not e.groups and not e.unfinished and not e.evaluating and not e.loading
        ]
