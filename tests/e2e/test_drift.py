"""A trainer with another temperature than its servers: what a run reports, and what `dora check --drift` reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dora.journal.run_folder import RunFolder
from tests.e2e.runs import END_S, environment, run_to_end, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

#: The `dora` command with the trainer's temperature changed on its way to the ranks.
PLANTED = """
import runpy
import msgspec
from dora.app import settings

real = settings.trainer_settings

def planted(config, *, max_staleness):
    return msgspec.structs.replace(real(config, max_staleness=max_staleness), temperature=1.1)

settings.trainer_settings = planted
runpy.run_module("dora", run_name="__main__", alter_sys=True)
"""


def run_planted(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PLANTED, *arguments]
    return subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=END_S, check=False, stdin=subprocess.DEVNULL
    )


def test_a_wrong_temperature_is_alarmed_in_the_log_the_rows_and_the_summary(tmp_path: Path) -> None:
    result = run_planted("run", *small(tmp_path))
    assert result.returncode == 0, result.stderr
    (root,) = tmp_path.iterdir()
    folder = RunFolder(root)
    logged = [json.loads(line) for line in folder.log.read_text().splitlines()]
    alarms = [line["alarm"] for line in logged if line["event"] == "drift_alarm"]
    assert [alarm.split(":")[0] for alarm in alarms] == ["engine_mismatch at step 1"]
    assert "temperature" in alarms[0]
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["alarms"] for row in rows if row["kind"] == "step"] == [["engine_mismatch"]] * 2
    assert f"  drift: {alarms[0]}\n" in result.stdout
    assert f"warning: drift_alarm alarm={alarms[0]}\n" in result.stderr


def test_the_drift_check_finds_a_wrong_temperature(tmp_path: Path) -> None:
    result = run_planted("check", "--drift", *small(tmp_path))
    assert result.returncode == 1, result.stderr
    *steps, last = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in steps] == [f"step {step}/5" for step in range(1, 6)]
    assert last.startswith("DRIFT: the mismatch is ")
    assert "compare their temperature, dtype and model" in last
    assert "Traceback" not in result.stderr


def test_the_drift_check_passes_a_healthy_job_and_leaves_nothing(tmp_path: Path) -> None:
    result = run_to_end("check", "--drift", *small(tmp_path, rollout__max_staleness=1, engine__instances=2))
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert result.stdout.splitlines()[-1].startswith("flat: engine and trainer agree at every step and staleness")
    assert list(tmp_path.iterdir()) == []
