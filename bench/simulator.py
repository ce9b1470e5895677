"""Simulated trajectories per second on one core, and what share of the time is the decision core's own.

Run: python bench/simulator.py [--full]. Regime A of workloads.md, N = 2 groups per instance, G = 16, K = 3, 64 slots an
instance, reports every 10 simulated seconds; all checks of the simulator are on, the full recount included. Every run
is a process of its own; CPU seconds. The bar at 10,000 instances is a million trajectories in ten minutes; the short
profile simulates a step of it (320,000 trajectories), the full one more than a million. Ceiling: the decision core
alone, given the same events again: no simulator around the same core can be faster.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

from result import Report, number, parser

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


def simulate(one: Workload) -> None:
    """Prints CPU seconds of a whole simulated job, and peak memory in bytes."""
    begun = time.process_time()
    World(one, seed=0, sink=lambda _event, _orders: None).run()
    print(time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def replay(one: Workload) -> None:
    """Prints CPU seconds of the core alone, and their number of events."""
    events: list[Event] = []
    World(one, seed=0, sink=lambda event, _orders: events.append(event)).run()
    handle = ControllerState(one.settings()).handle
    begun = time.process_time()
    for event in events:
        handle(event)
    print(time.process_time() - begun, len(events))


def in_a_process(what: str, num_instances: int, *, steps: int) -> tuple[float, int]:
    command = [sys.executable, __file__, "--one", what, str(num_instances), str(steps)]
    seconds, number = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(seconds), int(number)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        what, num_instances, steps = options.one
        one = workload(int(num_instances), steps=int(steps))
        return simulate(one) if what == "simulate" else replay(one)
    report = Report(__doc__, full=options.full, sizes="N = 2 groups of 16 per instance, K = 3, all checks on")
    large_steps, core_steps = (4, 4) if options.full else (1, 2)
    seconds, num_bytes = in_a_process("simulate", 1000, steps=core_steps)
    core_s, num_events = in_a_process("replay", 1000, steps=core_steps)
    trajectories = core_steps * 1000 * GROUPS_PER_INSTANCE * GROUP_SIZE
    report.row(
        f"1,000 instances, {trajectories:,} trajectories, {num_events:,} events",
        trajectories / seconds,
        "per CPU second",
        against=f"the core alone, {number(trajectories / core_s)} per CPU second",
        ratio=core_s / seconds,
    )
    seconds, num_bytes = in_a_process("simulate", 10_000, steps=large_steps)
    trajectories = large_steps * 10_000 * GROUPS_PER_INSTANCE * GROUP_SIZE
    rate = trajectories / seconds
    report.row(f"10,000 instances, {trajectories:,} trajectories", rate, "per CPU second", bar="figure >= 1667")
    report.row("10,000 instances: peak memory", num_bytes / 1e9, "GB", bar="figure <= 8")
    report.print()
    return None


if __name__ == "__main__":
    main()
