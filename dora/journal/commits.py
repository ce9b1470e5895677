"""Group commit of journal and token store: one task writes to the disk, and all others wait for it.

Invariant: tokens are on the disk before the journal records that refer to them are written, and a waiter continues only
when its record is on the disk. A commit includes everything written before it begins, so that one pair of syncs
serves many events. A commit that finds the disk full is repeated until there is space. Any other failed commit ends the
run, and no waiter continues.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from dora.journal.frames import FrameWriter, JournalError, JournalFull

#: How long a commit is repeated while the disk is full. Training and pushes wait meanwhile, and generated tokens stay
#: in memory; the staleness bound limits their number.
FULL_TIMEOUT_S = 600.0
_PAUSE_S = 1.0


class Commits:
    """Writer of journal and token store, which reports how much of the journal is on the disk."""

    def __init__(self, *, journal: FrameWriter, tokens: FrameWriter) -> None:
        self._journal = journal
        self._tokens = tokens
        self.position = 0  #: number of this process's journal records that are on the disk
        self.num_syncs = 0
        self.on_full: Callable[[str], None] = lambda reason: None  #: called when a commit begins to wait for space
        self._requested = asyncio.Event()
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # (position, callback)
        self._taken: deque[tuple[bytes, bytes]] = deque()  # frames of tokens and journal, not on the disk yet
        self._storing = threading.Lock()
        self._failed = False  # it is unknown what is on the disk, so nothing more is written
        for file in (journal, tokens):
            file.on_large = self.soon

    @property
    def written(self) -> int:
        """The position after all that has been written, on the disk or not."""
        return self._journal.num_records

    def soon(self) -> None:
        """Request a commit without waiting for it."""
        self._requested.set()

    async def durable(self, position: int) -> None:
        """Wait until the journal is on the disk up to `position`."""
        if position > self.position:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(position, lambda: None if done.done() else done.set_result(None))
            await done

    def then(self, position: int, callback: Callable[[], None], *, is_urgent: bool = True) -> None:
        """Call `callback` when the journal is on the disk up to `position`, at once if it already is.

        If `is_urgent`, a commit is requested; otherwise the callback waits for a commit that something else requests.
        """
        if position <= self.position:
            callback()
            return
        self._waiting.append((position, callback))
        if is_urgent:
            self._requested.set()

    async def run(self) -> None:
        """Commit whenever a commit is requested."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            position = self._take()
            await self._store_patiently()
            self._reached(position)

    async def _store_patiently(self) -> None:
        deadline = 0.0
        while True:
            try:
                return await asyncio.to_thread(self._store)
            except JournalFull as err:
                if deadline and time.monotonic() > deadline:
                    self._fail()
                    raise
                if not deadline:
                    deadline = time.monotonic() + FULL_TIMEOUT_S
                    self.on_full(str(err))
            await asyncio.sleep(_PAUSE_S)

    def sync(self) -> None:
        """Commit everything now, and block; used at the start and the end of a run. No effect after a failure."""
        if self._failed:
            return
        position = self._take()
        try:
            self._store()
        except JournalFull:
            self._fail()
            raise
        self._reached(position)

    def _take(self) -> int:
        """Take everything that was written; return the position after it."""
        self._taken.append((self._tokens.take(), self._journal.take()))
        return self._journal.num_records

    def _store(self) -> None:
        """Store the frames that were taken, in order, including those that a cancelled task has left."""
        with self._storing:
            while self._taken:
                tokens, journal = self._taken[0]
                try:
                    self._tokens.store(tokens)
                    self._taken[0] = (b"", journal)
                    self._journal.store(journal)
                except JournalFull:
                    raise
                except JournalError:
                    self._fail()
                    raise
                self._taken.popleft()
                self.num_syncs += 1

    def _fail(self) -> None:
        self._failed = True
        self._tokens.abandon()
        self._journal.abandon()

    def _reached(self, position: int) -> None:
        self.position = max(self.position, position)
        waiting, self._waiting = self._waiting, []
        for wanted, callback in waiting:
            if wanted <= self.position:
                callback()
            else:
                self._waiting.append((wanted, callback))
