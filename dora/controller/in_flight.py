"""The requests in flight, one task each.

Invariant: after `fence`, no request on that instance adds a token or emits an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from dora.controller.trajectories import Trajectories
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.tables import Server


class InFlight:
    """The tasks of all requests, by trajectory."""

    def __init__(self, trajectories: Trajectories, *, rows: Mapping[InstanceId, Server]) -> None:
        """`rows` is the core's instance table."""
        self._trajectories = trajectories
        self._rows = rows
        self._tasks: dict[TrajectoryId, asyncio.Task[None]] = {}

    def begin(self, trajectory: TrajectoryId, task: asyncio.Task[None]) -> None:
        """Add the task of a request that has begun."""
        self._tasks[trajectory] = task
        task.add_done_callback(partial(self._end, trajectory))

    def request(self, trajectory: TrajectoryId) -> asyncio.Task[None] | None:
        """Return the task of a trajectory's request, if one is in flight."""
        return self._tasks.get(trajectory)

    def _end(self, trajectory: TrajectoryId, task: asyncio.Task[None]) -> None:
        if self._tasks.get(trajectory) is task:
            del self._tasks[trajectory]

    def fence(self, instance: InstanceId) -> dict[TrajectoryId, int]:
        """Cancel all requests on an instance; return the token counts that its trajectories continue from."""
        residents = self._rows[instance].residents if instance in self._rows else {}
        counts = self._trajectories.fence(residents)
        for trajectory in counts:
            task = self._tasks.pop(trajectory, None)
            if task is not None:
                task.cancel()
        return counts

    def cancel(self) -> None:
        """Cancel all requests; their records are kept."""
        for task in list(self._tasks.values()):
            task.cancel()
