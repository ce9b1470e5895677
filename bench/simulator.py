"""Simulated trajectories per second on one core, and what share of the time is the decision core's own.

Run: python bench/simulator.py [--full]. Regime A of docs/SIMULATION.md, N = 2 groups per instance, G = 16, K = 3, 64
slots per instance, reports every 10 simulated seconds, with all checks of the simulator, the full recount included.
Every run is a separate process; figures are CPU seconds. The bar at 10,000 instances is a million trajectories in ten
minutes; the short profile simulates one step (320,000 trajectories), the full one more than a million. Ceiling: the
decision core alone, replaying the same events, because no simulator around the same core can be faster.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from result import Report, number, parser

from dora.core.core import handle
from dora.core.decode_time import DecodeTime
from dora.core.events import Event
from dora.core.state import State
from dora.sim.server import SimulatedServer
from dora.sim.workload import FleetModel, JobModel, LengthModel, TrainerModel, Workload
from dora.sim.world import World

GROUP_SIZE = 16
DEVICES_PER_RANK = 8


class Case(NamedTuple):
    """One simulated job."""

    num_instances: int
    groups_per_instance: int  #: in a step
    steps: int

    @property
    def trajectories(self) -> int:
        return self.steps * self.num_instances * self.groups_per_instance * GROUP_SIZE


def workload(case: Case) -> Workload:
    """Decoding and training about balanced, so that several versions are alive."""
    num_instances = case.num_instances
    trainers = max(DEVICES_PER_RANK, num_instances // 4)
    return Workload(
        job=JobModel(steps=case.steps, groups_per_step=case.groups_per_instance * num_instances, group_size=GROUP_SIZE),
        lengths=LengthModel(regime="A"),
        fleet=FleetModel(
            devices=num_instances + trainers,
            rollout_devices=num_instances,
            server=SimulatedServer(slots=64, kv_tokens=373_000, decode=DecodeTime(0.0072, 2.8e-5, 4.4e-8)),
            weight_bytes=16.4e9,
        ),
        train=TrainerModel(
            tokens_s_per_device=2_000 * num_instances / trainers,
            devices_per_rank=DEVICES_PER_RANK,
            micro_batch_tokens=65_536,
        ),
    )


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """CPU and wall-clock seconds of it."""
    cpu, wall = time.process_time(), time.monotonic()
    work()
    return time.process_time() - cpu, time.monotonic() - wall


def simulate(case: Case) -> tuple[float, float, int]:
    """CPU and wall-clock seconds of a whole simulated job, and peak memory in bytes."""
    spent = seconds(World(workload(case), seed=0, sink=lambda _event, _orders: None).run)
    return *spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def replay(case: Case) -> tuple[float, float, int]:
    """CPU and wall-clock seconds of the core alone, and the number of events."""
    events: list[Event] = []
    one = workload(case)
    World(one, seed=0, sink=lambda event, _orders: events.append(event)).run()
    state = State(one.settings())

    def again() -> None:
        for event in events:
            handle(state, event)

    return *seconds(again), len(events)


def in_a_process(what: str, case: Case) -> tuple[float, float, int]:
    command = [sys.executable, __file__, "--one", what, *map(str, case)]
    cpu_s, wall_s, count = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(cpu_s), float(wall_s), int(count)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        what, *sizes = options.one
        print(*{"simulate": simulate, "replay": replay}[what](Case(*map(int, sizes))))
        return
    report = Report(__doc__, full=options.full, sizes="Groups of 16, K = 3, all checks on")
    case = Case(1_000, groups_per_instance=2, steps=4 if options.full else 2)
    cpu_s, _, _ = in_a_process("simulate", case)
    core_s, _, num_events = in_a_process("replay", case)
    report.row(
        f"1,000 instances, {case.trajectories:,} trajectories, {num_events:,} events",
        case.trajectories / cpu_s,
        "per CPU second",
        against=f"the core alone, {number(case.trajectories / core_s)} per CPU second",
        ratio=core_s / cpu_s,
    )
    case = (
        Case(10_000, groups_per_instance=2, steps=4) if options.full else Case(10_000, groups_per_instance=1, steps=2)
    )
    cpu_s, wall_s, num_bytes = in_a_process("simulate", case)
    name, millions = (
        f"10,000 instances, {case.steps} steps, {case.trajectories:,} trajectories",
        case.trajectories / 1e6,
    )
    report.row(f"{name}: CPU", cpu_s / millions, "s a million", bar="figure <= 600")
    report.row(f"{name}: by the clock", wall_s / millions, "s a million", bar="figure <= 600")
    report.row(f"{name}: peak memory", num_bytes / 1e9, "GB", bar="figure <= 8")
    report.print()


if __name__ == "__main__":
    main()
