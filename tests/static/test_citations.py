"""Every cited document exists in the repository, and every section sign follows the name of a document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEARCHED = ("README.md", "CONTRIBUTING.md", "docs", "launch", "bench", "dora", "tests")
SUFFIXES = {".py", ".md", ".toml", ".html"}
PAGE = re.compile(r"[\w./-]*[\w-]\.md\b(?!\()")  # a lesson calls mo.md()
PAPER = re.compile(r"arXiv|\b\d{4}\.\d{5}\b")


def files() -> Iterator[Path]:
    for name in SEARCHED:
        path = ROOT / name
        yield from sorted(path.rglob("*")) if path.is_dir() else [path]


def is_there(name: str, file: Path) -> bool:
    published = (
        file.parent.parent if file.name == "lesson.py" else file.parent
    )  # the page of a lesson is beside its folder
    return any((home / name).is_file() for home in (ROOT, ROOT / "docs", ROOT / "bench", published))


def dangling(text: str, file: Path) -> list[str]:
    """Find cited pages that do not exist, and section signs without a paper or page on the same or previous line."""
    found = []
    before = ""
    for line in text.splitlines():
        pages = PAGE.findall(line)
        found += [name for name in pages if not is_there(name, file)]
        if "§" in line and not (PAGE.search(before + line) or PAPER.search(before + line)):
            found.append(line.strip())
        before = line
    return found


@pytest.mark.parametrize("name", SEARCHED)
def test_the_paths_that_are_searched_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_every_cited_document_exists() -> None:
    texts = {p: p.read_text() for p in files() if p.suffix in SUFFIXES and p.name != Path(__file__).name}
    assert {str(path.relative_to(ROOT)): found for path, text in texts.items() if (found := dangling(text, path))} == {}


def test_no_docstring_lists_callers() -> None:
    stale = re.compile(r"\b(?:Called|Inherited|Read) by\b")
    sources = {p.relative_to(ROOT): p.read_text() for p in (ROOT / "dora").rglob("*.py")}
    assert [str(path) for path, text in sources.items() if stale.search(text)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see docs/STALENESS.md", []),
        ("see STALENESS.md", []),
        ("see system.md", ["system.md"]),
        ("see docs/NOWHERE.md", ["docs/NOWHERE.md"]),
        ("the limit (§3.2)", ["the limit (§3.2)"]),
        ("the limit of arXiv 2604.26256,\n§3.2", []),
        ("the limit (docs/SIMULATION.md, §3)", []),
    ],
)
def test_a_dangling_citation_is_found(text: str, found: list[str]) -> None:
    assert dangling(text, ROOT / "dora" / "files.py") == found
