"""Sweeps: combinations of settings, and the processes that simulate them."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from dora.core.orchestration import SWITCHES
from dora.errors import ConfigError
from dora.sim.limit import limit
from dora.sim.measure import Result
from dora.sim.workload import Workload, checked
from dora.sim.world import World

Case = tuple[Workload, int]  #: a workload and its seed


def cases(
    workload: Workload,
    *,
    strategies: Sequence[str],
    staleness: Sequence[int],
    splits: Sequence[int],
    instances: Sequence[int],
    seeds: Sequence[int],
    rules: Sequence[str] = (),
    ablate: bool = False,
) -> list[Case]:
    """Return every combination once; an empty list keeps the workload's value. K applies to `dora` and `partial`;
    splits do not apply to `sync`, which uses all devices in both phases. Changing the number of instances keeps the
    trainer's devices. `ablate` adds to each case of `dora` one case per placement rule, with that rule turned off."""
    if splits and instances:
        raise ConfigError("--split, --instances: give one of them; instances are added to the trainer's devices")
    job, fleet = workload.job, workload.fleet
    variants = [(name, job.without) for name in rules or [job.rules]]
    if ablate:
        variants += [(name, (*job.without, switch)) for name in rules or [job.rules] for switch in SWITCHES]
    found: dict[tuple[object, ...], Workload] = {}
    for strategy, k, fleet_size, (name, without) in itertools.product(
        strategies or [job.strategy], staleness or [job.max_staleness], instances or [0], variants
    ):
        if strategy != "dora" and (name, without) != variants[0]:
            continue
        rollout = fleet_size * fleet.devices_per_instance
        devices = fleet.devices - fleet.rollout_devices + rollout if rollout else fleet.devices
        for split in splits or [rollout or fleet.rollout_devices]:
            one = workload.with_changes(
                job={"strategy": strategy, "max_staleness": k, "rules": name, "without": without},
                fleet={"devices": devices, "rollout_devices": split},
            )
            key = (strategy, one.rules.max_staleness, devices, 0 if one.is_shared else split, name, without)
            found.setdefault(key, checked(one, origin=f"{strategy}, K = {k}, {split} of {devices} devices"))
    return [(one, seed) for one in found.values() for seed in seeds]


def simulate(case: Case) -> Result:
    """Run one simulation to its end. Raise InvariantViolation, and RunFailed if the run fails."""
    workload, seed = case
    world = World(workload, seed=seed)
    world.run()
    bound = limit(workload, seed=seed)
    return world.measure.result(seed=seed, limit=bound, state=world.state, num_events=world.num_events)


def run(found: Sequence[Case], *, processes: int) -> Iterator[Result]:
    """Yield the results in the order of the cases, each when it and all before it are ready."""
    if processes == 1 or len(found) == 1:
        yield from map(simulate, found)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(simulate, found)


def as_json(results: Sequence[Result]) -> bytes:
    """Return all results as a JSON list."""
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"
