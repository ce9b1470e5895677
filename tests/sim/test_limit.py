"""The limit of a workload, against figures worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from dora.core.decode_time import DecodeTime
from dora.sim.limit import Limit, limit
from dora.sim.server import SimulatedServer, SpeculationModel
from dora.sim.workload import Workload
from tests.sim.worlds import constant, workload

#: 10 ms a step and nothing else: 100 tokens alone take a second.
PLAIN = SimulatedServer(slots=4, kv_tokens=100_000, decode=DecodeTime(0.01, 0.0, 0.0), prefill_s_per_token=0.0)


def plain(strategy: str = "dora", *, k: int = 1, tokens_s: float = 60.0, **fleet: object) -> Workload:
    """Steps of 16 answers of 100 tokens with prompts of 20, two instances, one trainer device, pushes of 1 s."""
    return workload(
        strategy,
        k=k,
        job={"groups_per_step": 4, "group_size": 4, "strategy": strategy, "max_staleness": k},
        lengths=constant(100, groups=4, group_size=4),
        fleet={"devices": 3, "rollout_devices": 2, "server": PLAIN, "weight_bytes": 0.0, **fleet},
        train={"tokens_s_per_device": tokens_s, "update_s": 0.5},
        grade={"median_s": 0.25},
    )


def bound(one: Workload) -> Limit:
    return limit(one, seed=0)


def test_each_term_agrees_with_a_calculation_by_hand() -> None:
    found = bound(plain())
    assert found.train_s == pytest.approx(16 * 120 / 60 + 0.5)
    assert found.decode_s == pytest.approx(16 * 100 / 4 * 0.01 / 2), "four at a time on two instances"
    assert found.slowest_s == pytest.approx(1 + 1 + 0.25), "push, decode alone, grading"
    assert found.last_s == pytest.approx(120 / 60 + 0.5)


def test_the_limit_is_the_largest_term() -> None:
    assert (bound(plain()).rule, bound(plain()).step_s) == ("train", pytest.approx(32.5))
    fast = bound(plain(tokens_s=1e6))
    assert (fast.rule, fast.step_s) == ("decode", pytest.approx(2.0))
    slots = SimulatedServer(slots=64, kv_tokens=100_000, decode=PLAIN.decode, prefill_s_per_token=0.0)
    tail = bound(plain(tokens_s=1e6, server=slots))
    assert (tail.rule, tail.step_s) == ("slowest", pytest.approx((2.25 + 0.5) / 2, rel=1e-3))
    more = bound(plain(k=3, tokens_s=1e6, server=slots, devices=9, rollout_devices=8))
    assert (more.rule, more.step_s) == ("slowest", pytest.approx((2.25 + 0.5) / 4, rel=1e-3))


def test_barrier_strategies_have_limits_of_their_own() -> None:
    assert bound(plain("sync")).step_s == pytest.approx(2.25 + 16 * 120 / 180 + 0.5), (
        "all three devices, one after other"
    )
    one_by_one = SimulatedServer(slots=1, kv_tokens=100_000, decode=PLAIN.decode, prefill_s_per_token=0.0)
    crowded = bound(plain("sync", server=one_by_one))
    assert (crowded.rule, crowded.step_s) == ("decode", pytest.approx(1600 * 0.01 / 3 + 1920 / 180 + 0.5))
    heavy = bound(plain("sync", weight_bytes=20e9))
    assert heavy.step_s == pytest.approx(2.25 + 2.5 + 16 * 120 / 180 + 0.5 + 1), "pushed in 2.5 s more, written in 1 s"
    assert bound(plain("periodic")).step_s == pytest.approx(2.25 + 32.5), "the first complete group, then training"
    assert bound(plain("one_step_off")).step_s == pytest.approx(32.5)


def test_kv_limits_the_batch_where_slots_do_not() -> None:
    tight = SimulatedServer(slots=1000, kv_tokens=3050, decode=PLAIN.decode, prefill_s_per_token=0.0)
    steps = (16 * 100 * 99 / 2 + 4 * 20 * 100) / 3050
    assert bound(plain(server=tight)).decode_s == pytest.approx(steps * 0.01 / 2)


def test_filtered_groups_count_as_decoded() -> None:
    """One group in four is kept; in a job with one group per step, some steps have only a filtered one."""
    alike = constant(100, groups=4, group_size=4) | {"rewards": ((1.0,) * 4,) * 3 + ((0.0, 1.0) * 2,)}
    for n in (4, 1):
        every = plain().with_changes(lengths=alike, job={"groups_per_step": n})
        kept = every.with_changes(job={"filter_zero_variance": True})
        assert bound(kept).decode_s == pytest.approx(4 * bound(every).decode_s)
        assert bound(kept).train_s == bound(every).train_s


def test_drafts_shorten_the_slowest_answer_and_decoding_where_they_pay() -> None:
    """Of two drafted tokens, half and a quarter are kept: 1.75 tokens a step."""
    drafts = SpeculationModel(draft_tokens=2, acceptance=0.5, draft_s=0.001, per_draft_s=0.0005)
    found = bound(plain(server=msgspec.structs.replace(PLAIN, speculation=drafts)))
    assert found.slowest_s == pytest.approx(1.25 + (0.01 + 0.001 + 2 * 0.0005) / 1.75 * 100)
    assert found.decode_s == pytest.approx(16 * 100 / 4 * (0.01 + 0.001 + 2 * 4 * 0.0005) / 1.75 / 2)
    dear = msgspec.structs.replace(drafts, per_draft_s=0.1)
    assert bound(plain(server=msgspec.structs.replace(PLAIN, speculation=dear))) == bound(plain())


def test_a_slow_instance_counts_by_its_speed() -> None:
    one, other = bound(plain()), bound(plain(slow_instances=1, slow_speed=0.5))
    assert other.decode_s == pytest.approx(one.decode_s * 2 / 1.5)
    assert other.slowest_s == one.slowest_s, "the slowest answer is decoded by the fastest instance"
