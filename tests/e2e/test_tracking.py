"""Runs with trackers: real ones, and ones that go wrong while a run goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dora.journal.run_folder import RunFolder
from dora.observe import observed, scores
from dora.trackers.follow import num_rows, read_position
from dora.trackers.kinds import title
from tests.e2e.runs import Run, paced_workload, run_to_end, settings, small
from tests.trackers import records

BAD = [f"tests/trackers/bad.py:{name}" for name in ("Raising", "Hanging", "Stopped", "FullDisk", "Deaf")]

pytestmark = pytest.mark.deep


def assert_tensorboard_complete(folder: RunFolder, name: str) -> None:
    wanted = records.expected(folder)
    home = folder.tracker(title(name))
    assert records.from_tensorboard(home, wanted) == records.in_float32(wanted)
    assert read_position(home).rows == num_rows(folder) == len(wanted)


def test_bad_trackers_change_nothing_about_a_run_and_their_records_are_completed_later(tmp_path: Path) -> None:
    workload = tmp_path / "workload.toml"
    workload.write_text(
        paced_workload(steps=6, devices=6, rollout_devices=4, slots=16, kv_tokens=20_000, tokens_s_per_device=3_000.0)
    )
    tracks = [word for name in (*BAD, "tensorboard") for word in ("--track", name)]
    result = run_to_end("pace", str(workload), "--folder", str(tmp_path), *tracks)
    assert result.returncode == 0, result.stderr
    [root] = tmp_path.glob("paced-*")
    folder = RunFolder(root)
    assert num_rows(folder) == 6
    assert_tensorboard_complete(folder, "tensorboard")
    said = re.findall(r"^dora: (\w+) has \d of 6 rows of this run; finish with dora track (.+)$", result.stderr, re.M)
    assert said == [(title(name), str(root)) for name in BAD]
    (folder.tracking / "healed").touch()
    completed = run_to_end("track", str(root))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == [f"{title(n):<13}6 rows, complete" for n in (*BAD, "tensorboard")]
    for name in BAD:
        assert_tensorboard_complete(folder, name)


def test_a_resumed_run_goes_on_in_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = settings(tracking__trackers='["tensorboard", "wandb"]')
    evaluated = settings(eval__sets='[{name = "heldout", prompts = 8}]')
    with Run(*small(tmp_path, run__steps=2, trainer__checkpoint_every=1), *evaluated, *trackers) as run:
        folder = run.folder
        assert run.end() == 0, run.told()
    with Run("--resume", str(folder.root), *settings(run__steps=4)) as run:
        assert run.end() == 0, run.told()
    completed = run_to_end("track", str(folder.root))  # what the trackers had no time for at the ends of the two
    assert completed.returncode == 0, completed.stderr
    wanted = records.expected(folder)
    assert [(axis, value) for axis, value, _ in wanted if axis == "step"] == [("step", step) for step in range(4)]
    assert any(axis == "version" for axis, _, _ in wanted)
    assert_tensorboard_complete(folder, "tensorboard")
    assert records.from_wandb(folder.tracker("wandb")) == wanted
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    described = {"step": {*observed.row_figures(), "trainer", "kind"}, "evaluation": {*scores.row_figures(), "kind"}}
    assert {key for row in rows for key in row.keys() - described[row["kind"]]} == set(), "describe it in rows.py"


def test_a_tracker_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for command in (["run", *small(tmp_path)], ["check"]):
        result = run_to_end(*command, *settings(tracking__trackers='["nothing:Here"]'))
        assert result.returncode == 2
        assert result.stderr.startswith("dora: tracking.trackers: cannot import 'nothing'")
        assert result.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_run_without_trackers_can_be_tracked_afterwards(tmp_path: Path) -> None:
    folder = records.make_folder(tmp_path, [{"kind": "step", "at": 1.0, "step": 0, "reward_mean": 0.5}])
    refused = run_to_end("track", str(folder.root))
    assert refused.returncode == 2
    assert "choose one with --to" in refused.stderr
    assert run_to_end("track", str(folder.root), "--to", "tensorboard").returncode == 0
    assert_tensorboard_complete(folder, "tensorboard")
