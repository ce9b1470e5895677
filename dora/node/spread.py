"""Which nodes have which versions, and the sources from which each node, and this host, receives them.

Invariant: only versions that the controller has journaled are named to nodes, until they are released; with deltas, the
newest version and the one before it for longer, as the base of the next one. This host is the last receiver, and keeps
the durable copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from dora.core.ids import VersionId
from dora.errors import RemoteError
from dora.node.place import ALIVE_S, Changes, Place
from dora.node.sources import Stock, choose, last_known
from dora.transport.node_messages import FolderOrder, RelaySource
from dora.weights.merging import has_recipe
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import Manifest, StoreError, VersionStore

log = structlog.get_logger(__name__)

#: Delay before a version that could not be received is asked for again.
FETCH_PAUSE_S: Final = 1.0
#: Limit of the wait for a version on a node; a version that takes longer is useless to a run.
ARRIVAL_TIMEOUT_S: Final = 3_600.0


class Spread:
    def __init__(
        self,
        places: Sequence[Place],
        *,
        store: VersionStore,
        relay: Relay,
        source: RelaySource,
        changes: Changes,
        whole_every: int,
        model: Path,
    ) -> None:
        """`source`: this host's relay, as nodes see it. `whole_every`: versions that are no multiple of this travel as
        deltas, if possible; 0: none. `model`: the folder of the model on this host."""
        self._whole_every = whole_every
        self._places = places
        self.maker: Place | None = next((place for place in places if place.has_ranks), None)  #: where rank 0 is
        self._store = store
        self._relay = relay
        self._model = model
        self._source = source
        self._changes = changes
        self._manifests: dict[VersionId, Manifest] = {}
        self._own: dict[VersionId, Stock] = {}  # what this host has
        self._released: set[VersionId] = set()  # that nodes may still need as bases
        #: Versions that ranks wrote again and nothing needs, with their node: named to it until it has reported them.
        self._unneeded: dict[VersionId, tuple[Place, Manifest]] = {}

    def has_again(self, place: Place) -> bool:
        """Return whether the ranks' node has all needed versions, which its ranks may write again, unless no node has
        them."""
        others = [other for other in self._places if other is not place]
        kept = {
            version
            for version in self._manifests.keys() - self._released
            if self._own[version] is Stock.ALL or Stock.ALL in (_holding(other, version) for other in others)
        }
        return place.report is not None and kept <= place.report.versions.keys()

    def hold(self, manifest: Manifest) -> None:
        """Have the nodes receive a version that is journaled."""
        self._unneeded.pop(manifest.version, None)
        self._manifests[manifest.version] = manifest
        self._own.setdefault(manifest.version, Stock.NOTHING)
        self.note_own(manifest.version)

    def note_own(self, version: VersionId) -> None:
        """Look whether this host's store has a version."""
        with suppress(StoreError):
            self._store.folder(version)
            self._own[version] = Stock.ALL
        self._changes.tell()

    async def fetch(self, version: VersionId, *, may_wait: Callable[[], bool] = lambda: True) -> None:
        """Bring a version into this host's store, unless it is there, or is released meanwhile.

        StoreError if it cannot be received, and `may_wait` does not allow another attempt.
        """
        if self._own.get(version) is Stock.ALL and (base := self._base(version)) is not None:
            with suppress(StoreError):
                await self._relay.offer_delta(version, base)
        while (holding := self._own.get(version)) in (Stock.NOTHING, Stock.SOME):
            if holding is Stock.SOME:  # another call receives it: the version was published again meanwhile
                await self._changes.until(lambda: self._own.get(version) is not Stock.SOME)
                continue
            problem = await self._attempt(version, may_wait)
            if problem and version in self._own:
                if not may_wait():
                    raise StoreError(f"version {version} was not received: {problem}")
                await self._until(lambda: version not in self._own, timeout_s=FETCH_PAUSE_S)

    async def _attempt(self, version: VersionId, may_wait: Callable[[], bool]) -> str:
        """Receive a version once a node has it; return a problem, or an empty text."""
        await self._until(lambda: version not in self._own or bool(self._own_sources(version)), timeout_s=ALIVE_S)
        if self._own.get(version) is not Stock.NOTHING:
            return ""
        known = last_known(partial(self._own_sources, version))
        if not known():
            return "no node has it"
        self._own[version] = Stock.SOME
        try:
            await self._relay.fetch(
                self._manifests[version],
                lambda: known() if self._own_sources(version) or may_wait() else [],
                base=self._base(version),
                model=self._model,
            )
            self._own[version] = Stock.ALL
        except StoreError as err:
            log.warning("version_not_received", version=version, reason=str(err))
            return str(err)
        finally:
            if self._own.get(version) is Stock.SOME:
                self._own[version] = Stock.NOTHING
            self._changes.tell()
        return ""

    async def _until(self, is_so: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait until that is so, but no longer than the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changes.until(is_so)

    def release(self, version: VersionId) -> None:
        """Have the nodes delete a version, as soon as none needs it as the base of a delta."""
        if version in self._manifests:
            self._released.add(version)
            self._changes.tell()

    def drop(self, manifest: Manifest) -> None:
        """Have the ranks' node delete a version that they have written again, unless nodes hold it as a base.

        A node deletes what it held and is no longer ordered to hold.
        """
        if self.maker is not None and manifest.version not in self._manifests:
            self._unneeded[manifest.version] = self.maker, manifest
            self._changes.tell()

    def _forget_released(self) -> None:
        for version, (place, _) in [*self._unneeded.items()]:
            if place.report is None or version in place.report.versions:
                del self._unneeded[version]
        for version in [version for version in self._released if not self._is_base(version)]:
            self._released.discard(version)
            del self._manifests[version]
            self._own.pop(version, None)
            self._changes.tell()  # no fetch waits for it

    def _is_base(self, version: VersionId) -> bool:
        """Return whether the next version will arrive as a delta to this one, or still does."""
        following, newest = VersionId(version + 1), max(self._manifests)
        if self._base(following) is None or newest > following:
            return False
        if newest == version:
            return True
        found = {_holding(place, following) for place in self._places if not place.has_ranks} | {self._own[following]}
        return not found <= {Stock.ALL, Stock.GONE}

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

    def orders(self) -> list[dict[int, FolderOrder]]:
        """Return the versions that each node must hold, with their sources, in the order of the places."""
        self._forget_released()
        found: list[dict[int, FolderOrder]] = [{} for _ in self._places]
        for version, manifest in self._manifests.items():
            for place, sources in self._sources(version):
                if place is not None:
                    found[place.number][version] = _order(manifest, sources, base=self._base(version))
        for version, (place, manifest) in self._unneeded.items():
            found[place.number][version] = _order(manifest, ())
        return found

    def _base(self, version: VersionId) -> VersionId | None:
        """Return the version to which a version has a delta, if any: none if receivers make its weights."""
        if (manifest := self._manifests.get(version)) is not None and has_recipe(manifest):
            return None
        return VersionId(version - 1) if self._whole_every and version % self._whole_every else None

    def _own_sources(self, version: VersionId) -> list[VersionSource]:
        [sources] = [sources for place, sources in self._sources(version) if place is None]
        return [VersionSource(source.url, source.key) for source in sources]

    def _sources(self, version: VersionId) -> list[tuple[Place | None, tuple[RelaySource, ...]]]:
        """Return all receivers, each with its sources; None is this host."""
        rolling = [place for place in self._places if not place.has_ranks]
        chain = [*rolling, None, *([self.maker] if self.maker is not None else [])]
        own = self._own.get(version, Stock.NOTHING)
        chosen = choose([own if place is None else _holding(place, version) for place in chain])
        return [
            (place, tuple(self._source_at(chain[i]) for i in sources))
            for place, sources in zip(chain, chosen, strict=True)
        ]

    def _source_at(self, place: Place | None) -> RelaySource:
        if place is None:
            return self._source
        assert place.report is not None, "it is not gone"
        return place.report.relay


def _holding(place: Place, version: VersionId) -> Stock:
    report = place.report
    if report is None or place.is_silent:
        return Stock.GONE
    if version in report.versions:
        return Stock.ALL
    if report.problem:
        return Stock.GONE
    return Stock.SOME if version in report.fetching else Stock.NOTHING


def _order(manifest: Manifest, sources: tuple[RelaySource, ...], *, base: VersionId | None = None) -> FolderOrder:
    files, num_bytes, chain = dict(manifest.files), manifest.num_bytes, manifest.chain
    return FolderOrder(files=files, num_bytes=num_bytes, chain=chain, sources=sources, base=base)
