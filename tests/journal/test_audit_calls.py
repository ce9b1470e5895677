"""The audit of calls: nothing in real journals, and every alteration in altered ones."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.journal.audit import audit_entries
from dora.journal.audit_report import render
from tests.core.builders import Core, started
from tests.core.world import Faults, World, run
from tests.journal.recorded import (
    Entries,
    first_command,
    first_event,
    with_command,
    with_commands,
    with_event,
    without_command,
)


@pytest.fixture(scope="module")
def world() -> World:
    return run(calls=0.5, faults=Faults(call_fails=0.1, call_ends=0.1), group_size=3)


@pytest.fixture
def entries(world: World) -> Entries:
    return list(world.journal)


def found(world: World, entries: Entries) -> dict[str, str]:
    """Return rule and id -> messages, of every violation."""
    messages: dict[str, str] = {}
    for v in audit_entries(world.settings, entries).violations:
        messages[f"{v.rule}: {v.id}"] = messages.get(f"{v.rule}: {v.id}", "") + v.message
    return messages


def test_a_job_with_calls_is_clean_and_its_failed_environments_are_counted(world: World, entries: Entries) -> None:
    report = audit_entries(world.settings, entries)
    failed = [e for e, _ in entries if isinstance(e, ev.CallFinished) and e.failed]
    assert report.ok, report.violations
    assert report.environment_failed == len(failed) > 0
    assert f"environments {len(failed)} trajectories failed" in render(report)


def test_the_rewards_of_turns_are_added_in_the_order_in_which_the_core_adds_them() -> None:
    """0.1 + 0.2 + 0.3 is not 0.2 + 0.3 + 0.1."""
    core = started(groups_per_step=1, group_size=2)
    for t in (0, 1):
        for tokens, reward in ((1, 0.2), (3, 0.3)):
            core.called(t, tokens=tokens)
            attempt = core.attempts[cmd.CallEnvironment, t]
            core.tell(ev.CallFinished(0.0, TrajectoryId(t), attempt, tokens + 1, ended=tokens > 1, reward=reward))
        core.graded(t, 0.1)
    [dropped] = core.of(cmd.DropGroup)
    assert dropped.outcome.value == "filtered"
    assert audit_entries(core.state.settings, core.journal).violations == ()


def test_a_call_made_twice_is_named(world: World, entries: Entries) -> None:
    (at, _), order = first_command(entries, cmd.CallEnvironment)
    twice = with_commands(entries, at, [*entries[at][1], order])
    assert "without an intent" in found(world, twice)[f"C2 calls: trajectory {order.trajectory}"]


def test_a_call_without_an_intent_is_named(world: World, entries: Entries) -> None:
    at, event = first_event(entries, ev.CallStarted)
    old = with_event(entries, at, attempt=event.attempt + 7)
    assert "without an intent" in found(world, old)[f"C2 calls: trajectory {event.trajectory}"]


def test_a_turn_that_begins_during_a_call_is_named(world: World, entries: Entries) -> None:
    at, event = first_event(entries, ev.CallFinished, lambda e: not e.ended and not e.failed)
    later = with_event(entries, at, attempt=event.attempt + 7)
    assert "its call is under way" in found(world, later)[f"C2 tokens: trajectory {event.trajectory}"]


def test_a_call_that_loses_tokens_is_named(world: World, entries: Entries) -> None:
    at, event = first_event(entries, ev.CallFinished, lambda e: not e.failed)
    fewer = with_event(entries, at, num_tokens=0)
    assert "are lost" in found(world, fewer)[f"C2 tokens: trajectory {event.trajectory}"]


def test_a_turn_that_does_not_begin_with_the_observation_is_named(world: World, entries: Entries) -> None:
    returned = {e.trajectory for e, _ in entries if isinstance(e, ev.CallFinished)}
    at, order = first_command(entries, cmd.Generate, lambda o: o.trajectory in returned and o.num_tokens > 3)
    shorter = with_command(entries, at, num_tokens=order.num_tokens - 1)
    assert "a scheduling abort" in found(world, shorter)[f"C2 tokens: trajectory {order.trajectory}"]


def test_an_answer_that_is_graded_without_its_end_is_named(world: World, entries: Entries) -> None:
    at, event = first_event(entries, ev.CallFinished, lambda e: e.ended)
    assert f"C2 ledger: trajectory {event.trajectory}" in found(world, with_event(entries, at, ended=False))


def test_an_order_to_call_that_is_missing_is_named(world: World, entries: Entries) -> None:
    at, _ = first_command(entries, cmd.CallEnvironment)
    assert found(world, without_command(entries, at))


def test_replays_are_counted(world: World, entries: Entries) -> None:
    at, _ = first_event(entries, ev.CallFinished)
    report = audit_entries(world.settings, with_event(entries, at, replays=2))
    assert report.episode_replays == 2
    assert "2 replays" in render(report)


def restarted(*, replayable: tuple[int, ...]) -> Core:
    core = started(groups_per_step=1, max_staleness=0, steps=2)
    core.called(0, tokens=2)
    core.called(1, tokens=2)
    core.restarted(replayable=replayable)
    return core


def test_a_new_controller_repeats_only_calls_that_can_be_repeated() -> None:
    core = restarted(replayable=(1,))
    report = audit_entries(core.state.settings, core.journal)
    assert report.ok, report.violations
    assert report.environment_failed == 1
    at, event = first_event(core.journal, ev.ControllerRestarted)
    changed = with_event(core.journal, at, replayable=())
    messages = [v.message for v in audit_entries(core.state.settings, changed).violations if v.rule == "C2 calls"]
    assert len(messages) == 1
    assert event.replayable == (1,)
