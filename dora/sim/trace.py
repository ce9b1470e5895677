"""The trace of a simulation: the versions of each instance over time, when it decoded, and when the trainer worked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId
from dora.sim.workload import Workload
from dora.sim.world import World

#: Number of steps of a traced job after its warm-up; more do not fit in a picture.
TRACED_STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class Period:
    """A period of time under one version."""

    begin: float
    end: float
    version: int


@dataclass(slots=True)
class Lane:
    """One place for a version on an instance."""

    held: list[Period] = field(default_factory=list)  #: while it held a confirmed version
    decoding: list[Period] = field(default_factory=list)  #: while at least one request had that version
    version: int = -1
    held_since: float | None = None
    decoding_since: float | None = None
    requests: int = 0

    def empty(self, at: float) -> None:
        """Record that the last request has left."""
        if self.decoding_since is not None:
            self.decoding.append(Period(self.decoding_since, at, self.version))
            self.decoding_since = None

    def unload(self, at: float) -> None:
        """Record that the version is no longer held."""
        self.empty(at)
        if self.held_since is not None:
            self.held.append(Period(self.held_since, at, self.version))
            self.held_since = None


class Trace:
    """The sink of a `World`, which receives every event with its commands. Call `finish` at the end."""

    def __init__(self, num_instances: int, *, num_lanes: int = 1) -> None:
        """`num_lanes`: versions that an instance holds side by side."""
        self.rows = [[Lane() for _ in range(num_lanes)] for _ in range(num_instances)]
        self.trainer: list[Period] = []  #: busy, under the version of the step
        self.published: list[float] = []  #: by version
        self._where: dict[TrajectoryId, Lane] = {}
        self._waves: deque[float] = deque()  # when each was sent
        self._trainer_free = 0.0

    def __call__(self, event: ev.Event, orders: Sequence[cmd.Command]) -> None:
        """Take an event with its commands."""
        match event:
            case ev.GenerationFinished() | ev.GenerationStopped() | ev.CallStarted():
                lane = self._where.pop(event.trajectory)
                lane.requests -= 1
                if not lane.requests:
                    lane.empty(event.at)
            case ev.WeightPushFinished():
                lane = next(lane for lane in self.rows[event.instance] if lane.held_since is None)
                lane.version, lane.held_since = event.version, event.at
                if lane.requests:
                    lane.decoding_since = event.at  # they continue under the new weights
            case ev.InstanceLost():
                for lane in self.rows[event.instance]:
                    lane.unload(event.at)
                    lane.requests = 0
            case ev.VersionPublished():
                self.published.append(event.at)
            case ev.MicroBatchTrained():
                self._worked(max(self._waves.popleft(), self._trainer_free), event.at, event.step)
            case ev.StepTrained():
                self._worked(self._trainer_free, event.at, event.step)
        for order in orders:
            self._order(order, event.at)

    def _order(self, order: cmd.Command, at: float) -> None:
        match order:
            case cmd.Generate():
                lane = self._lane_of(order.instance, order.version)
                self._where[order.trajectory] = lane
                lane.requests += 1
                if lane.decoding_since is None:
                    lane.decoding_since = at
            case cmd.PushWeights() if len(self.rows[order.instance]) == 1:
                self.rows[order.instance][0].unload(at)
            case cmd.UnloadVersion():
                for lane in self.rows[order.instance]:
                    if lane.version == order.version:
                        lane.unload(at)
            case cmd.TrainMicroBatch():
                self._waves.append(at)

    def _lane_of(self, instance: InstanceId, version: int) -> Lane:
        """Return where an instance holds a version; the only one if it holds full weights."""
        first, *others = self.rows[instance]
        return next((lane for lane in others if lane.held_since is not None and lane.version == version), first)

    def _worked(self, begin: float, end: float, step: int) -> None:
        self.trainer.append(Period(begin, end, step))
        self._trainer_free = end

    def finish(self, at: float) -> None:
        """Close all periods at the end of the job."""
        for row in self.rows:
            for lane in row:
                lane.unload(at)


def trace(workload: Workload, *, seed: int) -> tuple[Trace, float, float]:
    """Return the trace of a short job of this kind, and the begin and end of its steady state."""
    steps = 3 * (workload.rules.max_staleness + 1) + TRACED_STEPS
    traced = Trace(workload.num_instances, num_lanes=workload.settings().num_holdings)
    world = World(workload.with_changes(job={"steps": steps}), seed=seed, sink=traced)
    world.run()
    traced.finish(world.now)
    first, last = world.measure.window()
    return traced, world.measure.marks[first].at, world.measure.marks[last].at
