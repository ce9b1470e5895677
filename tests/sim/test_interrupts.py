"""Simulated partial rollout and over-sampling: their gain, and how often they break constraints by design."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.commands import Generate
from dora.core.ids import InstanceId, TrajectoryId
from dora.errors import ConfigError
from dora.sim.instance import SimulatedInstance
from dora.sim.measure import Result
from dora.sim.report import rows, table
from dora.sim.server import Request, SimulatedServer
from dora.sim.trace import trace
from dora.sim.world import World
from tests.sim.worlds import simulate, workload

#: Training is fast, so that answers outlive versions.
FAST: dict[str, Any] = {"train": {"tokens_s_per_device": 4000.0}}


def result(strategy: str, **changes: Any) -> Result:
    return simulate(workload(strategy, **{**FAST, **changes}))[0]


def request(id: int, *, total: int) -> Request:
    order = Generate(TrajectoryId(id), 1, InstanceId(0), 0, 0)
    return Request(order, group=id, prompt_tokens=100, total=total, offset=0)


def updated(*, retract: bool) -> tuple[SimulatedInstance, float]:
    """A server with two answers that takes an update of one second, and the time at which the first answer ends."""
    server = SimulatedInstance(InstanceId(0), SimulatedServer(prefill_s_per_token=1e-3))
    server.version = 0
    for id, total in ((0, 50), (1, 400)):
        server.take(request(id, total=total))
    server.settle()
    server.reach(0.25)
    server.begin_push(retract=retract)
    server.settle()
    assert server.next_at() == math.inf
    server.reach(1.25)
    server.update(1)
    server.end_push()
    server.settle()
    return server, server.next_at()


def test_an_update_ends_the_span_of_every_running_answer() -> None:
    server, _ = updated(retract=False)
    before = [server.spans(r) for r in server.requests.values()]
    assert all(len(spans) == 1 and spans[0][:2] == (0, 0) for spans in before)
    server.reach(server.next_at())
    [ended] = server.settle()
    assert server.spans(ended) == (before[0][0], (1, before[0][0][2], 50))


def test_retract_prefills_everything_again_and_in_place_costs_only_the_pause() -> None:
    (kept, kept_at), (retracted, retracted_at) = updated(retract=False), updated(retract=True)
    tokens = sum(100 + kept.tokens(r) for r in kept.requests.values())
    assert kept.use.again_s == 0
    assert retracted.use.again_s == pytest.approx(1e-3 * tokens)
    assert retracted_at - kept_at == pytest.approx(1e-3 * tokens)


def test_no_answer_grows_while_its_server_is_paused() -> None:
    server, _ = updated(retract=False)
    counts = [server.tokens(r) for r in server.requests.values()]
    again = [server.spans(r)[0][2] for r in server.requests.values()]
    assert counts == again


@pytest.mark.parametrize("strategy", ["partial", "partial_bounded", "partial_sync"])
def test_partial_reports_its_broken_constraint(strategy: str) -> None:
    _, world, journal = simulate(workload(strategy, k=1, **FAST))
    found = result(strategy, k=1)
    ends = [e for e, _ in journal if isinstance(e, ev.GenerationFinished)]
    tags = {o.group: o.version for _, orders in journal for o in orders if isinstance(o, cmd.AdmitGroup)}
    mixed = sum(any(v != tags[e.trajectory // 4] for v, _, _ in e.spans) for e in ends)
    assert mixed == world.state.counters.version_conflicts > 0
    assert found.mixed_share > 0
    assert found.violations == 0
    assert "C1 " in table(rows([found]), wide=True)


def test_only_the_bounded_variant_keeps_k() -> None:
    free, bounded = result("partial", k=1), result("partial_bounded", k=1)
    assert free.staleness_max > 1
    assert free.beyond_share > 0
    assert bounded.staleness_max == 1
    assert bounded.beyond_share == 0


def test_partial_sync_halts_while_its_devices_train() -> None:
    seen: list[dict[TrajectoryId, int]] = []  # tokens of all answers under way, from the first micro-batch on
    grown = []

    def look(event: ev.Event, _: Sequence[cmd.Command]) -> None:
        if isinstance(event, ev.MicroBatchTrained | ev.StepTrained | ev.VersionPublished):
            seen.append({t: n for i in world.instances for t, n in i.counts().items()})
        if isinstance(event, ev.VersionPublished):
            grown.extend(later for later in seen[1:] if later != seen[0])
            assert any(seen) or event.version in (0, world.settings.steps)
            seen.clear()

    world = World(workload("partial_sync", **FAST), seed=0, sink=look)
    world.run()
    assert grown == []


def test_partial_sync_is_faster_than_sync_and_slower_than_partial() -> None:
    assert result("partial", k=1).step_s < result("partial_sync").step_s < result("sync").step_s


def test_seeds_with_different_staleness_make_one_row() -> None:
    free = workload("partial", k=1, **FAST)
    found = [simulate(free, seed=seed)[0] for seed in range(4)]
    assert len({len(r.staleness) for r in found}) > 1
    [row] = rows(found)
    assert sum(row.staleness) == sum(sum(r.staleness) for r in found)


def test_the_timeline_shows_requests_that_continue_after_an_update() -> None:
    traced, *_ = trace(workload("partial", k=1, **FAST), seed=0)
    resumed = [
        (before.end, after.begin)
        for [row] in traced.rows
        for before, after in itertools.pairwise(row.decoding)
        if before.version < after.version and after.begin - before.end < 1.2  # a push takes 1.1 s
    ]
    assert resumed


def test_oversample_is_faster_than_periodic_and_trains_shorter_answers_than_it_generates() -> None:
    over, exact = result("oversample"), result("periodic")
    assert over.step_s < exact.step_s
    assert over.discarded_share == pytest.approx(1 / 3, abs=0.02)
    assert over.length_bias < 0.8
    assert exact.length_bias == 1.0
    assert (over.violations, over.staleness_max) == (0, 0)


def test_no_strategy_beats_its_own_limit() -> None:
    for strategy in ("partial", "partial_bounded", "partial_sync", "oversample"):
        assert result(strategy, k=2).ratio > 0.97


def test_oversampling_needs_a_surplus() -> None:
    with pytest.raises(ConfigError, match=r"job\.oversample: must be above 1"):
        workload("oversample", job={"strategy": "oversample", "oversample": 1.0})
