"""Property tests: the same examples in every run unless a seed is given, and what fails can be repeated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_TEST: Final = """
from hypothesis import given, reproduce_failure, strategies as st

{decorator}
@given(st.integers(0, 2**64))
def test_it(number):
    with open("drawn", "a") as file:
        file.write(f"{{number}} ")
    assert number % 8
"""


def drawn(folder: Path, *options: str, decorator: str = "") -> str:
    """Every number that a property is tested with, until it has failed and the smallest such number is found."""
    (folder / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport")
    (folder / "test_it.py").write_text(_TEST.format(decorator=decorator))
    (folder / "drawn").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", _ROOT / "pyproject.toml", f"--rootdir={folder}", *options, "test_it.py"],
        cwd=folder,
        env={"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return (folder / "drawn").read_text()


def test_every_run_draws_the_same_examples_and_a_seed_draws_others(tmp_path: Path) -> None:
    first = drawn(tmp_path)
    assert drawn(tmp_path) == first
    assert drawn(tmp_path, "--hypothesis-seed=7") != first
    assert 'pytest -q -n auto --hypothesis-seed="$seed"' in (_ROOT / ".ci" / "run").read_text()


def test_the_example_that_fails_is_kept_with_the_line_that_repeats_it(tmp_path: Path) -> None:
    smallest = drawn(tmp_path).split()[-1]
    [kept] = (tmp_path / ".hypothesis" / "failed").iterdir()
    assert kept.name == "test_it.py-test_it.txt"
    line = re.search(r"@reproduce_failure\(.*\)", kept.read_text())
    assert line is not None
    assert drawn(tmp_path, "--hypothesis-seed=7", decorator=line[0]).split() == [smallest]
