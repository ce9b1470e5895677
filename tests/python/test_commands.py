"""`dora check`, `dora simulate` and `dora eval` from Python: results as plain data, refusals as exceptions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import dora
from dora.app.opening import publish_model
from dora.seed.policy import path
from dora.weights.store import VersionStore
from tests.e2e.runs import heed_ctrl_c

pytestmark = pytest.mark.deep

SMALL = {
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_staleness": 0},
    "engine": {"instances": 1},
    "trainer": {"ranks": 1},
    "eval": {"sets": [{"prompts": 16}]},
}
#: A script that simulates for minutes.
SIMULATES = "import dora; dora.simulate(seeds=1000, steps=500)"


def test_simulate_returns_a_row_for_each_combination() -> None:
    rows = dora.simulate(strategy=["dora", "sync"], steps=3, fleet__push_fixed_s=0.5)
    assert len(rows) == 2
    assert isinstance(rows, dora.Rows)
    assert all(isinstance(row, dict) for row in rows)


def test_simulate_takes_a_workload_as_tables_and_refuses_as_the_command_does(tmp_path: Path) -> None:
    with pytest.raises(dora.ConfigError, match="groups_per_stepp"):
        dora.simulate({"job": {"groups_per_stepp": 3}})
    with pytest.raises(dora.ConfigError, match="no such run folder"):
        dora.simulate(run=tmp_path / "gone")


def test_check_returns_its_findings_and_makes_no_folder(tmp_path: Path) -> None:
    findings = dora.check(SMALL, run={"folder": tmp_path / "runs"})
    assert {"inputs", "rewards", "checkpoint"} <= {row["topic"] for row in findings}
    assert all(row.keys() == {"topic", "text"} for row in findings)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(dora.ConfigError, match=r"^model\.path: "):
        dora.check(SMALL, model__path=str(tmp_path / "gone"), run__folder=tmp_path)


def test_an_interrupt_stops_the_command_and_its_processes() -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", SIMULATES], stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    )
    with script:
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(started) < 3:  # the command and its two workers
            assert time.monotonic() < deadline
            started = psutil.Process(script.pid).children(recursive=True)
        script.send_signal(signal.SIGINT)
        _, said = script.communicate(timeout=60)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    psutil.wait_procs(started, timeout=30)
    assert [process for process in started if process.is_running()] == []


def test_evaluate_returns_the_results_and_their_folder(tmp_path: Path) -> None:
    results = dora.evaluate(SMALL, model="seed", run__folder=tmp_path)
    assert results["folder"].parent == tmp_path.resolve()
    assert dora.load(results["folder"]).status()["phase"] == "finished"
    assert re.search("heldout", repr(results))
    assert os.listdir(tmp_path) == [results["folder"].name]


def test_a_run_is_evaluated_as_its_own_configuration_says(tmp_path: Path) -> None:
    """With one server for K = 2, which only a run that trains could not do with."""
    first = dora.evaluate(SMALL, model="seed", run__folder=tmp_path, rollout__max_staleness=2)
    versions = first["folder"] / "versions"
    publish_model(VersionStore(memory_root=versions, durable_root=versions), path())  # evaluations keep none
    again = dora.evaluate(model=dora.load(first["folder"]))
    assert again["folder"].parent == tmp_path.resolve()
    assert again["sets"] == first["sets"]
    assert len(dora.evaluate(model=first["folder"], eval__sets__0__prompts=3)["sets"][0]["rewards"]) == 3
