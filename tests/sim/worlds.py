"""Small workloads and runs shared by the tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.decode_time import DecodeTime
from dora.sim.limit import limit
from dora.sim.measure import Result
from dora.sim.server import SimulatedServer
from dora.sim.workload import FleetModel, JobModel, LengthModel, TrainerModel, Workload, checked
from dora.sim.world import World

Journal = list[tuple[ev.Event, Sequence[cmd.Command]]]


def workload(strategy: str = "dora", *, k: int = 2, **changes: dict[str, Any]) -> Workload:
    """A long tail (D, at a tenth of its length) on eight instances; decoding and training are about balanced."""
    small = Workload(
        job=JobModel(strategy=strategy, max_staleness=k, steps=24, groups_per_step=24, group_size=4),
        lengths=LengthModel(regime="D", scale=0.1, cap=3000, prompt_tokens=20),
        fleet=FleetModel(
            devices=12,
            rollout_devices=8,
            server=SimulatedServer(slots=16, kv_tokens=8_000, decode=DecodeTime(base_s=0.01, per_request_s=1e-4)),
            report_s=2.0,
        ),
        train=TrainerModel(tokens_s_per_device=500, micro_batch_tokens=2048),
    )
    return checked(small.with_changes(**changes), origin="test")


def constant(length: int, *, groups: int, group_size: int) -> dict[str, Any]:
    """A workload whose answers have equal lengths."""
    return {
        "regime": "recorded",
        "prompts": (20,) * groups,
        "answers": ((length,) * group_size,) * groups,
        "rewards": ((0.0, 1.0) * (group_size // 2),) * groups,
        "cap": 3000,
    }


def simulate(one: Workload, *, seed: int = 0) -> tuple[Result, World, Journal]:
    """The world at the end of the job, with its journal."""
    journal: Journal = []
    world = World(one, seed=seed, sink=lambda event, orders: journal.append((event, orders)))
    world.run()
    bound = limit(one, seed=seed)
    result = world.measure.result(seed=seed, limit=bound, state=world.state, num_events=world.num_events)
    return result, world, journal
