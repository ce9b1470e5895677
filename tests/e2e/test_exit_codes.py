"""What a script learns from an exit code: that a run, or its audit, found one of its promises broken."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dora.cli.run import end
from dora.controller.loop import Outcome
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.core.world import run
from tests.e2e.runs import Run, assert_audit_clean, run_to_end, small
from tests.journal.recorded import first_event, new_folder, with_event, write

pytestmark = [pytest.mark.deep, pytest.mark.timeout(240)]


@pytest.fixture
def altered(tmp_path: Path) -> RunFolder:
    """A journal in which one answer is not told by any version."""
    world = run(seed=3, steps=2)
    at, _ = first_event(world.journal, ev.GenerationFinished, lambda e: e.trajectory >= 0)
    return write(new_folder(tmp_path), world.settings, with_event(world.journal, at, spans=()))


def test_an_audit_that_finds_a_violation_exits_with_3(altered: RunFolder) -> None:
    result = run_to_end("audit", str(altered.root))
    assert "VIOLATION C1 spans" in result.stdout
    assert result.returncode == 3, result.stderr


def test_an_audit_that_finds_none_exits_with_0_and_one_that_fails_does_not_exit_with_3(tmp_path: Path) -> None:
    world = run(seed=3, steps=2)
    folder = write(new_folder(tmp_path), world.settings, world.journal)
    assert run_to_end("audit", str(folder.root)).returncode == 0
    folder.journal.unlink()
    failed = run_to_end("audit", str(folder.root))
    assert failed.returncode in (1, 2)


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome(True, "done", violations=1), 3), (Outcome(False, "interrupted"), 130)]
)
def test_an_outcome_that_is_not_good_has_an_exit_code_of_its_own(outcome: Outcome, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        end(outcome)
    assert ended.value.code == code
    end(Outcome(True, "done"))


def test_a_run_whose_audit_finds_a_violation_exits_with_3(tmp_path: Path) -> None:
    with Run(*small(tmp_path, run__steps=4)) as job:
        job.until_trained(1)
        os.truncate(job.folder.tokens, 0)  # behind its back
        code = job.end()
        assert code == 3, job.told()
        assert "VIOLATIONS: see dora audit" in job.told()


def test_the_same_command_starts_a_run_continues_it_after_a_kill_and_leaves_it_alone_at_its_end(tmp_path: Path) -> None:
    options = [*small(tmp_path, run__steps=3), "--continue"]
    with Run(*options) as job:
        job.until_trained(1)
        folder = job.folder
        job.process.kill()
        job.process.wait()
    with Run(*options) as job:
        assert job.end() == 0, job.told()
    again = run_to_end("run", *options)
    assert again.returncode == 0, again.stderr
    assert "the run has ended" in again.stdout
    assert [path.name for path in tmp_path.iterdir()] == [folder.run_id]
    assert_audit_clean(folder)
    assert "not used" not in again.stderr
    edited = tmp_path / "job.toml"
    edited.write_text(re.sub("(?m)^steps = 3$", "steps = 5", folder.config.read_text()))
    again = run_to_end("run", str(edited), "--continue")
    assert again.returncode == 0, again.stderr
    assert "keeps its own configuration; not used: run.steps = 5 (the run has 3); --set changes a key\n" in again.stderr
