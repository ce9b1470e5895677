"""`python -m tests.static.states` draws docs/STATES.md from the tables in dora/core/phases.py."""

from __future__ import annotations

import enum
import inspect
import re
from pathlib import Path
from typing import Any, Final

from dora.core import phases

PAGE: Final = Path(__file__).parents[2] / "docs" / "STATES.md"
_HEAD: Final = """# States

Drawn from `dora/core/phases.py` by `python -m tests.static.states`; a change that a table does not list raises.
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


def render() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for title, kind, table, note in _TABLES:
        arrows = [f"    {a.value} --> {b.value}" for a in kind for b in kind if b in table[a]]
        ends = [f"    {a.value} --> [*]" for a in kind if not table[a]]
        diagram = "\n".join(["```mermaid", "stateDiagram-v2", *arrows, *ends, "```"])
        meanings = "\n".join(f"| {name} | {meaning} |" for name, meaning in _meanings(kind))
        parts.append(f"## {title}\n\n{note}\n\n{diagram}\n\n| phase | meaning |\n|---|---|\n{meanings}\n")
    return "\n".join(parts)


def _meanings(kind: type[enum.Enum]) -> list[tuple[str, str]]:
    """Return each phase with its comment."""
    return re.findall(r'^    [A-Z]+ = "(\w+)"(?:  #: (.*))?$', inspect.getsource(kind), re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(render())
