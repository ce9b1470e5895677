"""Versions that pass from node to node: relays on loopback, with a proxy between them that counts, holds and cuts."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import xxhash

from dora.errors import ConfigError
from dora.files import Operation, observed
from dora.weights import relay as relays
from dora.weights.arrival import PIECE_BYTES, RelayLimits
from dora.weights.fence import StaleEpoch, pass_fence, raise_fence
from dora.weights.relay import Relay
from dora.weights.source import PIECE_CHECKSUM, VersionSource
from dora.weights.store import MANIFEST, Manifest, StoreError, StoreFull, VersionStore
from tests.weights.nodes import (
    AHEAD,
    BRIEF,
    FILES,
    KEY,
    NUM_BYTES,
    NUM_PIECES,
    PIECE,
    WAIT_S,
    Proxy,
    ask,
    fetched,
    fetcher,
    held,
    left_in,
    node,
    process_of,
    publish,
    refused,
    store_at,
)

# -- a chain ----------------------------------------------------------------------------------------------------------


async def test_pieces_pass_on_through_a_node_that_does_not_have_all_of_them(tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # a fetch that waits has a thread of its own
    maker, a, b = (store_at(tmp_path / name) for name in ("maker", "a", "b"))
    manifest = publish(maker)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=5 * PIECE) as (_, from_maker),
        node(a) as (relay_a, from_a),
        node(maker) as (_, around),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()]))
        await from_maker.until(1)
        tasks.create_task(fetcher(b).fetch(manifest, lambda: [from_a.source(), around.source()]))
        await from_a.until(3 * PIECE)
        assert a.live() == [], "the maker is still holding most of it back"
        from_maker.open()
    assert held(a) == held(b) == FILES
    assert b.manifest(3) == maker.manifest(3)
    for proxy in (from_maker, from_a):
        assert NUM_BYTES < proxy.num_bytes < 1.1 * NUM_BYTES
    assert around.connections == 0


async def test_the_next_node_is_told_when_a_fetch_ends_without_the_version(tmp_path: Path) -> None:
    maker, a, b = (store_at(tmp_path / name) for name in ("maker", "a", "b"))
    manifest = publish(maker)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=5 * PIECE) as (_, from_maker),
        node(maker) as (_, around),
        node(a) as (relay_a, from_a),
    ):
        first = asyncio.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()]))
        await from_maker.until(1)
        second = asyncio.create_task(fetcher(b).fetch(manifest, lambda: [from_a.source(), around.source()]))
        await from_a.until(3 * PIECE)
        await relay_a.stop(3)
        with pytest.raises(StoreError, match="versions/3 was released meanwhile"):
            await first
        await second
    assert held(b) == FILES
    assert left_in(a) == []
    pieces = from_a.pieces_asked_of("model.safetensors") + around.pieces_asked_of("model.safetensors")
    assert sorted(set(pieces)) == list(range(NUM_PIECES))
    assert len(pieces) <= NUM_PIECES + AHEAD, "only the pieces for which the second waited were asked for again"


async def test_who_asks_for_a_version_after_it_was_released_does_not_wait_for_it(tmp_path: Path) -> None:
    maker, a, b = (store_at(tmp_path / name) for name in ("maker", "a", "b"))
    manifest = publish(maker)
    patient = RelayLimits(piece_bytes=PIECE, wait_s=10 * WAIT_S)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=5 * PIECE) as (_, from_maker),
        node(a, limits=patient) as (relay_a, from_a),
    ):
        fetch = asyncio.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()]))
        await from_maker.until(1)
        await relay_a.stop(3)
        with pytest.raises(StoreError, match="was released meanwhile"):
            await fetch
        hasty = RelayLimits(piece_bytes=PIECE, attempts=1)
        assert "HTTP status 503" in await refused(b, manifest, from_a.source(), limits=hasty)
        from_maker.open()
        await relay_a.fetch(manifest, lambda: [from_maker.source()])
        await fetched(b, manifest, from_a.source())
    assert held(a) == held(b) == FILES


async def test_a_request_for_a_piece_that_does_not_arrive_ends(tmp_path: Path) -> None:
    """The node says so; until then the connection may be silent for longer than it may take to begin."""
    maker, a, b = (store_at(tmp_path / name) for name in ("maker", "a", "b"))
    manifest = publish(maker)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=5 * PIECE) as (_, from_maker),
        node(a, limits=RelayLimits(piece_bytes=PIECE, wait_s=0.5)) as (relay_a, from_a),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()]))
        await from_maker.until(5 * PIECE)
        told = await refused(
            b, manifest, from_a.source(), limits=RelayLimits(piece_bytes=PIECE, attempts=2, idle_s=0.2)
        )
        from_maker.open()
    assert told.endswith(f": {from_a.url}: HTTP status 503; check or name others")


async def test_a_piece_is_served_at_the_moment_in_which_its_version_becomes_visible(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    renamed, go_on = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.kind == "sync_folder" and operation.path == a.memory_root:
            renamed.set()
            go_on.wait(WAIT_S)

    async with asyncio.timeout(WAIT_S), node(maker) as (_, from_maker), node(a) as (relay_a, from_a):
        with observed(hold):
            fetching = asyncio.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()]))
            await asyncio.to_thread(renamed.wait)
            assert (await ask(from_a.url, WEIGHTS, START))[0] == 206
            go_on.set()
            await fetching


async def test_a_file_that_begins_anew_at_this_moment_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Who hears that a node does not have a file never asks it for that file again."""
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=5 * PIECE) as (_, from_maker),
        node(a) as (relay_a, from_a),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()]))
        last = f"Range: bytes={3 * PIECE}-{3 * PIECE + 9}"  # of the pieces that the maker does not hold back
        assert (await ask(from_a.url, WEIGHTS, last))[0] == 206
        [arriving] = a.memory_root.glob("*/model.safetensors")
        moved = arriving.rename(arriving.with_name("elsewhere"))
        assert (await ask(from_a.url, WEIGHTS, START))[0] == 503
        moved.rename(arriving)
        from_maker.open()
    assert held(a) == FILES


