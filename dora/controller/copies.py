"""What becomes of versions in the store: their durable copies, and the deletion of what nothing needs.

Invariant: nothing is deleted before the disk has the event that caused it, and no version that is needed. The
coroutines are finished at a shutdown, not cancelled.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from dora.controller.published import Published
from dora.controller.work import Work
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import VersionId
from dora.core.versions import Window
from dora.journal.commits import Commits
from dora.weights.checkpoints import drop
from dora.weights.store import StoreError, StoreFull, VersionLost, VersionStore

log = structlog.get_logger(__name__)

#: Pauses after tries of a durable copy that found the disk full.
COPY_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)


class Copies:
    """The keeper of one run's versions and checkpoints."""

    def __init__(
        self,
        store: VersionStore,
        *,
        checkpoints: Path,
        published: Published,
        window: Window,
        commits: Commits,
        work: Work,
        keep: int,
    ) -> None:
        """`checkpoints`: their folder. `window`: the core's, of the versions that are needed. `keep`: durable versions
        kept besides; 0: all."""
        self._store = store
        self._checkpoints = checkpoints
        self._published = published
        self._window = window
        self._commits = commits
        self._work = work
        self._keep = keep
        self._copies: dict[VersionId, asyncio.Task[None]] = {}  # under way, by version

    def publish(self, event: ev.VersionPublished, *, position: int) -> None:
        """A version is in the store: it needs a durable copy, or, made again by a replay, it may need nothing."""
        is_needed = event.version in self._window.entries
        self._published.add(event.version, event.files, is_needed=is_needed)
        if event.differs:
            log.warning("replayed_version_differs", version=event.version, checksum=event.differs)
        if event.files:
            keeping = self._keep_version(event.version, is_needed=is_needed, position=position)
            self._copies[event.version] = self._work.finishing(keeping, name=f"keep-{event.version}")

    async def keep_result(self, event: ev.Event) -> None:
        """A durable copy, before the journal says that the run is finished: no resume would make the version again."""
        version = self._window.newest
        if version is not None and not (isinstance(event, ev.VersionPublished) and not event.files):
            await (self._copies.get(version) or self._copy(version))

    def release(self, order: cmd.ReleaseVersion, *, position: int) -> None:
        """The version leaves memory once its copy is made."""
        self._work.finishing(self._release_when_copied(order.version, position=position), name="release")

    def drop_checkpoint(self, order: cmd.DropCheckpoint, *, position: int) -> None:
        """The trainer's checkpoint is not needed any more. It is known by name: the run folder may have been copied
        since, and the original is not ours."""
        self._work.finishing(self._drop_when_durable(order, position=position), name="drop-checkpoint")

    async def _keep_version(self, version: VersionId, *, is_needed: bool, position: int) -> None:
        await self._commits.durable(position)
        if is_needed or version in self._kept_versions(version):
            await self._copy(version)
        if not is_needed:
            self._copies.pop(version, None)  # its release may have taken it
            await asyncio.to_thread(self._store.release, version)
        await self._prune()

    async def _copy(self, version: VersionId) -> None:
        """A durable copy, needed by a resume and by the audit; without it the run goes on, and says so."""
        for pause_s in COPY_PAUSES_S:
            try:
                await asyncio.to_thread(self._store.copy_durable, version)
                return
            except StoreFull:
                await asyncio.sleep(pause_s)
            except StoreError as err:
                if isinstance(err, VersionLost) and version in self._window.entries:
                    raise  # deleted by somebody else: the run would wait for it in vain
                log.error("version_not_durable", version=version, reason=str(err))
                return
        log.error("version_not_durable", version=version, reason="the disk of the run folder is full")

    async def _release_when_copied(self, version: VersionId, *, position: int) -> None:
        await self._commits.durable(position)
        copy = self._copies.pop(version, None)
        if copy is not None:
            await copy
        await asyncio.to_thread(self._store.release, version)
        await self._prune()

    async def _drop_when_durable(self, order: cmd.DropCheckpoint, *, position: int) -> None:
        await self._commits.durable(position)
        try:
            await asyncio.to_thread(drop, self._checkpoints / Path(order.folder).name)
        except OSError as err:
            log.warning("checkpoint_not_deleted", folder=order.folder, reason=str(err))

    def _kept_versions(self, *among: VersionId) -> set[VersionId]:
        """Those whose durable copies stay: what is needed, and the newest `weights.keep` of the others, or all."""
        keep, newest = self._keep, self._window.newest or 0
        return {*self._window.entries, *(v for v in among if not keep or v > newest - keep)}

    async def _prune(self) -> None:
        """Delete the durable copies that nothing needs and `weights.keep` does not ask for."""
        if not self._keep:
            return
        stored = await asyncio.to_thread(self._store.durable)
        unneeded = [version for version in stored if version not in self._kept_versions(version)]
        await self._commits.durable(self._commits.written)  # the last of their releases may be younger than the cause
        for version in unneeded:
            await asyncio.to_thread(self._store.release_durable, version)
