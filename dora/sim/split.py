"""A search for the best split of the devices between rollout and training, with a few short simulations.

The search starts at the split with the smallest limit and, among equal ones, the least training and decoding time. It
simulates the splits at one and two distances on both sides, moves to the fastest, and halves the distance when the
middle is the fastest. One distance is not enough, because the step time is not smooth in the number of instances.
`sync` uses all devices in both phases and has no split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dora.errors import ConfigError
from dora.sim.limit import limit
from dora.sim.sweep import run
from dora.sim.workload import Workload

#: Number of steps that each simulation measures between its warm-up and its run-out.
MEASURED_STEPS: Final = 8
#: Number of splits, evenly spaced, for which the limit is computed.
STARTS: Final = 16
#: The smallest distance is the range over this number.
FINEST: Final = 64


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search."""

    workload: Workload  #: with the best split
    steps: int  #: of each simulation
    step_s: dict[int, float]  #: rollout devices -> seconds per step
    noise: float  #: standard error of the fastest, as a share of it; splits that are closer are not told apart

    def __str__(self) -> str:
        fleet, k = self.workload.fleet, self.workload.rules.max_staleness
        tried = ", ".join(f"{split}: {step_s:.4g} s" for split, step_s in sorted(self.step_s.items()))
        return (
            f"{self.workload.job.strategy}, K = {k}: {fleet.rollout_devices} of {fleet.devices} devices roll out "
            f"(of {len(self.step_s)} simulations of {self.steps} steps, with a noise of {self.noise:.1%}; {tried})"
        )


def search(workload: Workload, *, seed: int, processes: int) -> Search:
    """Search for the fastest split of a workload; its own `rollout_devices` is ignored."""
    splits = _feasible(workload)
    if not splits:
        raise ConfigError(f"fleet.devices: no split of {workload.fleet.devices} has K + 1 instances and a trainer")
    steps = 3 * (workload.rules.max_staleness + 1) + MEASURED_STEPS
    short = workload.with_changes(job={"steps": steps})
    step_s: dict[int, float] = {}
    errors_s: dict[int, float] = {}
    coarse = range(0, len(splits), max(1, len(splits) // STARTS))
    best = min(coarse, key=lambda i: _limit(_split(short, splits[i]), seed=seed))
    distance = max(1, len(splits) // STARTS)
    while distance >= max(1, len(splits) // FINEST):
        near = [i for i in range(best - 2 * distance, best + 2 * distance + 1, distance) if 0 <= i < len(splits)]
        new = [splits[i] for i in near if splits[i] not in step_s]
        for result in run([(_split(short, split), seed) for split in new], processes=processes):
            step_s[result.rollout_devices] = result.step_s
            errors_s[result.rollout_devices] = result.step_error_s
        middle, best = best, min(near, key=lambda i: step_s[splits[i]])
        if best == middle:
            distance //= 2
    fastest = splits[best]
    return Search(_split(workload, fastest), steps, step_s, errors_s[fastest] / step_s[fastest])


def _limit(workload: Workload, *, seed: int) -> tuple[float, float]:
    bound = limit(workload, seed=seed)
    return bound.step_s, bound.train_s + bound.decode_s


def _feasible(workload: Workload) -> list[int]:
    """Return the possible numbers of rollout devices: at least K + 1 instances, and at least one rank left."""
    fleet = workload.fleet
    size = fleet.devices_per_instance
    first = size * (workload.rules.max_staleness + 1)
    return list(range(first, fleet.devices - workload.train.devices_per_rank + 1, size))


def _split(workload: Workload, rollout_devices: int) -> Workload:
    return workload.with_changes(fleet={"rollout_devices": rollout_devices})
