"""A test outside the deep set has a limit in CI: of CPU time, children included, and of idle time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.durations import Duration

_ROOT: Final = Path(__file__).parents[2]
_CONFTEST: Final = """
pytest_plugins = ("tests.durations",)

def pytest_configure():
    from tests import durations
    durations.LIMIT_S = 0.1
"""
_ON_A_SLOW_MACHINE: Final = f"{_CONFTEST}    durations._LOOP_S = 1e-6; durations.LIMIT_S = 0.24\n"  # idle too
_TESTS: Final = """
import subprocess, sys
import pytest

BUSY = "import time; end = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"

def test_quick(): pass
def test_busy(): exec(BUSY)
def test_busy_below(): subprocess.run([sys.executable, "-c", BUSY])
@pytest.mark.deep
def test_deep(): exec(BUSY)
"""


def run_tests(folder: Path, *workers: str, conftest: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", _ROOT / "pyproject.toml", f"--rootdir={folder}", "-m", ""]
    return subprocess.run(
        [*command, *workers, "--durations-file=found.tsv", "test_it.py"],
        cwd=folder,
        env={"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_test_that_computes_too_long_fails_unless_it_is_deep(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = run_tests(tmp_path, *workers, conftest=_CONFTEST)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    named = {line.split()[2].rstrip(":").rpartition("::")[2] for line in done.stdout.splitlines() if "TOO LONG" in line}
    assert named == {"test_busy", "test_busy_below"}
    rows = [line.split("\t") for line in (tmp_path / "found.tsv").read_text().splitlines()]
    assert {row[-1].rpartition("::")[2] for row in rows} == named | {"test_quick", "test_deep"}


def test_a_slow_machine_is_no_reason_to_fail(tmp_path: Path) -> None:
    done = run_tests(tmp_path, conftest=_ON_A_SLOW_MACHINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TOO LONG" not in done.stdout


def test_a_test_over_its_limit_is_named_before_it_fails(tmp_path: Path) -> None:
    done = run_tests(tmp_path, conftest=_CONFTEST.replace("LIMIT_S = 0.1", "LIMIT_S = 0.2; durations.FAILS_AT = 100"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TOO LONG" not in done.stdout
    assert "LONG test_it.py::test_busy: " in done.stdout


def test_the_setup_and_idle_time_have_limits_of_their_own_and_the_one_whole_run_is_exempt() -> None:
    def times(test: str, *, setup_s: float = 0.0, cpu_s: float = 0.0, idle_s: float = 0.0) -> float:
        return Duration(test, False, setup_s, cpu_s, 60.0, idle_s).times_limit()

    assert times("tests/e2e/test_run.py::test_a", setup_s=40.0, cpu_s=6.0) == 0
    assert times("tests/log/test_log.py::test_a", setup_s=6.0, cpu_s=4.0, idle_s=4.0) == pytest.approx(0.8)
    assert times("tests/log/test_log.py::test_a", setup_s=11.0) == pytest.approx(1.1)
    assert times("tests/log/test_log.py::test_a", cpu_s=6.0) == pytest.approx(1.2)
    assert times("tests/log/test_log.py::test_a", idle_s=6.0) == pytest.approx(1.2)
