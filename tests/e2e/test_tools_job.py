"""The second default job, cut to a few steps: a policy that makes its own calls, through hosts; the run is audited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora.core.commands import CallEnvironment
from dora.core.events import CallFinished
from dora.journal.deep import read_kept
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import assert_audit_clean, events_of, orders_of, run_to_end, settings

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

JOB = "launch/configs/tools-cpu.toml"


def run(folder: Path, **changes: object) -> RunFolder:
    values = {"run__folder": folder, "status__port": 0, "run__steps": 4, "rollout__groups_per_step": 6, **changes}
    result = run_to_end("run", JOB, *settings(**values))
    assert result.returncode == 0, result.stderr
    (root,) = folder.iterdir()
    return RunFolder(root)


def means(folder: RunFolder) -> list[float]:
    rows = [json.loads(line) for line in (folder.root / "metrics.jsonl").read_text().splitlines()]
    return [row["mean"] for row in rows if row["kind"] == "evaluation"]


def test_the_policy_looks_keys_up_and_the_episodes_are_those_that_were_sampled(tmp_path: Path) -> None:
    folder = run(tmp_path)
    finished = events_of(folder, CallFinished)
    assert len(finished) == len(orders_of(folder, CallEnvironment))
    assert not [event.failed for event in finished if event.failed]
    assert sum(event.ended for event in finished) < len(finished) / 2
    kept = [one for one in read_kept(folder.trajectories) if one.outcome == "trained"]
    assert any(len(one.observed) >= 2 for one in kept)
    assert all(one.reward in (0.0, 1.0) for one in kept)
    assert means(folder)[0] <= 0.4
    assert_audit_clean(folder)
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout


def test_from_another_table_nothing_is_learned(tmp_path: Path) -> None:
    changes = {"environment__options": "{shuffled=true}", "rollout__filter_zero_variance": False, "run__steps": 2}
    folder = run(tmp_path, **changes)
    assert events_of(folder, CallFinished)
    assert max(means(folder)) <= 0.1
    assert_audit_clean(folder)


def test_the_job_is_checked_without_a_run(tmp_path: Path) -> None:
    result = run_to_end("check", JOB, *settings(status__port=0, run__folder=tmp_path))
    assert result.returncode == 0, result.stderr
    assert "renderer qwen3 continues its turns exactly" in result.stdout
    assert "server and trainer agree" in result.stdout
    assert "\nsample       none: an answer would be a single turn, and only a run plays whole episodes" in result.stdout
    assert "reference answers" not in result.stdout  # there are none: the environment grades its episodes itself
