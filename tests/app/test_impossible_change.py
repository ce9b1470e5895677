"""A change of phases that no table lists ends a run with the journal's lines about its subject, and the event."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora.app.job import _Run
from dora.cli.app import _end
from dora.core.ids import GroupId
from dora.core.phases import GroupPhase, ImpossibleChange
from dora.journal.codec import FORMAT, Header
from dora.journal.run_folder import RunFolder
from dora.journal.writer import JournalWriter
from tests.core.builders import started

#: The last event is not in the journal.
EXCERPT = (
    "     0.000 s  WeightPushFinished instance=0 attempt=1 version=0",
    "              → AdmitGroup group=1 version=0 deadline=1",
    "              → Generate trajectory=2 attempt=1 instance=0 version=0 num_tokens=0",
    "              → Generate trajectory=3 attempt=1 instance=0 version=0 num_tokens=0",
    "     0.000 s  GenerationFinished trajectory=2 attempt=1 num_tokens=1 length_capped=False spans=((0, 0, 1),)",
    "              → GradeTrajectory trajectory=2 attempt=2",
    "     0.000 s  GenerationFinished trajectory=3 attempt=1 num_tokens=1 length_capped=False spans=((0, 0, 1),)",
)


@pytest.fixture
def refused(tmp_path: Path) -> ImpossibleChange:
    """The error of a group that has got into a wrong phase; the journal is in the folder."""
    core = started(instances=1, slots=4)
    core.answer(0)
    core.finished(2)
    with JournalWriter(RunFolder(tmp_path).journal) as journal:
        journal.append(Header(FORMAT, "run-1", "2026-01-01T00:00:00Z", "0.1.0", core.state.settings))
        for event, commands in core.journal:
            journal.handled(event, commands)
    core.state.ledger.groups[GroupId(1)].phase = GroupPhase.COMPLETE
    with pytest.raises(ImpossibleChange) as caught:
        core.finished(3)
    return caught.value


async def test_a_run_adds_what_its_journal_has_about_the_subject(refused: ImpossibleChange, tmp_path: Path) -> None:
    assert refused.excerpt == EXCERPT[-1:]
    async with AsyncExitStack() as stack:
        job: Any = SimpleNamespace(state=None, epoch=0, started_at=0.0, time_scale=1.0)
        frontend: Any = None
        assert _Run(job, RunFolder(tmp_path), stack, frontend, held=stack, streams=1)._explain(refused) is None
    assert refused.excerpt == EXCERPT


def test_the_command_line_prints_the_excerpt(refused: ImpossibleChange, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _end(refused, code=1)
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "dora: group 1: complete --> grading by GenerationFinished is impossible "
        "(version 0, deadline 1, 0 siblings unfinished, 2 ungraded)",
        f"dora:     {EXCERPT[-1]}",
    ]
