"""`python -m tests.static.states` draws docs/STATES.md from the tables in dora/core/phases.py."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Set
from pathlib import Path
from typing import Any, Final, get_args

from dora.core import phases
from dora.core.events import AnyEvent

PAGE: Final = Path(__file__).parents[2] / "docs" / "STATES.md"
_HEAD: Final = """# States

Drawn from `dora/core/phases.py` by `python -m tests.static.states`. An arrow names its causes: events, whose handlers
make the change at once, and decisions, which `decide.py` makes after the handler. A change that a table does not list
with its cause raises.

| decision | meaning |
|---|---|
{decisions}
"""
_TABLES: Final[tuple[tuple[str, type[enum.Enum], Any, str], ...]] = (
    ("A prompt group", phases.GroupPhase, phases.GROUP, "It begins as generating, when it is admitted."),
    ("A trajectory", phases.TrajectoryPhase, phases.TRAJECTORY, "It begins as waiting."),
    ("The weights of an instance", phases.WeightsPhase, phases.WEIGHTS, "An instance begins as lost."),
    (
        "The membership of an instance",
        phases.Membership,
        phases.MEMBERSHIP,
        "It is independent of the weights, and survives a loss. Only an instance that is serving and a member, and "
        "neither pressed (its KV is nearly full) nor condemned (about to be declared lost), takes work.",
    ),
)
#: All causes, in the order in which they are shown.
_CAUSES: Final[tuple[phases.Cause, ...]] = (*get_args(AnyEvent), *phases.Decision)


def render() -> str:
    """Return the text of the page."""
    parts = [_HEAD.format(decisions=_rows(phases.Decision))]
    for title, kind, table, note in _TABLES:
        changes = [(a, b) for a in kind for b in kind if b in table[a]]
        arrows = [f"    {a.value} --> {b.value}: {_names(table[a][b])}" for a, b in changes]
        ends = [f"    {a.value} --> [*]" for a in kind if not table[a]]
        diagram = "\n".join(["```mermaid", "stateDiagram-v2", *arrows, *ends, "```"])
        parts.append(f"## {title}\n\n{note}\n\n{diagram}\n\n| phase | meaning |\n|---|---|\n{_rows(kind)}\n")
    return "\n".join(parts)


def _rows(kind: type[enum.Enum]) -> str:
    """Return a row for each member, with its comment."""
    members = re.findall(r'^    [A-Z]+ = "(\w+)"(?:  #: (.*))?$', inspect.getsource(kind), re.MULTILINE)
    return "\n".join(f"| {name} | {meaning} |" for name, meaning in members)


def _names(causes: Set[phases.Cause]) -> str:
    """Return events in the order of events.py, then decisions."""
    return ", ".join(phases.name_of(cause) for cause in _CAUSES if cause in causes)


if __name__ == "__main__":
    PAGE.write_text(render())
