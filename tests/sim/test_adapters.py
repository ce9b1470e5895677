"""Servers that hold the adapters of several versions: nothing is lost, and their costs are what the workload says."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer

from dora.cli.app import app
from dora.cli.pace import pace
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId, evaluation_id
from dora.errors import ConfigError, InvariantViolation
from dora.journal.audit import audit_entries
from dora.sim.plan import SimulatedPlan, search
from dora.sim.recorded import _Reader, read_run
from dora.sim.report import rows, table
from dora.sim.server import SimulatedServer, Use
from dora.sim.workload import Workload, checked
from dora.sim.world import World
from tests.sim.test_recorded import record
from tests.sim.test_world import TROUBLE
from tests.sim.worlds import Journal, constant, simulate, workload

SERVED: dict[str, Any] = {"use": "served"}
SHARING = [("dora", 0), ("dora", 1), ("dora", 3), ("sync", 0), ("one_step_off", 1), ("oversample", 0)]


def served(strategy: str = "dora", *, k: int = 2, **changes: Any) -> Workload:
    adapters = SERVED | changes.pop("adapters", {})
    return workload(strategy, k=k, adapters=adapters, **changes)


def require_held(journal: Journal) -> int:
    """Fail if a request is for a version that its server has not confirmed, or unloads; return how many versions were
    decoded on one server at once at most."""
    held: dict[InstanceId, set[int]] = defaultdict(set)
    decoded: dict[InstanceId, Counter[int]] = defaultdict(Counter)
    where: dict[int, cmd.Generate] = {}
    most = 0
    for event, orders in journal:
        match event:
            case ev.WeightPushFinished():
                held[event.instance].add(event.version)
            case ev.InstanceLost():
                held[event.instance].clear()
                decoded[event.instance].clear()
                where = {id: order for id, order in where.items() if order.instance != event.instance}
            case ev.GenerationFinished() | ev.GenerationStopped():
                order = where.pop(event.trajectory)
                decoded[order.instance][order.version] -= 1
        for order in orders:
            if isinstance(order, cmd.Generate):
                assert order.version in held[order.instance]
                where[order.trajectory] = order
                decoded[order.instance][order.version] += 1
                most = max(most, sum(n > 0 for n in decoded[order.instance].values()))
            elif isinstance(order, cmd.UnloadVersion):
                assert not decoded[order.instance][order.version]
                held[order.instance].discard(order.version)
    return most


@pytest.mark.parametrize(("strategy", "k"), SHARING)
def test_every_strategy_finishes_with_adapters_whatever_fails(strategy: str, k: int) -> None:
    result, world, journal = simulate(served(strategy, k=k, **TROUBLE), seed=1)
    kinds = Counter(type(event) for event, _ in journal)
    assert min(kinds[k] for k in (ev.InstanceLost, ev.WeightPushFailed, ev.VersionUnloaded)) > 0
    assert result.violations == 0
    assert result.staleness_max <= k
    report = audit_entries(world.settings, journal)
    assert report.ok, report.violations
    at_once = require_held(journal)
    assert at_once > 1 if strategy == "dora" and k else at_once == 1
    for instance in world.instances:
        assert sum(getattr(instance.use, name) for name in Use.__slots__) == pytest.approx(instance.anchor, rel=1e-9)


@pytest.mark.parametrize("k", range(5))
def test_one_server_is_enough_for_any_k(k: int) -> None:
    alone = {"fleet": {"devices": 3, "rollout_devices": 1}, "job": {"groups_per_step": 4}}
    result, world, journal = simulate(served(k=k, **alone))
    assert isinstance(world.outcome, cmd.FinishRun)
    assert (result.violations, result.migrations) == (0, 0)
    assert result.staleness_max <= k
    assert require_held(journal) >= min(k + 1, 4)
    if k:
        with pytest.raises(ConfigError, match=f"1 instances cannot hold the {k + 1} versions"):
            workload(k=k, adapters={"use": "merged"}, **alone)


def test_merged_adapters_are_simulated_as_weights() -> None:
    assert (
        simulate(workload(adapters={"use": "merged", "throughput": 0.1, "load_s": 50.0}))[2] == simulate(workload())[2]
    )


def timed(*, k: int = 0, **adapters: float) -> float:
    """The step time of one server that decodes all answers of a step at once, 200 tokens at 0.01 s, and of a trainer
    that takes no time."""
    same = {
        "lengths": constant(200, groups=8, group_size=4),
        "job": {"groups_per_step": 4},
        "fleet": {
            "devices": 2,
            "rollout_devices": 1,
            "server": SimulatedServer(16, 8_000, DecodeTime(0.01, 0.0, 0.0), prefill_s_per_token=0.0),
        },
        "train": {"tokens_s_per_device": 1e9, "update_s": 0.0},
        "grade": {"sigma": 0.0},
    }
    return simulate(served(k=k, adapters=adapters, **same))[0].step_s


@pytest.mark.parametrize(("throughput", "load_s"), [(1.0, 1.0), (0.8, 1.0), (0.5, 0.0), (1.0, 2.5)])
def test_without_staleness_a_step_is_decoding_at_the_throughput_and_a_load(throughput: float, load_s: float) -> None:
    grading_s = workload().grade.median_s
    expected = 200 * 0.01 / throughput + load_s + grading_s
    assert timed(throughput=throughput, load_s=load_s) == pytest.approx(expected, abs=1e-4)


def test_loads_run_beside_decoding() -> None:
    assert timed(k=3, throughput=0.8, load_s=1.5) == pytest.approx(200 * 0.01 / 0.8, rel=1e-3)
    result, _, _ = simulate(served(k=3))
    assert result.instance_shares["push"] == 0


# -- what the world's own accounts catch ------------------------------------------------------------------------------


def started() -> World:
    world = World(served(k=2), seed=0)
    world.run(max_events=400)
    return world


def test_a_request_for_an_adapter_that_is_not_confirmed_is_a_violation_of_c1() -> None:
    world = started()
    busy = next(i for i in world.instances if i.requests)
    order = next(iter(busy.requests.values())).order
    busy.served.discard(order.version)
    with pytest.raises(InvariantViolation, match="C1: the instance holds"):
        world._on_generate(order)


def test_an_adapter_that_requests_have_is_not_unloaded() -> None:
    world = started()
    busy = next(i for i in world.instances if i.requests)
    version = next(iter(busy.requests.values())).order.version
    load = next(load for load, held in busy.adapters.items() if held == version)
    with pytest.raises(InvariantViolation, match="C1: requests on it have this adapter"):
        world._on_unload_version(cmd.UnloadVersion(busy.id, 99, version, load))
    with pytest.raises(InvariantViolation, match="it has no such adapter"):
        world._on_unload_version(cmd.UnloadVersion(busy.id, 99, version, load + 50))


def test_an_adapter_is_loaded_once_and_needs_a_place() -> None:
    world = started()
    instance, version = world.instances[0], next(iter(world.instances[0].served))
    with pytest.raises(InvariantViolation, match="it has or may have this adapter"):
        world._on_push_weights(cmd.PushWeights(instance.id, 99, version))
    instance.adapters = {load: 100 + load for load in range(world.settings.num_holdings)}
    with pytest.raises(InvariantViolation, match="no place is left"):
        world._on_push_weights(cmd.PushWeights(instance.id, 99, version))


def test_a_server_that_was_lost_has_no_adapter_and_its_loads_have_no_end() -> None:
    world = started()
    instance, order = world.instances[0], cmd.PushWeights(InstanceId(0), 99, 0)
    instance.adapters.clear()
    world._on_push_weights(order)
    incarnation = instance.incarnation
    world._lose(instance, incarnation)
    assert not instance.adapters
    assert not instance.served
    world._come_up(instance)
    assert world._end_load(order, incarnation, False) is None
    assert not instance.served


def test_a_prompt_is_read_again_under_each_version() -> None:
    world = World(served(k=2, job={"eval_samples": 3}), seed=0)
    instance = world.instances[0]
    instance.served |= {0, 1}
    for version in (0, 1):
        id = evaluation_id(version, 0, num_samples=3)
        world._on_generate(cmd.Generate(id, 1, instance.id, version, 0))
    instance.settle()
    assert instance.num_running == 2
    assert instance.used == 2 * 20


# -- tables, plans and recorded runs ----------------------------------------------------------------------------------


def test_the_table_names_what_servers_hold() -> None:
    results = [simulate(workload(adapters={"use": use}))[0] for use in ("none", "merged", "served")]
    for wide in (False, True):
        lines = table(rows(results), wide=wide).splitlines()[2:]
        assert [line.split(" | ")[0].strip("| ") for line in lines] == ["dora", "dora, merged", "dora, adapters"]


def planned(*, devices: int, groups: int, **adapters: float) -> dict[str, SimulatedPlan]:
    """The best plan of each use, the fastest first."""
    fleet = {"devices": devices, "rollout_devices": 1, "widths": (1,), "weight_bytes": 4e9}
    one = served(k=1, adapters=adapters, fleet=fleet, job={"groups_per_step": groups})
    plans = search(one, staleness=[0, 1], most=1)
    return {plan.workload.adapters.use: plan for plan in plans}


def test_a_plan_serves_adapters_on_one_server_and_merges_them_on_a_large_fleet_where_they_are_slow() -> None:
    small = planned(devices=2, groups=2, throughput=0.9)
    assert list(small) == ["served", "merged"]
    assert [plan.result.max_staleness for plan in small.values()] == [1, 0], "merged weights need a server each"
    large = planned(devices=16, groups=16, throughput=0.65)
    assert list(large) == ["merged", "served"]
    assert large["served"].result.step_s > 1.1 * large["merged"].result.step_s


def test_the_command_says_which_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, written = tmp_path / "mine.toml", tmp_path / "planned.toml"
    path.write_text(
        """
