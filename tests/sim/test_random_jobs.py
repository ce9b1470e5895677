"""Random simulations, by seed: every strategy, small fleets, few slots, tools, evaluations and faults at once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from dora.core.decode_time import DecodeTime
from dora.core.orchestration import RULES, SWITCHES
from dora.core.phases import GroupPhase
from dora.core.strategies import STRATEGIES
from dora.errors import ConfigError, RunFailed
from dora.journal.audit import audit_entries
from dora.sim.server import SimulatedServer, Use
from dora.sim.tools import Tools
from dora.sim.workload import Faults, FleetModel, GradingModel, JobModel, LengthModel, TrainerModel, Workload, checked
from dora.sim.world import World
from tests.sim.worlds import simulate

SHALLOW, RUNS = 30, 100


def drawn(seed: int) -> Workload:
    """A job, its fleet and its faults; `checked` refuses some of them."""
    r = random.Random(seed)
    job: dict[str, Any] = {
        **{"strategy": r.choice([*STRATEGIES, "dora"]), "max_staleness": r.randint(0, 4)},
        **{"pause": r.choice(["retract", "in_place"]), "oversample": r.choice([1.2, 2.5])},
        **{"steps": r.randint(2, 10), "groups_per_step": r.choice([1, 3, 8]), "group_size": r.choice([2, 4])},
        **{"filter_zero_variance": r.random() < 0.3, "refill": r.random() < 0.3},
        **{"eval_samples": r.choice([0, 1, 30]), "eval_every": r.choice([0, 1, 3])},
        **{"rules": r.choice(RULES), "without": tuple(r.sample(list(SWITCHES), r.choice([0, 0, 3])))},
    }
    server = SimulatedServer(
        slots=r.choice([2, 8, 32]),
        kv_tokens=r.choice([3_400, 8_000]),
        decode=DecodeTime(0.01, 1e-4, r.choice([0.0, 1e-6])),
        prefill_s_per_token=r.choice([1e-5, 1e-3]),
        kv_bytes_per_token=1,
        kv_bytes_s=r.choice([0.0, 1e4]),
    )
    fleet: dict[str, Any] = {
        **{"server": server, "time_shared": r.random() < 0.6, "devices_per_instance": r.choice([1, 2])},
        **{
            "push_fixed_s": r.choice([0.05, 8.0]),
            "store_bytes_s": r.choice([3e9, 200e9]),
            "relay": r.random() < 0.3,
            "stop_s": r.choice([0.05, 1.0]),
        },
        **{"slow_instances": r.choice([0, 1]), "report_s": r.choice([1.0, 5.0]), "answer_s": r.choice([0.0, 0.0, 0.3])},
    }
    faults = Faults(
        instance_hours=r.choice([0.0, 0.01, 0.1]),
        down_s=r.choice([0.01, 60.0]),
        push_failure_share=r.choice([0.0, 0.5]),
        late_instances=r.choice([0, 1]),
        join_s=30.0,
    )
    one = Workload(
        job=JobModel(**job),
        lengths=LengthModel(regime=r.choice("ABCDS"), scale=r.choice([0.02, 0.1]), cap=r.choice([300, 3_000])),
        tools=Tools(calls=r.choice([(), (0.5, 0.3, 0.2)]), result_tokens=r.choice([0, 100]), stuck_s=20.0),
        fleet=FleetModel(**fleet),
        train=TrainerModel(tokens_s_per_device=r.choice([100.0, 10_000.0]), micro_batch_tokens=r.choice([256, 4096])),
        grade=GradingModel(
            workers=r.choice([0, 1]), hang_share=r.choice([0.0, 0.01]), failure_share=r.choice([0.0, 0.02])
        ),
        faults=faults,
    )
    least = one.rules.max_staleness + 1
    servers, trainers = r.randint(least, least + 5), r.randint(1, 4)
    if one.rules.in_flight is None and r.random() < 0.4:
        one = one.with_changes(adapters={"use": "served", "load_s": r.choice([0.05, 8.0])})
        servers = max(1, servers - r.choice([0, least]))
    rollout = one.fleet.devices_per_instance * servers
    return checked(
        one.with_changes(fleet={"rollout_devices": rollout, "devices": rollout + trainers}), origin=f"job {seed}"
    )


@pytest.mark.parametrize("runs", [SHALLOW, pytest.param(RUNS, marks=pytest.mark.deep)])
def test_every_simulation_ends_with_everything_accounted_for(runs: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(runs):
        try:
            seen[_run_to_the_end(seed)] += 1
        except BaseException as err:
            err.add_note(f"in the job of seed {seed}")
            raise
    assert seen.keys() >= {*STRATEGIES, "adapters", "refused"}


def _run_to_the_end(seed: int) -> str:
    try:
        one = drawn(seed)
    except ConfigError as err:
        if "would survive a loss" not in str(err) and "counts as lost after" not in str(err):
            raise
        return "refused"
    try:
        result, world, journal = simulate(one, seed=seed)
    except RunFailed as err:
        if "had to top up" not in str(err):
            raise
        return "failed"
    assert result.violations == 0
    report = audit_entries(world.settings, journal)
    assert report.ok, report.violations
    _nothing_is_left(world)
    assert sum(result.instance_shares.values()) == pytest.approx(1, abs=1e-9)
    assert min(result.instance_shares.values()) >= 0
    assert 0 <= result.trainer_idle + result.trainer_unbalanced <= 1
    return "adapters" if one.serves_adapters else one.job.strategy


def _nothing_is_left(world: World) -> None:
    job, counts = world.workload.job, world.state.ledger.counts
    assert counts[GroupPhase.TRAINED] == job.steps * job.groups_per_step
    assert not world._tags
    for instance in world.instances:
        used = instance.used - instance.spare()  # a discarded answer that called leaves its KV, until space is needed
        assert (len(instance.requests), used, instance.context, len(instance.waiting)) == (0, 0, 0, 0)
        assert sum(getattr(instance.use, name) for name in Use.__slots__) == pytest.approx(instance.anchor, rel=1e-9)
