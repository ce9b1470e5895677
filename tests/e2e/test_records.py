"""Records of real runs: spans without holes that add up to the wall time, the account of tokens, and causes by name."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.spans import SpanLine, read_spans, read_timeline
from tests.e2e.runs import Run, paced_workload, run_to_end, settings, small

SLOW = """
import time

def slow(prompt, response, answer, metadata):
    time.sleep(0.4)
    return float(len(response) % 2)
"""

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]


def of(home: Path) -> RunFolder:
    [folder] = [path for path in home.iterdir() if (path / "journal.msgpack").exists()]
    return RunFolder(folder)


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [row for row in found if row["kind"] == "step"]


def lanes(folder: RunFolder) -> dict[tuple[str, int], list[SpanLine]]:
    found = defaultdict(list)
    for span in read_spans(folder.spans):
        found[span[0], span[1]].append(span)
    return found


def rank_seconds(folder: RunFolder) -> list[str]:
    """Activities of the ranks once the run had begun, most first."""
    spent: dict[str, float] = defaultdict(float)
    for row in rows(folder)[1:]:
        for activity, seconds in row["rank_s"].items():
            spent[activity] += seconds
    return sorted(spent, key=lambda activity: -spent[activity])


def assert_whole(folder: RunFolder, *, ranks: int, instances: int, restarts: int = 0) -> None:
    """No lane has a hole or an overlap, and each ends with the run; the sums are those of the rows."""
    wall_s = max(event.at for event, _ in Journal(folder.journal))
    found = lanes(folder)
    assert sorted(found) == [*(("instance", i) for i in range(instances)), *(("rank", r) for r in range(ranks))]
    total: dict[str, float] = defaultdict(float)
    for (kind, _), spans in found.items():
        assert all(a[3] == b[2] for a, b in pairwise(spans))
        begin = 0.0 if kind == "rank" else spans[0][2]
        assert sum(end - start for _, _, start, end, _, _ in spans) == pytest.approx(wall_s - begin, rel=0.01)
        total[kind] += wall_s - begin
    in_rows: dict[str, float] = defaultdict(float)
    for row in read_timeline(folder.timeline):
        in_rows[row.kind] += sum(s for entries in row.lanes.values() for _, _, s in entries)
    assert in_rows == pytest.approx(total, rel=0.01)


def assert_account(folder: RunFolder) -> None:
    accounts = [row["tokens"] for row in rows(folder)]
    assert accounts[-1]["trained"] > 0
    for account in accounts:
        dropped = sum(account["dropped"].values())
        assert account["sampled"] == account["trained"] + dropped + account["in_flight"]


def test_a_run_that_is_stopped_and_one_that_is_killed_go_on_with_whole_records(tmp_path: Path) -> None:
    arguments = [
        *small(tmp_path, run__steps=12, rollout__max_staleness=1, engine__instances=2, trainer__ranks=2),
        *settings(rollout__filter_zero_variance=True),
    ]
    with Run(*arguments) as run:
        folder = run.folder
        run.until_trained(2)
        run.interrupt()
        assert run.end() == 130, run.told()
    with Run("--resume", str(folder.root)) as run:
        status = run.until_status(lambda s: s["steps"], what="the steps from before")
        assert [step["step"] for step in status["steps"]][:2] == [0, 1]
        assert status["counts"]["recovered"] == 0
        before = status["steps_trained"]
        run.until_trained(before + 3)
        run.process.kill()
        run.process.wait()
    with Run("--resume", str(folder.root)) as run:
        assert run.end() == 0, run.told()
    assert_whole(folder, ranks=2, instances=2)
    assert_account(folder)
    assert [row["step"] for row in rows(folder)] == sorted({row["step"] for row in rows(folder)})
    tokens = rows(folder)[-1]["tokens"]
    assert tokens["in_flight"] + tokens["trained"] + sum(tokens["dropped"].values()) == tokens["sampled"]
    assert all(
        sum(row[name] for name in ("all_right", "all_wrong", "all_same", "mixed")) == pytest.approx(1.0)
        for row in rows(folder)
        if "mixed" in row
    )


def paced(home: Path, workload: str) -> RunFolder:
    path = home / "workload.toml"
    path.write_text(workload)
    result = run_to_end("pace", str(path), "--seed", "3", "--time-scale", "20", "--folder", str(home / "runs"))
    assert result.returncode == 0, result
    return of(home / "runs")


SIZES = {"devices": 10, "rollout_devices": 8, "slots": 4, "kv_tokens": 4000}
FAST = paced_workload(steps=5, tokens_s_per_device=300_000.0, **SIZES)


def test_a_paced_run_with_a_slow_trainer_has_whole_records_and_its_training_comes_first(tmp_path: Path) -> None:
    folder = paced(tmp_path, paced_workload(steps=5, tokens_s_per_device=800.0, **SIZES))
    assert_whole(folder, ranks=2, instances=8)
    assert_account(folder)
    assert rank_seconds(folder)[0] == "forward_backward"


def test_slow_pushes_come_first_by_name(tmp_path: Path) -> None:
    slow = FAST.replace("push_fixed_s = 0.5", "push_fixed_s = 30.0").replace("max_staleness = 1", "max_staleness = 0")
    assert rank_seconds(paced(tmp_path, slow))[0] == "waiting:push"


def test_a_long_tail_comes_first_by_name(tmp_path: Path) -> None:
    """One answer in four is 40 times as long as the others, and there is a slot for each."""
    lengths = 'regime = "recorded"\nprompts = [50]\nanswers = [[10, 10, 10, 400]]\nrewards = [[1, 0, 1, 0]]\ncap = 500'
    job, fleet = FAST.replace("max_staleness = 1", "max_staleness = 0").split("[lengths]")
    tail = f"{job}[lengths]\n{lengths}\n[fleet]{fleet.split('[fleet]')[1]}"
    assert rank_seconds(paced(tmp_path, tail))[0] == "waiting:tail"


def test_a_slow_grader_comes_first_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_rewards.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(dora.__file__).parents[1])]))
    arguments = small(
        tmp_path / "runs", run__steps=3, rollout__max_new_tokens=8, task__graders=1,
        task__rewards='[{kind="function", name="slow_rewards:slow"}]',
    )  # fmt: skip
    result = run_to_end("run", *arguments)
    assert result.returncode == 0, result
    folder = of(tmp_path / "runs")
    assert_whole(folder, ranks=1, instances=1)
    assert rank_seconds(folder)[0] == "waiting:grading"
