"""Replay and audit of altered journals end with a report, whatever was altered; bugs of the core escape."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from dora.core import core
from dora.core import events as ev
from dora.core.commands import Command
from dora.core.events import Event
from dora.core.ids import InstanceId
from dora.core.state import State
from dora.journal.audit import audit_entries
from dora.journal.replay import replay
from tests.core.world import Faults, World, run
from tests.journal.recorded import Entries

#: Events that no recorded run contains.
FOREIGN: list[Event] = [
    ev.InstanceRemoved(0.0, InstanceId(0)),
    ev.InstanceRecalled(0.0, InstanceId(1)),
    ev.InstanceDrainRequested(0.0, InstanceId(0), True),
    ev.KvPressureReported(0.0, InstanceId(0), True),
    ev.ControllerRestarted(0.0, 1, {}),
    ev.TrainerReady(0.0, 0),
    ev.MicroBatchTrained(0.0, 2, 1),
    ev.StepTrained(0.0, 2),
    ev.VersionPublished(0.0, 4, 1, {}),
    ev.CheckpointSaved(0.0, 3, ""),
]


@pytest.fixture(scope="module", params=["dora", "sync", "partial", "oversample"])
def world(request: pytest.FixtureRequest) -> World:
    faults = Faults(
        push_fails=0.05, request_fails=0.03, instance_dies=0.02, zero_variance=0.15, late_completion=0.05,
        controller_restarts=0.02,
    )  # fmt: skip
    return run(request.param, seed=3, steps=4, max_top_up=100.0, faults=faults, checked=False)


def altered(entries: Entries, rng: random.Random) -> Entries:
    """Entries with one dropped, duplicated, moved, changed or added, up to three times."""
    entries = list(entries)
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(entries))
        event, commands = entries[index]
        match rng.choice(["drop", "double", "move", "change", "change", "add"]):
            case "drop":
                del entries[index]
            case "double":
                entries.insert(rng.randrange(index, len(entries)), entries[index])
            case "move":
                entries.insert(rng.randrange(len(entries)), entries.pop(index))
            case "change":
                commands = [changed(c, rng) if rng.random() < 0.3 else c for c in commands]
                entries[index] = (changed(event, rng), commands)
            case "add":
                entries.insert(index, (msgspec.structs.replace(rng.choice(FOREIGN), at=event.at), []))
    return entries


def changed(fact: Any, rng: random.Random) -> Any:
    """The struct with another value in one field."""
    name = rng.choice(fact.__struct_fields__)
    value = getattr(fact, name)
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int | float):
        value += rng.choice([-1_000_000, -3, -1, 1, 3, 1_000_000])
    elif isinstance(value, str):
        value += "x"
    elif isinstance(value, tuple):
        value = value[:-1] if rng.random() < 0.5 else value * 2
    elif isinstance(value, dict):
        value = {k if isinstance(k, str) else k + rng.choice([0, 1]): v for k, v in value.items()}
    return msgspec.structs.replace(fact, **{name: value})


def test_the_audit_of_an_altered_journal_ends_with_a_report(world: World) -> None:
    """Only a late fact, or one on which nothing depends, can be altered unnoticed."""
    rng = random.Random(7)
    verdicts = [audit_entries(world.settings, altered(world.journal, rng)).ok for _ in range(150)]
    assert audit_entries(world.settings, world.journal).ok
    assert verdicts.count(False) > 75


def test_a_micro_batch_that_was_never_sent_is_a_difference(world: World) -> None:
    at = next(i for i, (e, _) in enumerate(world.journal) if isinstance(e, ev.TrainerReady)) + 1
    entries = [*world.journal[:at], (ev.MicroBatchTrained(5.0, 0, 0), []), *world.journal[at:]]
    assert "recomputed FailRun" in str(replay(world.settings, entries).difference)


@pytest.mark.parametrize("error", [AttributeError, TypeError, AssertionError])
def test_a_bug_of_the_core_is_not_reported_as_a_difference(
    world: World, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: State, event: Event) -> list[Command]:
        raise error("a bug")

    monkeypatch.setitem(core.HANDLERS, ev.GenerationFinished, broken)
    with pytest.raises(error, match="a bug"):
        replay(world.settings, world.journal)
