"""Ctrl-C: a clean stop from which a resume continues, and a second Ctrl-C, which ends the run at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.app.saved_status import read_saved
from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import (
    Run,
    alive,
    assert_audit_clean,
    assert_one_clear_error,
    command,
    environment,
    events_of,
    heed_ctrl_c,
    orders_of,
    run_to_end,
    settings,
    small,
    until,
    until_gone,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

STEPS = 8
STOP_LIMIT_S = 10.0


@dataclass
class Interrupted:
    """A run that was stopped by Ctrl-C and resumed; while it lived, a second resume was tried."""

    folder: RunFolder
    code: int
    stopped_within_s: float
    left: int  # processes
    said: str
    intruder: object = None
    resumed: Run | None = None
    resumed_code: int = -1


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    arguments = settings(
        run__folder=tmp_path_factory.mktemp("runs"),
        run__steps=STEPS,
        rollout__groups_per_step=16,
        engine__instances=3,
        eval__every=2,
        eval__sets="[{prompts=64}]",
        status__port=0,
    )
    with Run(*arguments) as run:
        run.until_trained(3)
        folder, children = run.folder, run.children()
        began = time.monotonic()
        run.interrupt()
        code = run.end()
        stopped_within_s = time.monotonic() - began
        found = Interrupted(folder, code, stopped_within_s, len(alive(children)), run.told())
    with Run("--resume", str(folder.root), "--set", "status.port=0") as run:
        assert run.url
        found.intruder = run_to_end("run", "--resume", str(folder.root), "--set", "status.port=0")
        found.resumed_code = run.end()
        found.resumed = run
    return found


def test_ctrl_c_stops_cleanly_and_leaves_no_process(interrupted: Interrupted) -> None:
    assert interrupted.code == 130, interrupted.said
    assert interrupted.stopped_within_s < STOP_LIMIT_S
    assert interrupted.left == 0
    assert "dora: stopping; everything in flight is kept" in interrupted.said
    assert f"  to continue it: dora run --resume {interrupted.folder.root}\n" in interrupted.said
    assert f"audit of C1, C2, C3: dora audit {interrupted.folder.root}" in interrupted.said
    assert "Traceback" not in interrupted.said


def test_a_resume_goes_on_to_the_end(interrupted: Interrupted) -> None:
    assert interrupted.resumed_code == 0, interrupted.resumed.told()
    assert [line for line in interrupted.resumed.err if line.strip() and "evaluation_skipped" not in line] == []
    assert len(events_of(interrupted.folder, ev.ControllerRestarted)) == 1
    assert [o.reason for o in orders_of(interrupted.folder, cmd.FinishRun)] == [f"all {STEPS} steps are trained"]


def test_the_trainer_goes_on_from_the_checkpoint_of_the_stop(interrupted: Interrupted) -> None:
    starts = [e.step for e in events_of(interrupted.folder, ev.TrainerReady)]
    assert starts[0] == 0
    assert starts[1] >= 3


def test_every_group_is_trained_exactly_once_over_both_lives(interrupted: Interrupted) -> None:
    folder = interrupted.folder
    trained = [g for order in orders_of(folder, cmd.ForgetGroups) for g in order.groups]
    dropped = [order.group for order in orders_of(folder, cmd.DropGroup)]
    assert sorted(trained + dropped) == [order.group for order in orders_of(folder, cmd.AdmitGroup)]
    assert len(trained) == 16 * STEPS
    assert_audit_clean(folder)


def test_no_evaluation_is_lost_or_made_twice(interrupted: Interrupted) -> None:
    versions = [o.version for o in orders_of(interrupted.folder, cmd.ReportEvaluation)]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, STEPS)


def test_a_run_that_is_alive_is_not_resumed_a_second_time(interrupted: Interrupted) -> None:
    says = "is held by another process: is a run still alive there"
    assert_one_clear_error(interrupted.intruder, code=2, says=says)


def test_a_setting_that_decisions_depend_on_cannot_change_in_a_resume(interrupted: Interrupted) -> None:
    result = run_to_end(
        "run", "--resume", str(interrupted.folder.root), *settings(status__port=0, rollout__max_staleness=1)
    )
    assert result.returncode == 2


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The rank is frozen, so the first one has to wait for its checkpoint."""
    with Run(*small(tmp_path, run__steps=50)) as run:
        run.until_trained(1)
        children = run.children()
        for rank in run.ranks():
            rank.suspend()
        run.interrupt()
        until(lambda: "dora: stopping" in "".join(run.err), what="the first Ctrl-C is heard")
        run.interrupt()
        assert run.end() == 130
    assert "interrupted:" not in "".join(run.out)
    until_gone(children)


