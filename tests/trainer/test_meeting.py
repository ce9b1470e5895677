"""Words between ranks over a real file that is taken away, in a process that a store without an end cannot hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys
from pathlib import Path
from torch.distributed import FileStore
from dora.trainer.meeting import Meeting

folder, again = Path(sys.argv[1]), sys.argv[2] == "again"

def fence():
    if not (folder / "epoch").exists():
        print("the run folder is gone", flush=True)
        os._exit(1)  # as a rank does: the destructor of this FileStore never returns

meeting = Meeting(FileStore(str(folder / "store"), 1), rank=0, size=1, fence=fence)
meeting.gather("a", what="a word")
folder.rename(folder.with_name("gone"))
if again:
    folder.mkdir()
meeting.say("another word")
meeting.hear("another word", rank=0)
meeting.hear("a word that is never said", rank=0)
"""


@pytest.mark.deep
@pytest.mark.parametrize("folder", ["absent", "again"])
def test_a_rank_whose_file_of_words_is_deleted_asks_the_fence(tmp_path: Path, folder: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "epoch").touch()
    rank = [sys.executable, "-c", RANK, str(run), folder]
    ended = subprocess.run(rank, capture_output=True, text=True, timeout=60)
    assert "the run folder is gone" in ended.stdout
