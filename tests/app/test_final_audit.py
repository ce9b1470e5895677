"""The audit at the end of a run: others have their turn meanwhile, and it can be left out while it is under way."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from dora.app import job
from dora.errors import DoraError
from dora.journal.audit_report import AuditReport
from dora.journal.run_folder import RunFolder
from tests.core.world import run
from tests.journal.recorded import new_folder, write


class HeldAudit:
    """An audit that begins, and ends when it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, folder: RunFolder) -> AuditReport:
        self.has_begun.set()
        self.may_end.wait()
        raise DoraError("let go")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldAudit:
    found = HeldAudit()
    monkeypatch.setattr(job, "audit", found)
    return found


async def test_the_violations_of_a_run_are_counted(tmp_path: Path) -> None:
    world = run(seed=3, steps=2)
    folder = write(new_folder(tmp_path), world.settings, world.journal)
    assert await job.audit_until(asyncio.Event(), folder) == 0
    folder.tokens.unlink()
    assert await job.audit_until(asyncio.Event(), folder) == 1


async def test_others_have_their_turn_while_an_audit_is_under_way(held: HeldAudit, tmp_path: Path) -> None:
    interrupted = asyncio.Event()
    audit = asyncio.create_task(job.audit_until(interrupted, RunFolder(tmp_path)), name="final-audit")
    await asyncio.to_thread(held.has_begun.wait)
    assert not audit.done()
    interrupted.set()
    assert await audit is None
    held.may_end.set()  # with an error, which nobody hears any more


async def test_an_error_of_the_audit_is_one_of_the_run(held: HeldAudit, tmp_path: Path) -> None:
    held.may_end.set()
    with pytest.raises(DoraError, match="let go"):
        await job.audit_until(asyncio.Event(), RunFolder(tmp_path))


async def test_a_run_that_was_interrupted_before_its_end_is_not_audited(held: HeldAudit, tmp_path: Path) -> None:
    interrupted = asyncio.Event()
    interrupted.set()
    assert await job.audit_until(interrupted, RunFolder(tmp_path)) is None
    assert not held.has_begun.is_set()
