"""The closed form of a server's batch agrees with a loop over single tokens."""

from __future__ import annotations

import random

import msgspec
import pytest

from dora.core.commands import Generate
from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId, TrajectoryId
from dora.sim.instance import HEADROOM_TOKENS, SimulatedInstance
from dora.sim.server import Request, SimulatedServer, SpeculationModel, Use

DECODE = DecodeTime(base_s=1e-2, per_request_s=1e-3, per_token_s=1e-5)
DRAFTS = SpeculationModel(draft_tokens=2, acceptance=0.6, draft_s=1e-3, per_draft_s=2.5e-3)
SERVER = SimulatedServer(slots=8, kv_tokens=10_000, decode=DECODE, prefill_s_per_token=1e-4)


def request(id: int, *, total: int, group: int | None = None, prompt: int = 100, have: int = 0) -> Request:
    order = Generate(TrajectoryId(id), 1, InstanceId(0), 0, have)
    return Request(order, id if group is None else group, prompt, total, have)


def instance(server: SimulatedServer = SERVER, *requests: Request) -> SimulatedInstance:
    one = SimulatedInstance(InstanceId(0), server)
    for r in requests:
        one.take(r)
    one.settle()
    return one


def run_out(one: SimulatedInstance) -> dict[TrajectoryId, float]:
    """The time at which each answer ends."""
    ends: dict[TrajectoryId, float] = {}
    while one.num_running:
        now = one.next_at()
        one.reach(now)
        assert one.used <= one.server.kv_tokens or one.num_running == 1
        ends.update((r.order.trajectory, now) for r in one.settle())
    return ends


def token_by_token(totals: list[int], *, prompt: int, drafts: SpeculationModel | None = None) -> list[float]:
    """The same by stepping: all begin together and are prefilled in turn, and none share a prompt."""
    at = len(totals) * prompt * SERVER.prefill_s_per_token
    ends, step = [0.0] * len(totals), 0
    while running := [i for i, total in enumerate(totals) if total > step]:
        took = DECODE.step_s(num_requests=len(running), num_tokens=len(running) * (prompt + step))
        if drafts is not None and len(running) <= 2:  # where they pay
            took += drafts.draft_s + drafts.per_draft_s * drafts.draft_tokens * len(running)
            took /= 1 + 0.6 + 0.36
        at += took
        step += 1
        for i in running:
            if totals[i] == step:
                ends[i] = at
    return ends


def test_the_batch_in_closed_form_is_the_sum_over_its_steps() -> None:
    totals = [1, 50, 50, 333, 700]
    ends = run_out(instance(SERVER, *(request(i, total=n) for i, n in enumerate(totals))))
    assert [ends[TrajectoryId(i)] for i in range(5)] == pytest.approx(token_by_token(totals, prompt=100), rel=1e-9)


