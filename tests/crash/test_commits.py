"""Group commit while a run ends in the middle of it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dora.journal.codec import Note
from dora.journal.commits import Commits
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from tests.crash.checker import records


async def test_the_records_of_a_cancelled_commit_are_stored_before_later_ones(tmp_path: Path) -> None:
    """A failure elsewhere cancels the committing task while its job is still queued for a thread."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    release = threading.Event()
    busy = loop.run_in_executor(None, release.wait)
    path = tmp_path / "journal.msgpack"
    with TokenWriter(tmp_path / "tokens.bin") as tokens, JournalWriter(path) as journal:
        commits = Commits(journal=journal, tokens=tokens)
        task = asyncio.create_task(commits.run())
        journal.append(Note(0.0, "first", {}))
        commits.soon()
        for _ in range(5):
            await asyncio.sleep(0)  # the task takes the record, and waits for its thread
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.append(Note(1.0, "second", {}))
        commits.sync()
        release.set()
        await busy
    assert [record["name"] for _, record in records(path.read_bytes())] == ["first", "second"]
