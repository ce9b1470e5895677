"""Excerpts of a journal: readable lines about one group, trajectory, instance, version or step.

It reads the fields of events and commands generically, so that new ones need no code here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Final, NamedTuple

from dora.core.commands import Command
from dora.core.events import Event, ProgressReported
from dora.core.ids import GroupId, Subject, TrajectoryId, group_of, trajectory_id

#: An event with the commands it led to, as in the journal.
Entry = tuple[Event, Sequence[Command]]

#: Fields that name a subject, the most specific one first.
KINDS: Final = ("trajectory", "group", "instance", "version", "step")


RUN: Final = Subject("run", 0)


def subject_of(fact: Event | Command) -> Subject:
    """Return the main subject of an event or command."""
    for kind in KINDS:
        id = getattr(fact, kind, None)
        if id is not None:
            return Subject(kind, id)
    return RUN


def excerpt(entries: Iterable[Entry], subject: Subject, *, group_size: int) -> list[str]:
    """Return all events and commands about `subject` in order, and the events that caused the commands.

    The excerpt about a group includes its trajectories, and that about a trajectory its group. Of consecutive progress
    reports only the last is kept.
    """
    ids = _ids_of(subject, group_size=group_size)
    lines: list[str] = []
    after_progress = False
    for event, commands in entries:
        orders = [c for c in commands if _mentions(c, subject, ids)]
        if not orders and not _mentions(event, subject, ids):
            continue
        is_progress = isinstance(event, ProgressReported) and not orders
        if is_progress and after_progress:
            lines.pop()
        after_progress = is_progress
        lines += lines_of(event, orders, ids.trajectories)
    return lines


def lines_of(event: Event, orders: Iterable[Command], trajectories: Container[int] = ()) -> list[str]:
    """Describe an event and the commands it led to, one line each."""
    return [
        f"{event.at:10.3f} s  {describe(event, trajectories)}",
        *(f"{'':12}  → {describe(order, trajectories)}" for order in orders),
    ]


def describe(fact: Event | Command, trajectories: Container[int] = ()) -> str:
    """Describe an event or command in one line; of several trajectories, show only those in `trajectories`."""
    parts = [type(fact).__name__]
    for name in fact.__struct_fields__:
        if name != "at":
            parts.append(f"{name}={_value(getattr(fact, name), name=name, trajectories=trajectories)}")
    return " ".join(parts)


class _Ids(NamedTuple):
    trajectories: range
    group: GroupId | None


def _ids_of(subject: Subject, *, group_size: int) -> _Ids:
    """Return the trajectories of a subject, and its group."""
    if subject.kind == "group":
        first = trajectory_id(GroupId(subject.id), 0, group_size=group_size)
        return _Ids(range(first, first + group_size), GroupId(subject.id))
    if subject.kind == "trajectory":
        group = group_of(TrajectoryId(subject.id), group_size=group_size) if subject.id >= 0 else None
        return _Ids(range(subject.id, subject.id + 1), group)
    return _Ids(range(0), None)


def _mentions(fact: Event | Command, subject: Subject, ids: _Ids) -> bool:
    if getattr(fact, subject.kind, None) == subject.id or getattr(fact, "trajectory", None) in ids.trajectories:
        return True
    if ids.group is not None and (
        getattr(fact, "group", None) == ids.group or ids.group in getattr(fact, "groups", ())
    ):
        return True
    many = getattr(fact, "num_tokens", None)
    if isinstance(many, dict) and not many.keys().isdisjoint(ids.trajectories):
        return True
    return any(t in ids.trajectories for rank in getattr(fact, "ranks", ()) for t in rank)


def _value(value: Any, *, name: str, trajectories: Container[int]) -> str:
    if name == "num_tokens" and isinstance(value, dict):
        shown = {t: n for t, n in value.items() if t in trajectories}
        return str(shown) if shown else f"({len(value)} trajectories)"
    if name == "ranks":
        shown_ranks = [[t for t in rank if t in trajectories] for rank in value]
        return str(shown_ranks) if any(shown_ranks) else f"({sum(map(len, value))} trajectories)"
    if name in ("groups", "num_prompt_tokens", "files"):
        return f"({len(value)})"
    return str(value)