def test_a_step_with_drafts_is_one_of_several_tokens_where_they_pay() -> None:
    """A step of n requests takes 10 + n ms, drafts 1 + 5 n ms more, for 1.96 tokens: with up to two requests."""
    server = msgspec.structs.replace(SERVER, speculation=DRAFTS)
    assert [server.drafting(n)[1] > 1 for n in (1, 2, 3, 8)] == [True, True, False, False]
    totals = [1, 50, 50, 333, 700]
    ends = run_out(instance(server, *(request(i, total=n) for i, n in enumerate(totals))))
    expected = token_by_token(totals, prompt=100, drafts=DRAFTS)
    assert [ends[TrajectoryId(i)] for i in range(5)] == pytest.approx(expected, rel=1e-9)
    assert expected < token_by_token(totals, prompt=100)


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_reading_the_state_in_between_changes_nothing(drafts: SpeculationModel | None) -> None:
    totals = [40, 170, 333]
    server = msgspec.structs.replace(SERVER, speculation=drafts)
    watched = instance(server, *(request(i, total=n) for i, n in enumerate(totals)))
    now, ends, last = 0.0, {}, [0, 0, 0]
    while watched.num_running:
        now = min(now + 0.1234, watched.next_at())
        watched.reach(now)
        for id, r in watched.requests.items():
            assert last[id] <= watched.tokens(r) <= totals[id]
            last[id] = watched.tokens(r)
        ends.update((r.order.trajectory, now) for r in watched.settle())
    expected = token_by_token(totals, prompt=100, drafts=drafts)
    assert [ends[TrajectoryId(i)] for i in range(3)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("changed", [60, 400])
def test_an_answer_whose_length_changes_ends_when_one_of_that_length_does(changed: int) -> None:
    answers = [request(i, total=n) for i, n in enumerate([40, 170, 333])]
    one = instance(SERVER, *answers)
    one.reach(one.after(20))
    one.change_total(answers[1], changed)
    one.settle()
    ends = run_out(one)
    expected = token_by_token([40, changed, 333], prompt=100)
    assert [ends[TrajectoryId(i)] for i in range(3)] == pytest.approx(expected, rel=1e-9)


def test_steps_in_a_span_are_the_inverse_of_the_time_they_take() -> None:
    for per_token_s in (0.0, 1e-5):
        server = SimulatedServer(decode=DecodeTime(per_token_s=per_token_s), kv_tokens=1_000_000)
        one = instance(server, request(0, total=50_000), request(1, total=50_000))
        start = one.anchor
        for steps in (1, 17, 4321):
            after = start + one._duration(steps)
            assert one._steps_in(after + 1e-9) == steps
            assert one._steps_in(after - 1e-6) == steps - 1


def test_siblings_share_the_prompt_in_kv_and_in_prefill() -> None:
    shared = instance(SERVER, request(0, total=10, group=7), request(1, total=10, group=7))
    apart = instance(SERVER, request(0, total=10, group=7), request(1, total=10, group=8))
    assert (shared.used, apart.used) == (100, 200)
    assert shared.anchor == pytest.approx(apart.anchor / 2)
    assert shared.context == apart.context == 200, "attention reads the prompt for each of them"
    run_out(shared)
    assert (shared.used, shared.context) == (0, 0)


def test_if_the_next_token_does_not_fit_the_youngest_is_evicted_and_keeps_its_tokens() -> None:
    server = SimulatedServer(slots=4, kv_tokens=1000, decode=DECODE, prefill_s_per_token=1e-4)
    one = instance(server, request(0, total=600), request(1, total=600))
    one.reach(one.next_at())
    one.settle()
    assert one.evictions == 1
    assert [r.order.trajectory for r in one.waiting] == [1]
    assert one.waiting[0].offset == 400
    ends = run_out(one)
    assert ends[TrajectoryId(0)] < ends[TrajectoryId(1)]
    assert one.use.again_s == pytest.approx((100 + 400) * 1e-4)


def test_a_request_is_admitted_only_with_space_to_grow() -> None:
    server = SimulatedServer(slots=4, kv_tokens=400 + HEADROOM_TOKENS * 2 - 1, decode=DECODE)
    one = instance(server, request(0, total=64, prompt=200), request(1, total=64, prompt=200))
    assert one.num_running == 1
    assert len(run_out(one)) == 2


def test_a_stopped_request_keeps_its_tokens_and_leaves_the_kv() -> None:
    one = instance(SERVER, request(0, total=500), request(1, total=500))
    one.reach(1.0)
    had = one.tokens(one.requests[TrajectoryId(1)])
    stopped = one.remove(TrajectoryId(1))
    assert 0 < stopped.offset == had < 500
    assert one.used == 100 + had
    other = instance(SERVER, request(1, total=500, have=had))
    assert other.used == 100 + had
    before = other.anchor
    run_out(other)
    assert other.anchor > before
    assert other.use.again_s > 0


def test_the_fullness_of_a_batch_is_its_average_share_of_the_slots_or_the_kv() -> None:
    """One answer of 200 tokens after a prompt of 100: 200 tokens of KV on average, of 1,000."""
    for slots, fill in ((8, 0.2), (2, 0.5)):
        one = instance(SimulatedServer(slots=slots, kv_tokens=1_000, decode=DECODE), request(0, total=200))
        run_out(one)
        assert one.use.thin_new_s == pytest.approx(200 * DECODE.base_s * (1 - fill))
        assert one.use.thin_old_s == 0


def test_a_slow_instance_takes_proportionally_longer() -> None:
    slow = SimulatedInstance(InstanceId(0), SERVER, slowness=2.0)
    slow.take(request(0, total=100))
    slow.settle()
    assert run_out(slow)[TrajectoryId(0)] == pytest.approx(2 * run_out(instance(SERVER, request(0, total=100)))[0])


@pytest.mark.parametrize("seed", range(20))
def test_all_time_is_accounted_for_in_random_histories(seed: int) -> None:
    draw = random.Random(seed)
    server = SimulatedServer(slots=6, kv_tokens=1500, decode=DECODE, prefill_s_per_token=1e-4)
    one, now, idle, waiting, ended = SimulatedInstance(InstanceId(0), server), 0.0, 0.0, 0, 0
    one.up = True
    while ended < 60:
        arrival = now + draw.expovariate(1.0)
        next_at = min(arrival, one.next_at())
        if not one.num_running:
            idle += max(0.0, next_at - one.anchor)
        now = next_at
        one.reach(now)
        if now == arrival and waiting < 60:
            one.take(request(waiting, total=draw.randint(1, 600), group=waiting // 3, prompt=draw.choice([10, 200])))
            waiting += 1
        elif now == arrival and one.requests and draw.random() < 0.3:
            stopped = one.remove(draw.choice(sorted(one.requests)))
            one.take(request(stopped.order.trajectory, total=stopped.total, prompt=9, have=stopped.offset))
        ended += len(one.settle())
        running = [r for r in one.requests.values() if r.running]
        assert one.num_running == len(running) == len(one.requests) - len(one.waiting)
        assert one.context == sum(r.prompt_tokens + one.tokens(r) for r in running)
        assert all(0 <= one.tokens(r) <= r.total for r in one.requests.values())
        assert one.used <= server.kv_tokens or len(running) == 1
    assert sum(getattr(one.use, name) for name in Use.__slots__) == pytest.approx(one.anchor, rel=1e-6)
    assert one.use.empty_s == pytest.approx(idle, rel=1e-6)
