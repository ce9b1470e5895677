"""Who holds versions for the servers to read: the store of this host or, if servers are on nodes, each node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dora.core.ids import InstanceId, VersionId
from dora.weights.store import Manifest, VersionStore


class Holders(Protocol):
    def hold(self, manifest: Manifest) -> None:
        """Have all of them receive a version that is published."""

    async def fetch(self, version: VersionId, *, may_wait: Callable[[], bool]) -> None:
        """Bring a version into the store of this host. StoreError if it does not come, and `may_wait` is false."""

    async def folder(self, instance: InstanceId, version: VersionId) -> Path:
        """Return the folder of a version, as an instance sees it, once it is there; RemoteError or StoreError."""

    async def own_folder(self, version: VersionId) -> Path:
        """Return the folder of a version on this host, once it is there; StoreError."""

    def release(self, version: VersionId) -> None:
        """Have all of them delete a version."""

    def drop(self, manifest: Manifest) -> None:
        """Have the node of the ranks delete a version that they have written again, and that nothing needs."""


@dataclass(frozen=True)
class OwnStore:
    """Ranks, servers and controller use one store."""

    store: VersionStore

    def hold(self, manifest: Manifest) -> None: ...

    async def fetch(self, version: VersionId, *, may_wait: Callable[[], bool]) -> None: ...

    async def folder(self, instance: InstanceId, version: VersionId) -> Path:
        return await self.own_folder(version)

    async def own_folder(self, version: VersionId) -> Path:
        return await asyncio.to_thread(self.store.folder, version)

    def release(self, version: VersionId) -> None: ...

    def drop(self, manifest: Manifest) -> None: ...
