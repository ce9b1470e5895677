"""The version window: which policy versions are alive, who needs each, and when one is released.

A version is live while it is the newest or a group tagged with it is not yet trained (system.md §5.6), and it is held,
without being live, while an evaluation or a push in flight needs it. Entry counters follow every change;
`invariants.check` recomputes them.
"""

from __future__ import annotations

from heapq import heappop, heappush

from dora.core.groups import Trajectory, TrajectoryPhase
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.instances import Instance


class Version:
    """One published version that something needs."""

    __slots__ = (
        "_rooms",
        "_waiting",
        "evaluating",
        "groups",
        "kv_load",
        "loading",
        "num_waiting",
        "number",
        "serving",
        "unfinished",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.groups = 0  #: groups with this tag that are not trained, filtered or failed
        self.unfinished = 0  #: training trajectories that are waiting, resident or being moved
        self.num_waiting = 0  #: training trajectories that wait for a slot
        self.evaluating = False  #: its evaluation is under way
        self.kv_load = 0  #: footprints of its residents
        self.loading = 0  #: pushes of this version in flight
        self.serving: dict[InstanceId, Instance] = {}  #: SERVING and DRAINING instances that hold it
        self._waiting: list[tuple[int, TrajectoryId, Trajectory]] = []  # lazy heap, see enqueue
        self._rooms: list[tuple[float, InstanceId, Instance]] = []  # lazy heap, see offer

    @property
    def needs_instance(self) -> bool:
        """Rule 1 of system.md §3.1: a training trajectory of it is unfinished."""
        return self.unfinished > 0

    # -- waiting trajectories: fewest unfinished siblings first, then admission order -------------------------------

    def enqueue(self, trajectory: Trajectory) -> None:
        """A training trajectory waits for a slot."""
        self.num_waiting += 1
        self._push_waiting(trajectory)

    def reprioritize(self, trajectory: Trajectory) -> None:
        """Its group has fewer unfinished siblings now; the older entry turns stale."""
        self._push_waiting(trajectory)

    def _push_waiting(self, trajectory: Trajectory) -> None:
        assert trajectory.group is not None
        heappush(self._waiting, (trajectory.group.unfinished, trajectory.id, trajectory))

    def peek_waiting(self) -> Trajectory | None:
        """The trajectory to be served first."""
        heap = self._waiting
        while heap:
            unfinished, _, trajectory = heap[0]
            group = trajectory.group
            if trajectory.phase is TrajectoryPhase.WAITING and group is not None and group.unfinished == unfinished:
                return trajectory
            heappop(heap)
        return None

    # -- instances with room: least loaded first --------------------------------------------------------------------

    def offer(self, instance: Instance) -> None:
        """The load of an instance has changed; the entry with another key turns stale."""
        key = instance.load()
        if key != instance.room_key:
            instance.room_key = key
            heappush(self._rooms, (key, instance.id, instance))
            if len(self._rooms) > 64 + 4 * len(self.serving):
                self._compact()

    def _compact(self) -> None:
        self._rooms = sorted((i.room_key, i.id, i) for i in self.serving.values())

    def roomiest(self) -> Instance | None:
        """The least loaded instance that takes work of this version."""
        heap = self._rooms
        while heap:
            key, id, instance = heap[0]
            if instance.room_key == key and instance.version == self.number and instance.takes_work:
                return instance
            heappop(heap)
            if instance.room_key == key and self.serving.get(id) is instance:
                instance.room_key = -1.0  # it is out of the heap: whoever makes it take work again must offer it
        return None


class Window:
    """All versions that something needs, oldest first (keys are added in order)."""

    __slots__ = ("entries", "newest")

    def __init__(self) -> None:
        self.entries: dict[int, Version] = {}
        self.newest: int | None = None  #: v*

    def publish(self, number: int) -> Version:
        """A version is complete in the store; it becomes the newest."""
        entry = self.entries[number] = Version(number)
        self.newest = number
        return entry

    def live(self) -> list[int]:
        """The newest, and versions with a group that is not yet trained."""
        return [v for v, e in self.entries.items() if v == self.newest or e.groups]

    def releasable(self) -> list[int]:
        """Versions that nothing needs: not live, not under evaluation, no push in flight."""
        return [
            v
            for v, e in self.entries.items()
            if v != self.newest and not e.groups and not e.unfinished and not e.evaluating and not e.loading
        ]
