"""Public class names are unique, so that a search for a class finds one definition."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "dora"


def public_classes(source: str) -> list[str]:
    tree = ast.parse(source)
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def repeated(sources: list[str]) -> list[str]:
    counts = Counter(name for source in sources for name in public_classes(source))
    return sorted(name for name, count in counts.items() if count > 1)


def test_no_public_class_name_is_used_twice() -> None:
    assert repeated([path.read_text() for path in ROOT.rglob("*.py")]) == []


def test_a_repeated_name_is_found() -> None:
    assert repeated(["class Row: ...", "class _Row: ...\nclass Step: ...", "class Row: ..."]) == ["Row"]
