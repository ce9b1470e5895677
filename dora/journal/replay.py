"""Events → state, the commands recomputed and compared with those that were recorded.

Invariant: the core is the fold of its events, so a journal that differs from its replay was altered, or was written by
a core that decides otherwise. Called by the audit, by a resume, and by whoever wants the state at some moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Final

from dora.core.commands import Command
from dora.core.events import Event
from dora.core.state import ControllerState
from dora.core.story import RUN, Entry, Subject, describe, story, subject_of
from dora.core.strategies import Settings
from dora.errors import DoraError, InvariantViolation

#: Lines of a story that a difference carries: the last ones.
STORY_LINES: Final = 40
#: What the core raises on events that cannot have followed one another; only a damaged journal holds such.
_IMPOSSIBLE: Final = (DoraError, LookupError, ValueError, AssertionError, AttributeError, TypeError)


class ReplayDifference(InvariantViolation):
    """The recorded commands of event number `index` are not what the core gives."""

    def __init__(self, message: str, *, index: int, subject: Subject, story: Sequence[str]) -> None:
        super().__init__(message, tuple(story))
        self.index = index
        self.subject = subject


@dataclass(frozen=True, slots=True)
class Replay:
    """The state after the last event that could be replayed, and the first difference if there is one."""

    state: ControllerState
    num_events: int
    difference: ReplayDifference | None


def replay(settings: Settings, entries: Iterable[Entry]) -> Replay:
    """Replay `entries` (iterated again for the story of a difference) up to the first difference."""
    state = ControllerState(settings)
    index = -1
    for index, (event, recorded) in enumerate(entries):
        try:
            recomputed = state.handle(event)
        except _IMPOSSIBLE as err:
            found = (subject_of(event), f"the core refuses it: {type(err).__name__}: {err}")
        else:
            if list(recorded) == recomputed:
                continue
            found = _compare(event, recorded, recomputed)
        subject, what = found
        lines = story(islice(entries, index + 1), subject, group_size=settings.group_size)
        message = f"event {index} at {event.at:.3f} s, {describe(event)}: {what}"
        return Replay(state, index, ReplayDifference(message, index=index, subject=subject, story=lines[-STORY_LINES:]))
    return Replay(state, index + 1, None)


def _compare(event: Event, recorded: Sequence[Command], recomputed: Sequence[Command]) -> tuple[Subject, str]:
    """What the first difference is about, and in words."""
    for mine, theirs in zip_longest(recomputed, recorded):
        if mine != theirs:
            about = theirs if theirs is not None else mine
            subject = subject_of(about) if about is not None else subject_of(event)
            was = describe(theirs) if theirs is not None else "nothing more"
            now = describe(mine) if mine is not None else "nothing more"
            return (subject if subject != RUN else subject_of(event)), f"recorded {was}, recomputed {now}"
    raise AssertionError("called only when the lists differ")