[job]
steps = 12
groups_per_step = 8
group_size = 2
[lengths]
cap = 400
[fleet]
devices = 8
rollout_devices = 4
weight_bytes = 1e8
[train]
update_s = 0.0
[adapters]
use = "served"
throughput = 0.4
"""
    )
    words = ["plan", str(path), "--k", "1", "--widths", "1", "--processes", "1", "--write", str(written)]
    typer.main.get_command(app).main(words, standalone_mode=False)
    told = capsys.readouterr().out
    assert "adapters: merge them; served (plan 2) takes" in told
    assert 'adapters.use = "merged"' in told
    assert 'use = "merged"' in written.read_text()


def test_a_run_of_adapters_is_predicted_from_its_journal(tmp_path: Path) -> None:
    folder, own = record(served(k=2, adapters={"load_s": 2.5}), tmp_path)
    found, _ = read_run(folder.root)
    assert (found.adapters.use, found.adapters.throughput) == ("served", 1.0)
    assert found.push_s == pytest.approx(2.5)
    predicted, _, _ = simulate(found, seed=1)
    assert predicted.step_s == pytest.approx(own.step_s, rel=0.05)


def test_loads_to_one_server_at_the_same_time_are_measured_apart() -> None:
    one = InstanceId(0)
    entries: Journal = [
        (ev.Ticked(0.0), [cmd.PushWeights(one, 1, 0)]),
        (ev.Ticked(1.0), [cmd.PushWeights(one, 2, 1), cmd.PushWeights(one, 3, 2)]),
        (ev.WeightPushFinished(3.0, one, 2, 1), []),
        (ev.WeightPushFailed(4.0, one, 3, "gone"), [cmd.PushWeights(one, 4, 2)]),
        (ev.WeightPushFinished(7.0, one, 1, 0), []),
        (ev.WeightPushFinished(7.5, one, 3, 2), []),
        (ev.WeightPushFinished(8.0, one, 4, 2), []),
    ]
    assert _Reader(served().settings(), graders=1).read(entries).push_s == [2.0, 7.0, 4.0]


@pytest.mark.parametrize(
    ("adapters", "strategy", "field"),
    [({"throughput": 0.0}, "dora", "adapters.throughput"), ({"load_s": -1.0}, "dora", "adapters.load_s")]
    + [({}, strategy, "adapters.use: job.strategy") for strategy in ("partial", "partial_bounded", "partial_sync")],
)
def test_an_impossible_use_is_refused(adapters: dict[str, float], strategy: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        checked(served(strategy, adapters=adapters), origin="there")


def test_paced_servers_serve_no_adapters(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[adapters]\nuse = "served"\n')
    with pytest.raises(ConfigError, match=r"adapters\.use: paced servers hold one version each"):
        pace(path, seed=0, time_scale=1.0, processes=1, folder=tmp_path)
