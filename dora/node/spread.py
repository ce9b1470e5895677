"""Which nodes have which versions, and from whom each of them, and this host, receives them.

Invariant: only versions that the controller has journaled are named to nodes, until they are released. This host is the
last receiver, and keeps the durable copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from dora.core.ids import VersionId
from dora.errors import RemoteError
from dora.node.place import Changes, Place
from dora.node.sources import Holding, choose
from dora.transport.node_messages import FolderOrder, Source
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import Manifest, StoreError, VersionStore

log = structlog.get_logger(__name__)

#: Delay before a version that could not be received is asked for again.
FETCH_PAUSE_S: Final = 1.0
#: Limit of the wait for a version on a node; one that takes longer than this is of no use to a run.
ARRIVAL_TIMEOUT_S: Final = 3_600.0


class Spread:
    def __init__(
        self, places: Sequence[Place], *, store: VersionStore, relay: Relay, source: Source, changes: Changes
    ) -> None:
        """`source`: this host's relay, as nodes see it."""
        self._places = places
        self._store = store
        self._relay = relay
        self._source = source
        self._changes = changes
        self._manifests: dict[VersionId, Manifest] = {}
        self._own: dict[VersionId, Holding] = {}  # what this host has
        #: Versions that the ranks will write again: on their node, so that the journaled bytes are kept.
        self._again: dict[VersionId, Manifest] = {}

    def hold_again(self, manifest: Manifest) -> None:
        """Have the ranks' node receive a version that its ranks will write again."""
        self._again[manifest.version] = manifest
        self._own.setdefault(manifest.version, Holding.NOTHING)
        self.note_own(manifest.version)

    def has_again(self, place: Place) -> bool:
        """Return whether the ranks' node has all versions that its ranks will write again."""
        return place.report is not None and self._again.keys() <= place.report.versions.keys()

    def hold(self, manifest: Manifest) -> None:
        """Have the nodes receive a version that is journaled."""
        self._again.pop(manifest.version, None)
        self._manifests[manifest.version] = manifest
        self._own.setdefault(manifest.version, Holding.NOTHING)
        self.note_own(manifest.version)

    def note_own(self, version: VersionId) -> None:
        """Look whether this host's store has a version."""
        try:
            self._store.folder(version)
        except StoreError:
            return
        self._own[version] = Holding.ALL
        self._changes.tell()

    async def fetch(self, version: VersionId) -> None:
        """Bring a version into this host's store, unless it is there, or is released meanwhile."""
        while self._own.get(version) is Holding.NOTHING:
            self._own[version] = Holding.SOME
            try:
                await self._changes.until(lambda: version not in self._own or bool(self._own_sources(version)))
                if version in self._own:
                    await self._relay.fetch(self._manifests[version], lambda: self._own_sources(version))
                    self._own[version] = Holding.ALL
                    self._changes.tell()
            except StoreError as err:
                log.warning("version_not_received", version=version, reason=str(err))
                await asyncio.sleep(FETCH_PAUSE_S)
            finally:
                if self._own.get(version) is Holding.SOME:
                    self._own[version] = Holding.NOTHING

    def release(self, version: VersionId) -> None:
        """Have the nodes delete a version."""
        if self._manifests.pop(version, None) is not None:
            self._own.pop(version, None)
            self._changes.tell()

    async def folder(self, place: Place, version: VersionId) -> Path:
        """Wait until a node has a version, and return its folder there; RemoteError if the node is lost."""
        identity = place.identity

        def is_decided() -> bool:
            return place.report is None or place.identity != identity or version in place.report.versions

        try:
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
                await self._changes.until(is_decided)
        except TimeoutError:
            problem = place.report.problem if place.report is not None else place.lost
            raise RemoteError(
                f"node {place.name}: has not received version {version} in {ARRIVAL_TIMEOUT_S:g} s; {problem}"
            ) from None
        if place.report is None or version not in place.report.versions:
            raise RemoteError(f"node {place.name} was lost before it had version {version}: {place.lost}")
        return Path(place.report.versions[version])

    def orders(self, place: Place) -> dict[int, FolderOrder]:
        """Return the versions that a node must hold, with their sources."""
        if place.has_ranks and place.number > 0:
            return {}
        return {
            version: FolderOrder(
                files=dict(manifest.files),
                num_bytes=manifest.num_bytes,
                chain=manifest.chain,
                sources=tuple(self._sources(version, place)),
            )
            for version, manifest in {**self._manifests, **(self._again if place.has_ranks else {})}.items()
        }

    def _own_sources(self, version: VersionId) -> list[VersionSource]:
        return [VersionSource(source.url, source.key) for source in self._sources(version, None)]

    def _sources(self, version: VersionId, receiver: Place | None) -> list[Source]:
        """Return the sources of a node, or of this host (None)."""
        chain = [place for place in self._places if not place.has_ranks]
        makers = [place for place in self._places[:1] if place.has_ranks]
        is_maker = receiver in makers
        has_own = not makers  # then the ranks, or the files of the model, are on this host
        held = [_holding(place, version) for place in chain]
        own = self._own.get(version, Holding.NOTHING)
        made = [own if has_own else _holding(makers[0], version)]
        if not has_own:
            held.append(own)
        position = len(chain) if receiver is None or is_maker else chain.index(receiver)
        chosen = choose(held, position, makers=made)
        return [source for i in chosen if (source := self._source_at(i, chain, makers, receiver)) is not None]

    def _source_at(
        self, position: int, chain: Sequence[Place], makers: Sequence[Place], receiver: Place | None
    ) -> Source | None:
        places = [*chain, None] if makers else [*chain]
        found = places[position] if position >= 0 else (makers[0] if makers else None)
        if found is receiver:
            return None
        if found is None:
            return self._source
        return found.report.relay if found.report is not None else None


def _holding(place: Place, version: VersionId) -> Holding:
    report = place.report
    if report is None:
        return Holding.GONE
    if version in report.versions:
        return Holding.ALL
    if report.problem:
        return Holding.GONE
    return Holding.SOME if version in report.fetching else Holding.NOTHING
