"""bench/README.md matches the recorded results, and its bars are judged correctly."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path for path in BENCH.glob("*.py") if path.stem != "result")


def load_module(path: Path) -> ModuleType:
    """Import a file of bench/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # msgspec resolves annotations there
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(BENCH))
bench = load_module(BENCH / "result.py")


def test_the_readme_is_what_the_results_render_to():
    assert (BENCH / "README.md").read_text() == bench.render(bench.load()), "run: python bench/run --render"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_begins_with_one_sentence_that_becomes_the_title_of_its_result(script: Path):
    doc = ast.get_docstring(ast.parse(script.read_text()))
    assert doc is not None
    title, _, rest = doc.partition("\n")
    assert title.endswith(".")
    assert rest, "no word about sizes and ceiling"


@pytest.mark.parametrize(
    ("bar", "reached"),
    [
        ("ratio >= 0.7", True),
        ("ratio >= 0.71", False),
        ("ratio <= 0.7", True),
        ("ratio <= 0.69", False),
        ("figure >= 50", True),
        ("figure <= 49", False),
        ("", None),
    ],
)
def test_a_bar_holds_the_figure_or_the_ratio(bar: str, reached: bool | None):
    assert bench.Row("what", 50.0, "ms", "the ceiling", 0.7, bar).reached is reached


@pytest.mark.parametrize("bar", ["0.7", "speed >= 0.7", "ratio > 0.7", "ratio >= much"])
def test_a_bar_that_says_something_else_is_refused(bar: str):
    with pytest.raises(ValueError):  # noqa: PT011 - of float() or ours
        bench.Row("what", 50.0, bar=bar)


def test_what_was_not_measured_reaches_no_bar_and_says_why():
    row = bench.Row("real SGLang", None, against="no environment", bar="ratio >= 2")
    result = bench.Result("engine", "Title.", "short", "sizes", "a machine", "abc", "2026-01-01", 1.0, (0, 0), [row])
    assert row.reached is None
    assert "| real SGLang | not measured | no environment |" in bench.render([result])
    assert "0 of 0 bars are reached" in bench.render([result])


def test_a_missed_bar_is_shown_among_the_bars_and_in_its_section():
    row = bench.Row("push", 0.5, "s", "a file copy", 0.6, "ratio >= 0.7")
    result = bench.Result("weights", "Title.", "short", "sizes", "a machine", "abc", "2026-01-01", 1.0, (0, 0), [row])
    text = bench.render([result])
    assert "| [weights](#weights) | push | 0.600 of a file copy | ≥ 0.7 | **missed** |" in text
    assert "| push | 0.500 s | a file copy | 0.600 | ≥ 0.7 **missed** |" in text


def test_the_readme_says_how_long_each_script_took_the_slowest_first():
    quick = bench.Result("core", "Title.", "short", "sizes", "a machine", "abc", "2026-01-01", 9.4, (0, 0), [])
    slow = bench.Result("training", "Title.", "full", "sizes", "a machine", "abc", "2026-01-01", 1521.4, (0, 0), [])
    assert ": training 1,521 (`--full`), core 9.\n" in bench.render([quick, slow])


def test_a_run_shows_how_long_each_script_takes_and_at_the_end_the_slowest(tmp_path: Path):
    for name in ("run", "result.py"):
        shutil.copy(BENCH / name, tmp_path)
    shutil.copytree(BENCH / "on_gpu", tmp_path / "on_gpu")
    (tmp_path / "results").mkdir()
    script = """from result import Report
report = Report("Title.", full=False, sizes="one")
report.row("what", 7.0, "lines")
report.print()
"""
    (tmp_path / "good.py").write_text(script)
    (tmp_path / "odd.py").write_text("raise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run")], capture_output=True, text=True, check=False, timeout=60
    )
    lines = [re.sub(r"\d+ s\b", "N s", line) for line in done.stdout.splitlines() if line]
    assert lines[:3] == ["good (1 of 2)", "  what | 7.00 lines |  ", "  N s, N s since the start"]
    assert lines[3:6] == ["odd (2 of 2)", "  N s, N s since the start", "2 scripts in the short profile: N s"]
    assert re.fullmatch(r"slowest: (good|odd) N s, (good|odd) N s", lines[6])
    assert (done.returncode, done.stderr) == (1, "odd failed with exit code 3\n")
    assert "Title. one." in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("value", "text"), [(219_873, "220,000"), (123.4, "123"), (12.34, "12.3"), (0.01234, "0.0123"), (0, "0")]
)
def test_a_figure_has_three_digits(value: float, text: str):
    assert bench.number(value) == text
