"""The versions that the journal knows, by content: what their labels are, and what a label on a server means.

Invariant: a label carries the digest of the version's bytes, so a server that holds other bytes under the same number
(of a history that was lost, or of another run) never passes for one that holds this version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from dora.core.ids import FOREIGN_VERSION, VersionId
from dora.engine.names import version_in, version_label
from dora.errors import RunFailed
from dora.weights.store import checksum_of_files


class Published:
    """All versions of one run."""

    def __init__(
        self,
        run_id: str,
        *,
        files: Mapping[VersionId, Mapping[str, str]] | None = None,
        missing: Collection[int] = (),
    ) -> None:
        """`files`: checksums by name, by version, as journaled. `missing`: those that the trainer has to make again."""
        self._run_id = run_id
        self._checksums = {version: checksum_of_files(one) for version, one in (files or {}).items()}
        self._missing = {version: asyncio.Event() for version in missing}

    def add(self, version: VersionId, files: Mapping[str, str], *, is_needed: bool) -> None:
        """The trainer has published it, or made it again. RunFailed if it has other bytes now and is needed."""
        checksum = checksum_of_files(files)
        if self._checksums.setdefault(version, checksum) != checksum and is_needed:
            raise RunFailed(
                f"version {version} was lost with the memory of its host before a copy was on disk, and the trainer "
                "makes other bytes of it now: the unfinished answers that it had begun cannot go on"
            )
        if version in self._missing:
            self._missing.pop(version).set()

    async def available(self, version: VersionId) -> None:
        """Return once the store holds it; unblocked by the trainer, which makes it again after a loss."""
        if version in self._missing:
            await self._missing[version].wait()

    def label(self, version: VersionId) -> str:
        """What servers call the weights of a version."""
        return version_label(self._run_id, version, checksum=self._checksums[version])

    def version_of(self, label: str) -> VersionId:
        """The version a label names; FOREIGN_VERSION unless it names the bytes that the journal knows."""
        version = version_in(label, run_id=self._run_id)
        if version is None or version not in self._checksums or self.label(version) != label:
            return FOREIGN_VERSION
        return version
