"""The simulated fleet drives the controller's own core, breaks no constraint, and detects commands that would."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.decode_time import DecodeTime
from dora.core.phases import GroupPhase
from dora.core.tables import Group, Trajectory
from dora.errors import InvariantViolation, RunFailed
from dora.journal.audit import audit_entries
from dora.sim.server import SimulatedServer, Use
from dora.sim.world import World
from tests.sim.worlds import constant, simulate, workload

STRATEGIES = [
    *[("dora", 0), ("dora", 1), ("dora", 3), ("sync", 0), ("periodic", 0), ("one_step_off", 1)],
    *[("partial", 0), ("partial", 3), ("partial_bounded", 2), ("partial_sync", 0), ("oversample", 0)],
]
TROUBLE: dict[str, dict[str, Any]] = {
    "faults": {
        "instance_hours": 0.05,
        "down_s": 20.0,
        "push_failure_share": 0.05,
        "late_instances": 2,
        "join_s": 30.0,
    },
    "grade": {"workers": 2, "hang_share": 0.002, "hang_s": 3.0, "failure_share": 0.005},
    "fleet": {"slow_instances": 1},
}


def test_a_server_that_takes_longer_than_two_minutes_for_a_token_is_not_lost() -> None:
    """Else the watchdog would lose it again and again, and the job would not end."""
    slow = SimulatedServer(slots=16, kv_tokens=8_000, decode=DecodeTime(base_s=200.0))
    lengths = constant(4, groups=24, group_size=4)
    for fleet in ({"server": slow}, {"answer_s": 200.0}):
        one = workload(job={"steps": 3, "groups_per_step": 8}, lengths=lengths, fleet=fleet)
        result, world, _ = simulate(one)
        assert isinstance(world.outcome, cmd.FinishRun)
        assert result.violations == 0


def test_servers_that_are_never_lost_are_those_of_a_job_without_faults() -> None:
    digests = [simulate(workload(faults={"instance_hours": hours}))[0].step_s for hours in (math.inf, 0.0)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("strategy", "k"), STRATEGIES)
def test_every_strategy_finishes_its_job_without_a_violation_and_passes_the_audit(strategy: str, k: int) -> None:
    result, world, journal = simulate(workload(strategy, k=k))
    assert isinstance(world.outcome, cmd.FinishRun)
    assert result.violations == 0
    assert result.staleness_max <= world.settings.max_lag
    report = audit_entries(world.settings, journal)
    assert report.ok, report.violations


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("strategy", "k"), STRATEGIES)
def test_failures_joins_and_slow_graders_lose_nothing(strategy: str, k: int, seed: int) -> None:
    result, world, journal = simulate(workload(strategy, k=k, **TROUBLE), seed=seed)
    kinds = Counter(type(event) for event, _ in journal)
    assert min(kinds[ev.InstanceLost], kinds[ev.WeightPushFailed]) > 0, "the faults did not happen"
    assert result.violations == 0
    report = audit_entries(world.settings, journal)
    assert report.ok, report.violations


@pytest.mark.parametrize(("strategy", "k"), [("dora", 3), ("one_step_off", 1), ("partial", 1)])
def test_the_same_seed_gives_the_same_journal(strategy: str, k: int) -> None:
    first, second, other = (
        msgspec.msgpack.encode(simulate(workload(strategy, k=k, **TROUBLE), seed=seed)[2]) for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other


def test_dora_without_staleness_is_periodic_event_for_event() -> None:
    assert simulate(workload("dora", k=0))[2] == simulate(workload("periodic"))[2]


def test_every_answer_is_trained_with_the_length_the_table_gives_it() -> None:
    _, world, journal = simulate(workload("dora", k=3))
    trained = [
        id for _, orders in journal for o in orders if isinstance(o, cmd.TrainMicroBatch) for r in o.ranks for id in r
    ]
    assert len(trained) == len(set(trained)) == 24 * 24 * 4
    answers = world.workload.answers(seed=0)
    finished = {e.trajectory: e.num_tokens for e, _ in journal if isinstance(e, ev.GenerationFinished)}
    for id in trained:
        assert finished[id] == answers.group(id // 4).lengths[id % 4]


def test_a_group_that_was_trained_or_filtered_is_freed_without_a_garbage_collection() -> None:
    """At 10,000 instances a full collection stops the event loop for 0.3 s."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        some_alike = constant(40, groups=50, group_size=4) | {"rewards": ((0.0, 1.0) * 2, (1.0,) * 4) * 25}
        _, world, _ = simulate(workload("dora", lengths=some_alike, job={"filter_zero_variance": True}))
        gc.collect()
        searched = Counter(type(one) for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    counts = world.state.ledger.counts
    assert min(counts[GroupPhase.TRAINED], counts[GroupPhase.FILTERED]) > 0
    assert searched[Group] == searched[Trajectory] == 0


def test_kv_pressure_evicts_requests_then_ends_and_loses_nothing() -> None:
    tight = SimulatedServer(slots=32, kv_tokens=3100, decode=workload().fleet.server.decode)
    result, _, journal = simulate(workload("dora", k=3, fleet={"server": tight}))
    assert result.evictions > 1
    assert result.violations == 0
    pressed: dict[int, float] = {}
    for event, _ in journal:
        if isinstance(event, ev.KvPressureReported) and event.pressed:
            pressed[event.instance] = event.at
        elif isinstance(event, ev.KvPressureReported):
            del pressed[event.instance]
    last = journal[-1][0].at
    assert all(at > last / 2 for at in pressed.values()), "an instance that has emptied is relieved"


def test_dora_beats_every_barrier_on_a_long_tail_and_a_larger_k_never_hurts_much() -> None:
    step_s = {(s, k): simulate(workload(s, k=k))[0].step_s for s, k in STRATEGIES}
    assert step_s["dora", 3] < 0.75 * step_s["periodic", 0]
    assert step_s["dora", 1] < 0.9 * step_s["one_step_off", 1]
    assert step_s["dora", 3] < 1.03 * step_s["dora", 1] < step_s["dora", 0]


def test_with_constant_lengths_that_fit_asynchrony_gains_nothing_over_a_barrier() -> None:
    same = {"lengths": constant(200, groups=24, group_size=4), "job": {"groups_per_step": 16}}
    step_s = {(s, k): simulate(workload(s, k=k, **same))[0].step_s for s, k in STRATEGIES}
    push_s = workload().push_s
    assert step_s["dora", 1] == pytest.approx(step_s["one_step_off", 1], abs=4 * push_s)
    assert step_s["dora", 0] == step_s["periodic", 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("strategy", "k"), STRATEGIES)
def test_no_strategy_beats_its_limit(strategy: str, k: int, seed: int) -> None:
    """A few steps may train shorter answers than the whole job has: hence the tolerance of a tenth."""
    result, _, _ = simulate(workload(strategy, k=k, job={"steps": 40}), seed=seed)
    assert result.ratio > 0.9


@pytest.mark.parametrize(("strategy", "k"), [("dora", 3), ("sync", 0), ("partial", 1), ("partial_sync", 0)])
def test_the_time_of_a_fleet_adds_up(strategy: str, k: int) -> None:
    result, world, _ = simulate(workload(strategy, k=k, **TROUBLE))
    for instance in world.instances:
        assert sum(getattr(instance.use, name) for name in Use.__slots__) == pytest.approx(instance.anchor, rel=1e-9)
    assert sum(result.instance_shares.values()) == pytest.approx(1, abs=1e-9)
    assert min(result.instance_shares.values()) >= 0
    assert result.instance_shares["down"] > 0
    assert 0 <= result.tool_load <= result.slot_load <= 1
    assert 0 <= result.trainer_idle < 1


def test_decoding_under_an_old_version_is_counted_apart_from_the_newest() -> None:
    shares = {s: simulate(workload(s, k=3))[0].instance_shares for s in ("dora", "periodic")}
    assert shares["dora"]["thin_old"] > 0.01
    assert shares["periodic"]["thin_old"] == 0


def test_a_serial_grader_grades_one_answer_at_a_time() -> None:
    _, _, journal = simulate(workload("dora", grade={"median_s": 0.2, "sigma": 0.0, "workers": 1}, job={"steps": 6}))
    graded = [event.at for event, _ in journal if isinstance(event, ev.TrajectoryGraded)]
    gaps = [b - a for a, b in itertools.pairwise(graded)]
    assert min(gaps) == pytest.approx(0.2)


def test_pushes_loading_and_absence_do_not_count_as_empty() -> None:
    late = {"late_instances": 2, "join_s": 30.0}
    result, world, _ = simulate(workload("dora", k=3, faults=late, fleet={"push_fixed_s": 0.0, "weight_bytes": 8e9}))
    pushes = sum(row.full.attempt for row in world.state.instances.values())
    assert sum(i.use.push_s for i in world.instances) == pytest.approx(pushes * world.workload.push_s)
    assert [i.use.down_s for i in world.instances] == [0.0] * 6 + [30.0] * 2
    assert result.instance_shares["down"] == 0, "they join before the steady state"


# -- what the world's own accounts catch ------------------------------------------------------------------------------


def started(strategy: str = "dora") -> World:
    world = World(workload(strategy, k=2), seed=0)
    world.run(max_events=400)
    return world


def resume(world: World, *, max_events: int | None = None) -> None:
    world._begin = lambda: None  # type: ignore[method-assign]
    world.run(max_events=max_events)


def test_a_request_for_a_server_that_holds_another_version_is_a_violation_of_c1() -> None:
    world = started()
    busy = next(i for i in world.instances if i.requests)
    order = next(iter(busy.requests.values())).order
    busy.version = 7
    with pytest.raises(InvariantViolation, match="C1"):
        world._on_generate(order)


def test_weights_for_a_server_that_decodes_are_a_violation_of_c1() -> None:
    world = started()
    busy = next(i for i in world.instances if i.requests)
    with pytest.raises(InvariantViolation, match="C1"):
        world._on_push_weights(cmd.PushWeights(busy.id, 9, 0))


def test_an_answer_that_does_not_continue_from_all_its_tokens_is_a_violation_of_c2() -> None:
    world = started()
    id, request = next((id, r) for i in world.instances for id, r in i.requests.items())
    world._interrupted[id] = replace(request, offset=17)
    with pytest.raises(InvariantViolation, match="C2"):
        world._on_generate(request.order)


@pytest.mark.parametrize("step", [-1, 3])
def test_a_group_committed_too_early_or_too_late_is_a_violation_of_c3(step: int) -> None:
    world = started()
    group, version = next(iter(world._tags.items()))
    with pytest.raises(InvariantViolation, match="C3"):
        world._on_commit_group(cmd.CommitGroup(group, version, step))


def test_a_group_that_vanishes_from_the_ledger_is_a_violation_of_c2() -> None:
    world = started()
    world.state.ledger.admitted += 1
    with pytest.raises(InvariantViolation, match="C2"):
        world._deliver(ev.Ticked(world.now))


def test_a_wrong_counter_is_found_by_the_recount_at_the_end() -> None:
    world = started()
    next(iter(world.state.instances.values())).kv_load += 1
    with pytest.raises(InvariantViolation, match="kv_load"):
        resume(world, max_events=world.num_events)


def test_a_run_that_the_core_ends_is_a_failed_run() -> None:
    lengths = constant(50, groups=8, group_size=4)
    lengths["rewards"] = ((1.0,) * 4,) * 8
    with pytest.raises(RunFailed, match="had to top up"):
        simulate(workload(lengths=lengths, job={"filter_zero_variance": True}))


@pytest.mark.parametrize(("strategy", "k"), STRATEGIES)
def test_an_evaluation_ends_under_every_strategy(strategy: str, k: int) -> None:
    """If rollout and training share devices, its samples are halted while the trainer has them."""
    evaluated = {"job": {"steps": 6, "eval_samples": 30, "eval_every": 2}, "lengths": {"regime": "D", "scale": 0.3}}
    result, world, journal = simulate(workload(strategy, k=k, **evaluated))
    reported = [o.version for _, orders in journal for o in orders if isinstance(o, cmd.ReportEvaluation)]
    assert {0, 6} <= set(reported)
    assert not any(instance.requests for instance in world.instances)
    assert result.violations == 0


def test_a_stuck_simulation_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.sim.world.SILENT_S", 1_000.0)
    world = started("sync")
    for instance in world.instances:
        instance.halted = True
    with pytest.raises(RunFailed, match="is stuck: no command since"):
        resume(world)


def test_held_out_answers_are_evaluated_beside_rollout_under_one_version_each() -> None:
    evaluated = {"job": {"steps": 12, "eval_samples": 30, "eval_every": 4}}
    result, world, journal = simulate(workload("dora", k=2, **evaluated))
    orders = [order for _, orders in journal for order in orders]
    assert [o.version for o in orders if isinstance(o, cmd.ReportEvaluation)] == [0, 4, 8, 12]
    samples = [o for o in orders if isinstance(o, cmd.Generate) and o.trajectory < 0 and not o.num_tokens]
    assert Counter(o.version for o in samples) == dict.fromkeys((0, 4, 8, 12), 30)
    ends = {e.trajectory: e.num_tokens for e, _ in journal if isinstance(e, ev.GenerationFinished)}
    lengths = [
        [ends[o.trajectory] for o in sorted(samples, key=lambda o: -o.trajectory) if o.version == v] for v in (0, 12)
    ]
    assert lengths[0] == lengths[1], "every version is asked the same"
    assert lengths[0] != [world.answers.group(i).lengths[0] for i in range(30)], "and what is never trained"
    assert result.violations == 0
    report = audit_entries(world.settings, journal)
    assert report.ok, report.violations


def test_kv_that_moves_with_its_answer_is_not_read_again() -> None:
    def again(rate: float) -> float:
        server = SimulatedServer(
            slots=16, kv_tokens=12_000, prefill_s_per_token=1e-3, decode=workload().fleet.server.decode
        )
        moving = msgspec.structs.replace(server, kv_bytes_per_token=1, kv_bytes_s=rate)
        result, _, _ = simulate(workload("dora", k=3, fleet={"server": moving}))
        assert result.migrations > 0
        return result.instance_shares["again"]

    read, slow, fast = again(0.0), again(1e3), again(1e9)
    assert fast < 1e-3 * read, "nothing is evicted"
    assert fast < slow
