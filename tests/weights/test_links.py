"""What crosses each link of a chain of relays: a version once, whatever the links and the sources do."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from dora.weights.arrival import RelayLimits
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import StoreError, VersionStore
from tests.weights.nodes import LIMITS, PIECE, WAIT_S, Proxy, fetcher, held, left_in, node, publish, store_at

#: Enough pieces that those on their way when a link breaks are few.
LARGE = {"config.json": b"{}", "model.safetensors": random.Random(1).randbytes(PIECE * 63 + 5)}
NUM_BYTES = sum(map(len, LARGE.values()))
NAMES = ("maker", "a", "b", "c")


class Chain:
    """A maker and three receivers, each behind a proxy and each taking from the one before."""

    def __init__(self, root: Path, *, limits: RelayLimits = LIMITS) -> None:
        self.limits = limits
        self.stores = {name: store_at(root / name) for name in NAMES}
        self.manifest = publish(self.stores["maker"], files=LARGE)
        self.relays: dict[str, Relay] = {}
        self.links: dict[str, Proxy] = {}  # what a node sends

    @asynccontextmanager
    async def open(self, **proxied: dict[str, object]) -> AsyncIterator[Chain]:
        async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
            for name, store in self.stores.items():
                opened = await stack.enter_async_context(node(store, limits=self.limits, **proxied.get(name, {})))
                self.relays[name], self.links[name] = opened
            yield self

    async def fetch(self) -> None:
        """All receivers at once; those at the end ask before the first knows of the version."""
        async with asyncio.TaskGroup() as tasks:
            for before, name in reversed([*itertools.pairwise(NAMES)]):
                tasks.create_task(self.fetch_from(before, name))
                await self.links[before].until_asked()

    async def fetch_from(self, before: str, name: str) -> None:
        await self.relays[name].fetch(self.manifest, lambda: [self.links[before].source()])

    def sent(self) -> dict[str, int]:
        return {name: link.num_bytes for name, link in self.links.items()}


async def test_each_node_of_a_chain_sends_a_version_once(tmp_path: Path) -> None:
    async with Chain(tmp_path).open() as chain:
        await chain.fetch()
    assert all(held(store) == LARGE for store in chain.stores.values())
    assert chain.sent().pop("c") == 0
    assert all(NUM_BYTES < chain.sent()[name] < 1.1 * NUM_BYTES for name in NAMES[:3])
    assert all(chain.links[name].connections == 1 for name in NAMES[:3])


@pytest.mark.parametrize("slow", NAMES[:3])
async def test_so_it_does_with_a_slow_link(tmp_path: Path, slow: str) -> None:
    async with Chain(tmp_path).open(**{slow: {"pace": 0.01}}) as chain:
        await chain.fetch()
    assert all(held(store) == LARGE for store in chain.stores.values())
    assert all(NUM_BYTES < chain.sent()[name] < 1.1 * NUM_BYTES for name in NAMES[:3])


@pytest.mark.parametrize("cut", NAMES[:3])
async def test_so_it_does_with_a_link_that_is_cut(tmp_path: Path, cut: str) -> None:
    async with Chain(tmp_path).open(**{cut: {"after": 30 * PIECE + 7, "cuts": True}}) as chain:
        await chain.fetch()
    assert all(held(store) == LARGE for store in chain.stores.values())
    assert all(NUM_BYTES < chain.sent()[name] < 1.1 * NUM_BYTES for name in NAMES[:3])


async def test_a_receiver_that_dies_in_the_middle_is_passed_by(tmp_path: Path) -> None:
    """The one behind it goes on at the maker, where it has stopped: the maker sends what it lacks, and no more."""
    chain = Chain(tmp_path)
    async with AsyncExitStack() as stack, chain.open(b={"after": 1 << 40}):
        a = await stack.enter_async_context(Proxy(chain.links["maker"].url, after=30 * PIECE))
        around = await stack.enter_async_context(Proxy(chain.links["maker"].url))
        first = asyncio.create_task(chain.relays["a"].fetch(chain.manifest, lambda: [a.source()]))
        sources = [chain.links["a"].source(), around.source()]
        second = asyncio.create_task(chain.relays["b"].fetch(chain.manifest, lambda: sources))
        await chain.links["a"].until(20 * PIECE)
        first.cancel()
        await asyncio.wait({first})
        sources.pop(0)
        await second
    assert held(chain.stores["b"]) == LARGE
    assert left_in(chain.stores["a"]) == []
    assert chain.links["a"].num_bytes + around.num_bytes < 1.1 * NUM_BYTES


def lie(store: VersionStore) -> None:
    """Flip a bit of a stored file; the checksums of pieces will be right."""
    path = store.folder(3) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[40 * PIECE] ^= 1
    path.write_bytes(data)


async def test_a_lying_maker_behind_an_honest_node_is_found_out_by_everyone(tmp_path: Path) -> None:
    """The honest node passes lies on until it knows; then all take the file once more, from the true source."""
    chain = Chain(tmp_path)
    other = store_at(tmp_path / "other")
    assert publish(other, files=LARGE) == chain.manifest
    lie(chain.stores["maker"])
    async with chain.open(), node(other) as (_, true), asyncio.TaskGroup() as tasks:
        sources = {"a": [chain.links["maker"], true], "b": [chain.links["a"]], "c": [chain.links["b"]]}
        for name, links in sources.items():
            known = [link.source() for link in links]
            tasks.create_task(chain.relays[name].fetch(chain.manifest, lambda known=known: known))
    assert all(held(chain.stores[name]) == LARGE for name in ("a", "b", "c"))
    sent = chain.sent()
    assert sent["maker"] < 1.1 * NUM_BYTES, "it is not asked again"
    assert NUM_BYTES < true.num_bytes < 1.1 * NUM_BYTES
    assert sent["a"] < 2.2 * NUM_BYTES
    assert sent["b"] < 2.2 * NUM_BYTES


async def test_without_a_true_source_nobody_gets_a_lie(tmp_path: Path) -> None:
    chain = Chain(tmp_path, limits=RelayLimits(piece_bytes=PIECE, wait_s=0.2, pause_s=0.001, attempts=4))
    lie(chain.stores["maker"])
    async with chain.open():
        fetches = [chain.fetch_from(before, name) for before, name in itertools.pairwise(NAMES)]
        ended = await asyncio.gather(*fetches, return_exceptions=True)
    assert [type(err) for err in ended] == [StoreError] * 3
    assert all(left_in(chain.stores[name]) == [] for name in ("a", "b", "c"))
    assert chain.sent()["maker"] < 2.2 * NUM_BYTES


async def test_two_liars_that_take_turns_end_a_fetch(tmp_path: Path) -> None:
    stores = [store_at(tmp_path / name) for name in ("x", "y")]
    manifests = [publish(store, files=LARGE) for store in stores]
    for store in stores:
        lie(store)
    async with asyncio.timeout(WAIT_S), node(stores[0]) as (_, x), node(stores[1]) as (_, y):
        turn = 0

        def sources() -> list[VersionSource]:
            nonlocal turn
            turn += 1
            return [(x, y)[turn // 40 % 2].source()]

        with pytest.raises(StoreError, match="does not fit the manifest"):
            await fetcher(store_at(tmp_path / "a")).fetch(manifests[0], sources)
    assert x.num_bytes + y.num_bytes < 4.4 * NUM_BYTES


async def test_a_slow_link_is_no_failure_as_long_as_pieces_come(tmp_path: Path) -> None:
    """The node between answers that the next piece is not there yet more often than a source may fail in a row."""
    limits = RelayLimits(piece_bytes=PIECE, wait_s=0.02, pause_s=0.0, attempts=16)
    chain = Chain(tmp_path, limits=limits)
    async with chain.open(maker={"pace": 0.06}), asyncio.TaskGroup() as tasks:
        for before, name in (("maker", "a"), ("a", "b")):
            tasks.create_task(chain.fetch_from(before, name))
    assert held(chain.stores["b"]) == LARGE
    assert chain.links["a"].connections > 16, "one for each failure"
