"""The terminal: a live view, or plain lines."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dora.cli.summary import summary
from dora.journal.run_folder import RunFolder
from dora.status.facts import MAX_PROBLEMS, ShellFacts
from dora.status.snapshot import Snapshot
from dora.status.terminal import PlainView, draw, score_line, show_progress, step_line
from tests.status.conftest import score, step_facts


def shown(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(draw(snapshot))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=40, force_terminal=False), file


def test_the_view_shows_steps_scores_speed_staleness_trainer_and_versions(middle: Snapshot):
    text = shown(middle)
    assert f"step {middle.steps_trained}/8" in text
    assert "heldout 0.250 (version 0) -> 0.500 (version 4)" in text
    assert "100 sampled" in text
    assert f"mean {middle.staleness_mean:.2f}" in text
    assert f"waiting for {middle.trainer.waits_for}" in text or "working" in text
    assert re.search(r"\d+ s left", text)
    for row in middle.versions:
        assert f"{'█' * row.serving}{'░' * row.loading} {row.serving}" in text


def test_a_counter_that_must_stay_0_is_shown_if_it_does_not(middle: Snapshot):
    assert "aborts" not in shown(middle)
    assert "3 scheduling aborts" in shown(replace(middle, counts=replace(middle.counts, scheduling_aborts=3)))


def test_the_view_can_be_drawn_at_every_moment_of_a_job(job):
    for snapshot in job.snapshots[::25]:
        assert "job-1" in shown(snapshot)


def test_a_step_is_one_line(middle: Snapshot):
    line = step_line(step_facts(4), replace(middle, eta_s=125.4, tokens_per_s=1234.5))
    versions = " ".join(f"{v.version}:{v.serving}" for v in middle.versions if v.is_live)
    assert line == (
        f"step 5/8  reward 0.290  2.0 s  1234 tokens/s  live versions (version:instances) {versions}  "
        "staleness 0.50  trainer idle 25 %  left 2 min 5 s"
    )


def test_the_plain_view_prints_each_step_and_each_score_once(middle: Snapshot):
    console, file = plain()
    view = PlainView(console)
    first = replace(middle, steps=(step_facts(0),), scores=(score(0, 0.25),))
    both = replace(first, steps=(step_facts(0), step_facts(1)))
    for snapshot in (first, first, both, replace(both, scores=(score(0, 0.25), score(8, 0.5)))):
        view.show(snapshot)
    assert file.getvalue().splitlines() == [
        score_line(score(0, 0.25)),
        step_line(step_facts(0), first),
        step_line(step_facts(1), both),
        score_line(score(8, 0.5)),
    ]


def test_a_problem_is_recorded_once_and_stays_in_the_view(middle: Snapshot):
    facts = ShellFacts(run_id="job-1", strategy="dora")
    is_new = [facts.note_problem(f"not graded: {reason}") for reason in ("[a]", "[a]", "b")]
    assert is_new == [True, False, True]
    text = shown(replace(middle, problems=tuple(facts.problems)))
    assert "not graded: [a]\nnot graded: b\n" in re.sub(r" +\n", "\n", text)


def test_the_number_of_problems_is_limited():
    facts = ShellFacts(run_id="job-1", strategy="dora")
    is_new = [facts.note_problem(f"answer {i}") for i in range(3 * MAX_PROBLEMS)]
    assert is_new == [True] * (MAX_PROBLEMS + 1) + [False] * (2 * MAX_PROBLEMS - 1)
    assert facts.problems[-1] == "more problems: they are in the journal"


def test_steps_of_a_resumed_run_are_printed_once_although_old_ones_leave_the_window(middle: Snapshot):
    console, file = plain()
    view = PlainView(console)
    view.show(replace(middle, scores=(), steps=tuple(step_facts(i) for i in range(5, 25))))
    view.show(replace(middle, scores=(), steps=tuple(step_facts(i) for i in range(6, 26))))
    assert [line.split("/")[0] for line in file.getvalue().splitlines()] == [f"step {i + 1}" for i in range(5, 26)]


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_progress_shows_address_folder_and_the_last_state(middle: Snapshot, is_terminal: bool):
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=is_terminal)
    states: Iterator[Snapshot] = iter([middle])
    last = replace(middle, phase="finished", scores=(*middle.scores, score(8, 0.875)))

    def take() -> Snapshot:
        return next(states, last)

    async with show_progress(take, status_url="http://127.0.0.1:8421", folder=Path("/runs/job-1"), console=console):
        pass
    text = file.getvalue()
    assert "run folder /runs/job-1\nstatus     http://127.0.0.1:8421\n" in text
    assert "0.875" in text


async def test_progress_shows_the_file_of_a_generated_token_but_not_the_token(middle: Snapshot):
    console = Console(file=io.StringIO(), width=120)
    paths = {"folder": Path("/runs/job-1"), "token": Path("/runs/job-1/status-token")}
    async with show_progress(lambda: middle, status_url="http://127.0.0.1:8421", **paths, console=console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert "\ntoken      /runs/job-1/status-token\n" in console.file.getvalue()


def test_the_summary_counts_the_groups_that_were_left_out_by_reason(middle: Snapshot, tmp_path: Path):
    now = replace(middle, dropped={"filtered: zero variance": 29, "failed: grading": 12})
    lines = summary(now, folder=RunFolder(tmp_path), violations=0)
    assert "  groups left out: 29 filtered: zero variance, 12 failed: grading" in lines
    assert "left out" not in "".join(summary(replace(now, dropped={}), folder=RunFolder(tmp_path), violations=0))


def test_episodes_are_shown_where_there_is_an_environment(calling: Snapshot, middle: Snapshot, tmp_path: Path):
    turns = "2.2 turns (at most 4), 40 tokens sampled and 6 observed, reward by turn 0.25 0.50, truncated: 2 turns"
    calls = "1.5 an episode (at most 3), 0.25 s each (p90 0.50 s), 12% of its time"
    text = re.sub(r" +", " ", shown(calling))
    assert f"episodes {turns}" in text.replace("\n ", " ")
    assert f"calls 7 under way; {calls}" in text
    assert "environment failed: 2 timeout, 1 host" in text
    lines = summary(calling, folder=RunFolder(tmp_path), violations=0)
    assert f"  episodes of the last step: {turns}; calls: {calls}" in lines
    assert "  3 episodes left out, as their environment failed: 2 timeout, 1 host" in lines
    assert "turns 2.2  left" in step_line(calling.steps[-1], calling)
    for line in [shown(middle), *summary(middle, folder=RunFolder(tmp_path), violations=0)]:
        assert not re.search("episodes |turns|environment", line)


def test_a_held_out_set_of_which_nothing_was_graded_says_so(middle: Snapshot, tmp_path: Path):
    none = replace(score(0, 0.0), mean=None, num_samples=0, num_failed=64)
    assert score_line(none) == "version 0: heldout nothing was graded (0 answers, 64 failed)"
    now = replace(middle, scores=(none, score(4, 0.5)))
    assert "heldout nothing was graded (version 0) -> 0.500 (version 4)" in shown(now)
    assert "  held-out accuracy (heldout): nothing was graded at version 0, 0.500 at version 4" in summary(
        now, folder=RunFolder(tmp_path), violations=0
    )
