"""A node, driven through its socket: it starts and ends what is ordered, and follows the newest controller."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dora import files
from dora.config.load import dump
from dora.config.schema import Config
from dora.core.ids import VersionId
from dora.errors import ConfigError, RunFailed
from dora.node import agent as agent_module
from dora.node import member as member_module
from dora.transport.node_messages import (
    CONTROLLER_HOST,
    Beat,
    FolderOrder,
    Join,
    NodeOrders,
    NodePaths,
    NodeWelcome,
    Over,
    RanksOrder,
    Rejected,
    RelaySource,
    Report,
    Superseded,
)
from dora.weights import fence
from dora.weights.store import OWNER, Manifest, VersionStore
from tests.node.peers import RUN, WAIT_S, Hub, agent, config_of
from tests.weights.adapted import make_model, publish_adapted
from tests.weights.nodes import FILES, KEY, held, node, publish, store_at

#: A server whose address names its process.
SERVER = "import os, threading; print(f'ready http://127.0.0.1:{os.getpid()}', flush=True); threading.Event().wait(300)"
RANKS = RanksOrder(start=1, port=1, node_rank=0, nodes=1, master="", incarnation=0, checkpoints={})


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that reports often."""
    monkeypatch.setattr(agent_module, "REPORT_S", 0.05)
    monkeypatch.setattr(agent_module, "SILENT_S", 0.2)
    monkeypatch.setattr(member_module, "FETCH_PAUSE_S", 0.01)


def job(tmp_path: Path, *overrides: str, server: str = SERVER, ranks: str = SERVER) -> Config:
    return config_of(
        f"engine.command={json.dumps([sys.executable, '-c', server])}",
        f"trainer.command={json.dumps([sys.executable, '-c', ranks])}",
        f"weights.memory_folder={tmp_path}",
        *overrides,
    )


def pid_of(report: Report, index: int = 0) -> int:
    return int(report.servers[index].url.rpartition(":")[2])


def is_up(start: int) -> Callable[[Report], bool]:
    def check(report: Report) -> bool:
        state = report.servers.get(0)
        return state is not None and (state.start, state.phase) == (start, "up")

    return check


def epoch_at(fence: str) -> int:
    return int(Path(fence).read_text().partition(".")[0])


def has_ended(report: Report) -> bool:
    return 0 in report.servers and report.servers[0].phase == "ended"


def store_of(paths: NodePaths) -> VersionStore:
    return VersionStore(memory_root=Path(paths.memory_root), durable_root=Path(paths.durable_root))


def order_of(manifest: Manifest, *sources: RelaySource) -> FolderOrder:
    return FolderOrder(
        files=dict(manifest.files), num_bytes=manifest.num_bytes, chain=manifest.chain, sources=tuple(sources)
    )


# -- processes


async def test_a_server_is_started_again_and_ended_as_ordered(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address):
            joined = await there.welcome(job(tmp_path))
            assert (joined.serial, joined.servers, joined.ranks, joined.versions) == (-1, {}, None, {})
            serial = await there.order(servers={0: 1})
            first = await there.report(is_up(1))
            assert (first.serial, len(first.servers[0].key)) == (serial, 64)
            await there.order(servers={0: 4})
            second = await there.report(is_up(4))
            assert not psutil.pid_exists(pid_of(first))
            assert second.servers[0].key != first.servers[0].key
            await there.order()
            await there.report(lambda report: report.servers == {})
            assert not psutil.pid_exists(pid_of(second))


@pytest.mark.parametrize("serial", [10, 3], ids=["repeated", "older"])
async def test_repeated_and_older_orders_change_nothing(tmp_path: Path, serial: int) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address):
            await there.welcome(job(tmp_path))
            there.serial = 9
            await there.order(servers={0: 1})
            before = await there.report(is_up(1))
            await there.send(NodeOrders(term=0, serial=serial, servers={}, ranks=None, versions={}))
            await there.send(Beat(term=-1, serial=0))
            await there.until(Superseded)  # so the orders were read before
            for _ in range(2):
                after = await there.report()
            assert (after.serial, after.servers) == (10, before.servers)
            assert psutil.Process(pid_of(before)).is_running()


