"""Run folders with the journals of simulated runs, unchanged or with one change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dora.core import events as ev
from dora.core.commands import Command, Generate
from dora.core.events import Event
from dora.core.strategies import Settings
from dora.journal.codec import FORMAT, Epoch, Header
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from tests.core.world import Faults, World, run

RECORDS_PER_FRAME = 50

Entries = list[tuple[Event, list[Command]]]
Place = tuple[int, int]  #: index of the event, index among its commands
E = TypeVar("E", bound=Event)
C = TypeVar("C", bound=Command)


def full_run(seed: int = 24) -> World:
    """A run in which everything happens: migration, losses, filters, late completions, evaluation."""
    return run(
        seed=seed,
        steps=10,
        max_top_up=100.0,
        eval_prompt_tokens=(3, 3, 3),
        eval_every=4,
        faults=Faults(
            push_fails=0.05, request_fails=0.03, instance_dies=0.02, zero_variance=0.15, late_completion=0.05
        ),
    )


def write(folder: RunFolder, settings: Settings, entries: Entries, *, with_tokens: bool = True) -> RunFolder:
    """The run folder that these events leave."""
    folder.config.write_text("")
    tokens = TokenWriter(folder.tokens) if with_tokens else None
    with JournalWriter(folder.journal) as journal:
        journal.append(Header(FORMAT, folder.run_id, "2026-01-01T00:00:00Z", "0.1.0", settings))
        journal.append(Epoch(0, 0.0, ""))
        starts: dict[int, Generate] = {}
        for number, (event, commands) in enumerate(entries):
            if tokens is not None:
                _write_tokens(tokens, starts, event)
            if number % RECORDS_PER_FRAME == 0:
                for file in (tokens, journal):
                    if file is not None:
                        file.store(file.take())
            journal.handled(event, commands)
            starts.update((order.trajectory, order) for order in commands if isinstance(order, Generate))
    if tokens is not None:
        tokens.close()
    return folder


def _write_tokens(tokens: TokenWriter, starts: dict[int, Generate], event: Event) -> None:
    """The tokens of the attempts that end with this event."""
    ended: dict[int, int] = {}
    if isinstance(event, ev.GenerationFinished | ev.GenerationStopped | ev.GenerationFailed):
        start = starts.get(event.trajectory)
        if start is not None and start.attempt == event.attempt:
            ended[event.trajectory] = event.num_tokens
    elif isinstance(event, ev.InstanceLost):
        ended = dict(event.num_tokens)
    for trajectory, num_tokens in ended.items():
        order = starts.pop(trajectory, None)
        if order is not None:
            new = num_tokens - order.num_tokens
            tokens.append(trajectory, order.attempt, [7] * new, [-0.5] * new, start=order.num_tokens)


def new_folder(parent: Path) -> RunFolder:
    """An empty run folder."""
    return RunFolder.create(parent, name="test")


def first_event(entries: Entries, kind: type[E], where: Callable[[E], bool] = lambda _: True) -> tuple[int, E]:
    """The index of the first event of a kind that fits, and the event."""
    return next((i, event) for i, (event, _) in enumerate(entries) if isinstance(event, kind) and where(event))


def first_command(entries: Entries, kind: type[C], where: Callable[[C], bool] = lambda _: True) -> tuple[Place, C]:
    """The position of the first command of a kind that fits, and the command."""
    return next(
        ((i, k), command)
        for i, (_, commands) in enumerate(entries)
        for k, command in enumerate(commands)
        if isinstance(command, kind) and where(command)
    )


def with_event(entries: Entries, index: int, **changes: object) -> Entries:
    """The same entries with one event changed."""
    event, commands = entries[index]
    return [*entries[:index], (msgspec.structs.replace(event, **changes), commands), *entries[index + 1 :]]


def with_commands(entries: Entries, index: int, commands: Sequence[Command]) -> Entries:
    """The same entries with other commands for one event."""
    return [*entries[:index], (entries[index][0], list(commands)), *entries[index + 1 :]]


def with_command(entries: Entries, at: Place, **changes: object) -> Entries:
    """The same entries with one command changed."""
    index, place = at
    commands = list(entries[index][1])
    commands[place] = msgspec.structs.replace(commands[place], **changes)
    return with_commands(entries, index, commands)


def without_command(entries: Entries, at: Place) -> Entries:
    """The same entries without one command."""
    index, place = at
    return with_commands(entries, index, [c for k, c in enumerate(entries[index][1]) if k != place])
