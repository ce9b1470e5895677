"""Runs with an environment are simulated from their journals: turns, calls, prompts and rewards of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from msgspec.structs import replace

from dora.cli.pace import pace
from dora.config.load import without_unset
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId
from dora.errors import ConfigError
from dora.journal.audit import audit_entries
from dora.sim.recorded import Timed, _Reader, read_run
from dora.sim.tools import Call
from dora.sim.workload import Workload, checked, load
from tests.core.world import Faults, World, run
from tests.sim.test_instance import SERVER, instance, run_out
from tests.sim.test_recorded import record, write
from tests.sim.test_tools import CALLS, asking
from tests.sim.worlds import constant, simulate, workload


def recorded(calls: tuple[Any, ...], *, length: int = 60, **changes: Any) -> Workload:
    """A workload of which every answer makes these calls."""
    lengths = constant(length, groups=6, group_size=4) | {"calls": ((tuple(Call(*c) for c in calls),) * 4,) * 6}
    return workload(lengths=lengths, **changes)


def moments(journal: list[tuple[ev.Event, Any]]) -> dict[int, list[tuple[str, float, int]]]:
    """The turns and calls of each answer: what ended, when, with how many tokens."""
    seen = defaultdict(list)
    for event, _ in journal:
        if isinstance(event, ev.CallStarted | ev.CallFinished | ev.GenerationFinished):
            seen[event.trajectory].append((type(event).__name__, event.at, event.num_tokens))
    return seen


@pytest.mark.parametrize("calls", ["release", "keep"])
def test_a_recorded_run_with_calls_is_predicted_from_its_journal(tmp_path: Path, calls: str) -> None:
    one = workload(k=1, tools=CALLS, job={"calls": calls})
    folder, own = record(one, tmp_path)
    found, _ = read_run(folder.root)
    answers = one.answers(seed=0)
    drawn = [answers.group(i) for i in range(20)]
    assert found.lengths.answers[:20] == tuple(tuple(group.lengths) for group in drawn)
    assert [[len(made) for made in group.calls] for group in drawn] == [
        [*map(len, row)] for row in found.lengths.calls[:20]
    ]
    for group, row in zip(drawn, found.lengths.calls, strict=False):
        for made, read in zip(group.calls, row, strict=True):
            assert [(c.at, c.num_tokens) for c in made] == [(c.at, c.num_tokens) for c in read]
            assert [c.latency_s for c in made] == pytest.approx([c.latency_s for c in read])
    assert found.settings().call_limit_s == pytest.approx(
        max(c.latency_s for g in drawn for m in g.calls for c in m), rel=1
    )
    predicted, world, journal = simulate(found, seed=1)
    assert predicted.step_s == pytest.approx(own.step_s, rel=0.05)
    assert audit_entries(world.settings, journal).ok


def spent(world: World) -> dict[TrajectoryId, list[tuple[int, float, int]]]:
    """The calls of each answer, from the orders and the last event of each attempt: a reading of its own."""
    ordered: dict[tuple[int, int], float] = {}
    before: dict[int, int] = {}
    found = defaultdict(list)
    for event, orders in world.journal:
        if isinstance(event, ev.CallFinished) and (event.trajectory, event.attempt) in ordered:
            since = ordered.pop((event.trajectory, event.attempt))
            at = before[event.trajectory]
            found[event.trajectory].append((at, event.at - since, event.num_tokens - at))
        for order in orders:
            if isinstance(order, cmd.CallEnvironment):
                ordered[order.trajectory, order.attempt] = event.at
                follows = isinstance(event, ev.CallStarted) and event.trajectory == order.trajectory
                before[order.trajectory] = event.num_tokens if follows else 0
    return found


@pytest.mark.parametrize("own_prompts", [False, True])
def test_turns_and_endings_of_an_environment_are_read(tmp_path: Path, own_prompts: bool) -> None:
    world = run(
        seed=1, slots=4, token_s=0.05, steps=6, calls=0.9, own_prompts=own_prompts, faults=Faults(call_ends=0.3)
    )
    folder = write(world.journal, world.settings, tmp_path)
    found, measured = read_run(folder.root)
    last: dict[int, tuple[int, bool]] = {}  # tokens, and whether a call ended it
    for event, _ in world.journal:
        if isinstance(event, ev.GenerationFinished) or (isinstance(event, ev.CallFinished) and event.ended):
            last[event.trajectory] = event.num_tokens, isinstance(event, ev.CallFinished)
    size, calls = world.settings.group_size, spent(world)
    rows = [(answers, made) for answers, made in zip(found.lengths.answers, found.lengths.calls, strict=True)]
    groups = sorted({t // size for t in measured.rewards})
    assert len(rows) == len(groups) > 10
    for group, (answers, made) in zip(groups, rows, strict=True):
        ids = [group * size + i for i in range(size)]
        assert answers == tuple(last[t][0] for t in ids)
        for t, read in zip(ids, made, strict=True):
            expected = calls[TrajectoryId(t)]
            assert [(c.at, c.num_tokens) for c in read] == [(at, n) for at, _, n in expected]
            assert [c.latency_s for c in read] == pytest.approx([seconds for _, seconds, _ in expected])
    assert any(by_call for _, by_call in last.values()), "no call ended an episode"
    assert set(found.lengths.prompts) == {0 if own_prompts else 3}  # the world's own prompts have one token
    assert found.settings().own_prompts is own_prompts
    assert all(request.seconds == pytest.approx(0.05 * request.tokens) for request in measured.requests)
    _, simulated, journal = simulate(found.with_changes(job={"steps": 12}))
    assert audit_entries(simulated.settings, journal).ok
    assert any(isinstance(event, ev.CallFinished) and event.ended for event, _ in journal)


def test_episodes_begin_with_a_call_and_siblings_share_its_prompt(tmp_path: Path) -> None:
    one = recorded(((0, 4.0, 7), (20, 3.0, 10)))
    folder, own = record(one, tmp_path)
    _, world, journal = simulate(one)
    assert audit_entries(world.settings, journal).ok
    seen = moments(journal)
    begun = {t: event.at for event, orders in journal for o in orders for t in [trajectory_begun(o)] if t is not None}
    assert {kinds[0][0] for kinds in seen.values()} == {"CallFinished"}
    assert all(kinds[0][1:] == (pytest.approx(begun[t] + 4.0), 7) for t, kinds in seen.items())
    found, _ = read_run(folder.root)
    assert set(found.lengths.prompts) == {20 + 6}
    assert {n for row in found.lengths.answers for n in row} == {60 - 6}
    read = {
        tuple((c.at, round(c.latency_s, 9), c.num_tokens) for c in calls)
        for row in found.lengths.calls
        for calls in row
    }
    assert read == {((0, 4.0, 1), (14, 3.0, 10))}
    predicted, simulated, again = simulate(found)
    assert audit_entries(simulated.settings, again).ok
    assert 0.9 * own.step_s < predicted.step_s < own.step_s, "siblings did not share these prompts before"


def test_the_first_reading_of_a_prompt_is_none_of_lost_kv() -> None:
    request = asking(0, total=40, prompt=100, have=7)
    request.unread = 7
    one = instance(SERVER, request)
    run_out(one)
    assert (one.use.prefill_s, one.use.again_s) == (pytest.approx(107 * SERVER.prefill_s_per_token), 0.0)


def trajectory_begun(order: cmd.Command) -> TrajectoryId | None:
    """The trajectory of the first call of an episode; attempts count orders."""
    return order.trajectory if isinstance(order, cmd.CallEnvironment) and order.attempt == 1 else None


@pytest.mark.parametrize("first", [(0, 1.0, 0), (5, 1.0, 1)])
def test_either_every_answer_begins_with_a_call_or_none_does(first: tuple[int, float, int]) -> None:
    calls = (((Call(0, 1.0, 3),),) * 3 + ((Call(*first),),),) * 6
    with pytest.raises(ConfigError, match=r"lengths\.calls: either every answer begins with a call"):
        workload(lengths=constant(60, groups=6, group_size=4) | {"calls": calls})


@pytest.mark.parametrize(
    ("instance", "lost", "read"), [(0, False, 10), (1, False, 150), (0, True, 150)], ids=["kept", "moved", "lost"]
)
def test_a_server_that_has_the_answer_reads_only_the_result(instance: int, lost: bool, read: int) -> None:
    """Of a prompt of 100 tokens, a turn of 40 and a result of 10, beside another request that began before."""
    first, other = (cmd.Generate(TrajectoryId(t), 1, InstanceId(0), 0, 0) for t in (0, 4))
    beside = cmd.Generate(TrajectoryId(8), 1, InstanceId(instance), 0, 0)
    entries: list[tuple[ev.Event, list[cmd.Command]]] = [
        (ev.PromptsArrived(0.0, 0, (100, 0, 0), False), [first, other]),
        (ev.CallStarted(1.0, TrajectoryId(0), 1, 40, ()), [cmd.CallEnvironment(TrajectoryId(0), 1)]),
        (ev.GenerationFinished(1.5, TrajectoryId(4), 1, 9, False, ()), []),
        (ev.Ticked(2.0), [beside]),
        (ev.CallFinished(3.0, TrajectoryId(0), 1, 50), [cmd.Generate(TrajectoryId(0), 2, InstanceId(instance), 0, 50)]),
        (ev.GenerationFinished(5.0, TrajectoryId(8), 1, 30, False, ()), []),
    ]
    if lost:
        entries.insert(3, (ev.InstanceLost(1.7, InstanceId(0), 1, {}, "gone"), []))
    found = _Reader(workload().settings(), graders=1).read(entries)
    assert found.requests[-1] == Timed(tokens=30, batch=pytest.approx(5 / 3), read=read, seconds=3.0)


def test_a_run_keeps_the_number_of_episodes_for_which_its_hosts_had_room(tmp_path: Path) -> None:
    slow = CALLS | {"latency_median_s": 20.0}
    folder, own = record(workload(k=1, tools=slow, job={"max_episodes": 16, "steps": 12}), tmp_path)
    found, _ = read_run(folder.root)
    assert found.settings().max_episodes == 16
    bound, free = (simulate(found.with_changes(job={"max_episodes": most}))[0] for most in (16, 0))
    assert bound.step_s == pytest.approx(own.step_s, rel=0.05)
    assert free.step_s < 0.7 * own.step_s


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_groups_of_episodes_that_failed_are_simulated_with_their_failures(tmp_path: Path, share: float) -> None:
    world = run(seed=1, slots=4, token_s=0.05, steps=8, calls=0.9, group_size=4, faults=Faults(call_fails=share))
    found, _ = read_run(write(world.journal, world.settings, tmp_path).root)
    ended = {e.trajectory for e, _ in world.journal if isinstance(e, ev.GenerationFinished | ev.TrajectoryGraded)}
    failed = {e.trajectory for e, _ in world.journal if isinstance(e, ev.CallFinished) and e.failed}
    groups = {t // 4 for t in ended | failed if all(4 * (t // 4) + i in ended | failed for i in range(4))}
    assert len(found.lengths.answers) == len(groups) > 8
    assert sum(math.isnan(reward) for row in found.lengths.rewards for reward in row) >= len(failed) // 2 > 0
    _, simulated, journal = simulate(found)
    assert audit_entries(simulated.settings, journal).ok
    assert any(isinstance(event, ev.TrajectoryGraded) and event.reward is None for event, _ in journal)


def test_an_episode_that_could_not_begin_is_simulated_as_one_that_fails(tmp_path: Path) -> None:
    """The environment fails before it gives a prompt: an answer without a token."""
    world = run(seed=3, slots=4, token_s=0.05, steps=8, calls=0.9, own_prompts=True, faults=Faults(call_fails=0.1))
    called = {event.trajectory for event, _ in world.journal if isinstance(event, ev.CallStarted)}
    not_begun = [
        e for e, _ in world.journal if isinstance(e, ev.CallFinished) and e.failed and e.trajectory not in called
    ]
    journal = [(replace(e, num_tokens=0) if e in not_begun else e, orders) for e, orders in world.journal]
    found, measured = read_run(write(journal, world.settings, tmp_path).root)
    assert 0 in measured.lengths.values()
    assert min(n for row in found.lengths.answers for n in row) == 1
    _, simulated, again = simulate(found)
    assert audit_entries(simulated.settings, again).ok


def test_siblings_read_their_own_prompt_once() -> None:
    """Two siblings with an own prompt of 51 tokens each, one after the other on one server."""
    entries: list[tuple[ev.Event, list[cmd.Command]]] = [
        (ev.PromptsArrived(0.0, 0, (0,), False), [cmd.CallEnvironment(TrajectoryId(t), 1) for t in (0, 1)]),
        (ev.CallFinished(1.0, TrajectoryId(0), 1, 51), [cmd.Generate(TrajectoryId(0), 2, InstanceId(0), 0, 51)]),
        (ev.CallFinished(2.0, TrajectoryId(1), 1, 51), [cmd.Generate(TrajectoryId(1), 2, InstanceId(0), 0, 51)]),
        (ev.GenerationFinished(5.0, TrajectoryId(0), 2, 60, False, ()), []),
        (ev.GenerationFinished(6.0, TrajectoryId(1), 2, 60, False, ()), []),
    ]
    settings = msgspec.structs.replace(workload().settings(), own_prompts=True)
    found = _Reader(settings, graders=1).read(entries)
    assert [(request.tokens, request.read) for request in found.requests] == [(9, 52), (9, 1)]


def test_an_answer_whose_last_call_ends_it_is_complete_with_its_result() -> None:
    result, world, journal = simulate(recorded(((20, 3.0, 10), (45, 2.0, 15))))
    assert audit_entries(world.settings, journal).ok
    assert result.step_s > 0
    whole = [seen for seen in moments(journal).values() if len(seen) == 4]
    assert whole
    for seen in whole:
        assert [kind for kind, _, _ in seen] == ["CallStarted", "CallFinished"] * 2
        assert [tokens for _, _, tokens in seen] == [20, 30, 45, 60]
        assert [round(b[1] - a[1], 6) for a, b in zip(seen[::2], seen[1::2], strict=True)] == [3.0, 2.0]
    assert not any(isinstance(event, ev.GenerationFinished) for event, _ in journal)
    assert all(not instance._idle for instance in world.instances if not instance.requests)


def test_a_call_may_follow_another_without_a_token() -> None:
    _, world, journal = simulate(recorded(((20, 1.0, 10), (30, 1.0, 10))))
    assert audit_entries(world.settings, journal).ok
    assert [20, 30, 30, 40, 60] in [[n for _, _, n in seen] for seen in moments(journal).values()]


@pytest.mark.parametrize(
    "calls",
    [
        ((20, -1.0, 10),), ((20, float("nan"), 10),), ((20, float("inf"), 10),), ((-1, 1.0, 10),), ((20, 1.0, -1),),
        ((55, 1.0, 10),), ((20, 1.0, 10), (29, 1.0, 1)),
    ],
)  # fmt: skip
def test_calls_that_no_answer_has_are_refused(calls: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"lengths\.calls: .* cannot be the calls of an answer of 60 tokens$"):
        recorded(calls)


@pytest.mark.parametrize(
    "calls", [(((),) * 4,) * 5, (((),) * 3,) * 6, ((),) * 6],
)  # fmt: skip
def test_calls_of_other_answers_are_refused(calls: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"lengths\.calls: needs a list of calls for each recorded answer$"):
        workload(lengths=constant(60, groups=6, group_size=4) | {"calls": calls})


def test_calls_without_recorded_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"there: lengths\.calls: needs a list of calls"):
        checked(Workload().with_changes(lengths={"calls": (((),) * 8,)}), origin="there")


def test_a_file_may_have_recorded_calls_and_is_not_paced(tmp_path: Path) -> None:
    one, path = recorded(((20, 3.0, 10), (45, 2.0, 15))), tmp_path / "recorded.toml"
    path.write_text(tomli_w.dumps(without_unset(msgspec.to_builtins(one))))
    assert load(path) == one
    with pytest.raises(ConfigError, match=r"lengths\.calls: are simulated, not paced"):
        pace(path, seed=0, time_scale=1.0, processes=1, folder=tmp_path / "out")
