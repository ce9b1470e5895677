"""The journaled versions: their labels on servers, and the version that a server's label stands for.

Invariant: a label has a digest of the version's bytes, so that a server with other bytes under the same number (of a
lost history or of another run) is recognized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from dora.core.ids import FOREIGN_VERSION, VersionId
from dora.core.versions import digest_of
from dora.engine.names import version_in, version_label
from dora.errors import RunFailed


class Published:
    """All versions of one run."""

    def __init__(
        self,
        run_id: str,
        *,
        files: Mapping[VersionId, Mapping[str, str]] | None = None,
        missing: Collection[int] = (),
    ) -> None:
        """`files`: version -> file name -> checksum, as journaled. `missing`: versions to be written again."""
        self._run_id = run_id
        self._files = dict(files or {})
        self._digests = {version: digest_of(names) for version, names in self._files.items()}
        self._missing = {version: asyncio.Event() for version in missing}

    def add(self, version: VersionId, files: Mapping[str, str], *, is_needed: bool) -> None:
        """Add a version that the trainer wrote, possibly again; RunFailed if it is needed and now has other bytes."""
        if self._files.setdefault(version, files) != files and is_needed:
            raise RunFailed(
                f"version {version} was lost with the memory of its host before a copy was on the disk, and the "
                "trainer has now written other bytes: the unfinished answers of the version cannot be continued"
            )
        self._digests.setdefault(version, digest_of(files))
        if version in self._missing:
            self._missing.pop(version).set()

    async def available(self, version: VersionId) -> None:
        """Wait until the store has a version; after a loss the trainer writes it again."""
        if version in self._missing:
            await self._missing[version].wait()

    def label(self, version: VersionId) -> str:
        """Return the label of a version on servers."""
        return version_label(self._run_id, version, digest=self._digests[version])

    def version_of(self, label: str) -> VersionId:
        """Return the version with this label, or FOREIGN_VERSION if no journaled version has the label."""
        version = version_in(label, run_id=self._run_id)
        if version is None or version not in self._digests or self.label(version) != label:
            return FOREIGN_VERSION
        return version
