"""Each lesson says what its page shows, is a notebook that marimo takes as it is, and is short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.lessons.publish import LESSONS, ROOT, cells

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.parent.name)


def published(lesson: Path) -> str:
    return lesson.parent.with_suffix(".md").read_text(encoding="utf-8")


def shown(text: str) -> list[str]:
    """The outputs on a page."""
    return [part.partition("\n```")[0] for part in text.split("```text\n")[1:]]


def test_there_are_six() -> None:
    assert len(LESSONS) == 6


@every_lesson
def test_the_page_has_the_text_and_the_programs_of_the_lesson(lesson: Path) -> None:
    text = published(lesson)
    places = [
        text.find(cell.text.partition("\n")[2] if not place else cell.text) for place, cell in enumerate(cells(lesson))
    ]
    assert -1 not in places
    assert places == sorted(places)
    assert sum(len(cell.text.splitlines()) for cell in cells(lesson)) <= 100


@pytest.mark.parametrize("cell", ["x = 1\n    mo.md('text')", "mo.md(f'{1}')", "mo.ui.slider(1, 2)"])
def test_a_cell_is_text_or_a_program(cell: str, tmp_path: Path) -> None:
    (tmp_path / "lesson.py").write_text(f"@app.cell\ndef _(mo):\n    {cell}\n    return\n")
    with pytest.raises(AssertionError):
        list(cells(tmp_path / "lesson.py"))


@every_lesson
def test_marimo_takes_the_lesson_as_it_is(lesson: Path) -> None:
    command = [sys.executable, "-m", "marimo", "check", "--strict", str(lesson)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.deep
@pytest.mark.timeout(600)
@every_lesson
def test_the_lesson_is_a_script_that_prints_what_the_page_shows(lesson: Path, tmp_path: Path) -> None:
    environ = {**environment(), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run([sys.executable, str(lesson)], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == " ".join(shown(published(lesson))).split()