@pytest.mark.parametrize("code", [1, 2])
async def test_the_end_of_a_server_is_reported_with_its_last_words(tmp_path: Path, code: int) -> None:
    server = f"import sys; print('loading'); print('no memory'); sys.exit({code})"
    with Hub() as there:
        async with agent(tmp_path, there.address):
            await there.welcome(job(tmp_path, server=server), first_instance=6)
            await there.order(servers={0: 3})
            state = (await there.report(has_ended)).servers[0]
            assert state.start == 3
            assert state.reason.startswith(f"engine-6: ended with exit code {code} before it was ready; its log (")
            assert state.reason.endswith("engine-6.log) ends: loading | no memory")
            assert state.is_final == (code == 2)


async def test_a_server_that_is_killed_is_not_started_again_by_itself(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address):
            await there.welcome(job(tmp_path))
            await there.order(servers={0: 1})
            psutil.Process(pid_of(await there.report(is_up(1)))).kill()
            state = (await there.report(has_ended)).servers[0]
            assert (state.start, state.is_final) == (1, False)
            assert state.reason.startswith("engine-0 ended with SIGKILL")
            await there.order(servers={0: 2})
            await there.report(is_up(2))


async def test_a_server_that_the_node_does_not_have_is_a_configuration_error(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address):
            await there.welcome(job(tmp_path))
            await there.order(servers={5: 1})
            state = (await there.report(lambda report: 5 in report.servers and report.servers[5].is_final)).servers[5]
            assert state.reason == "the controller ordered server 5, but this node has 1"


# -- a change of controller


