"""What the documents call unverified without a GPU is what the parts of bench/gpu.py settle."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from on_gpu.parts import MARK, PARTS, Statement

ROOT = Path(__file__).parents[2]
MAX_LIMIT_S = 480.0
#: How far before the mark the words of a statement may begin: about two lines.
REACH = 240
STATEMENTS = [(part.name, statement) for part in PARTS.values() for statement in part.settles]


def files() -> Iterator[Path]:
    """The documents and the code, except what `python -m dora.config.docs` makes of dora/config/schema.py."""
    yield ROOT / "README.md"
    yield from (path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "CONFIG.md")
    yield from sorted((ROOT / "dora").rglob("*.py"))


def text_before_marks(text: str) -> list[str]:
    """The text before each mark, on one line and without emphasis."""
    flat = re.sub(r"\s+", " ", text.replace("*", ""))
    return [flat[: found.start()][-REACH:] for found in re.finditer(MARK, flat, re.IGNORECASE)]


def unsettled(file: str, text: str) -> list[str]:
    """The marks of a text that no part settles, or more than one."""
    named = [statement.words for _, statement in STATEMENTS if statement.file == file]
    return [before for before in text_before_marks(text) if sum(words in before for words in named) != 1]


def test_every_statement_is_settled_by_one_part() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files()}
    assert {file: found for file, text in texts.items() if (found := unsettled(file, text))} == {}


@pytest.mark.parametrize(("part", "statement"), STATEMENTS)
def test_every_statement_that_a_part_settles_is_there(part: str, statement: Statement) -> None:
    marks = text_before_marks((ROOT / statement.file).read_text())
    assert sum(statement.words in before for before in marks) == 1, part


def test_no_part_takes_more_than_eight_minutes() -> None:
    assert max(part.limit_s for part in PARTS.values()) <= MAX_LIMIT_S


def test_a_mark_is_found_in_emphasis_and_over_two_lines() -> None:
    assert text_before_marks("A kernel: *unverified without\na GPU*. B.") == ["A kernel: "]
    assert unsettled("docs/TRAINER.md", "something else (unverified without a GPU)") == ["something else ("]


def test_the_list_has_every_part_with_its_statements_and_its_limit() -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in PARTS.values():
        assert f"{part.name} (at most {part.limit_s:.0f} s): {part.title}" in listed
        assert all(f"{statement.file}: {statement.words}" in listed for statement in part.settles)
