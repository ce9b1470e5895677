"""Answers that call tools, on one server against figures worked out by hand, and in a fleet with moves and losses."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dora.cli.pace import pace
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.commands import Generate
from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId, TrajectoryId
from dora.errors import ConfigError
from dora.journal.audit import audit_entries
from dora.sim.instance import SimulatedInstance
from dora.sim.limit import limit
from dora.sim.server import Request, SimulatedServer, Use
from dora.sim.tools import Call, Tools, lay_out
from dora.sim.workload import Workload, load
from tests.sim.test_instance import DECODE, SERVER, instance, run_out
from tests.sim.test_world import STRATEGIES, TROUBLE
from tests.sim.worlds import Journal, simulate, workload

SEARCH_AGENT = Path("launch/workloads/search-agent.toml")
#: Calls that take as long as turns, and servers that are lost now and then.
CALLS: dict[str, Any] = {
    "calls": (0.2, 0.4, 0.3, 0.1),
    "latency_median_s": 2.0,
    "latency_max_s": 30.0,
    "result_tokens": 60,
    "stuck_share": 0.02,
    "stuck_s": 40.0,
}
READ_S = SERVER.prefill_s_per_token


def asking(
    id: int, *calls: tuple[int, float, int], total: int, group: int | None = None, prompt: int = 100, have: int = 0
) -> Request:
    order = Generate(TrajectoryId(id), 1, InstanceId(0), 0, have)
    made = tuple(Call(*call) for call in calls)
    return Request(order, id if group is None else group, prompt, total, have, calls=made)


def decode_s(first: int, last: int, *, prompt: int = 100) -> float:
    """Tokens [first, last) of one answer alone."""
    return sum(DECODE.step_s(num_requests=1, num_tokens=prompt + i) for i in range(first, last))


def step(one: SimulatedInstance) -> list[Request]:
    one.reach(one.next_at())
    return one.settle()


def holders(one: SimulatedInstance) -> list[Request]:
    """The requests that have KV."""
    return [r for r in one.requests.values() if r.running] + list(one._idle.values())


def recount(one: SimulatedInstance) -> int:
    prompts = {r.group: r.prompt_tokens for r in holders(one)}
    return sum(prompts.values()) + sum(one.tokens(r) - r.unread for r in holders(one))


# -- drawing answers --------------------------------------------------------------------------------------------------


def test_a_search_agent_has_the_published_turns_and_calls() -> None:
    drawn = load(SEARCH_AGENT).answers(seed=1)
    groups = [drawn.group(i) for i in range(8192)]
    calls = [found for group in groups for found in group.calls]
    latencies = np.array([call.latency_s for found in calls for call in found])
    heard = latencies[latencies < 60]
    assert np.mean([len(found) for found in calls]) == pytest.approx(1.65, abs=0.02)
    assert max(map(len, calls)) == 4
    assert heard.mean() == pytest.approx(0.40, abs=0.02)
    assert np.percentile(heard, [50, 90]) == pytest.approx([0.17, 0.96], rel=0.03)
    assert heard.max() == 4.0
    assert (latencies == 60).mean() == pytest.approx(0.001, abs=0.0003)
    turns = []
    for group in groups:
        for length, found in zip(group.lengths, group.calls, strict=True):
            edges = [(0, 0), *((call.at, call.num_tokens) for call in found), (length, 0)]
            turns += [at - before - size for (before, size), (at, _) in pairwise(edges)]
    assert (np.mean(turns), np.percentile(turns, 99)) == pytest.approx((78, 358), rel=0.02)
    assert min(turns) >= 1
    assert {call.num_tokens for found in calls for call in found if call.latency_s == 60} == {0}


def test_calls_do_not_depend_on_earlier_requests() -> None:
    forward, backward = (load(SEARCH_AGENT).answers(seed=3) for _ in range(2))
    numbers = range(0, 2000, 7)
    assert [forward.group(i) for i in numbers] == [backward.group(i) for i in reversed(numbers)][::-1]


@pytest.mark.parametrize(
    ("cap", "total", "calls"),
    [
        (1000, 160, ((10, 1.0, 50), (80, 2.0, 50))),
        (131, 131, ((10, 1.0, 50), (80, 2.0, 50))),
        (100, 100, ((10, 1.0, 50), (80, 2.0, 19))),
        (81, 81, ((10, 1.0, 50), (80, 2.0, 0))),
        (80, 80, ((10, 1.0, 50),)),
        (10, 10, ()),
    ],
)
def test_an_answer_ends_with_a_decoded_token_within_its_budget(cap: int, total: int, calls: tuple[Any, ...]) -> None:
    assert lay_out([10, 20, 30], called=[(1.0, 50), (2.0, 50)], cap=cap) == (total, calls)


# -- one server -------------------------------------------------------------------------------------------------------


def test_a_result_is_waited_for_and_read_but_not_decoded() -> None:
    one = instance(SERVER, asking(0, (1, 5.0, 40), (61, 0.5, 0), total=100))
    by_hand = READ_S * 100 + decode_s(0, 1) + 5.0 + READ_S * 40 + decode_s(41, 61) + 0.5 + decode_s(61, 100)
    assert run_out_with_calls(one)[0] == pytest.approx(by_hand, rel=1e-9)
    assert one.use.prefill_s == pytest.approx(READ_S * 140)
    assert one.use.again_s == 0
    assert one.steps == 60
    assert one.slots_s() == pytest.approx(by_hand - 5.5)
    assert (one.used, one.context) == (0, 0)


def run_out_with_calls(one: SimulatedInstance, *called: tuple[float, Request]) -> dict[TrajectoryId, float]:
    """When each answer ends, if each continues here after its calls; `called`: those under way, with their times."""
    ends: dict[TrajectoryId, float] = {}
    calls = [(at, r.order.trajectory, r) for at, r in called]
    while one.requests or calls:
        calls.sort(key=lambda call: call[:2])
        back_at = calls[0][0] if calls else math.inf
        now = min(one.next_at(), back_at)
        one.reach(now)
        if now == back_at:
            come_back(one, calls.pop(0)[2])
        for request in one.settle():
            if request.calls:
                calls.append((now + request.calls[0].latency_s, request.order.trajectory, request))
            else:
                ends[request.order.trajectory] = now
    return ends


def come_back(one: SimulatedInstance, request: Request) -> None:
    """The result has arrived, and the answer continues here."""
    request.receive_result()
    id, attempt = request.order.trajectory, request.order.attempt + 1
    one.take(request.resent(Generate(id, attempt, InstanceId(0), 0, request.offset)))


def test_an_answer_in_a_call_has_left_the_server_and_its_kv_stays() -> None:
    one = instance(SERVER, asking(0, (10, 9.0, 40), total=100, group=7), asking(1, total=300, group=7))
    [called] = step(one)
    assert (one.num_running, len(one.requests)) == (1, 1)
    assert one.used == 100 + 10 + 10 == recount(one)
    assert one.context == 100 + 10
    assert one.spare() == 10, "the prompt is shared"
    others = run_out_with_calls(instance(SERVER, asking(1, total=300)))[1]
    assert one.next_at() < others + 9, "the other decodes on"
    assert one.counts() == {1: 10}
    one.forget(called.order.trajectory)
    assert one.used == 100 + 10 == recount(one)


def test_kv_of_a_waiting_answer_is_dropped_if_needed_and_all_is_read_again() -> None:
    server = SimulatedServer(slots=4, kv_tokens=1000, decode=DECODE, prefill_s_per_token=READ_S)
    one = instance(server, asking(0, (10, 60.0, 40), total=100), asking(1, (20, 60.0, 40), total=100))
    first, second = [(one.anchor + 60.0, request) for _ in range(2) for request in step(one)]
    assert (one.num_running, one.used) == (0, 230)
    one.take(asking(2, total=850))
    one.settle()
    assert (one.used, recount(one)) == (330, 330), "there is room"
    assert step(one) == []
    assert list(one._idle) == [1], "the one that has been idle longest goes first"
    assert step(one) == []
    assert (list(one._idle), one.evictions) == ([], 0)
    assert [r.order.trajectory for r in step(one)] == [2]
    run_out_with_calls(one, first, second)
    assert one.use.again_s == pytest.approx(READ_S * (100 + 10 + 100 + 20))
    assert one.use.prefill_s == pytest.approx(READ_S * (3 * 100 + 2 * 40))


def test_a_request_is_admitted_at_the_cost_of_idle_kv() -> None:
    server = SimulatedServer(slots=4, kv_tokens=1000, decode=DECODE)
    one = instance(server, asking(0, (10, 60.0, 40), total=100, prompt=500), asking(1, total=200))
    step(one)
    one.take(asking(2, total=300, prompt=300))
    one.settle()
    assert (one.num_running, list(one._idle)) == (2, [])
    assert one.used == recount(one) <= 1000


def test_dropping_an_idle_answer_does_not_free_a_prompt_that_a_sibling_needs() -> None:
    server = SimulatedServer(slots=4, kv_tokens=1000, decode=DECODE)
    one = instance(server, asking(0, (10, 60.0, 40), total=100, prompt=500, group=7), asking(1, total=200))
    step(one)
    one.take(asking(2, total=300, prompt=500, group=7, have=280))
    one.settle()
    assert (one.num_running, list(one._idle)) == (1, [0])


def test_an_answer_that_continues_elsewhere_after_a_call_is_read_there_as_a_whole() -> None:
    first, second = instance(SERVER, asking(0, (10, 9.0, 40), total=100)), instance(SERVER, asking(1, total=4))
    [called] = step(first)
    assert (called.offset, first.used, first.next_at()) == (10, 110, math.inf)
    run_out(second)
    again = second.use.prefill_s
    end = run_out_with_calls(second, (9.0, called))[0]
    assert end == pytest.approx(9.0 + READ_S * 150 + decode_s(50, 100))
    assert second.use.again_s == pytest.approx(READ_S * 110)
    assert second.use.prefill_s - again == pytest.approx(READ_S * 40)


@pytest.mark.parametrize(("retract", "read"), [(True, 150), (False, 40)])
def test_an_update_during_a_call_drops_its_kv_only_with_retract(retract: bool, read: int) -> None:
    one = instance(SERVER, asking(0, (10, 9.0, 40), total=100))
    one.version = 0
    [called] = step(one)
    assert one.spans(called) == ((0, 0, 10),)
    one.reach(2.0)
    one.begin_push(retract=retract)
    one.settle()
    one.reach(3.0)
    one.update(1)
    one.end_push()
    before = one.use.prefill_s
    one.reach(9.0)
    come_back(one, called)
    one.settle()
    [ended] = step(one)
    assert one.spans(ended) == ((1, 50, 100),)
    assert one.use.again_s + one.use.prefill_s - before == pytest.approx(READ_S * read)


def test_a_result_that_arrives_during_a_pause_is_read_after_it() -> None:
    one = instance(SERVER, asking(0, (10, 1.0, 40), total=100))
    [called] = step(one)
    one.begin_push(retract=False)
    one.reach(1.0)
    come_back(one, called)
    one.settle()
    one.reach(5.0)
    one.end_push()
    one.settle()
    assert one.next_at() == pytest.approx(5.0 + READ_S * 40 + decode_s(50, 100))


@pytest.mark.parametrize("seed", range(20))
def test_kv_slots_and_time_add_up_in_random_histories(seed: int) -> None:
    draw = random.Random(seed)
    server = SimulatedServer(slots=6, kv_tokens=1500, decode=DECODE, prefill_s_per_token=READ_S)
    one, now, idle_s, born, ended = SimulatedInstance(InstanceId(0), server), 0.0, 0.0, 0, 0
    away: list[tuple[float, int, Request]] = []
    one.up = True
    while ended < 60:
        arrival = now + draw.expovariate(1.0)
        back_at = min(at for at, *_ in away) if away else math.inf
        next_at = min(arrival, one.next_at(), back_at)
        idle_s += 0.0 if one.num_running else max(0.0, next_at - one.anchor)
        now = next_at
        one.reach(now)
        if now == back_at:
            back = min(away, key=lambda call: call[:2])
            away.remove(back)
            if draw.random() < 0.2:
                one.forget(TrajectoryId(back[1]))
            come_back(one, back[2])
        if now == arrival and born < 60:
            turns = [draw.randint(1, 150) for _ in range(draw.randint(1, 4))]
            called = [(draw.choice([0.0, draw.expovariate(0.3)]), draw.choice([0, 90])) for _ in turns[1:]]
            total, calls = lay_out(turns, called=called, cap=700)
            one.take(asking(born, *calls, total=total, group=born // 3, prompt=[10, 200][born // 3 % 2]))
            born += 1
        elif now == arrival and one.requests and draw.random() < 0.3:
            stopped = one.remove(draw.choice(sorted(one.requests)))
            one.take(stopped.resent(stopped.order))
        elif now == arrival and draw.random() < 0.05:
            for lost in one.clear().values():
                one.take(lost.resent(lost.order))
        for request in one.settle():
            if request.calls:
                away.append((now + request.calls[0].latency_s, request.order.trajectory, request))
            else:
                ended += request.total == request.offset
        running = [r for r in one.requests.values() if r.running]
        assert one.num_running == len(running) == len(one.requests) - len(one.waiting)
        assert one.context == sum(r.prompt_tokens + one.tokens(r) for r in running)
        assert one.used == recount(one)
        assert one.used <= server.kv_tokens or len(holders(one)) == 1
    assert sum(getattr(one.use, name) for name in Use.__slots__) == pytest.approx(one.anchor, rel=1e-6)
    assert one.use.empty_s == pytest.approx(idle_s, rel=1e-6)
    assert born == ended == 60


# -- the fleet --------------------------------------------------------------------------------------------------------


def calling(strategy: str = "dora", *, k: int = 2, **changes: dict[str, Any]) -> Workload:
    return workload(strategy, k=k, **{"tools": CALLS, **changes})


def elsewhere_after_a_call(journal: Journal) -> int:
    """How often an answer continued after a call on another server than before."""
    where: dict[int, int] = {}
    called, found = set(), 0
    for event, orders in journal:
        if isinstance(event, ev.CallFinished):
            called.add(event.trajectory)
        for order in orders:
            if isinstance(order, cmd.Generate):
                found += order.trajectory in called and where[order.trajectory] != order.instance
                called.discard(order.trajectory)
                where[order.trajectory] = order.instance
    return found


@pytest.mark.parametrize(("strategy", "k"), STRATEGIES)
def test_no_call_breaks_a_constraint_even_if_servers_fail(strategy: str, k: int) -> None:
    result, world, journal = simulate(calling(strategy, k=k, **TROUBLE))
    assert isinstance(world.outcome, cmd.FinishRun)
    assert result.violations == 0
    assert 0 < result.tool_load < result.slot_load <= 1
    report = audit_entries(world.settings, journal)
    assert report.ok, report.violations


def test_answers_moved_or_lost_during_a_call_continue_once_and_to_their_full_length() -> None:
    _, world, journal = simulate(calling("dora", k=3, **TROUBLE))
    assert elsewhere_after_a_call(journal) > 0
    answers = world.workload.answers(seed=0)
    ends = Counter(e.trajectory for e, _ in journal if isinstance(e, ev.GenerationFinished))
    assert set(ends.values()) == {1}
    for event, _ in journal:
        if isinstance(event, ev.GenerationFinished):
            assert event.num_tokens == answers.group(event.trajectory // 4).lengths[event.trajectory % 4]


@pytest.mark.parametrize(("strategy", "k"), [("dora", 3), ("partial", 1)])
def test_the_same_seed_gives_the_same_journal_with_tools(strategy: str, k: int) -> None:
    first, second, other = (
        msgspec.msgpack.encode(simulate(calling(strategy, k=k, **TROUBLE), seed=seed)[2]) for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other


def test_with_keep_calls_hold_slots_for_their_latency_and_otherwise_for_less() -> None:
    _, world, journal = simulate(calling("periodic", job={"calls": "keep"}))
    lent = simulate(calling("periodic"))[1]
    answers = world.workload.answers(seed=0)
    latency_s = sum(
        call.latency_s
        for event, _ in journal
        if isinstance(event, ev.GenerationFinished)
        for call in answers.group(event.trajectory // 4).calls_of(event.trajectory % 4)
    )
    assert world.measure.counts.called_s == pytest.approx(latency_s, rel=0.05), "sampled"
    assert 0 < lent.measure.counts.called_s < 0.8 * latency_s


def test_a_server_that_only_waits_for_tools_is_not_considered_lost() -> None:
    stuck = {**CALLS, "stuck_share": 0.2, "stuck_s": 400.0}
    one = calling("dora", k=3, tools=stuck)
    assert one.watchdog_s < 400 == one.settings().call_limit_s
    _, _, journal = simulate(one)
    assert not any(isinstance(o, cmd.CondemnInstance) for _, orders in journal for o in orders)


@pytest.mark.parametrize(("strategy", "k"), STRATEGIES)
def test_no_strategy_beats_its_limit_with_tool_calls(strategy: str, k: int) -> None:
    result, _, _ = simulate(calling(strategy, k=k, job={"strategy": strategy, "max_staleness": k, "steps": 40}))
    assert result.ratio > 0.9


def test_the_limit_of_an_answer_with_calls_agrees_with_a_calculation_by_hand() -> None:
    plain = SimulatedServer(slots=4, kv_tokens=100_000, decode=DecodeTime(0.01, 0.0, 1e-4), prefill_s_per_token=1e-3)
    one = workload(
        "dora",
        k=1,
        job={"groups_per_step": 4, "group_size": 4, "max_staleness": 1, "calls": "keep"},
        lengths={"scale": 1e-9, "prompt_tokens": 20},  # every turn is one token
        tools={"calls": (0.0, 0.0, 1.0), "latency_median_s": 9.0, "latency_max_s": 3.0, "latency_sigma": 0.1}
        | {"result_tokens": 50},
        fleet={"devices": 3, "rollout_devices": 2, "server": plain, "weight_bytes": 0.0},
        train={"tokens_s_per_device": 61.5, "update_s": 0.5},
        grade={"median_s": 0.25},
    )
    found = limit(one, seed=0)
    assert found.train_s == pytest.approx(16 * (20 + 103) / 61.5 + 0.5)
    context_s = 1e-4 * (20 + (20 + 51) + (20 + 102))  # the second token follows one and a result, the third two of both
    assert found.slowest_s == pytest.approx(1 + (20 + 100) * 1e-3 + 3 * 0.01 + context_s + 2 * 3 + 0.25)
    read_s = 4 * 20 * 1e-3 + 16 * 100 * 1e-3
    held_s = 16 * (3 * 0.01 + context_s + 6)
    assert found.decode_s == pytest.approx((held_s / 4 + read_s) / 2), "calls hold the four slots"
    free = limit(one.with_changes(job={"calls": "release"}), seed=0)
    assert free.decode_s == pytest.approx(1.0704), "with release they do not"
    short = limit(one.with_changes(tools={"latency_max_s": 0.0}), seed=0)
    assert short.decode_s == pytest.approx((16 * (3 / 4 * 0.01 + context_s) + read_s) / 2), "results are no decoding"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": {"calls": (0.0, 0.0)}}, "tools.calls: weights"),
        ({"tools": {"calls": (2.0, -1.0)}}, "tools.calls: weights"),
        ({"tools": {"calls": (0.0, 1.0), "latency_median_s": -1.0}}, "tools.latency_median_s"),
        ({"tools": {"calls": (0.0, 1.0)}, "lengths": {"regime": "recorded"}}, "tools.calls: recorded"),
    ],
)
def test_tools_that_cannot_be_simulated_are_named(changes: dict[str, dict[str, Any]], said: str) -> None:
    if "lengths" in changes:
        changes["lengths"] |= {"prompts": (20,) * 4, "answers": ((5,) * 4,) * 4, "rewards": ((0.0,) * 4,) * 4}
    with pytest.raises(ConfigError, match=said):
        workload(**changes)


def test_calls_without_a_result_are_not_paced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tools: calls without a result are simulated, not paced"):
        pace(SEARCH_AGENT, seed=0, time_scale=1.0, processes=1, folder=tmp_path)


def test_without_a_call_tools_change_nothing() -> None:
    never = simulate(workload("dora", k=2, tools={**CALLS, "calls": (1.0,)}))[2]
    assert never == simulate(workload("dora", k=2))[2]
    assert Tools(calls=(1.0,)).longest_s == 0
