"""Simulated trajectories per second on one core, and what share of the time is the decision core's own.

Run: python bench/simulator.py [--instances 100 1000] [--steps 4] [--rounds 3]. Regime A of workloads.md, N = 2 groups
per instance, G = 16, K = 3, 64 slots an instance, reports every 10 simulated seconds; all checks of the simulator are
on, the full recount included. CPU seconds of the fastest round: others use the machine too. Ceiling: the decision core
alone, given the same events again: no simulator around the same core can be faster.
"""

from __future__ import annotations

import argparse
import platform
import resource
import time

from dora.core.decode_time import DecodeTime
from dora.core.events import Event
from dora.core.state import ControllerState
from dora.sim.instance import Server
from dora.sim.workload import Fleet, Job, Lengths, Train, Workload
from dora.sim.world import World

GROUPS_PER_INSTANCE = 2
GROUP_SIZE = 16
DEVICES_PER_RANK = 8


def workload(num_instances: int, *, steps: int) -> Workload:
    """Decoding and training about balanced, so that several versions are alive."""
    trainers = max(DEVICES_PER_RANK, num_instances // 4)
    return Workload(
        job=Job(steps=steps, groups_per_step=GROUPS_PER_INSTANCE * num_instances, group_size=GROUP_SIZE),
        lengths=Lengths(regime="A"),
        fleet=Fleet(
            devices=num_instances + trainers,
            rollout_devices=num_instances,
            server=Server(slots=64, kv_tokens=373_000, decode=DecodeTime(0.0072, 2.8e-5, 4.4e-8)),
            weight_bytes=16.4e9,
            parallel_pushes=max(2, num_instances // 16),
        ),
        train=Train(
            tokens_s_per_device=2_000 * num_instances / trainers,
            devices_per_rank=DEVICES_PER_RANK,
            micro_batch_tokens=65_536,
        ),
    )


def simulate(one: Workload) -> tuple[float, list[Event]]:
    """CPU seconds of a whole simulated job, and its events."""
    events: list[Event] = []
    begun = time.process_time()
    world = World(one, seed=0, sink=lambda event, _orders: events.append(event))
    world.run()
    return time.process_time() - begun, events


def replay(one: Workload, events: list[Event]) -> float:
    """CPU seconds of the core alone."""
    handle = ControllerState(one.settings()).handle
    begun = time.process_time()
    for event in events:
        handle(event)
    return time.process_time() - begun


def measure(num_instances: int, *, steps: int, rounds: int) -> None:
    one = workload(num_instances, steps=steps)
    runs = [simulate(one) for _ in range(rounds)]
    best = min(seconds for seconds, _ in runs)
    core = min(replay(one, runs[0][1]) for _ in range(rounds))
    trajectories = steps * one.job.groups_per_step * one.job.group_size
    print(f"\n{num_instances} instances, {trajectories:,} trajectories, {len(runs[0][1]):,} events")
    print(f"  simulator {trajectories / best:>9,.0f} trajectories/s, {best / len(runs[0][1]) * 1e6:.1f} us an event")
    print(f"  ceiling   {trajectories / core:>9,.0f} trajectories/s (the core alone); ratio {core / best:.2f}")
    print(f"  memory    {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB, recorded events included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one core")
    for num_instances in args.instances:
        measure(num_instances, steps=args.steps, rounds=args.rounds)


if __name__ == "__main__":
    main()
