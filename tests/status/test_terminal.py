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
from dora.observe.facts import MAX_ALIKE, MAX_PROBLEMS, ShellFacts
from dora.observe.snapshot import Snapshot
from dora.status.frame import frame
from dora.status.terminal import LiveView, PlainView, score_line, show_progress, step_line, view
from tests.status.conftest import score, step_facts


def shown(snapshot: Snapshot) -> str:
    return "\n".join(line.text for line in frame(snapshot, 240))


def plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=40, force_terminal=False), file


def test_the_live_view_is_drawn_as_wide_as_the_terminal(middle: Snapshot):
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width, force_terminal=False)
        console.print(LiveView(middle))
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().splitlines() == [line.text for line in frame(middle, width)]


def test_a_step_is_one_line_and_the_latest_says_what_is_now(middle: Snapshot):
    now = replace(middle, eta_s=125.4, steps_trained=5)
    versions = ", ".join(f"v{v.version} on {v.serving}" for v in middle.versions if v.is_live)
    own = "step 5/8  reward 0.290  2.0 s  50 tokens/s  staleness 0.50  trainer idle 25 %"
    assert step_line(step_facts(4), now) == f"{own}  {versions}  about 2 min 5 s left"
    assert step_line(step_facts(4), replace(now, eta_s=0.0)) == f"{own}  {versions}"
    assert step_line(step_facts(4), replace(now, steps_trained=6)) == own
    assert step_line(step_facts(4), replace(now, phase="finished")) == own


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


def test_what_was_printed_before_a_resume_is_not_printed_again(middle: Snapshot):
    console, file = plain()
    known = replace(middle, steps=(step_facts(0), step_facts(1)), steps_trained=2, scores=(score(0, 0.25),))
    now = replace(known, steps=(*known.steps, step_facts(2)), steps_trained=3, scores=(score(0, 0.25), score(2, 0.5)))
    with view(console, known=known) as show:
        show(known)
        show(now)
    assert file.getvalue().splitlines() == [score_line(score(2, 0.5)), step_line(step_facts(2), now)]


def test_the_plain_view_tells_of_the_start_now_and_then_and_not_of_what_follows(middle: Snapshot):
    console, file = plain()
    view = PlainView(console)
    start = replace(middle, groups_admitted=0, steps=(), scores=(), phase="starting")
    for second in range(12):
        view.show(replace(start, sentence=f"Starting: {second // 2}.", uptime_s=float(second)))
    view.show(replace(start, sentence="Step 1 of 8.", groups_admitted=1, uptime_s=60.0))
    assert file.getvalue().splitlines() == ["Starting: 0.", "Starting: 2.", "Starting: 5."]


def test_a_name_of_a_held_out_set_cannot_change_the_terminal(middle: Snapshot, tmp_path: Path):
    console, file = plain()
    scores = (score(0, 0.25, name="\x1b[31mred\u202e"),)
    PlainView(console).show(replace(middle, steps=(), scores=scores))
    lines = summary(replace(middle, scores=scores), folder=RunFolder(tmp_path), violations=0)
    assert all(line.isprintable() for line in [*file.getvalue().splitlines(), *lines])
    assert "red" in file.getvalue()


def test_a_finished_run_without_an_audit_says_how_to_audit_it(middle: Snapshot, tmp_path: Path):
    lines = summary(replace(middle, phase="finished"), folder=RunFolder(tmp_path), violations=None)
    assert f"  audit of C1, C2, C3: dora audit {tmp_path}" in lines


def test_a_problem_is_recorded_once():
    facts = ShellFacts(run_id="job-1", strategy="dora")
    is_new = [facts.note_problem(f"not graded: {reason}") for reason in ("[a]", "[a]", "b")]
    assert is_new == [True, False, True]
    assert facts.problems == ["not graded: [a]", "not graded: b"]


def test_failures_of_one_cause_are_one_problem():
    facts = ShellFacts(run_id="job-1", strategy="dora")
    texts = ("invalid literal: 'a1' (r.py:7)", "invalid literal: 'b22' (r.py:7)", "invalid literal: 'a1' (r.py:9)")
    assert [facts.note_problem(text, is_failure=True) for text in texts] == [True, False, True]


