"""Runs whose embedded engines draft: the same answers in fewer steps, through kills too."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.controller.recorder import read_rows
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from tests.e2e.runs import Run, assert_audit_clean, run_to_end, settings, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

FIRST_STEP = range(4 * 8)  # its trajectories


def first_answers(folder: RunFolder) -> dict[int, list[int]]:
    """The answers of the first step, which version 0 gave."""
    store = read_tokens(folder.tokens, wanted=set(FIRST_STEP))
    return {id: answer.tokens.tolist() for id, answer in store.answers.items() if id in FIRST_STEP}


def accept_lengths(folder: RunFolder) -> list[float | None]:
    return [row.get("accept_length") for row in read_rows(folder.metrics, kind="step")]


def test_drafts_change_no_answer_and_the_run_says_what_they_give(tmp_path: Path) -> None:
    """Two answers at a time, on a server whose steps take as long with drafts as without."""
    folders = []
    for draft_tokens in (0, 4):
        asked = {"rollout__group_size": 8, "engine__slots": 2, "engine__min_step_ms": 5.0}
        asked["engine__draft_tokens"] = draft_tokens
        with Run(*small(tmp_path / str(draft_tokens), **asked)) as run:
            folders.append(run.folder)
            assert run.end() == 0, run.told()
            assert ("speculative decoding: 1." in run.told()) == (draft_tokens > 0)
    plain, drafting = folders
    assert first_answers(plain) == first_answers(drafting)
    assert len(first_answers(plain)) == len(FIRST_STEP)
    assert accept_lengths(plain) == [None, None]
    lengths = [length or 0.0 for length in accept_lengths(drafting)]
    assert 1.0 <= min(lengths) <= lengths[-1] < 5.0
    assert lengths[-1] > 1.0


def test_answers_that_servers_and_controllers_left_in_the_middle_go_on_with_drafts(tmp_path: Path) -> None:
    """Every token is compared with the log-prob under its version."""
    asked = {"engine__draft_tokens": 4, "engine__instances": 2, "engine__min_step_ms": 20, "rollout__max_staleness": 1}
    with Run(*small(tmp_path, run__steps=5, rollout__group_size=8, **asked)) as run:
        folder = run.folder
        run.until_trained(1)
        run.engine(0).kill()
        run.until_trained(3)
        run.process.kill()
        run.end()
    with Run("--resume", str(folder.root), *settings(status__port=0)) as run:
        assert run.end() == 0, run.told()
    assert_audit_clean(folder)
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
