"""Limit, floor and the parts of a tail, against a recount of recorded runs that shares no code with the simulator's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.decode_time import DecodeTime
from dora.errors import InvariantViolation
from dora.sim.limit import limit
from dora.sim.server import SimulatedServer
from dora.sim.workload import Workload
from tests.sim.worlds import Journal, simulate, workload

SERVER = SimulatedServer(
    slots=16, kv_tokens=8_000, decode=DecodeTime(0.01, 1e-4, 1e-7), prefill_s_per_token=1e-4, prefill_s_per_token2=1e-8
)


def tail_bound(strategy: str = "dora", *, k: int) -> Workload:
    """Few short answers, one long one in most steps, and a fast trainer."""
    return workload(
        strategy,
        k=k,
        job={"steps": 20, "groups_per_step": 6, "strategy": strategy, "max_staleness": k},
        fleet={"server": SERVER, "weight_bytes": 1e9},
        train={"tokens_s_per_device": 20_000.0},
    )


@dataclass
class Recount:
    """Times of one run, by version."""

    published: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)  # the last answer
    graded: dict[int, float] = field(default_factory=dict)  # the last reward
    last: dict[int, int] = field(default_factory=dict)  # trajectory of the last answer
    groups: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def recount(journal: Journal, *, group_size: int) -> Recount:
    found, tags = Recount(), {}
    for event, orders in journal:
        for order in orders:
            if isinstance(order, cmd.AdmitGroup):
                tags[int(order.group)] = int(order.version)
                found.groups[order.version].append(order.group)
        if isinstance(event, ev.VersionPublished):
            found.published[event.version] = event.at
        elif isinstance(event, ev.GenerationFinished):
            version = tags[event.trajectory // group_size]
            found.ended[version], found.last[version] = event.at, event.trajectory
        elif isinstance(event, ev.TrajectoryGraded):
            version = tags[event.trajectory // group_size]
            found.graded[version] = event.at
    return found


def alone(tokens: int, *, prompt: int) -> float:
    """Token by token."""
    read = prompt * (1e-4 + 1e-8 * prompt / 2)
    return read + sum(0.01 + 1e-4 + 1e-7 * (prompt + n) for n in range(tokens))


def terms(one: Workload, groups: list[int]) -> tuple[float, float, float]:
    """T_train, L and tau of some groups."""
    answers = one.answers(seed=0)
    found = [answers.group(number) for number in groups]
    rate, ranks = 20_000.0, one.num_ranks
    tokens = sum(20 + n for group in found for n in group.lengths)
    longest = max(n for group in found for n in group.lengths)
    slowest = 1.0 + 1e9 / 8e9 + alone(longest, prompt=20) + 0.005
    return tokens / (rate * ranks) + 0.5, slowest, (20 + longest) / rate + 0.5 + 1e9 / 20e9


@pytest.mark.parametrize("k", [0, 1, 2])
def test_limit_and_floor_are_those_of_the_measured_blocks(k: int) -> None:
    one = tail_bound(k=k)
    found = limit(one, seed=0)
    first, last = 2 * (k + 1), 20 - (k + 1) - 1
    blocks = [terms(one, list(range(6 * s, 6 * s + 6))) for s in range(last + 1)]
    assert found.train_s == pytest.approx(fmean(b[0] for b in blocks[first:]))
    assert found.slowest_s == pytest.approx(fmean(b[1] for b in blocks[first:]))
    assert found.last_s == pytest.approx(fmean(b[2] for b in blocks[first:]))
    assert (found.rule, found.step_s) == ("slowest", pytest.approx((found.slowest_s + found.last_s) / (k + 1)))
    ready = {0: 0.0}
    for s, (train, slowest, last_s) in enumerate(blocks):
        ready[s + 1] = max(ready[s] + train, ready[max(0, s - k)] + slowest + last_s)
    assert found.floor_s == pytest.approx((ready[last + 1] - ready[first]) / (last + 1 - first))
    assert found.floor_s >= found.step_s


@pytest.mark.parametrize(("strategy", "k"), [("periodic", 0), ("dora", 1), ("dora", 3), ("sync", 0)])
def test_no_version_is_ready_before_the_slowest_answer_of_the_one_k_before_it(strategy: str, k: int) -> None:
    one = tail_bound(strategy, k=k).with_changes(fleet={"time_shared": False}, grade={"sigma": 0.0})
    result, _, journal = simulate(one)
    run = recount(journal, group_size=4)
    for version, groups in run.groups.items():
        if version + k + 1 in run.published:
            _, slowest, last = terms(one, groups)
            assert run.published[version + k + 1] - run.published[version] >= slowest + last - 1e-9, version
    if not k:
        assert result.ratio >= 1 - 1e-9
        assert result.step_s >= result.limit.floor_s * (1 - 1e-9)


@pytest.mark.parametrize(("strategy", "k"), [("dora", 1), ("dora", 2), ("sync", 0)])
def test_the_parts_of_a_tail_add_up_to_the_time_between_two_publications(strategy: str, k: int) -> None:
    one = tail_bound(strategy, k=k)
    result, _, journal = simulate(one)
    run, tail = recount(journal, group_size=4), result.tail
    assert tail is not None
    answers = one.answers(seed=0)
    versions = [v for v in range(2 * (k + 1), 19 - 2 * k) if v in run.last]
    lengths = [answers.group(t // 4).lengths[t % 4] for t in (run.last[v] for v in versions)]
    assert tail.alone_s == pytest.approx(fmean(alone(n, prompt=20) for n in lengths))
    assert tail.push_s == pytest.approx(1.125)
    assert tail.grade_s == pytest.approx(fmean(run.graded[v] - run.ended[v] for v in versions))
    assert tail.train_s == pytest.approx(fmean(run.published[v + k + 1] - run.graded[v] for v in versions))
    assert tail.batch_s >= 0
    assert tail.queue_s >= -1e-9
    spans = [run.published[v + k + 1] - run.published[v] for v in versions]
    assert sum(msgspec.structs.astuple(tail)) == pytest.approx(fmean(spans))


def test_steps_that_beat_their_limit_are_an_error() -> None:
    one = tail_bound(k=1)
    result, world, _ = simulate(one)
    first, last = world.measure.window()
    marks = world.measure.marks
    edges = (marks[last + 1].at - marks[last].at) + (marks[first].at - marks[first - 1].at)
    most = (result.step_s + edges / (last - first) + one.grade.median_s) * 3 / 2  # 2 K + 1 over K + 1
    for step_s, is_possible in ((0.999 * most, True), (1.001 * most, False)):
        claimed = msgspec.structs.replace(result.limit, step_s=step_s)
        if is_possible:
            world.measure.result(seed=0, limit=claimed, state=world.state, num_events=0)
        else:
            with pytest.raises(InvariantViolation, match="their limit"):
                world.measure.result(seed=0, limit=claimed, state=world.state, num_events=0)


def test_filtered_groups_belong_to_the_block_before_whose_end_they_are_drawn() -> None:
    """One group in two is filtered, so the measured steps are twice as far in the stream."""
    rewards = ((1.0,) * 4, (0.0, 1.0) * 2)
    rows = tuple((10 * (n + 1),) * 4 for n in range(40))
    lengths = {"regime": "recorded", "prompts": (20,) * 40, "answers": rows, "rewards": rewards * 20, "cap": 3000}
    one = tail_bound(k=0).with_changes(lengths=lengths, job={"filter_zero_variance": True, "groups_per_step": 1})
    assert limit(one, seed=0).slowest_s == pytest.approx(
        fmean(1.125 + alone(10 * (2 * s + 2), prompt=20) + 0.005 for s in range(2, 19))
    )