def test_the_number_of_problems_is_limited():
    facts = ShellFacts(run_id="job-1", strategy="dora")
    is_new = [facts.note_problem(f"answer {i}") for i in range(3 * MAX_PROBLEMS)]
    assert is_new == [True] * (MAX_PROBLEMS + 1) + [False] * (2 * MAX_PROBLEMS - 1)
    assert facts.problems[0] == "more problems: they are in the journal"


def test_a_reward_that_fails_is_a_problem_however_many_prompts_were_skipped():
    facts = ShellFacts(run_id="job-1", strategy="dora")
    skipped = [facts.note_problem(f"prompt skipped: rows.jsonl:{i}: has 5000 tokens") for i in range(2 * MAX_PROBLEMS)]
    assert skipped == [True] * (MAX_ALIKE + 1) + [False] * (2 * MAX_PROBLEMS - MAX_ALIKE - 1)
    assert facts.note_problem("not graded: r.py:7: TypeError: it returned None", is_failure=True)
    assert facts.problems[-1] == "not graded: r.py:7: TypeError: it returned None"


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


def test_rows_that_were_passed_over_are_counted(middle: Snapshot, tmp_path: Path):
    now = replace(middle, rows_passed=1234)
    assert "  rows passed over: 1,234, as the rewards of their last groups were equal" in summary(
        now, folder=RunFolder(tmp_path), violations=0
    )
    assert "passed over" not in "".join(summary(middle, folder=RunFolder(tmp_path), violations=0))


def test_what_speculative_decoding_gives_is_shown_where_servers_have_it(middle: Snapshot, tmp_path: Path):
    now = replace(middle, accept_length=2.345)
    assert "  speculative decoding: 2.35 tokens a step" in summary(now, folder=RunFolder(tmp_path), violations=0)
    assert "speculative decoding" not in "".join(summary(middle, folder=RunFolder(tmp_path), violations=0))
    assert "trained; 2.35 tokens a step" in shown(now)
    assert "a step" not in shown(middle)


def test_episodes_are_shown_where_there_is_an_environment(calling: Snapshot, middle: Snapshot, tmp_path: Path):
    tokens = "40 tokens sampled and 6 observed"
    turns = f"2.2 turns (at most 4), {tokens}, reward by turn 0.25 0.50, ended by a budget: 2 of turns, moves 2.5"
    calls = "1.5 an episode (at most 3), 0.25 s each (p90 0.50 s), 12% of its time"
    text = re.sub(r" +", " ", shown(calling))
    assert f"episodes {turns}" in text
    assert f"calls 7 under way; {calls}" in text
    assert "environment failed: 2 timeout, 1 host" in text
    lines = summary(calling, folder=RunFolder(tmp_path), violations=0)
    assert f"  episodes of the last step: {turns}; calls: {calls}" in lines
    assert "  3 episodes left out because their environment failed: 2 timeout, 1 host" in lines
    assert "  turns 2.2  v1 on 1" in step_line(calling.steps[-1], calling)
    for line in [shown(middle), *summary(middle, folder=RunFolder(tmp_path), violations=0)]:
        assert not re.search("episodes |turns|environment", line)


def test_a_held_out_set_of_which_nothing_was_graded_says_so(middle: Snapshot, tmp_path: Path):
    none = replace(score(0, 0.0), mean=None, num_samples=0, num_failed=64)
    assert score_line(none) == "version 0: heldout reward: nothing was graded (0 answers, 64 failed)"
    now = replace(middle, scores=(none, score(4, 0.5)))
    assert "nothing was graded (v0) → 0.500 (v4)" in shown(now)
    assert "  held-out reward (heldout): nothing was graded at version 0, 0.500 at version 4" in summary(
        now, folder=RunFolder(tmp_path), violations=0
    )


def test_the_summary_of_a_run_with_one_evaluation_says_its_reward_once(middle: Snapshot, tmp_path: Path):
    lines = summary(replace(middle, scores=(score(0, 0.25),)), folder=RunFolder(tmp_path), violations=0)
    assert "  held-out reward (heldout): 0.250 at version 0" in lines
