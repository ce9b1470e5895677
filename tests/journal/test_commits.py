"""Group commit: tokens before the records that refer to them, waiters after the sync, nothing after a failure."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora import files
from dora.journal import commits
from dora.journal.commits import Commits
from dora.journal.frames import FrameReader, FrameWriter, JournalError


@dataclass
class Log:
    journal: FrameWriter
    tokens: FrameWriter
    commits: Commits


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    journal, tokens = FrameWriter(tmp_path / "journal"), FrameWriter(tmp_path / "tokens")
    yield Log(journal, tokens, Commits(journal=journal, tokens=tokens))
    for file in (journal, tokens):
        file.close()


def write(log: Log) -> int:
    log.tokens.write(b"tokens")
    log.journal.write(b"names them")
    return log.journal.num_records


async def test_a_waiter_continues_when_both_files_are_on_the_disk(log: Log) -> None:
    done: list[files.Operation] = []
    with files.observed(done.append):
        running = asyncio.create_task(log.commits.run())
        await asyncio.wait_for(log.commits.durable(write(log)), 10)
        running.cancel()
    names = [(operation.kind, operation.path.name) for operation in done]
    assert names == [("append", "tokens"), ("sync", "tokens"), ("append", "journal"), ("sync", "journal")]


async def test_one_commit_serves_everything_written_before_it(log: Log) -> None:
    positions = [write(log) for _ in range(100)]
    running = asyncio.create_task(log.commits.run())
    await asyncio.wait_for(asyncio.gather(*(log.commits.durable(p) for p in positions)), 10)
    running.cancel()
    assert log.commits.num_syncs == 1


async def test_after_a_failed_sync_no_waiter_continues_and_nothing_is_written(log: Log, tmp_path: Path) -> None:
    def fail(operation: files.Operation) -> None:
        if operation.kind == "sync" and operation.path.name == "tokens":
            raise OSError(errno.EIO, "Input/output error")

    position = write(log)
    waiting = asyncio.create_task(log.commits.durable(position))
    with files.observed(fail):
        running = asyncio.create_task(log.commits.run())
        log.commits.soon()
        with pytest.raises(JournalError, match="tokens: cannot be written: Input/output error"):
            await running
    write(log)
    log.commits.sync()
    for file in (log.journal, log.tokens):
        file.close()
    assert not waiting.done()
    assert not list(FrameReader(tmp_path / "journal"))
    waiting.cancel()


class FullDisk:
    """Refuses to append to a file until it `has_space`."""

    def __init__(self, name: str) -> None:
        self.name, self.has_space = name, False
        self.refused = 0

    def __call__(self, operation: files.Operation) -> None:
        if operation.kind == "append" and operation.path.name == self.name and not self.has_space:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["journal", "tokens"])
async def test_a_commit_waits_for_space_and_stores_each_record_once(log: Log, tmp_path: Path, name: str) -> None:
    full, told = FullDisk(name), asyncio.Queue[str]()
    log.commits.on_full = told.put_nowait
    waiting = asyncio.create_task(log.commits.durable(write(log)))
    with files.observed(full):
        running = asyncio.create_task(log.commits.run())
        reason = await asyncio.wait_for(told.get(), 10)
        later = asyncio.create_task(log.commits.durable(write(log)))
        assert not waiting.done()
        full.has_space = True
        await asyncio.wait_for(asyncio.gather(waiting, later), 10)
        running.cancel()
    assert reason == f"{tmp_path / name}: cannot be written: No space left on device"
    assert told.empty()
    for file, record in (("journal", b"names them"), ("tokens", b"tokens")):
        assert [read for _, read in FrameReader(tmp_path / file)] == [record] * 2


async def test_a_disk_that_stays_full_ends_the_run(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "FULL_TIMEOUT_S", 0.5)
    full = FullDisk("journal")
    waiting = asyncio.create_task(log.commits.durable(write(log)))
    with files.observed(full):
        log.commits.soon()
        with pytest.raises(JournalError, match="journal: cannot be written: No space left on device"):
            await asyncio.wait_for(log.commits.run(), 10)
        refused = full.refused
        log.commits.sync()
    assert refused == full.refused > 1
    assert not waiting.done()
    waiting.cancel()


async def test_a_run_that_ends_while_the_disk_is_full_says_so(log: Log) -> None:
    write(log)
    with files.observed(FullDisk("journal")), pytest.raises(JournalError, match="No space left on device"):
        log.commits.sync()


async def test_a_callback_runs_when_its_position_is_reached_and_not_before(log: Log) -> None:
    first = write(log)
    called: list[str] = []
    log.commits.then(first, lambda: called.append("first"))
    log.commits.then(first + 1, lambda: called.append("second"))
    log.commits.sync()
    assert called == ["first"]
    write(log)
    log.commits.sync()
    log.commits.then(first, lambda: called.append("at once"))
    assert called == ["first", "second", "at once"]


async def test_many_pending_bytes_request_a_commit(log: Log, tmp_path: Path) -> None:
    stored = asyncio.Event()
    loop = asyncio.get_running_loop()
    with files.observed(lambda operation: loop.call_soon_threadsafe(stored.set)):
        running = asyncio.create_task(log.commits.run())
        for _ in range(20):
            log.journal.write(bytes(1 << 16))
        await asyncio.wait_for(stored.wait(), 10)
        running.cancel()
    log.commits.sync()
    assert len(list(FrameReader(tmp_path / "journal"))) > 10