def test_a_stop_whose_checkpoint_does_not_come_in_time_says_so_and_is_resumed_from_the_one_before(
    tmp_path: Path,
) -> None:
    arguments = small(tmp_path, run__steps=4, trainer__checkpoint_every=1, trainer__stop_timeout_s=0.5)
    with Run(*arguments) as run:
        run.until_trained(2)
        folder = run.folder
        for rank in run.ranks():
            rank.suspend()
        run.interrupt()
        assert run.end() == 130, run.told()
    said = "".join(run.err)
    assert "Waiting at most 0.5 s for the trainer's checkpoint; press Ctrl-C again to end at once\n" in said
    assert "warning: no_checkpoint after_s=0.5\n" in said
    with Run("--resume", str(folder.root), "--set", "status.port=0") as run:
        assert run.end() == 0, run.told()
    assert_audit_clean(folder)


#: `dora`, with an audit that does not end.
HELD_AUDIT = """
import sys, threading
from dora.app import job
from dora.cli.app import main

job.audit = lambda folder: threading.Event().wait()
sys.argv[:4] = ["dora"]
main()
"""


def test_an_audit_holds_no_server_and_ctrl_c_leaves_it_out(tmp_path: Path) -> None:
    (audited := tmp_path / "held_audit.py").write_text(HELD_AUDIT)
    with Run(*small(tmp_path / "runs"), prefix=[sys.executable, str(audited)]) as run:
        run.until_status(lambda status: status["phase"] == "finished", what="the end of the run")
        until(lambda: not alive(run.children()), what="the end of servers, ranks and graders")
        assert run.status()["steps_trained"] == 2
        run.interrupt()
        assert run.end() == 0, run.told()
        folder = run.folder
    assert "dora: the run has finished; its audit is skipped; press Ctrl-C again to end at once\n" in run.err
    assert f"  audit of C1, C2, C3: dora audit {folder.root}\n" in run.out
    assert read_saved(folder.root).snapshot.phase == "finished"


def test_a_run_whose_output_has_no_reader_any_more_goes_on_and_is_stopped_as_cleanly(tmp_path: Path) -> None:
    """As in `dora run 2>&1 | tee log`: Ctrl-C ends tee, too."""
    process = subprocess.Popen(
        command("run", *small(tmp_path, run__steps=50, trainer__checkpoint_every=1000)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
        preexec_fn=heed_ctrl_c,
    )
    with process:
        assert process.stdout is not None
        assert any(line.startswith(b"step 1/") for line in process.stdout)
        process.stdout.close()
        folder = RunFolder(*tmp_path.iterdir())
        until(lambda: folder.metrics.read_bytes().count(b"\n") > 2 or process.poll() is not None, what="3 steps")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert read_saved(folder.root).snapshot.phase == "interrupted"
    assert len([*folder.checkpoints.iterdir()]) == 1


#: Imported one after the other in the first moments of each command.
EARLY = ["dora.errors", "typer", "typer.main", "dora.cli.app", "pydantic"]


@pytest.mark.parametrize("arguments", [["run"], ["check"], ["simulate"], ["audit", "."]], ids=lambda words: words[0])
def test_ctrl_c_in_the_first_moments_of_a_command_ends_it_without_a_word(arguments: list[str], tmp_path: Path) -> None:
    for module in EARLY:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "dora", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=tmp_path,
            preexec_fn=heed_ctrl_c,
        )
        assert process.stderr is not None
        with process, process.stderr:
            for line in process.stderr:
                if line.startswith("import time:") and line.split("|")[-1].strip() == module:
                    process.send_signal(signal.SIGINT)
                    break
            said = [line for line in process.stderr if not line.startswith("import time:")]
        assert (module, process.returncode, said) == (module, 130, [])


def test_ctrl_c_while_the_ranks_still_load_is_as_clean(tmp_path: Path) -> None:
    with Run(*small(tmp_path)) as run:
        folder = run.folder
        until(run.ranks, what="a rank")
        children = run.children()
        run.interrupt()
        assert run.end() == 130, run.told()
    assert "Traceback" not in run.told()
    until_gone(children)
    with Run("--resume", str(folder.root), "--set", "status.port=0") as run:
        assert run.end() == 0, run.told()
    assert_audit_clean(folder)


def test_ctrl_c_before_anything_is_started_is_quiet(tmp_path: Path) -> None:
    with Run(*small(tmp_path)) as run:
        until(run.children, what="the first grader")
        children = run.children()
        run.interrupt()
        assert run.end() == 130, run.told()
    assert "Traceback" not in run.told()
    until_gone(children)
