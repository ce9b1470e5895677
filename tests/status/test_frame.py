"""The lines of the live view at fixed widths, and the sentence that begins every view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.text import Text

from dora.cli.instances import draw
from dora.config.schema import SUMS
from dora.observe.drift import Alarm
from dora.observe.scores import Score
from dora.observe.sentence import duration, sentence
from dora.observe.snapshot import EvaluationRow, HoldingRow, InstanceRow, Snapshot, TrainerRow, VersionRow
from dora.status.frame import frame, sparkline
from tests.status.conftest import Watched, score, step_facts

WIDTHS = (80, 120)
WAITS = "101 answers of 8 groups (5 answers queued)"


def instance(number: int, version: int | None, **changes: Any) -> InstanceRow:
    row = InstanceRow(
        instance=number,
        url=f"http://127.0.0.1:{30_000 + number}",
        phase="serving",
        version=version,
        pushing=None,
        residents=24,
        slots=32,
        kv_load=1000,
        kv_tokens=4096,
        incarnation=1,
        asked="",
    )
    return replace(row, **changes)


def version(number: int, **changes: Any) -> VersionRow:
    counts = {"serving": 2, "loading": 0, "groups": 9, "unfinished": 37, "waiting": 5}
    row = VersionRow(version=number, is_newest=False, is_live=True, evaluating=False, **counts)
    return replace(row, **changes)


def trainer(waits_for: str = WAITS, *, ranks_ready: int = 2) -> TrainerRow:
    reason = "12 answers of 3 groups"
    return TrainerRow(
        step=14,
        waits_for=waits_for,
        idle_share=0.23,
        mean_idle_share=0.07,
        idle_reason=reason,
        ranks=2,
        ranks_ready=ranks_ready,
    )


def worded(s: Snapshot, **changes: Any) -> Snapshot:
    changed = replace(s, **changes)
    return replace(changed, sentence=sentence(changed))


@pytest.fixture
def four(middle: Snapshot) -> Snapshot:
    """Step 15 of 24 on four servers."""
    return worded(
        middle,
        run_id="dora-20261123-130440-1a2b",
        max_staleness=2,
        uptime_s=39.4,
        eta_s=18.7,
        num_steps=24,
        groups_per_step=16,
        steps_trained=14,
        progress=14 / 24,
        step_forming=14,
        step_committed=7,
        newest_version=14,
        versions=(version(13), version(14, groups=12, unfinished=64, waiting=0, is_newest=True)),
        num_servers=4,
        instances=(instance(0, 14), instance(1, 13), instance(2, 14), instance(3, 13)),
        trainer=trainer(),
        not_admitting="",
        groups_admitted=260,
        groups_by_phase={"generating": 8, "grading": 1, "complete": 5, "filtered": 29, "failed": 0},
        staleness=(104, 96, 31),
        staleness_mean=0.68,
        steps=tuple(step_facts(i) for i in range(14)),
        rewards=tuple(0.25 + i / 100 for i in range(14)),
        held_out=("heldout",),
        scores=(score(0, 0.346), score(8, 0.82), score(12, 0.95)),
        dropped={"filtered: zero variance": 29},
        tokens_per_s=4120.0,
        trained_tokens_per_s=2950.0,
        counts=replace(middle.counts, migrations=12, recovered=0),
        problems=(),
    )


@pytest.fixture
def thousand(four: Snapshot) -> Snapshot:
    """A thousand servers with six versions, some of them down; names, problems and numbers are as bad as can be."""
    rows = [instance(i, 95 + i % 6 if i % 100 else None, phase="serving" if i % 100 else "lost") for i in range(1000)]
    rows = [replace(row, residents=0) if row.phase == "lost" else row for row in rows]
    versions = [version(95 + i, serving=165, loading=1, groups=4000, unfinished=64_000, waiting=1200) for i in range(6)]
    alarm = Alarm(
        **{"name": "low_ess", "step": 90, "staleness": None, "quantity": "all/ess", "value": 0.1, "threshold": 0.5},
        cause="a " + "long " * 60,
    )
    return worded(
        four,
        run_id="a-name-of-a-run-that-is-far-too-long-" * 4,
        max_staleness=8,
        num_steps=10_000,
        steps_trained=100,
        progress=0.01,
        uptime_s=400_000.0,
        eta_s=39_600_000.0,
        step_forming=103,
        groups_per_step=16_384,
        instances=tuple(rows),
        num_servers=1000,
        versions=(*versions[:-1], replace(versions[-1], is_newest=True, evaluating=True)),
        trainer=trainer("384,000 answers of 24,000 groups (7,200 answers queued)"),
        steps=tuple(step_facts(i) for i in range(100)),
        rewards=tuple(0.25 + i / 100 for i in range(100)),
        held_out=tuple(f"\x1b[31mset {i} \u202e数学数学数学" for i in range(5)),
        scores=(replace(score(0, 0.5), name="\x1b[31mset 0 \u202e数学数学数学"),),
        problems=("not graded: \x1b]0;title\x07 raised\nin its second line", "b" * 500, "c"),
        alarms=(alarm,),
    )


def lines(s: Snapshot, width: int) -> list[str]:
    return [line.text for line in frame(s, width)]


def text(s: Snapshot, width: int) -> str:
    return "\n".join(lines(s, width)) + "\n"


def test_a_frame_of_80_columns(four: Snapshot):
    assert text(four, 80) == FOUR_80


def test_a_frame_of_120_columns(thousand: Snapshot):
    assert text(thousand, 120) == THOUSAND_120


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_too_wide_or_has_a_control_character(four: Snapshot, thousand: Snapshot, width: int):
    for s in (four, thousand, worded(thousand, phase="failed", reason=thousand.problems[0] * 9)):
        for line in lines(s, width):
            assert cell_len(line) <= width
            assert line.isprintable(), repr(line)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_number_of_lines_never_changes_while_a_run_goes_on(job: Watched, width: int):
    assert len({len(frame(s, width)) for s in job.snapshots}) == 1


def test_the_number_of_lines_does_not_depend_on_problems_versions_and_scores(four: Snapshot):
    others = [
        worded(four, problems=("a", "b", "c"), scores=(), steps=()),
        worded(four, versions=tuple(version(9 + i) for i in range(6))),
        worded(four, versions=(), trainer=trainer("a " + "very " * 90)),
    ]
    assert {len(frame(s, 80)) for s in others} == {len(frame(four, 80))}


def test_a_low_terminal_is_spared_the_lines_that_matter_least(four: Snapshot, calling: Snapshot):
    much = worded(four, environment=calling.environment, held_out=("a", "b", "c"), max_staleness=3)
    labels = {line.split()[0] for line in lines(much, 80) if line}
    low = [line.text for line in frame(much, 80, 23)]
    assert (len(lines(much, 80)), len(low)) == (25, 23)
    assert labels - {line.split()[0] for line in low if line} == {"episodes", "calls"}
    assert len(frame(much, 80, 1)) == 20, "the others always stay"
    assert frame(four, 80, 40) == frame(four, 80)


def test_many_versions_are_folded_into_a_line(thousand: Snapshot):
    table = [line.split()[0] for line in lines(thousand, 120) if " loading " in line or "loadi…" in line]
    assert table == ["v95", "v96", "3", "v100"]


def test_a_version_that_is_evaluated_is_told_from_one_that_waits_for_its_turn(four: Snapshot):
    versions = (version(8, evaluating=True, is_live=False, groups=0), version(14, evaluating=True, is_newest=True))
    now = worded(four, versions=versions, evaluation=EvaluationRow(version=8, graded=3, samples=64))
    notes = {line.split()[0]: line[68:] for line in lines(now, 80) if line.startswith("v")}
    assert notes == {"version": "", "v8": "evaluating", "v14": "to evaluate"}


def test_a_version_that_nothing_needs_is_said_to_be_unloading(four: Snapshot):
    versions = (version(8, serving=1, unloading=3, is_live=False), version(14, unloading=1, is_newest=True))
    notes = {line.split()[0]: line[68:] for line in lines(worded(four, versions=versions), 80) if line.startswith("v")}
    assert notes == {"version": "", "v8": "unloading", "v14": "newest"}


def adapters(number: int, requests: dict[int, int], *others: HoldingRow) -> InstanceRow:
    """A server with so many requests of each version."""
    serving = [HoldingRow(version=v, phase="serving", requests=n) for v, n in requests.items()]
    newest, residents = max(requests, default=None), sum(requests.values())
    return instance(number, newest, holdings=(*serving, *others), residents=residents)


def test_a_server_of_adapters_generates_with_each_version_that_has_requests(four: Snapshot):
    rows = (adapters(0, {13: 9, 14: 15}), adapters(1, {12: 0, 13: 2, 14: 0}), adapters(2, {14: 0}))
    assert "Two servers generate: v14 on 1, v13 on 2; one is idle." in sentence(replace(four, instances=rows))
    older = (adapters(0, dict.fromkeys(range(10, 15), 1)), adapters(1, {10: 1, 14: 1}), adapters(2, {14: 1}))
    assert "Three servers generate: v14 on 3, v13 on 1, v12 on 1, older ones on 2." in sentence(
        replace(four, instances=older)
    )


def test_the_table_of_servers_has_every_adapter_with_its_requests():
    loads = HoldingRow(version=15, phase="loading", requests=0)
    rows = (adapters(0, {13: 9, 14: 15}, loads), instance(1, 14), instance(2, None, pushing=15), instance(3, None))
    assert [*draw(rows).columns[3].cells] == [Text("13 (9), 14 (15), 15 loading"), Text("14"), Text("→ 15"), Text("")]


def test_a_finished_run_has_no_next_step(four: Snapshot):
    ended = worded(four, phase="finished", reason="all 24 steps are trained", steps_trained=24, progress=1.0, eta_s=0.0)
    assert text(ended, 80) == FINISHED_80


def test_in_the_first_step_the_trainer_is_idle_for_a_share_of_that_step_alone(four: Snapshot):
    early = worded(four, trainer=replace(trainer(), mean_idle_share=None))
    [line] = [line for line in lines(early, 120) if line.startswith("trainer")]
    assert line == "trainer    idle 23 % of the last step, waiting for 12 answers of 3 groups"


def test_a_constraint_that_is_broken_is_shown(four: Snapshot):
    [line] = [line for line in frame(four, 120) if line.text.startswith("checks")]
    assert line.text == "checks     C1, C2, C3 hold; 12 answers moved, 0 recovered after a loss"
    broken = replace(four, counts=replace(four.counts, scheduling_aborts=3), by_design={"C1": "5 answers mix versions"})
    [line] = [line for line in frame(broken, 120) if line.text.startswith("checks")]
    assert line.text.startswith("checks     3 scheduling aborts; C1 broken by design: 5 answers mix versions; ")
    assert line.style == "bold red"


def test_a_server_that_is_down_is_the_first_problem(four: Snapshot):
    down = "server 2 has been down for 12 s (being restarted): connection refused"
    shown = lines(worded(four, down=(down,), problems=("not graded: a",)), 120)
    assert shown[shown.index(f"problems   {down}") + 1] == "           not graded: a"


def test_the_task_is_said_if_the_configuration_says_it(four: Snapshot):
    assert not any(line.startswith("task") for line in lines(four, 80))
    *_, task, run = lines(worded(four, task=SUMS), 80)
    assert (task, run[:3]) == (f"task       {SUMS}", "run")


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value():
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([3.0], 10) == sparkline([7.0], 10) == "▄"
    assert sparkline([], 10) == ""
    assert sparkline([float(i // 10) for i in range(80)], 8) == "▁▂▃▄▅▆▇█"


def test_a_time_is_written_as_people_say_it():
    assert [duration(s) for s in (None, 0.4, 59.6, 3599.0, 86_399.0, 3_660_000.0)] == [
        *("-", "0 s", "1 min 0 s", "59 min 59 s", "23 h 59 min", "42 d 8 h"),
    ]


# -- the sentence ----------------------------------------------------------------------------------------------------


def test_the_sentence_of_a_step_that_waits(four: Snapshot):
    assert sentence(four) == (
        "Step 15 of 24. Four servers generate: v14 on 2, v13 on 2. "
        "Training waits for 101 answers of 8 groups (5 answers queued)."
    )


def test_the_sentence_of_a_step_that_is_trained_says_what_each_server_does(four: Snapshot):
    rows = (
        instance(0, 14),
        instance(1, 13, residents=0),
        instance(2, None, phase="updating", pushing=14, residents=0),
        instance(3, None, phase="lost", residents=0),
        instance(4, None, phase="quarantined", residents=0),
        instance(5, None, phase="lost", residents=0),
    )
    assert sentence(replace(four, trainer=trainer(""), instances=rows)) == (
        "Step 15 of 24 is being trained. One server generates with v14; "
        "one is idle, one loads v14, two are down, one is quarantined."
    )


def test_a_server_that_only_evaluates_is_named_as_such(four: Snapshot):
    versions = (version(8, evaluating=True, is_live=False), version(14, evaluating=True))
    now = replace(four, versions=versions, instances=(instance(0, 14), instance(1, 8)))
    assert "Two servers generate: v14 on 1, v8 on 1 (evaluation). " in sentence(now)


def test_the_sentences_of_the_start(four: Snapshot):
    down = tuple(instance(i, None, phase="lost", residents=0) for i in range(2))
    up = tuple(instance(i, None, phase="blank", residents=0) for i in range(2))
    first = replace(
        four, phase="starting", newest_version=None, versions=(), steps_trained=0, groups_admitted=0, scores=()
    )
    assert sentence(replace(first, instances=(*up, *down), trainer=trainer("its ranks", ranks_ready=0))) == (
        "Starting: 2 of 4 servers up, 0 of 2 trainer ranks ready."
    )
    assert sentence(replace(first, num_servers=1, instances=up[:1], trainer=replace(trainer(), ranks=0))) == (
        "Starting: 1 of 1 server up, no trainer."
    )
    loading = replace(first, newest_version=0, versions=(version(0, serving=0, loading=2),), instances=up)
    assert sentence(loading) == "Starting: version 0 is being loaded into 2 servers; 2 of 2 trainer ranks ready."
    served = replace(loading, versions=(version(0),), instances=(instance(0, 0), instance(1, 0)))
    assert sentence(replace(served, evaluation=EvaluationRow(version=0, graded=48, samples=128))) == (
        "Before step 1 of 24, version 0 is being evaluated: 48 of 128 answers graded. Two servers generate with v0."
    )


def test_a_run_without_steps_counts_answers(four: Snapshot):
    none = replace(trainer(""), ranks=0, ranks_ready=0)
    row = EvaluationRow(version=0, graded=30, samples=120)
    known = {"num_steps": 0, "steps_trained": 0, "steps": (), "trainer": none, "groups_admitted": 0, "scores": ()}
    now = worded(four, **known, evaluation=row, progress=0.25, newest_version=0)
    assert now.sentence.startswith("The model is being evaluated: 30 of 120 answers graded. Four servers generate")
    lines = [line.text for line in frame(now, 80)]
    assert any("25% of the answers graded" in line for line in lines)
    assert not any("0 of 0" in line for line in lines)
    begun = worded(four, **known, evaluation=None, newest_version=None, instances=())
    assert begun.sentence == "Starting: 0 of 4 servers up, no trainer."
    changes = {"phase": "finished", "reason": "the model is evaluated", "uptime_s": 8.0, "evaluation": None}
    ended = worded(four, **{**known, "scores": (score(0, 0.25),)}, **changes)
    assert ended.sentence == "Finished in 8 s: the model is evaluated. Held-out reward: 0.250."
    stopped = worded(four, **known, **{**changes, "phase": "interrupted", "reason": "everything in flight is kept"})
    assert stopped.sentence == "Interrupted after 8 s: everything in flight is kept."


def test_after_a_resume_training_waits_for_its_ranks(four: Snapshot):
    assert sentence(replace(four, trainer=trainer("its ranks", ranks_ready=1))).endswith(
        "Training waits for its ranks: 1 of 2 are ready."
    )
    down = tuple(instance(i, None, phase="lost", residents=0) for i in range(4))
    assert sentence(replace(four, instances=down, trainer=trainer("its ranks", ranks_ready=1))) == (
        "Resuming after 14 of 24 steps: 0 of 4 servers up, 1 of 2 trainer ranks ready."
    )


def test_the_sentences_of_the_end(four: Snapshot):
    trained = replace(four, steps_trained=24)
    assert sentence(trained) == "Training is complete; the run is about to end."
    assert sentence(replace(trained, evaluation=EvaluationRow(version=24, graded=3, samples=128))) == (
        "Training is complete; version 24 is being evaluated: 3 of 128 answers graded."
    )
    finished = replace(trained, phase="finished", reason="all 24 steps are trained", uptime_s=58.0)
    assert sentence(finished) == (
        "Finished in 58 s: all 24 steps are trained. Held-out reward: 0.346 at version 0, 0.950 at 12."
    )
    none = Score(name="heldout", version=0, mean=None, pass_at_n=None, num_samples=0)
    assert sentence(replace(finished, scores=(none, score(4, 0.5)))) == "Finished in 58 s: all 24 steps are trained."
    interrupted = replace(four, phase="interrupted", reason="everything in flight is kept")
    assert sentence(interrupted) == "Interrupted after 14 of 24 steps: everything in flight is kept."
    failed = replace(four, phase="failed", reason="the trainer ended.", num_steps=1, steps_trained=0)
    assert sentence(failed) == "Failed after 0 of 1 step: the trainer ended."


FOUR_80 = """\
Step 15 of 24. Four servers generate: v14 on 2, v13 on 2. Training waits for 101
answers of 8 groups (5 answers queued).

