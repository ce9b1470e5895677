"""Versions on nodes: what is waited for when one does not come to this host, and what stays on them at a resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from dora.app.node_ranks import NodeRanks
from dora.app.nodes import NodeVersions, name_versions
from dora.app.resume import Start, read_run
from dora.config.schema import Config
from dora.controller import copies as copies_module
from dora.controller.copies import Copies
from dora.controller.published import Published
from dora.controller.run_tasks import RunTasks
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import VersionId
from dora.errors import RunFailed
from dora.journal.run_folder import RunFolder
from dora.node import spread as spread_module
from dora.transport.node_messages import NodeOrders, ProcessState, RelaySource
from dora.weights.store import Manifest, VersionStore
from tests.core.world import run as run_of_world
from tests.journal.recorded import first_event, with_event, write
from tests.node.peers import WAIT_S, Controller, Peer, config_of, controller
from tests.weights.nodes import KEY, held, node, publish, store_at

THREE = VersionId(3)
#: No disk has room for it.
HUGE = Manifest(THREE, {"model.safetensors": "0" * 32}, 1 << 62, "c")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "LAST_COPIES_S", 0.2)
    monkeypatch.setattr(spread_module, "FETCH_PAUSE_S", 0.05)
    monkeypatch.setattr(spread_module, "ALIVE_S", 0.05)


@dataclass
class Versions:
    """Those that the run needs."""

    entries: dict[VersionId, object] = field(default_factory=lambda: {THREE: None})
    newest: VersionId = THREE


class OnDisk:
    """A journal that is always on the disk."""

    written = 0

    async def durable(self, position: int) -> None:
        pass


@dataclass
class Run:
    there: Controller
    maker: Peer
    rolling: Peer
    tasks: RunTasks
    window: Versions
    copies: Copies

    def publish(self, manifest: Manifest) -> None:
        self.copies.publish(published(manifest), position=0)

    async def begun(self) -> None:
        """Until nodes have orders to hold the version."""
        await self.maker.until(NodeOrders, lambda orders: THREE in orders.versions, saying=self.maker.reports())


def published(manifest: Manifest) -> ev.VersionPublished:
    return ev.VersionPublished(0.0, manifest.version, manifest.num_bytes, dict(manifest.files), manifest.chain)


@asynccontextmanager
async def made_by_a_node(tmp_path: Path, **relay: Any) -> AsyncIterator[Run]:
    """A run whose node with ranks has version 3, and no other."""
    async with controller(tmp_path, "nodes.expected=2", "rollout.max_staleness=0") as there, asyncio.timeout(WAIT_S):
        with Peer(there.address, "a") as maker, Peer(there.address, "b") as rolling:
            await asyncio.gather(maker.join(), rolling.join())
            await rolling.until(NodeOrders, saying=rolling.reports(problem="its disk is full"))
            await maker.until(NodeOrders, saying=maker.reports(versions={THREE: "/there"}, **relay))
            store, tasks, window = there.cluster.spread._store, RunTasks(), Versions()
            copies = Copies(
                store,
                checkpoints=tmp_path,
                published=Published("run"),
                window=window,  # type: ignore[arg-type]
                commits=OnDisk(),  # type: ignore[arg-type]
                tasks=tasks,
                keep=2,
                holders=NodeVersions(there.cluster, store),
            )
            yield Run(there, maker, rolling, tasks, window, copies)


async def test_nodes_delete_a_version_for_which_this_host_never_had_room(tmp_path: Path) -> None:
    async with made_by_a_node(tmp_path) as run, run.tasks.group:
        run.publish(HUGE)
        await run.begun()
        run.window.entries.clear()
        run.copies.release(cmd.ReleaseVersion(THREE), position=0)
        await run.maker.until(NodeOrders, lambda orders: not orders.versions, saying=run.maker.reports())


@pytest.mark.parametrize("version", [1, 2], ids=["whose copy is not kept", "of which there is a copy"])
async def test_the_ranks_node_deletes_a_version_that_was_written_again_and_nothing_needs(
    tmp_path: Path, version: int
) -> None:
    async with made_by_a_node(tmp_path) as run, run.tasks.group:
        store = run.there.cluster.spread._store
        publish(store, 2)
        store.copy_durable(VersionId(2))
        again = publish(store_at(tmp_path / "again"), version, {"config.json": b"written again"})
        run.copies.publish(published(again), position=0)
        orders = await run.maker.until(NodeOrders, lambda orders: version in orders.versions)
        assert orders.versions[version].files == dict(again.files)
        assert orders.versions[version].sources == ()
        own = {THREE: "/there"}
        await run.maker.until(
            NodeOrders,
            lambda orders: version not in orders.versions,
            saying=run.maker.reports(versions=own | {version: "/there"}),
        )
        run.there.cluster.spread.hold(HUGE)
        orders = await run.rolling.until(NodeOrders, lambda orders: bool(orders.versions))
        assert version not in orders.versions
        run.there.cluster.spread.release(THREE)


async def test_the_end_of_a_run_does_not_wait_for_room_for_good(tmp_path: Path) -> None:
    async with made_by_a_node(tmp_path) as run, run.tasks.group:
        run.publish(HUGE)
        await run.begun()
        run.copies.end()


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_last_version_that_does_not_come_ends_the_run_with_an_error(tmp_path: Path, is_lost: bool) -> None:
    async with made_by_a_node(tmp_path) as run:
        if is_lost:
            run.there.cluster._lose(run.there.cluster.places[0], "its process has ended")
        with pytest.raises(RunFailed, match=r"^the last version 3 was not received: .+; continue with --resume"):
            await run.copies.keep_result(published(HUGE))


async def test_a_last_version_that_is_on_its_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "LAST_COPIES_S", 0.0)
    manifest = publish(maker := store_at(tmp_path / "maker"))
    async with AsyncExitStack() as stack:
        _, proxy = await stack.enter_async_context(node(maker, pace=0.02))
        relay = RelaySource(url=proxy.url, key=KEY)
        run = await stack.enter_async_context(made_by_a_node(tmp_path, relay=relay))
        await run.copies.keep_result(published(manifest))
        assert held(run.there.cluster.spread._store) == held(maker)


async def test_nodes_keep_a_version_that_a_resumed_controller_had_not_received(tmp_path: Path) -> None:
    """It was journaled and sampled from; the ranks' node gets it before its ranks write it again."""
    world = run_of_world(seed=3, steps=2)
    made = publish(store_at(tmp_path / "lost"), 2)
    entries = list(world.journal)
    at, _ = first_event(entries, ev.VersionPublished, lambda e: e.version == 2)
    entries = with_event(entries, at, **structs.asdict(published(made)) | {"at": entries[at][0].at})
    at, _ = first_event(entries, ev.StepTrained, lambda e: e.step == 1)
    entries = with_event(entries, at, chain=made.chain)
    recorded = read_run(write(RunFolder.create(tmp_path, name="recorded"), world.settings, entries))
    assert [*recorded.state.window.entries] == [2]
    async with controller(tmp_path, "nodes.expected=2", "rollout.max_staleness=0") as there, asyncio.timeout(WAIT_S):
        spread = there.cluster.spread
        name_versions(spread, recorded)
        with Peer(there.address, "a") as maker, Peer(there.address, "b") as rolling:
            await asyncio.gather(maker.join(), rolling.join())
            for peer in (maker, rolling):
                orders = await peer.until(NodeOrders, saying=peer.reports())
                order = orders.versions[2]
                assert Manifest(VersionId(2), order.files, order.num_bytes, order.chain) == made
            await rolling.send(rolling.reports(versions={2: "/there"}))
            await there.until(lambda cluster: not spread.has_again(cluster.places[0]))


