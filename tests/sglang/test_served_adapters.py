"""A whole run on one real server that holds its versions as adapters: launch/configs/sglang-cpu-lora.toml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dora.app.deep import recompute
from dora.config.load import load
from dora.controller.recorder import read_rows
from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of
from tests.sglang.conftest import DIALECT, LAUNCH

pytestmark = [pytest.mark.sglang, pytest.mark.deep, pytest.mark.timeout(900)]

CONFIG = LAUNCH.parent / "configs" / "sglang-cpu-lora.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    if os.environ.get("DORA_SGLANG") != "1" or not DIALECT.has_adapters:
        pytest.skip("asked for by DORA_SGLANG=1 DORA_SGLANG_RELEASE=0.5.23")
    runs: Path = tmp_path_factory.mktemp("runs")
    arguments = [str(CONFIG), "--set", f"run.folder={runs}", "--set", "status.port=0"]
    with Run(*arguments, cwd=CONFIG.parents[2], patience_s=600.0) as run:
        assert run.end(timeout_s=600.0) == 0, run.told()
        return run.folder


def test_versions_are_loaded_and_unloaded_beside_requests_and_nothing_moves(folder: RunFolder) -> None:
    assert_audit_clean(folder)
    assert not orders_of(folder, cmd.StopRequest)
    assert len(events_of(folder, ev.WeightPushFinished)) == 16  # nothing needs the last version
    assert len(events_of(folder, ev.VersionUnloaded)) >= 12
    assert len(events_of(folder, ev.InstanceUp)) == 1


def test_answers_come_from_the_adapter_that_was_requested(folder: RunFolder) -> None:
    checks = recompute(folder, load(folder.config, environ={})).checks
    assert len(checks) >= 8
    assert all(check.ok for check in checks), checks
    rows = [row["trainer"] for row in read_rows(folder.metrics, kind="step")]
    assert max(row.get("engine_mismatch_k3", 0.0) for row in rows) < 1e-9


def test_it_learns(folder: RunFolder) -> None:
    rewards = [row["reward_mean"] for row in read_rows(folder.metrics, kind="step")]
    assert sum(rewards[-4:]) / 4 > rewards[0] + 0.1
