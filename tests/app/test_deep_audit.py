"""What a deep audit computes with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dora.app.deep import recompute
from dora.config.load import load
from dora.journal.codec import FORMAT, Header
from dora.journal.commits import Commits
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from tests.core.world import settings


@pytest.fixture
def threads() -> Iterator[int]:
    """A number of threads that this process has during the test; the earlier number is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield 7
    torch.set_num_threads(before)


def test_a_deep_audit_uses_the_threads_of_a_rank_and_not_all_cores(tmp_path: Path, threads: int) -> None:
    folder = RunFolder.create(tmp_path, name="a")
    folder.trajectories.touch()
    with TokenWriter(folder.tokens, epoch=0) as tokens, JournalWriter(folder.journal) as journal:
        journal.append(Header(FORMAT, folder.run_id, "", "", settings()))
        Commits(journal=journal, tokens=tokens).sync()
    recompute(folder, load(None, ["trainer.threads=2"], environ={}))
    assert torch.get_num_threads() == 2
