"""Lessons, docs/lessons/NAME/lesson.py, as pages with their outputs: `python -m tests.lessons.publish` writes them all.

A lesson is a marimo notebook: a Python file whose cells are functions. Invariant: a cell is either text, `mo.md("...")`
alone, or a program, whose output is what it prints; so pages are made without marimo.
"""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
LESSONS: Final = sorted((ROOT / "docs/lessons").glob("*/lesson.py"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell, as text in Markdown or as a program."""

    text: str
    is_program: bool


def cells(lesson: Path) -> Iterator[Cell]:
    """Yield the cells in their order, without the one that imports marimo."""
    source = lesson.read_text(encoding="utf-8")
    lines = source.splitlines()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        statements = [part for part in function.body if not isinstance(part, ast.Return)]
        program = dedent("\n".join(lines[statements[0].lineno - 1 : statements[-1].end_lineno]))
        match statements:
            case [ast.Import(names=[ast.alias(name="marimo")])]:
                continue
            case [ast.Expr(ast.Call(ast.Attribute(ast.Name("mo"), "md"), [ast.Constant(str(text))]))]:
                yield Cell(dedent(text).strip(), is_program=False)
            case _:
                assert "mo." not in program, f"{lesson}: {program}"
                yield Cell(program, is_program=True)


def outputs(lesson: Path) -> list[str]:
    """Run the programs of a lesson one after the other, as marimo does, and return what each prints."""
    names: dict[str, Any] = {}
    found = []
    for cell in cells(lesson):
        if cell.is_program:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(cell.text, str(lesson), "exec"), names)
            found.append(printed.getvalue())
    return found


def page(lesson: Path, printed: list[str]) -> str:
    """Return the page of a lesson whose programs print this."""
    folder = lesson.parent.name
    title, *parts = [*cells(lesson)]
    rest = iter(printed)
    heading, _, introduction = title.text.partition("\n")
    shown = [
        heading,
        f"*This page is the file [lesson.py]({folder}/lesson.py) with its output. In the folder of the repository, "
        f"`python docs/lessons/{folder}/lesson.py` runs it, and `marimo edit docs/lessons/{folder}/lesson.py` lets you "
        "change it (`pip install marimo`).*",
        introduction.strip(),
    ]
    for cell in parts:
        shown.append(f"```python\n{cell.text}\n```" if cell.is_program else cell.text)
        if cell.is_program and (output := next(rest)):
            shown.append(f"```text\n{output.rstrip()}\n```")
    return "\n\n".join(shown) + "\n"


if __name__ == "__main__":
    for path in LESSONS:
        path.parent.with_suffix(".md").write_text(page(path, outputs(path)), encoding="utf-8")
