"""Durable copies of versions, and the deletion of versions and checkpoints that are no longer needed.

Invariant: no version that is needed is deleted, and nothing is deleted before the event that caused it is on the disk.
A version whose copy finds the disk full stays in memory until there is space, as long as memory has room for others.
At a shutdown these tasks are completed, not cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from dora.controller.holders import Holders
from dora.controller.published import Published
from dora.controller.run_tasks import RunTasks
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import VersionId
from dora.core.versions import Window
from dora.errors import RunFailed
from dora.journal.commits import Commits
from dora.weights.checkpoints import drop
from dora.weights.store import Manifest, StoreError, StoreFull, VersionLost, VersionStore

log = structlog.get_logger(__name__)

#: Pause after the first attempt at a durable copy that found the disk full, in seconds. Each further attempt doubles
#: the pause up to a limit, because an attempt may write gigabytes.
COPY_PAUSE_S: Final = 1.0
MAX_COPY_PAUSE_S: Final = 16.0
#: For how long copies are still attempted on a full disk once the run ends, in seconds.
LAST_COPIES_S: Final = 30.0


class Copies:
    """Manager of the versions and checkpoints of a run."""

    def __init__(
        self,
        store: VersionStore,
        *,
        checkpoints: Path,
        published: Published,
        window: Window,
        commits: Commits,
        tasks: RunTasks,
        keep: int,
        holders: Holders,
        drop_elsewhere: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`checkpoints`: the folder of all checkpoints. `window`: the core's versions, which are all needed. `keep`:
        number of newest versions whose durable copies are kept although nothing needs them; 0: all. `drop_elsewhere`:
        deletes a checkpoint, by the name of its folder, on the hosts of the ranks."""
        self._store = store
        self._checkpoints = checkpoints
        self._published = published
        self._window = window
        self._commits = commits
        self._tasks = tasks
        self._keep = keep
        self._holders = holders
        self._drop_elsewhere = drop_elsewhere
        self._copies: dict[VersionId, asyncio.Task[None]] = {}  # in progress, by version
        self._gives_up_at: float | None = None  # by the event loop's clock; None until the run ends
        self._not_received: dict[VersionId, str] = {}  # why, of versions that only nodes have had
        self._only_in_memory: set[VersionId] = set()  # versions for which there was no space until the end

    def publish(self, event: ev.VersionPublished, *, position: int) -> None:
        """Copy a published version, unless it was written again in a replay and is no longer needed."""
        is_needed = event.version in self._window.entries
        self._published.add(event.version, event.files, is_needed=is_needed)
        if event.differs:
            log.warning("replayed_version_differs", version=event.version, checksum=event.differs)
        if event.files:
            keeping = self._keep_version(event, is_needed=is_needed, position=position)
            self._copies[event.version] = self._tasks.finishing(keeping, name=f"keep-{event.version}")

    async def keep_result(self, event: ev.Event) -> None:
        """Copy the final version before FinishRun is journaled: no resume would write the version again.

        No event is handled meanwhile. RunFailed if this host cannot receive the version, even after LAST_COPIES_S.
        """
        self.end()
        version = self._window.newest
        if isinstance(event, ev.VersionPublished) and event.files:
            self._holders.hold(_manifest(event))
        if version is not None and not (isinstance(event, ev.VersionPublished) and not event.files):
            await (self._copies.get(version) or self._copy(version))
            if problem := self._not_received.get(version):
                raise RunFailed(f"the last {problem}; continue with --resume, which has the ranks write it again")

    def end(self) -> None:
        """Wait for space for at most LAST_COPIES_S from now on, because the run is ending."""
        if self._gives_up_at is None:
            self._gives_up_at = asyncio.get_running_loop().time() + LAST_COPIES_S

    def release(self, order: cmd.ReleaseVersion, *, position: int) -> None:
        """Delete a version from the live store once its durable copy is complete."""
        self._tasks.finishing(self._release_when_copied(order.version, position=position), name="release")

    def drop_checkpoint(self, order: cmd.DropCheckpoint, *, position: int) -> None:
        """Delete a checkpoint by its name: in a copied run folder, the journal still has the paths of the original."""
        self._tasks.finishing(self._drop_when_durable(order, position=position), name="drop-checkpoint")

    async def _keep_version(self, event: ev.VersionPublished, *, is_needed: bool, position: int) -> None:
        version = event.version
        await self._commits.durable(position)
        if is_needed or (self._keeps(version) and version not in await asyncio.to_thread(self._store.durable)):
            self._holders.hold(_manifest(event))
            await self._copy(version)
        else:
            self._holders.drop(_manifest(event))
        if not is_needed:
            self._copies.pop(version, None)  # unless `_release_when_copied` has removed it
            await self._release(version)
        await self._prune()

    async def _copy(self, version: VersionId) -> None:
        """Make a durable copy for a resume and the audit; on failure, log an error and let the run continue."""
        pause_s = COPY_PAUSE_S
        try:
            await self._holders.fetch(version, may_wait=partial(self._may_wait, version))
        except StoreError as err:
            log.error("version_not_durable", version=version, reason=str(err))
            self._not_received[version] = str(err)
            return
        while self._keeps(version):
            try:
                await asyncio.to_thread(self._store.copy_durable, version)
                return
            except StoreFull as err:
                if not self._may_wait(version):
                    log.error("version_not_durable", version=version, reason=str(err))
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_COPY_PAUSE_S)
            except StoreError as err:
                if isinstance(err, VersionLost) and version in self._window.entries:
                    raise  # another process has deleted a version that the run needs
                log.error("version_not_durable", version=version, reason=str(err))
                return

    def _may_wait(self, version: VersionId) -> bool:
        """Whether a version may wait for space on the disk: it is needed, or takes no memory that others need."""
        if self._gives_up_at is not None and asyncio.get_running_loop().time() >= self._gives_up_at:
            self._only_in_memory.add(version)
            return False
        return version in self._window.entries or self._store.has_room_beside(version)

    async def _release_when_copied(self, version: VersionId, *, position: int) -> None:
        await self._commits.durable(position)
        copy = self._copies.pop(version, None)
        if copy is not None:
            await copy
        await self._release(version)
        await self._prune()

    async def _release(self, version: VersionId) -> None:
        self._holders.release(version)
        if version not in self._only_in_memory:
            await asyncio.to_thread(self._store.release, version)

    async def _drop_when_durable(self, order: cmd.DropCheckpoint, *, position: int) -> None:
        await self._commits.durable(position)
        try:
            await asyncio.to_thread(drop, self._checkpoints / Path(order.folder).name)
        except OSError as err:
            log.warning("checkpoint_not_deleted", folder=order.folder, reason=str(err))
        if self._drop_elsewhere is not None:
            await self._drop_elsewhere(Path(order.folder).name)

    def _keeps(self, version: int) -> bool:
        """Whether a durable copy is kept: the version is needed, or among the newest `weights.keep`."""
        return version in self._window.entries or not self._keep or version > (self._window.newest or 0) - self._keep

    async def _prune(self) -> None:
        """Delete the durable copies that are not kept."""
        if not self._keep:
            return
        stored = await asyncio.to_thread(self._store.durable)
        unneeded = [version for version in stored if not self._keeps(version)]
        await self._commits.durable(self._commits.written)  # including the ReleaseVersion of each
        for version in unneeded:
            await asyncio.to_thread(self._store.release_durable, version)


def _manifest(event: ev.VersionPublished) -> Manifest:
    return Manifest(event.version, event.files, event.num_bytes, event.chain)