# -- broken links and false sources -----------------------------------------------------------------------------------


async def test_a_broken_connection_costs_at_most_the_pieces_on_their_way(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with node(maker, after=9 * PIECE + PIECE // 2, cuts=True) as (_, proxy):
        await fetched(a, manifest, proxy.source())
    assert held(a) == FILES
    pieces = proxy.pieces_asked_of("model.safetensors")
    assert sorted(set(pieces)) == list(range(NUM_PIECES))
    assert len(pieces) <= NUM_PIECES + AHEAD
    assert proxy.num_bytes < NUM_BYTES + (AHEAD + 0.1) * PIECE


async def test_another_source_continues_where_the_first_has_ended(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with node(maker, after=9 * PIECE, cuts=True) as (_, first), node(maker) as (_, second):
        await fetched(a, manifest, first.source(), second.source())
    assert held(a) == FILES
    pieces = first.pieces_asked_of("model.safetensors") + second.pieces_asked_of("model.safetensors")
    assert len(pieces) <= NUM_PIECES + AHEAD
    assert first.num_bytes + second.num_bytes < 1.1 * NUM_BYTES


def with_a_flipped_bit(folder: Path) -> tuple[VersionStore, Manifest]:
    store = store_at(folder)
    manifest = publish(store)
    path = store.folder(3) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[2 * PIECE] ^= 1
    path.write_bytes(data)
    return store, manifest


async def test_a_source_with_other_bytes_is_not_asked_for_that_file_again(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    liar, _ = with_a_flipped_bit(tmp_path / "liar")
    async with node(liar) as (_, false), node(maker) as (_, true):
        await fetched(a, manifest, false.source(), true.source())
    assert held(a) == FILES
    assert false.pieces_asked_of("model.safetensors") == list(range(NUM_PIECES))
    assert true.pieces_asked_of("model.safetensors") == list(range(NUM_PIECES))


async def test_not_even_if_the_true_source_fails(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    liar, _ = with_a_flipped_bit(tmp_path / "liar")
    async with node(liar) as (_, false), node(maker, after=9 * PIECE, cuts=True) as (_, true):
        await fetched(a, manifest, false.source(), true.source())
    assert held(a) == FILES
    assert false.pieces_asked_of("model.safetensors") == list(range(NUM_PIECES))


async def test_a_version_of_a_source_with_other_bytes_never_becomes_visible(tmp_path: Path) -> None:
    a = store_at(tmp_path / "a")
    liar, manifest = with_a_flipped_bit(tmp_path / "liar")
    async with node(liar) as (_, proxy):
        assert await refused(a, manifest, proxy.source()) == (
            f"cannot fetch versions/3/model.safetensors: {proxy.url}: the file, with bytes of {proxy.url}, does not "
            "fit the manifest; check or name others"
        )


async def test_a_file_from_a_false_and_a_true_source_is_taken_again_from_the_true_one(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    liar, _ = with_a_flipped_bit(tmp_path / "liar")
    async with node(maker) as (_, true), AsyncExitStack() as stack:
        _, false = await stack.enter_async_context(node(liar, after=9 * PIECE, cuts=True))
        await fetched(a, manifest, false.source(), true.source())
    assert held(a) == FILES


def answer(body: bytes, *, start: int = 0, size: int = len(FILES["model.safetensors"]), extra: str = "") -> bytes:
    """A correct answer to a request for a piece."""
    head = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\n{extra}"
        f"Content-Range: bytes {start}-{start + len(body) - 1}/{size}\r\n"
        f"{PIECE_CHECKSUM}: {xxhash.xxh3_128_hexdigest(body)}\r\n\r\n"
    )
    return head.encode() + body


WEIGHTS_BYTES = FILES["model.safetensors"]
FIRST_PIECE = WEIGHTS_BYTES[:PIECE]
FALSE_ANSWERS = {
    "no HTTP": b"\x00" * 70_000,
    "a piece larger than asked for": answer(WEIGHTS_BYTES[: 2 * PIECE]),
    "a smaller one": answer(FIRST_PIECE[:10]),
    "another one": answer(WEIGHTS_BYTES[PIECE : 2 * PIECE], start=PIECE),
    "a piece without length": b"HTTP/1.1 206 Partial Content\r\n\r\n" + FIRST_PIECE,
    "chunks": answer(b"", extra="Transfer-Encoding: chunked\r\n") + b"5\r\nhello\r\n",
    "a file larger than the version": answer(FIRST_PIECE, size=NUM_BYTES + 1),
    "a damaged piece": answer(FIRST_PIECE)[:-1] + b"!",
    "an empty file": answer(b"", size=0).replace(b"0--1", b"*"),
    "a file of less than nothing": answer(b"", size=-1).replace(b"0--1", b"*"),
    "another place": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
}
SILENT_ANSWERS = {
    "none": b"",
    "half a head": b"HTTP/1.1 206 Partial Content\r\nContent-",
    "half a piece": answer(FIRST_PIECE)[: -PIECE // 2],
    "endless": b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
}


@asynccontextmanager
async def saying(said: bytes) -> AsyncIterator[VersionSource]:
    """A source that gives this answer, and is then silent."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with server_ends:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

    server_ends = asyncio.Lock()
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        yield VersionSource(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY)
        async with server_ends:
            pass


@pytest.mark.parametrize("said", FALSE_ANSWERS)
async def test_a_false_answer_is_followed_by_the_next_source(tmp_path: Path, said: str) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker, files={"model.safetensors": WEIGHTS_BYTES})
    async with saying(FALSE_ANSWERS[said]) as false, node(maker) as (_, true):
        await fetched(a, manifest, false, true.source())
    assert held(a) == {"model.safetensors": WEIGHTS_BYTES}
    assert true.pieces_asked_of("model.safetensors") == list(range(NUM_PIECES)), "nothing of the false one was taken"


@pytest.mark.parametrize("said", SILENT_ANSWERS)
async def test_a_source_that_does_not_end_its_answer_is_followed_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker, files={"model.safetensors": WEIGHTS_BYTES})
    async with saying(SILENT_ANSWERS[said]) as false, node(maker) as (_, true):
        await fetched(
            a, manifest, false, true.source(), limits=RelayLimits(piece_bytes=PIECE, piece_s=1.0, pause_s=0.001)
        )
    assert held(a) == {"model.safetensors": WEIGHTS_BYTES}
    gc.collect()
    assert caplog.records == [], "asyncio logs errors that nobody has looked at"


async def test_all_files_together_have_no_more_bytes_than_the_version(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker, files={"a": bytes(PIECE), "b": bytes(2 * PIECE)})
    async with saying(answer(bytes(PIECE), size=3 * PIECE)) as false, node(maker) as (_, true):
        sources = [false, true.source()]
        await fetcher(a).fetch(manifest, lambda: sources if true.asked else sources[1:])
    assert held(a) == held(maker)
    assert true.asked == [("a", 0), ("b", 0), ("b", PIECE)]


async def test_a_false_size_of_a_file_is_noticed_by_the_next_source(tmp_path: Path) -> None:
    """The first source has given more bytes than the file has, and is gone."""
    maker, liar, a = (store_at(tmp_path / name) for name in ("maker", "liar", "a"))
    manifest = publish(maker, files={"a": bytes(3 * PIECE), "b": bytes(9 * PIECE)})
    publish(liar, files={"a": bytes(6 * PIECE)})
    async with node(liar, after=5 * PIECE, cuts=True) as (_, false), node(maker) as (_, true):
        sources = [false.source(), true.source()]
        await fetcher(a).fetch(manifest, lambda: sources if false.num_bytes < 5 * PIECE else sources[1:])
    assert held(a) == held(maker)
    assert true.pieces_asked_of("a")[0] >= 3, "pieces that the file does not have"
    assert true.pieces_asked_of("a")[-3:] == [0, 1, 2]


async def test_bytes_behind_an_answer_are_not_taken_for_the_next_one(tmp_path: Path) -> None:
    a = store_at(tmp_path / "a")
    manifest = publish(store_at(tmp_path / "maker"), files={"model.safetensors": WEIGHTS_BYTES})
    once = RelayLimits(piece_bytes=PIECE, attempts=1)
    async with saying(answer(FIRST_PIECE) + bytes(1 << 20)) as false:
        assert f"{false.url}: " in await refused(a, manifest, false, limits=once)


async def test_a_fetch_names_every_node_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    a = store_at(tmp_path / "a")
    manifest = publish(store_at(tmp_path / "other"))
    async with node(store_at(tmp_path / "empty"), limits=BRIEF) as (_, without):
        sources = [
            without.source(),
            VersionSource(without.url.replace("127.0.0.1", "localhost"), "wrong"),
            VersionSource("http://127.0.0.1:1", KEY),
            VersionSource("http://127.0.0.1:no", KEY),
            VersionSource("https://127.0.0.1:1", KEY),
            VersionSource("http://:1", KEY),
        ]
        assert await refused(a, manifest, *sources) == (
            f"cannot fetch versions/3/config.json: {sources[0].url}: HTTP status 503; {sources[1].url}: the key is "
            "refused; http://127.0.0.1:1: Connection refused; http://127.0.0.1:no: no proper answer (ValueError); "
            "https://127.0.0.1:1: an address is http://host:port; http://:1: an address is http://host:port; check or "
            "name others"
        )
    assert await refused(a, manifest) == ("cannot fetch versions/3/config.json: no node has it; check or name others")


async def test_sources_may_change_during_a_fetch(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with node(maker) as (_, first), node(maker) as (_, second):
        lists = [[first.source()]] * 10
        await fetcher(a).fetch(manifest, lambda: lists.pop() if lists else [second.source()])
    assert held(a) == FILES
    assert len(first.asked) <= 10 + AHEAD - 1
    assert second.asked[0] == ("model.safetensors", 8 * PIECE), "after ten pieces, two of them whole files"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_node_that_dies_or_freezes_is_left_for_the_next(tmp_path: Path, number: signal.Signals) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    limits = RelayLimits(piece_bytes=PIECE, piece_s=1.0, pause_s=0.001)
    async with (
        asyncio.timeout(WAIT_S),
        process_of(tmp_path / "maker") as (process, url),
        Proxy(url, after=5 * PIECE) as first,
        node(maker) as (_, second),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(fetcher(a, limits=limits).fetch(manifest, lambda: [first.source(), second.source()]))
        await first.until(5 * PIECE)
        process.send_signal(number)
        first.open()
    assert held(a) == FILES
    pieces = first.pieces_asked_of("model.safetensors") + second.pieces_asked_of("model.safetensors")
    assert sorted(set(pieces)) == list(range(NUM_PIECES))
    assert len(pieces) <= NUM_PIECES + AHEAD


# -- the end of a fetch -----------------------------------------------------------------------------------------------


async def test_a_cancelled_fetch_leaves_nothing_behind(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with asyncio.timeout(WAIT_S), node(maker, after=5 * PIECE) as (_, proxy):
        fetching = asyncio.create_task(fetcher(a).fetch(manifest, lambda: [proxy.source()]))
        await proxy.until(5 * PIECE)
        assert len(left_in(a)) == 1
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert left_in(a) == []


async def test_a_version_released_while_it_becomes_visible_can_be_deleted(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def fence() -> None:
        entered.set()
        go_on.wait(WAIT_S)

    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a", fence=fence)
    manifest = publish(maker)
    async with asyncio.timeout(WAIT_S), node(maker) as (_, proxy):
        relay = fetcher(a)
        fetching = asyncio.create_task(relay.fetch(manifest, lambda: [proxy.source()]))
        await asyncio.to_thread(entered.wait)
        stopping = [asyncio.create_task(relay.stop(3))]
        done, _ = await asyncio.wait({fetching, *stopping}, timeout=0.2)
        assert done == set(), "before it is known whether the version becomes visible"
        stopping.append(asyncio.create_task(relay.stop(3)))
        await asyncio.wait(stopping, timeout=0.0)
        go_on.set()
        with pytest.raises(StoreError, match="released"):
            await fetching
        await asyncio.gather(*stopping)
    assert a.live() == [3]
    a.release(3)
    assert left_in(a) == []


async def test_the_fence_holds_for_a_version_that_was_fetched(tmp_path: Path) -> None:
    raise_fence(tmp_path / "epoch", epoch=1)
    maker = store_at(tmp_path / "maker")
    a = store_at(tmp_path / "a", fence=partial(pass_fence, tmp_path / "epoch", epoch=0))
    manifest = publish(maker)
    async with node(maker) as (_, proxy):
        with pytest.raises(StaleEpoch):
            await fetched(a, manifest, proxy.source())
    assert left_in(a) == []


async def test_a_version_that_is_there_is_not_fetched(tmp_path: Path) -> None:
    a = store_at(tmp_path / "a")
    manifest = publish(a)
    await fetched(a, manifest)
    other = publish(store_at(tmp_path / "other"), files={"config.json": b"{}"})
    with pytest.raises(StoreError, match=r"cannot stage version 3: .*v000003 has other files; release it"):
        await fetched(a, other)
    assert held(a) == FILES


async def test_a_version_is_fetched_once_at_a_time(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with asyncio.timeout(WAIT_S), node(maker, after=1) as (_, proxy), asyncio.TaskGroup() as tasks:
        relay = fetcher(a)
        tasks.create_task(relay.fetch(manifest, lambda: [proxy.source()]))
        await proxy.until(1)
        with pytest.raises(StoreError, match="versions/3 is already being fetched"):
            await relay.fetch(manifest, lambda: [proxy.source()])
        proxy.open()
    assert held(a) == FILES


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "sub/../../out"])
async def test_a_manifest_with_a_file_elsewhere_is_not_fetched(tmp_path: Path, name: str) -> None:
    told = await refused(store_at(tmp_path / "a"), Manifest(3, {name: "0"}, 1))
    assert told == "cannot stage version 3: its manifest names a file outside of its folder"


async def test_a_manifest_with_a_false_sum_is_not_made_visible(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    more = Manifest(3, manifest.files, manifest.num_bytes + 1, manifest.chain)
    async with node(maker) as (_, proxy):
        assert "are not those of version 3: it is not made visible" in await refused(a, more, proxy.source())


async def test_a_version_larger_than_the_free_space_is_not_asked_for(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    larger = Manifest(3, publish(maker).files, 2**62)
    async with node(maker) as (_, proxy):
        with pytest.raises(
            StoreFull, match=r"version 3: it has 4,611,686,018,427,387,904 bytes, for which .*memory and"
        ):
            await fetched(a, larger, proxy.source())
        assert proxy.connections == 0
    assert left_in(a) == []


FETCH_ONTO_A_FULL_DISK = """
import asyncio, sys
from pathlib import Path
import msgspec
from dora.weights.arrival import VersionSource
from dora.weights.relay import Relay
from dora.weights.source import PIECE_CHECKSUM, VersionSource
from dora.weights.store import Manifest, StoreFull, VersionStore

disk = Path(sys.argv[1])
store = VersionStore(memory_root=disk, durable_root=disk)

def sources():
    filler = disk / "filler"
    if not filler.exists():  # nothing was asked for yet
        filler.write_bytes(bytes(3 << 20))
    return [VersionSource(sys.argv[3], sys.argv[4])]

manifest = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Manifest)
try:
    asyncio.run(Relay(store, key="k").fetch(manifest, sources))
except StoreFull as err:
    print(err)
print(sorted(path.name for path in disk.iterdir()))
"""


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    mount = [unshare or "", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return unshare is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this machine lets nobody mount a file system of their own")
async def test_a_disk_that_fills_up_is_no_fault_of_the_source(tmp_path: Path) -> None:
    maker, disk = store_at(tmp_path / "maker"), tmp_path / "disk"
    disk.mkdir()
    publish(maker, files={"model.safetensors": bytes(3 << 20)})
    script = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$0" -c "$2" "$1" "$3" "$4" "$5"'
    async with node(maker) as (_, proxy):
        shell = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, sys.executable]
        arguments = [disk, FETCH_ONTO_A_FULL_DISK, maker.folder(3) / MANIFEST, proxy.url, KEY]
        process = await asyncio.create_subprocess_exec(*shell, *arguments, stdout=subprocess.PIPE)
        async with asyncio.timeout(WAIT_S):
            out, _ = await process.communicate()
    assert out.decode().splitlines() == [
        "cannot write versions/3/model.safetensors: the file system is full",
        "['filler']",
    ]


# -- what is served ---------------------------------------------------------------------------------------------------


WEIGHTS = "/versions/3/model.safetensors"
START = "Range: bytes=0-9"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, VersionStore]]:
    store = store_at(tmp_path / "node")
    publish(store)
    async with Relay(store, key=KEY, limits=BRIEF).listening("127.0.0.1", 0) as url:
        yield url, store


@pytest.mark.parametrize("key", [None, "", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY])
async def test_without_the_key_nothing_can_be_learned(served, key: str | None) -> None:
    for path in (WEIGHTS, "/versions/9/model.safetensors", f"/versions/3/{MANIFEST}", "/", "/x"):
        for method in ("GET", "HEAD", "POST"):
            status, headers, body = await ask(served[0], path, START, method=method, key=key)
            assert (status, body) == (401, b"" if method == "HEAD" else b"Unauthorized\n")
            assert headers.keys() == {"Content-Type", "Content-Length", "Date", "Server", "Connection"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"])
async def test_only_get_and_head_are_answered(served, method: str) -> None:
    status, _, _ = await ask(served[0], WEIGHTS, START, method=method)
    assert status in (400, 405, 415)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/versions/3/",
        "/versions/3/other.json",
        "/versions/3/sub",
        "/versions/3/../v000003/config.json",
        "/versions/3/../../secret",
        "/versions/3/%2e%2e/%2e%2e/secret",
        "/versions/3/sub/../config.json",
        "/versions/3/./config.json",
        "/versions/3//config.json",
        "/versions/3/config.json/",
        "/versions/3/config.json%00",
        "/versions/-3/config.json",
        "/versions/9999999999/config.json",
        "/versions/%D9%A3/config.json",  # a digit, but not of ASCII
        "/versions/v000003/config.json",
        "/versions/../config.json",
    ],
)
async def test_only_files_that_a_manifest_names_are_served(served, tmp_path: Path, path: str) -> None:
    url, store = served
    for folder in (tmp_path, tmp_path / "node", store.memory_root, store.folder(3)):
        (folder / "secret").write_bytes(b"secret")
    status, _, body = await ask(url, path, START)
    assert status == 404
    assert b"secret" not in body


async def test_a_piece_is_served_with_its_checksum_and_the_size_of_its_file(served) -> None:
    content = FILES["model.safetensors"]
    for first, last in ((0, 9), (5, PIECE + 5), (len(content) - 3, len(content) + 100)):
        piece = content[first : last + 1]
        for method in ("GET", "HEAD"):
            status, headers, body = await ask(served[0], WEIGHTS, f"Range: bytes={first}-{last}", method=method)
            assert (status, body) == (206, piece if method == "GET" else b"")
            assert headers["Content-Length"] == str(len(piece))
            assert headers["Content-Range"] == f"bytes {first}-{first + len(piece) - 1}/{len(content)}"
            assert headers[PIECE_CHECKSUM] == xxhash.xxh3_128_hexdigest(piece)


@pytest.mark.parametrize(
    "asked",
    [
        "X: y",
        "Range: bytes=0-",
        "Range: bytes=-5",
        "Range: bytes=9-0",
        "Range: bytes=0-1,3-4",
        "Range: lines=0-1",
        f"Range: bytes=0-{PIECE_BYTES}",
        f"Range: bytes={len(FILES['model.safetensors'])}-{len(FILES['model.safetensors'])}",
        f"Range: bytes=0-{'9' * 99}",
    ],
)
async def test_a_request_is_for_one_piece(served, asked: str) -> None:
    status, _, body = await ask(served[0], WEIGHTS, asked)
    assert status == 416
    assert len(body) < 100


async def test_a_version_that_is_not_here_is_waited_for(served) -> None:
    """Orders reach nodes at different moments: one may be asked before it knows of a version."""
    assert (await ask(served[0], "/versions/4/config.json", START))[0] == 503


async def test_the_body_of_a_request_is_not_read(served) -> None:
    """The connection ends with the answer. (aiohttp would read on for 10 s.)"""
    for kind, status in (("application/json", b"206"), ("text/plain", b"415")):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served[0].rsplit(":", 1)[1]))
        lines = [f"GET {WEIGHTS} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", START]
        writer.write("\r\n".join([*lines, f"Content-Type: {kind}", f"Content-Length: {10**10}", "", "{"]).encode())
        async with asyncio.timeout(8.0):
            assert (await reader.read()).split()[1] == status
        writer.close()


async def test_a_large_header_is_refused(served) -> None:
    status, _, _ = await ask(served[0], WEIGHTS, START, f"X: {'x' * 10_000}")
    assert status == 400


@pytest.mark.parametrize("what", ["the file", "its folder", "the version"])
async def test_nothing_behind_a_link_is_served(served, tmp_path: Path, what: str) -> None:
    url, store = served
    folder = store.folder(3)
    linked = {"the file": folder / "sub" / "tokenizer.json", "its folder": folder / "sub", "the version": folder}[what]
    assert (await ask(url, "/versions/3/sub/tokenizer.json", START))[0] == 206
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    status, _, body = await ask(url, "/versions/3/sub/tokenizer.json", START)
    assert status in (404, 503)
    assert b"0,0," not in body


async def test_a_relay_without_a_key_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the key of the relay is empty"):
        Relay(store_at(tmp_path), key="")


async def test_an_address_that_is_taken_is_one_clear_line(served, tmp_path: Path) -> None:
    port = int(served[0].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*; choose another"):
        async with Relay(store_at(tmp_path), key=KEY).listening("127.0.0.1", port):
            pass


# -- peers that take time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /versions/3/config.json HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
async def test_a_connection_without_a_request_is_closed(tmp_path: Path, sent: bytes) -> None:
    relay = Relay(store_at(tmp_path), key=KEY, limits=RelayLimits(idle_s=0.1))
    async with relay.listening("127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_peer_that_does_not_read_is_cut(tmp_path: Path) -> None:
    """It sends requests until the relay takes no more of them, so that the end of the connection is a reset."""
    store = store_at(tmp_path)
    publish(store, files={"large": bytes(PIECE_BYTES)})
    lines = ["GET /versions/3/large HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"]
    request = "\r\n".join([*lines, f"Range: bytes=0-{PIECE_BYTES - 1}", "", ""]).encode()
    async with Relay(store, key=KEY, limits=RelayLimits(piece_s=0.2)).listening("127.0.0.1", 0) as url:
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=WAIT_S) as peer, pytest.raises(ConnectionError):
            await asyncio.to_thread(peer.sendall, request * 100_000)


async def test_strangers_do_not_displace_a_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "MAX_CONNECTIONS", 4)
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with asyncio.timeout(WAIT_S), node(maker, after=5 * PIECE) as (_, proxy), asyncio.TaskGroup() as tasks:
        tasks.create_task(fetcher(a).fetch(manifest, lambda: [proxy.source()]))
        await proxy.until(5 * PIECE)
        port = proxy._port
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for reader, _ in strangers[:4]:
            assert await reader.read() == b""
        proxy.open()
    for _, writer in strangers:
        writer.close()
    assert held(a) == FILES
    assert proxy.connections == 1
