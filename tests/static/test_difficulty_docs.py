"""The table of docs/DATA.md is that of the recorded jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.deep  # the script imports torch
def test_the_table_of_passing_over_rows_is_that_of_the_recorded_jobs() -> None:
    script = ROOT / "bench" / "sweeps" / "difficulty.py"
    made = subprocess.run(
        [sys.executable, str(script), "--table"], capture_output=True, text=True, check=True, timeout=120
    )
    assert made.stdout.count("\n") == 8
    assert made.stdout in (ROOT / "docs" / "DATA.md").read_text(encoding="utf-8"), f"run: python {script} --table"
