"""Outside the core its state is only read; `handle` alone changes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

DORA = Path(__file__).parents[2] / "dora"
#: Those that know the state of a run; elsewhere the word means other things.
ROOMS = ("cli", "controller", "journal", "sim", "status")
#: Of State and its tables: their own, and those of dicts, lists and sets.
MUTATORS = {
    *("move", "change", "admit", "commit", "drop", "close", "publish", "start", "finish", "restart", "let_go"),
    *("pop", "popitem", "clear", "update", "setdefault", "add", "discard", "remove", "append", "extend", "popleft"),
}


def of_the_state(node: ast.AST) -> bool:
    """Return whether an expression is reached through a state, such as `state.x` or `self._state.x[i].y`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(node, ast.Attribute | ast.Name) and name_of(node) in ("state", "_state"):
            return True
    return False


def name_of(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def changes(tree: ast.AST) -> list[int]:
    """Find the lines that change a state."""
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value]
        found += [node.lineno for target in targets if of_the_state(target)]
    return found


@pytest.mark.parametrize(
    "path",
    [path for room in ROOMS for path in sorted((DORA / room).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(DORA)),
)
def test_a_state_is_only_read(path: Path) -> None:
    assert changes(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "state.now = 1.0",
        "self.state.instances[i].pressed = True",
        "del state.window.entries[v]",
        "state.prompts.clear()",
    ],
)
def test_a_change_would_be_found(line: str) -> None:
    assert changes(ast.parse(line)) == [1]