@dataclass
class Opened:
    """What the ranks on nodes need of a run: the newest version is 3, and 1 and 2 are released."""

    config: Config
    store: VersionStore

    def __post_init__(self) -> None:
        self.start = Start((), may_start_over=True, step=0)
        self.folder = None
        self.job = SimpleNamespace(config=self.config, state=SimpleNamespace(window=Versions()))

    def tell(self, line: str) -> None: ...

    async def fence_ranks(self, incarnation: int) -> None: ...


async def test_ranks_start_again_without_the_released_versions_that_they_will_write_again(tmp_path: Path) -> None:
    overrides = ("nodes.expected=2", "rollout.max_staleness=0")
    async with controller(tmp_path, *overrides) as there, asyncio.timeout(WAIT_S):
        store = there.cluster.spread._store
        for version in (1, 2, 3):
            needed = publish(store, version)
            store.copy_durable(VersionId(version))
        there.cluster.spread.hold(needed)
        with Peer(there.address, "a") as maker, Peer(there.address, "b") as rolling:
            await asyncio.gather(maker.join(), rolling.join())
            for peer in (maker, rolling):
                await peer.until(NodeOrders, saying=peer.reports())
            ranks = NodeRanks(there.cluster, Opened(config_of(*overrides), store), port=1)  # type: ignore[arg-type]
            restart = asyncio.create_task(ranks.restart(1))
            orders = await maker.until(NodeOrders, lambda orders: 3 in orders.versions, saying=maker.reports())
            assert orders.ranks is None
            has_it = maker.reports(versions={3: "/there"})
            orders = await maker.until(NodeOrders, lambda orders: orders.ranks is not None, saying=has_it)
            assert [*orders.versions] == [3]
            await maker.send(maker.reports(ranks=ProcessState(start=1, phase="up")))
            assert await restart == 1
