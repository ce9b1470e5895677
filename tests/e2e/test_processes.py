"""The processes of a run: what they listen on, who may continue a run, and what is left of a run that is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dora.journal.run_folder import RunFolder
from dora.node.lease import hold
from dora.transport.trainer_end import UNREACHABLE_LIMIT_S
from tests.e2e.runs import (
    Run,
    assert_audit_clean,
    assert_one_clear_error,
    run_to_end,
    settings,
    small,
    until_gone,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]


def test_a_run_listens_where_it_must_and_children_that_are_stopped_do_not_outlive_it(tmp_path: Path) -> None:
    """Every process below the controller is stopped, as by SIGSTOP or a debugger, when the controller is killed."""
    with Run(*small(tmp_path, trainer__ranks=2, run__steps=4)) as run:
        folder = run.folder
        run.until_trained(1)
        engine, children, guards = run.engine(0), run.children(), []
        assert [p for p in children if listens(p)] == [engine]
        assert listens(psutil.Process(run.process.pid)) == 2  # for the ranks, and the status endpoint
        for child in children:
            with suppress(psutil.NoSuchProcess):  # one that ends while a grader starts
                child.suspend()
                guards += [child] if "dora.tasks.guard" in child.cmdline() else []
        run.process.kill()
        run.end()
        until_gone([child for child in children if child not in guards])
    with Run("--resume", str(folder.root), "--set", "status.port=0") as run:
        assert run.end() == 0, run.told()
        for guard in guards:
            with suppress(psutil.NoSuchProcess):  # one that the end of its parent has ended
                guard.resume()
        until_gone(guards)
    assert_audit_clean(folder)
    assert not [*folder.root.glob("lease*")]


@pytest.mark.xdist_group("a stopped controller")  # it waits beside other runs
def test_a_controller_that_was_stopped_for_more_than_a_minute_goes_on_with_its_ranks(tmp_path: Path) -> None:
    """As by Ctrl-Z, which reaches the controller alone."""
    with Run(*small(tmp_path, trainer__ranks=2, run__steps=4)) as run:
        folder = run.folder
        run.until_trained(1)
        ranks = [child for child in run.children() if child.cmdline()[-2:] == ["dora", "train"]]
        assert len(ranks) >= 2
        controller = psutil.Process(run.process.pid)
        controller.suspend()
        gone, _ = psutil.wait_procs(ranks, timeout=UNREACHABLE_LIMIT_S + 15)
        controller.resume()
        assert run.end() == 0, run.told()
        assert gone == []
    assert_audit_clean(folder)


def listens(process: psutil.Process) -> int:
    """At how many addresses; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("inet"))
    return 0


def test_a_resume_holds_the_run_before_it_reads_anything_of_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text("no TOML [")
    folder.journal.write_bytes(b"no journal")
    with hold(folder.lock):
        done = run_to_end("run", "--resume", str(tmp_path))
        assert_one_clear_error(done, code=2, says="lock is held by another process: is a run still alive")
    done = run_to_end("run", "--resume", str(tmp_path))
    assert_one_clear_error(done, code=2, says=r"config\.toml")


@pytest.mark.parametrize("which", ["memory", "run"])
def test_a_folder_that_is_deleted_under_a_run_ends_it_in_one_line_that_names_it(tmp_path: Path, which: str) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    arguments = [*small(tmp_path / "runs", run__steps=200), *settings(weights__memory_folder=memory)]
    with Run(*arguments) as run:
        run.until_trained(1)
        victim = run.folder.root if which == "run" else next(memory.iterdir())
        victim.rename(tmp_path / "gone")  # in one step: what is deleted file by file may be half there for a while
        assert run.end() == 1, run.told()
    (said,) = [line for line in run.err if line.startswith("dora: ")]
    assert f"{victim}" in said
    # Whatever is needed first: a name in the folder, or a version that has no other copy.
    assert "No such file or directory" in said or "is complete neither in" in said
    assert "Traceback" not in run.told()
    assert not victim.exists()
