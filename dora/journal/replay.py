"""Replay of recorded events, where the commands are recomputed and compared with the recorded ones.

Invariant: the state is a function of the events, so a journal that differs from its replay was altered, or was written
by a core with other rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final, Protocol

from dora.core.commands import Command
from dora.core.core import handle
from dora.core.events import Event
from dora.core.excerpt import RUN, Entry, describe, excerpt, subject_of
from dora.core.ids import Subject
from dora.core.phases import ImpossibleChange
from dora.core.state import State
from dora.core.strategies import Settings
from dora.errors import DoraError, InvariantViolation
from dora.journal.reader import Journal

#: Number of lines, from the end of an excerpt, that are kept with a difference.
EXCERPT_LINES: Final = 40
#: What the core raises for an impossible sequence of events, one that refers to something unknown, breaks a rule, or
#: has numbers that no run can have. It only occurs in an altered journal. Any other exception is a bug, and propagates.
_IMPOSSIBLE: Final = (DoraError, LookupError, ValueError, ArithmeticError)


class ReplayDifference(InvariantViolation):
    """The recorded commands of event number `index` differ from the core's."""

    def __init__(self, message: str, *, index: int, subject: Subject, excerpt: Sequence[str]) -> None:
        super().__init__(message, tuple(excerpt))
        self.index = index
        self.subject = subject


@dataclass(frozen=True, slots=True)
class Replay:
    """The state after the last event that could be replayed, and the first difference if there is one."""

    state: State
    num_events: int
    difference: ReplayDifference | None


class Projection(Protocol):
    """What is computed from all events, with the state before and after the core handles each."""

    def before(self, state: State, event: Event) -> None: ...

    def apply(self, state: State, event: Event, commands: Sequence[Command]) -> None: ...


def replay(settings: Settings, entries: Iterable[Entry], *, projection: Projection | None = None) -> Replay:
    """Replay `entries` up to the first difference; they are iterated again for its excerpt."""
    state = State(settings)
    index = -1
    for index, (event, recorded) in enumerate(entries):
        try:
            if projection is not None:
                projection.before(state, event)
            recomputed = handle(state, event)
            if projection is not None:
                projection.apply(state, event, recomputed)
        except _IMPOSSIBLE as err:
            subject = err.subject if isinstance(err, ImpossibleChange) else subject_of(event)
            found = (subject, f"the core rejects it: {type(err).__name__}: {err}")
        else:
            if list(recorded) == recomputed:
                continue
            found = _compare(event, recorded, recomputed)
        subject, what = found
        lines = excerpt(islice(entries, index + 1), subject, group_size=settings.group_size)
        message = f"event {index} at {event.at:.3f} s, {describe(event)}: {what}"
        last = lines[-EXCERPT_LINES:]
        return Replay(state, index, ReplayDifference(message, index=index, subject=subject, excerpt=last))
    return Replay(state, index + 1, None)


def add_excerpt(err: ImpossibleChange, path: Path) -> None:
    """Put the journal's lines about the subject before the event that was refused, which is not in the journal."""
    journal = Journal(path)
    lines = excerpt(journal, err.subject, group_size=journal.header.settings.group_size)
    err.excerpt = (*lines[-EXCERPT_LINES:], *err.excerpt)


def _compare(event: Event, recorded: Sequence[Command], recomputed: Sequence[Command]) -> tuple[Subject, str]:
    """Return the subject of the first difference, and its description."""
    for mine, theirs in zip_longest(recomputed, recorded):
        if mine != theirs:
            about = theirs if theirs is not None else mine
            subject = subject_of(about) if about is not None else subject_of(event)
            was = describe(theirs) if theirs is not None else "nothing more"
            now = describe(mine) if mine is not None else "nothing more"
            return (subject if subject != RUN else subject_of(event)), f"recorded {was}, recomputed {now}"
    raise AssertionError("called only when the lists differ")
