"""A task of one's own: rows of a file, a reward of one's own, and what happens where they misbehave."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import dora
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.phases import GroupPhase
from dora.journal.run_folder import RunFolder
from dora.weights.store import VersionStore
from tests.e2e.runs import (
    Run,
    assert_audit_clean,
    assert_one_clear_error,
    events_of,
    orders_of,
    run_to_end,
    settings,
    small,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

REWARDS = """
import time

def hangs_on_one_row(prompt, response, answer, metadata):
    while metadata["hangs"]:
        time.sleep(3600)
    return float(len(response) % 2)

def raises(prompt, response, answer, metadata):
    if metadata["hangs"]:
        raise ValueError("no level given")
    return float(len(response) % 2)

def constant(prompt, response, answer, metadata):
    return 0.5
"""


@pytest.fixture(autouse=True)
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    source = str(Path(dora.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), source]))


def rows(tmp_path: Path, *, hangs: tuple[bool, ...]) -> str:
    """A file of sums."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"a{i}b1=", "answer": f"0{i + 1}", "hangs": h}) for i, h in enumerate(hangs)]
    path.write_text("\n".join(lines) + "\n")
    return f'[{{kind="jsonl", path="{path}"}}]'


def reward(name: str) -> str:
    return f'[{{kind="function", name="own_rewards:{name}"}}]'