async def test_servers_stay_at_a_change_of_controller_and_ranks_end(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.welcome(job(tmp_path))
            await there.order(servers={0: 1}, ranks=RANKS)
            before = await there.report(
                lambda told: is_up(1)(told) and told.ranks is not None and told.ranks.phase == "up"
            )
            assert before.ranks is not None
            assert before.ranks.phase == "up"
            there.term = 3
            after = await there.take_over(job(tmp_path))
            assert (after.serial, after.servers, after.ranks) == (-1, before.servers, None)
            assert epoch_at(after.paths.fence) == 3
            await there.order(servers={0: 1})
            assert (await there.report(lambda told: told.serial >= 0)).servers == before.servers
            here.ended.cancel()
            await asyncio.wait({here.ended})
            assert not psutil.pid_exists(pid_of(before))


@pytest.mark.parametrize(
    "message",
    [
        NodeWelcome(term=2, run_id=RUN, first_instance=0, config="", live_bytes=1),
        NodeOrders(term=2, serial=99, servers={}, ranks=None, versions={}),
        Beat(term=2, serial=1),
        Over(term=2, reason="the run is over"),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_an_older_controller_is_told_that_it_was_replaced_and_is_not_followed(
    tmp_path: Path, message: NodeWelcome | NodeOrders | Beat | Over
) -> None:
    with Hub(term=3) as there:
        async with agent(tmp_path, there.address) as here:
            await there.welcome(job(tmp_path))
            await there.order(servers={0: 1})
            before = await there.report(is_up(1))
            await there.send(message)
            assert await there.until(Superseded) == Superseded(term=3)
            assert (await there.report()).servers == before.servers
            assert not here.ended.done()


@asynccontextmanager
async def followed(tmp_path: Path) -> AsyncIterator[tuple[Hub, Hub, Report]]:
    """The controller that a node follows, one that will take over at another address, and the node's report."""
    with Hub() as first, Hub(term=1) as second:
        async with agent(tmp_path, first.address, second.address):
            await first.welcome(job(tmp_path))
            await first.order(servers={0: 1})
            before = await first.report(is_up(1))
            await second.until(Join, lambda told: told.run_id == RUN)
            yield first, second, before


async def test_a_node_finds_the_controller_that_takes_over_at_another_address(tmp_path: Path) -> None:
    async with followed(tmp_path) as (first, second, before):
        assert (await second.take_over(job(tmp_path))).servers == before.servers
        await first.send(Beat(term=0, serial=1))
        assert await first.until(Superseded) == Superseded(term=1)


async def test_a_node_with_a_full_disk_follows_another_controller_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_PAUSE_S", 0.01)
    full = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(3)]

    def refuse(operation: files.Operation) -> None:
        if full and operation.kind == "write" and operation.path.name.startswith(".epoch-"):
            raise full.pop()

    async with followed(tmp_path) as (_, second, before):
        with files.observed(refuse):
            after = await second.take_over(job(tmp_path))
        assert (full, epoch_at(after.paths.fence), after.servers) == ([], 1, before.servers)


async def test_a_controller_that_was_silent_is_asked_again(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address):
            await there.welcome(job(tmp_path))
            assert (await there.until(Join)).run_id == RUN


async def test_a_report_waits_until_a_controller_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only until the node is prepared: its fence may take a while."""
    is_slow, may_go_on = threading.Event(), threading.Event()

    def slow(path: Path, *, epoch: int, incarnation: int) -> None:
        is_slow.set()
        may_go_on.wait(WAIT_S)

    monkeypatch.setattr(fence, "raise_fence", slow)
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.until(Join)
            await there.send(
                NodeWelcome(term=0, run_id=RUN, first_instance=0, config=dump(job(tmp_path)), live_bytes=1)
            )
            await asyncio.to_thread(is_slow.wait, WAIT_S)
            for _ in range(3):  # it looks for a controller in every round of reporting
                await there.until(Join)
            assert not here.ended.done()
            may_go_on.set()
            await there.report()


# -- versions


async def test_a_version_is_received_and_deleted_as_ordered(tmp_path: Path) -> None:
    manifest = publish(store := store_at(tmp_path / "there"))
    async with node(store) as (_, proxy):
        source = RelaySource(url=proxy.url.replace("127.0.0.1", CONTROLLER_HOST), key=KEY)
        with Hub() as there:
            async with agent(tmp_path, there.address):
                await there.welcome(job(tmp_path))
                await there.order(versions={3: order_of(manifest)})
                assert (await there.report(lambda told: told.serial == 1)).fetching == ()
                await there.order(versions={3: order_of(manifest, source)})
                folder = Path((await there.report(lambda told: 3 in told.versions)).versions[3])
                assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
                await there.order()
                await there.report(lambda told: told.serial == 3 and not told.versions)
                assert os.listdir(folder.parent) == [OWNER]


async def test_a_version_is_reported_until_it_has_been_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take it for gone, and its memory for free, as soon as it is not."""
    may_go_on, discard = threading.Event(), VersionStore.discard

    def slow(store: VersionStore, version: VersionId) -> None:
        may_go_on.wait(WAIT_S)
        discard(store, version)

    manifest = publish(store := store_at(tmp_path / "there"))
    async with node(store) as (_, proxy):
        source = RelaySource(url=proxy.url.replace("127.0.0.1", CONTROLLER_HOST), key=KEY)
        with Hub() as there:
            async with agent(tmp_path, there.address):
                await there.welcome(job(tmp_path))
                await there.order(versions={3: order_of(manifest, source)})
                folder = Path((await there.report(lambda told: 3 in told.versions)).versions[3])
                monkeypatch.setattr(VersionStore, "discard", slow)
                await there.order()
                assert 3 in (await there.report(lambda told: told.serial == 2)).versions
                may_go_on.set()
                await there.report(lambda told: not told.versions)
                assert not await asyncio.to_thread(folder.exists)


async def test_a_version_with_an_adapter_is_made_of_the_nodes_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "BF16")
    manifest = publish_adapted(store := store_at(tmp_path / "there"), model)
    with Hub() as there:
        async with agent(tmp_path, there.address), node(store) as (_, proxy):
            await there.welcome(job(tmp_path, f"model.path={model}"))
            await there.order(versions={3: order_of(manifest, RelaySource(url=proxy.url, key=KEY))})
            folder = Path((await there.report(lambda told: 3 in told.versions)).versions[3])
            assert (folder / "model.safetensors").read_bytes() == held(store)["model.safetensors"]
            assert proxy.num_bytes < 0.2 * manifest.num_bytes


async def test_a_version_that_is_on_its_way_is_dropped_when_it_is_released(tmp_path: Path) -> None:
    manifest = publish(store := store_at(tmp_path / "there"))
    async with node(store, after=100_000) as (_, proxy):
        with Hub() as there:
            async with agent(tmp_path, there.address):
                joined = await there.welcome(job(tmp_path))
                await there.order(versions={3: order_of(manifest, RelaySource(url=proxy.url, key=KEY))})
                await there.report(lambda told: told.fetching == (3,))
                await proxy.until(100_000)
                await there.order()
                await there.report(lambda told: told.serial == 2 and told.fetching == ())
                assert os.listdir(joined.paths.memory_root) == [OWNER]


@pytest.mark.parametrize("by", ["the same controller", "another one"])
async def test_a_version_that_cannot_be_had_is_reported_and_had_once_it_is_another_one(tmp_path: Path, by: str) -> None:
    manifest = publish(store := store_at(tmp_path / "there"))
    with Hub() as there:
        async with agent(tmp_path, there.address), node(store) as (_, proxy):
            await there.welcome(job(tmp_path))
            source = RelaySource(url=proxy.url, key=KEY)
            await there.order(versions={3: order_of(replace(manifest, files={"../outside": "0"}), source)})
            problem = (await there.report(lambda told: bool(told.problem))).problem
            assert problem == "cannot stage version 3: its manifest names a file outside of its folder"
            if by == "another one":
                there.term = 1
                await there.take_over(job(tmp_path))
            await there.order(versions={3: order_of(manifest, source)})
            await there.report(lambda told: 3 in told.versions and not told.problem)


async def test_a_version_that_the_file_system_refuses_is_reported_and_had_once_it_does_not(tmp_path: Path) -> None:
    """Nodes behind this one wait for it unless it says that it has a problem."""
    is_read_only = True

    def refuse(operation: files.Operation) -> None:
        if operation.kind == "rename" and is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    manifest = publish(store := store_at(tmp_path / "there"))
    with Hub() as there:
        async with agent(tmp_path, there.address), node(store) as (_, proxy):
            joined = await there.welcome(job(tmp_path))
            own = store_of(joined.paths)
            await there.order()
            await there.report(lambda told: told.serial == 1)
            publish(own, 3, FILES | {"config.json": b"another history"})
            with files.observed(refuse):
                await there.order(versions={3: order_of(manifest, RelaySource(url=proxy.url, key=KEY))})
                assert "Read-only file system" in (await there.report(lambda told: bool(told.problem))).problem
                is_read_only = False
                await there.report(lambda told: 3 in told.versions and not told.problem)
            assert held(own) == FILES


async def test_versions_that_a_new_controller_does_not_know_are_deleted_and_others_stay(tmp_path: Path) -> None:
    """Ranks may have written one that was not journaled before their controller ended."""
    with Hub() as there:
        async with agent(tmp_path, there.address):
            joined = await there.welcome(job(tmp_path))
            own = store_of(joined.paths)
            known = publish(own, 3)
            await there.order(versions={3: order_of(known)})
            folder = Path((await there.report(lambda told: 3 in told.versions)).versions[3])
            publish(own, 4, {"config.json": b"[]"})
            written = (folder / "model.safetensors").stat()
            there.term = 1
            assert [*(await there.take_over(job(tmp_path))).versions] == [3]
            assert sorted(own.live()) == [3, 4]  # until it says what it knows
            await there.order(versions={3: order_of(known)})
            await there.report(lambda told: told.serial == 2 and [*told.versions] == [3])
            assert sorted(own.live()) == [3]
            assert (folder / "model.safetensors").stat() == written


@pytest.mark.parametrize("is_held", [False, True], ids=["not reported before", "held for an earlier controller"])
async def test_a_version_with_other_bytes_than_the_journaled_ones_is_replaced(tmp_path: Path, is_held: bool) -> None:
    manifest = publish(store := store_at(tmp_path / "there"))
    with Hub() as there:
        async with agent(tmp_path, there.address), node(store) as (_, proxy):
            joined = await there.welcome(job(tmp_path))
            own = store_of(joined.paths)
            await there.order()
            await there.report(lambda told: told.serial == 1)
            other = publish(own, 3, FILES | {"config.json": b"another history"})
            if is_held:
                await there.order(versions={3: order_of(other)})
                await there.report(lambda told: 3 in told.versions)
                there.term = 1
                await there.take_over(job(tmp_path))
            await there.order(versions={3: order_of(manifest, RelaySource(url=proxy.url, key=KEY))})
            await there.report(lambda told: told.serial == there.serial and 3 in told.versions)
            assert held(own) == FILES


@pytest.mark.parametrize("source", ["none", "one that never sends it"])
async def test_a_version_that_is_waited_for_is_had_once_ranks_of_the_node_have_written_it(
    tmp_path: Path, source: str
) -> None:
    """The only node that had it was lost, and the ranks that replace its own write it again."""
    there_once = store_at(tmp_path / "there")
    manifest = publish(there_once)
    with Hub() as there:
        async with agent(tmp_path, there.address), node(there_once, after=0) as (_, proxy):
            joined = await there.welcome(job(tmp_path), first_instance=-1)
            sources = () if source == "none" else (RelaySource(url=proxy.url, key=KEY),)
            await there.order(versions={3: order_of(manifest, *sources)})
            await there.report(lambda told: told.serial == 1 and told.fetching == ((3,) if sources else ()))
            own = store_of(joined.paths)
            assert publish(own) == manifest
            await there.report(lambda told: 3 in told.versions and not told.fetching)
            assert held(own) == FILES


async def test_a_version_that_ranks_of_the_node_write_otherwise_while_it_arrives_is_replaced(tmp_path: Path) -> None:
    """A node that was cut off has the journaled bytes."""
    manifest = publish(store := store_at(tmp_path / "there"))
    with Hub() as there:
        async with agent(tmp_path, there.address), node(store, after=100_000) as (_, proxy):
            joined = await there.welcome(job(tmp_path), first_instance=-1)
            own = store_of(joined.paths)
            await there.order(versions={3: order_of(manifest, RelaySource(url=proxy.url, key=KEY))})
            await proxy.until(100_000)
            publish(own, 3, FILES | {"config.json": b"written again"})
            proxy.open()
            await there.report(lambda told: 3 in told.versions)
            assert held(own) == FILES


async def test_a_version_that_ranks_of_the_node_wrote_otherwise_is_kept_once_it_is_journaled(tmp_path: Path) -> None:
    manifest = publish(store_at(tmp_path / "there"))
    with Hub() as there:
        async with agent(tmp_path, there.address):
            joined = await there.welcome(job(tmp_path), first_instance=-1)
            await there.order(versions={3: order_of(manifest)})
            await there.report(lambda told: told.serial == 1)
            own = store_of(joined.paths)
            other = publish(own, 3, FILES | {"config.json": b"written again"})
            await there.order(versions={3: order_of(other)})
            await there.report(lambda told: 3 in told.versions)
            assert held(own)["config.json"] == b"written again"


async def test_what_an_earlier_process_of_the_node_left_is_not_used(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address):
            joined = await there.welcome(job(tmp_path))
            paths = joined.paths
            own = store_of(paths)
            publish(own, 3)
            own.copy_durable(3)
        async with agent(tmp_path, there.address):
            joined = await there.welcome(job(tmp_path))
            own = store_of(paths)
            assert (joined.versions, [*own.live(), *own.durable()]) == ({}, [])


async def test_two_nodes_cannot_share_a_folder(tmp_path: Path) -> None:
    """The second one would delete the versions of the first, and raise the fence of its ranks."""
    with Hub() as there, Hub() as beside:
        async with agent(tmp_path, there.address):
            joined = await there.welcome(job(tmp_path, f"weights.memory_folder={tmp_path / 'none'}"))
            own = store_of(joined.paths)
            publish(own, 3)
            async with agent(tmp_path, beside.address, name="m") as second:
                await beside.until(Join)
                await beside.send(
                    NodeWelcome(term=0, run_id=RUN, first_instance=1, config=dump(job(tmp_path)), live_bytes=1)
                )
                with pytest.raises(
                    ConfigError, match=r"^--folder \(each node needs its own\): .*/lock is held by another process"
                ):
                    async with asyncio.timeout(WAIT_S):
                        await asyncio.shield(second.ended)
            assert held(own) == FILES
        async with agent(tmp_path, there.address):  # once the first one has ended
            await there.welcome(job(tmp_path))


async def test_versions_of_a_node_that_was_killed_are_deleted_by_the_next_one_on_its_host(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path / "killed", there.address):
            paths = (await there.welcome(job(tmp_path))).paths
            own = store_of(paths)
            publish(own, 3)
            memory = Path(paths.memory_root)
            left = Path(shutil.copytree(memory, memory.with_name("dora-another-run-0")))  # a copy has no lock
        async with agent(tmp_path / "next", there.address):
            await there.welcome(job(tmp_path))
            assert left.name not in os.listdir(memory.parent)


# -- the end


async def test_a_node_without_a_controller_ends_everything_after_the_lease(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.welcome(job(tmp_path, "nodes.lease_s=0.5"))
            await there.order(servers={0: 1})
            pid = pid_of(await there.report(is_up(1)))
            with pytest.raises(RunFailed, match=r"^no controller at .* for 0.5 s; is it running"):
                async with asyncio.timeout(WAIT_S):
                    await asyncio.shield(here.ended)
            assert not psutil.pid_exists(pid)


async def test_a_node_that_finds_no_controller_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "JOIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(agent_module, "COMPLAIN_S", 0.0)
    monkeypatch.setattr(agent_module, "REPORT_S", 0.05)
    with Hub() as there:
        async with agent(tmp_path, there.address, token="another") as here:
            with pytest.raises(RunFailed, match="has it the same DORA_TOKEN"):
                async with asyncio.timeout(WAIT_S):
                    await asyncio.shield(here.ended)
    assert here.told == [
        "no answer yet; is the controller running, has it the same DORA_TOKEN, and a place for this node?"
    ]


async def test_a_node_that_is_told_to_leave_stays_until_it_is_let_go(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.welcome(job(tmp_path))
            await there.order(servers={0: 1})
            pid = pid_of(await there.report(is_up(1)))
            here.leave.set()
            assert 0 in (await there.report(lambda told: told.is_leaving)).servers
            assert psutil.pid_exists(pid)
            await there.send(Over(term=0, reason="it has left"))
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.shield(here.ended) == "it has left"
            assert not psutil.pid_exists(pid)


async def test_a_node_that_is_told_to_leave_when_no_controller_is_there_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "ALONE_S", 0.2)
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.welcome(job(tmp_path))
            await there.order(servers={0: 1})
            pid = pid_of(await there.report(is_up(1)))
            here.leave.set()
            async with asyncio.timeout(WAIT_S):
                ended = await asyncio.shield(here.ended)
            assert ended == "the node has left; no controller was there to let it go"
            assert not psutil.pid_exists(pid)


async def test_a_node_with_ranks_that_is_told_to_leave_says_so_and_goes(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.welcome(job(tmp_path), first_instance=-1)
            here.leave.set()
            await there.report(lambda told: told.is_leaving)
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.shield(here.ended) == "the node has left"


async def test_a_node_that_is_rejected_ends_with_the_reason(tmp_path: Path) -> None:
    with Hub() as there:
        async with agent(tmp_path, there.address) as here:
            await there.until(Join)
            await there.send(Rejected(reason="the run has its 1 nodes"))
            with pytest.raises(ConfigError, match=r"the controller at .* rejects this node: the run has its 1 nodes"):
                async with asyncio.timeout(WAIT_S):
                    await asyncio.shield(here.ended)


async def test_a_node_that_cannot_take_part_tells_the_controller_why(tmp_path: Path) -> None:
    (no_folder := tmp_path / "file").touch()
    with Hub() as there:
        async with agent(no_folder, there.address) as here:
            asks = await there.until(Join)
            await there.send(
                NodeWelcome(term=0, run_id=RUN, first_instance=0, config=dump(job(tmp_path)), live_bytes=1)
            )
            told = await there.until(Join, lambda join: join.problem != "")
            with pytest.raises(ConfigError) as ended:
                async with asyncio.timeout(WAIT_S):
                    await asyncio.shield(here.ended)
    assert (asks.problem, told.problem) == ("", str(ended.value))
    assert told.problem == f"--folder: cannot create {no_folder / RUN} (Not a directory)"