━━━━━━━━━━━━────────  14 of 24 steps  39 s elapsed, about 19 s left
reward     ▁▂▂▃▃▄▄▅▅▆▆▇▇█  0.250 → 0.380, 0.380 in trained groups
heldout    ▁▆█  0.346 (v0) → 0.950 (v12) held-out
tokens/s   4,120 sampled, 2,950 trained
staleness  mean 0.68; groups: 104 at 0, 96 at 1, 31 at 2
trainer    idle 7 % of steps 2 to 14; 23 % of the last one, waiting for 12 answ…
forming    step 15: 7 of 16 groups
groups     8 generating, 1 grading, 5 complete, 29 filtered, 0 failed
admission  open
version  servers              groups  unfinished  queued  train by
v13      ██ 2                      9          37       5  step 16
v14      ██ 2                     12          64       0  step 17   newest


checks     C1, C2, C3 hold; 12 answers moved, 0 recovered after a loss
problems   none

run        dora, K = 2  dora-20261123-130440-1a2b
"""
THOUSAND_120 = """\
Step 101 of 10,000. 990 servers generate: v100 on 166, v99 on 163, v98 on 167, older ones on 494; ten are down. Training
waits for 384,000 answers of 24,000 groups (7,200 answers queued).
────────────────────────────────────────  100 of 10,000 steps  4 d 15 h elapsed, about 458 d 8 h left
reward     ▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇███  0.250 → 1.240, 1.240 in trained groups
�[31mset 0… ▄  0.500 (v0) held-out
�[31mset 1… -
held-out   and 3 more sets: they are in metrics.jsonl
tokens/s   4,120 sampled, 2,950 trained
staleness  mean 0.68; groups: 104 at 0, 96 at 1, 31 at 2
trainer    idle 7 % of steps 2 to 100; 23 % of the last one, waiting for 12 answers of 3 groups
forming    step 104: 7 of 16,384 groups
groups     8 generating, 1 grading, 5 complete, 29 filtered, 0 failed
admission  open
version  servers              groups  unfinished  queued  train by
v95      █░ 165 + 1 loading    4,000      64,000   1,200  step 104
v96      █░ 165 + 1 loading    4,000      64,000   1,200  step 105
3 more   ████░ 495 + 3 loadi… 12,000     192,000   3,600
v100     █░ 165 + 1 loading    4,000      64,000   1,200  step 109  to evaluate
checks     C1, C2, C3 hold; 12 answers moved, 0 recovered after a loss
problems   drift: low_ess at step 91: all/ess is 0.1, limit 0.5; a long long long long long long long long long long lo…
           and 3 more: they are in log.jsonl
run        dora, K = 8  a-name-of-a-run-that-is-far-too-long-a-name-of-a-run-that-is-far-too-long-a-name-of-a-run-that-…
"""
FINISHED_80 = """\
Finished in 39 s: all 24 steps are trained. Held-out reward: 0.346 at version 0,
0.950 at 12.
━━━━━━━━━━━━━━━━━━━━  24 of 24 steps  39 s elapsed
reward     ▁▂▂▃▃▄▄▅▅▆▆▇▇█  0.250 → 0.380, 0.380 in trained groups
heldout    ▁▆█  0.346 (v0) → 0.950 (v12) held-out
tokens     1,000 sampled, 300 trained
staleness  mean 0.68; groups: 104 at 0, 96 at 1, 31 at 2
trainer    idle 7 % of steps 2 to 24
left out   29 filtered: zero variance
checks     C1, C2, C3 hold; 12 answers moved, 0 recovered after a loss
problems   none
run        dora, K = 2  dora-20261123-130440-1a2b
"""