def test_a_source_that_runs_dry_and_a_grader_that_hangs_end_in_clear_words(tmp_path: Path) -> None:
    """Five rows, two groups a step; the grader hangs on one row, whose group fails and is no reward 0."""
    arguments = small(
        tmp_path / "runs",
        run__steps=10,
        rollout__groups_per_step=2,
        task__sources=rows(tmp_path, hangs=(False, True, False, False, False)),
        task__rewards=reward("hangs_on_one_row"),
        task__epochs=1,
        task__shuffle=False,
        task__grade_timeout_s=1,
    )
    result = run_to_end("run", *arguments)
    assert result.returncode == 0, result.stderr
    assert "finished: the prompt source is dry after step 2 of 10" in result.stdout
    (root,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(root)
    assert [(o.group, o.outcome, o.reason, o.rewards) for o in orders_of(folder, cmd.DropGroup)] == [
        (1, GroupPhase.FAILED, "grading", (None,) * 4)
    ]
    failed = [e for e in events_of(folder, ev.TrajectoryGraded) if e.reward is None]
    assert {(e.trajectory // 4, e.reason) for e in failed} == {(1, "timeout")}
    assert sorted(o.group for o in orders_of(folder, cmd.CommitGroup)) == [0, 2, 3, 4]
    assert_audit_clean(folder)


def test_a_reward_that_raises_is_named_in_the_terminal_and_the_log_and_found_by_the_check(tmp_path: Path) -> None:
    arguments = small(
        tmp_path / "runs",
        run__steps=1,
        rollout__groups_per_step=2,
        task__sources=rows(tmp_path, hangs=(True, False, False)),
        task__rewards='[{kind="exact", weight=0.1}, {kind="function", name="own_rewards:raises"}]',
        task__epochs=1,
        task__shuffle=False,
    )
    said = "task.rewards.1 (function own_rewards:raises): ValueError: no level given (own_rewards.py:11)"
    result = run_to_end("run", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines().count(f"warning: not_graded reason={said}") == 1  # of four siblings
    (root,) = (tmp_path / "runs").iterdir()
    logged = [json.loads(line) for line in RunFolder(root).log.read_text().splitlines()]
    assert [line["reason"] for line in logged if line["event"] == "not_graded"] == [said]
    result = run_to_end("check", *arguments)
    assert_one_clear_error(result, code=2, says=re.escape(said))


def test_rows_over_the_prompt_limit_are_skipped_in_a_run_and_in_its_resume_alike(tmp_path: Path) -> None:
    """Of eight rows 1 and 4 are too long; the first step takes 0 and 2, a resumed run the rest."""
    path = tmp_path / "rows.jsonl"
    prompts = [f"a{i}b1=" + "1" * (40 if i in (1, 4) else 0) for i in range(8)]
    path.write_text("".join(json.dumps({"prompt": p, "answer": "01", "hangs": False}) + "\n" for p in prompts))
    arguments = small(
        tmp_path / "runs",
        run__steps=1,
        rollout__groups_per_step=2,
        task__sources=f'[{{kind="jsonl", path="{path}"}}]',
        task__rewards=reward("constant"),
        task__max_prompt_tokens=32,
        task__epochs=1,
        task__shuffle=False,
    )
    result = run_to_end("run", *arguments)
    assert result.returncode == 0, result.stderr
    says = "warning: prompt_skipped reason={}: the prompt has 45 tokens, task.max_prompt_tokens allows 1 to 32"
    assert result.stderr.splitlines().count(says.format(f"{path}:2")) == 1
    (root,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(root)
    result = run_to_end("run", "--resume", str(root), *settings(run__steps=3, status__port=0))
    assert result.returncode == 0, result.stderr
    assert says.format(f"{path}:5") in result.stderr.splitlines()
    reason = f"generation: {ev.NoPrompt.TOO_LONG}"
    dropped = [(o.group, o.outcome, o.reason) for o in orders_of(folder, cmd.DropGroup)]
    assert dropped == [(1, GroupPhase.FAILED, reason), (4, GroupPhase.FAILED, reason)]
    assert sorted(o.group for o in orders_of(folder, cmd.CommitGroup)) == [0, 2, 3, 5, 6, 7]
    arrived = {e.first + i: n for e in events_of(folder, ev.PromptsArrived) for i, n in enumerate(e.num_prompt_tokens)}
    assert [group for group, num_tokens in sorted(arrived.items()) if not num_tokens] == [1, 4]
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows[-1]["dropped"] == {f"failed: {reason}": 2}
    assert_audit_clean(folder)


def test_a_reward_without_variance_stops_the_job_and_shows_the_rewards(tmp_path: Path) -> None:
    arguments = small(
        tmp_path / "runs",
        run__steps=10,
        rollout__groups_per_step=2,
        rollout__filter_zero_variance=True,
        rollout__max_top_up=2,
        task__rewards=reward("constant"),
        task__sources=rows(tmp_path, hangs=(False, False)),
    )
    result = run_to_end("run", *arguments)
    says = r"step 1 had to top up 5 groups \(rollout.max_top_up is 2 x 2\); .*filtered: zero variance.* rewards.*0\.5"
    assert_one_clear_error(result, code=1, says=says)
    [folder] = (tmp_path / "runs").iterdir()
    assert run_to_end("status", str(folder)).stdout.startswith("Failed after 0 of 10 steps: step 1 had to top up")
    result = run_to_end("run", "--resume", str(folder), *settings(status__port=0))
    assert_one_clear_error(
        result, code=2, says="the run has failed and cannot be resumed: step 1 had to top up 5 groups"
    )


def test_rollouts_are_trained_from_disk(tmp_path: Path) -> None:
    """One half of the system at a time, over another number of ranks than there were writers. The schedule is that of
    the steps that there are, not of `run.steps`."""
    result = run_to_end("run", "--rollout-only", *small(tmp_path / "runs", run__steps=2))
    assert result.returncode == 0, result.stderr
    (root,) = (tmp_path / "runs").iterdir()
    rollouts = RunFolder(root).rollouts
    assert sorted(path.name for path in rollouts.iterdir()) == ["step-000000.rollout", "step-000001.rollout"]
    assert_audit_clean(RunFolder(root))
    changes = {"run__steps": 1, "trainer__ranks": 2, "trainer__schedule": "linear", "trainer__warmup_steps": 1}
    result = run_to_end("run", "--train-only", str(rollouts), *small(tmp_path / "trained", **changes))
    assert result.returncode == 0, result.stderr
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[:2]] == ["step 1/2", "step 2/2"]
    (root,) = (tmp_path / "trained").iterdir()
    trained = RunFolder(root)
    rows = [json.loads(line) for line in trained.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert [row["trainer"]["learning_rate"] for row in rows] == [2e-5, 2e-5]
    assert sum(row["trainer"]["all/sequences"] for row in rows) == 2 * 4 * 4
    assert VersionStore(memory_root=trained.versions, durable_root=trained.versions).durable() == [0, 1, 2]


def test_a_run_that_is_killed_goes_on_with_the_rows_that_it_had_chosen(tmp_path: Path) -> None:
    changes = {
        "rollout__filter_zero_variance": True,
        "rollout__max_top_up": 100,
        "task__revisit_share": 0.25,
        "task__rewards": '[{kind="regex", pattern="(?:^|\\\\D)(\\\\d\\\\d)$"}]',
        "run__steps": 6,
    }
    options = [*small(tmp_path, task__sources=rows(tmp_path, hangs=(False,) * 9), **changes), "--continue"]
    with Run(*options) as job:
        job.until_status(lambda s: bool(s["rows_passed"]), what="a row is passed over")
        folder = job.folder
        job.process.kill()
        job.process.wait()
    chosen = [visit for event in events_of(folder, ev.PromptsArrived) for visit in event.visits]
    with Run(*options) as job:
        assert job.end() == 0, job.told()
        assert "rows passed over: " in job.told()
    arrived = events_of(folder, ev.PromptsArrived)
    again = {event.first + i: visit for event in reversed(arrived) for i, visit in enumerate(event.visits)}
    assert [again[group] for group in range(len(chosen))] == chosen
    assert sum(event.dry for event in arrived) == 0
    assert_audit_clean(folder)
