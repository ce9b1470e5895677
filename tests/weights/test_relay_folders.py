"""Deltas and checkpoints between nodes."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dora.weights.arrival import RelayLimits
from dora.weights.checkpoints import MANIFEST
from dora.weights.delta import encode
from dora.weights.fence import StaleEpoch
from dora.weights.relay import MAX_DELTAS, Relay
from dora.weights.store import StoreError, StoreFull, VersionStore, checksum_of
from tests.weights.nodes import (
    BRIEF,
    KEY,
    PIECE,
    WAIT_S,
    Proxy,
    ask,
    fetcher,
    held,
    left_in,
    node,
    publish,
    store_at,
)

START = "Range: bytes=0-9"


def weights(version: int) -> bytes:
    """16-bit words of which each version changes one in 64."""
    words = list(struct.unpack("<262144H", random.Random(0).randbytes(1 << 19)))
    for later in range(1, version + 1):
        for at in random.Random(later).sample(range(len(words)), len(words) // 64):
            words[at] = (words[at] + 1) % (1 << 16)
    return struct.pack("<262144H", *words)


def files_of(version: int) -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": weights(version), "sub/odd": b"odd" * 5}


NUM_BYTES = sum(map(len, files_of(0).values()))


def maker_at(folder: Path, *, versions: int = 2) -> VersionStore:
    store = store_at(folder)
    for version in range(versions):
        publish(store, version, files_of(version))
    return store


def with_base(folder: Path) -> VersionStore:
    store = store_at(folder)
    publish(store, 0, files_of(0))
    return store


# -- deltas -----------------------------------------------------------------------------------------------------------


async def test_every_link_of_a_chain_carries_a_delta_once(tmp_path: Path) -> None:
    maker, stores = maker_at(tmp_path / "maker"), [with_base(tmp_path / name) for name in "abc"]
    manifest = maker.manifest(1)
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        relay, link = await stack.enter_async_context(node(maker))
        links: list[Proxy] = []
        async with asyncio.TaskGroup() as tasks:
            for store in stores:
                links.append(link)
                relays = await stack.enter_async_context(node(store))
                tasks.create_task(relays[0].fetch(manifest, lambda link=link: [link.source()], base=0))
                link = relays[1]
            await links[-1].until_asked()
            tasks.create_task(relay.offer_delta(1, 0))
        size = sum(path.stat().st_size for path in maker.memory_root.rglob(".delta-*/**/*") if path.is_file())
    assert all(held(store, 1) == files_of(1) for store in stores)
    assert all(store.manifest(1) == manifest for store in stores)
    assert 0 < size < 0.15 * NUM_BYTES
    assert all(size < each.num_bytes < 1.1 * size + 10_000 for each in links), "headers included"


async def test_a_node_without_the_base_and_those_behind_it_get_the_whole_version(tmp_path: Path) -> None:
    maker, a, b = maker_at(tmp_path / "maker"), store_at(tmp_path / "a"), with_base(tmp_path / "b")
    manifest = maker.manifest(1)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=2 * PIECE) as (relay, from_maker),
        node(a) as (relay_a, from_a),
        asyncio.TaskGroup() as tasks,
    ):
        await relay.offer_delta(1, 0)
        tasks.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()], base=0))
        await from_maker.until(2 * PIECE)
        tasks.create_task(fetcher(b).fetch(manifest, lambda: [from_a.source()], base=0))
        await from_a.until(PIECE)
        from_maker.open()
    assert held(a, 1) == held(b, 1) == files_of(1)
    assert NUM_BYTES < from_maker.num_bytes < 1.1 * NUM_BYTES
    assert NUM_BYTES < from_a.num_bytes < 1.1 * NUM_BYTES


@pytest.mark.parametrize("kind", ["of another base", "of other weights", "noise"])
async def test_a_delta_that_does_not_fit_is_followed_by_the_whole_version(tmp_path: Path, kind: str) -> None:
    maker, a, b = maker_at(tmp_path / "maker"), with_base(tmp_path / "a"), with_base(tmp_path / "b")
    manifest = maker.manifest(1)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker) as (relay, from_maker),
        node(a) as (relay_a, from_a),
        asyncio.TaskGroup() as tasks,
    ):
        await relay.offer_delta(1, 0)
        (folder,) = maker.memory_root.glob(".delta-*")
        path = folder / "model.safetensors"
        size = path.stat().st_size
        path.unlink()
        if kind == "noise":
            path.write_bytes(random.Random(0).randbytes(size))
        else:
            other = store_at(tmp_path / "other")
            for version in (0, 1):
                publish(other, version, files_of(version + (2 if kind == "of another base" else 2 * version)))
            encode(other.folder(0), other.folder(1), ["model.safetensors"], folder)
            path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
        tasks.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()], base=0))
        tasks.create_task(fetcher(b).fetch(manifest, lambda: [from_a.source(), from_maker.source()], base=0))
    assert held(a, 1) == held(b, 1) == files_of(1)
    assert len(left_in(a)) == len(left_in(b)) == 2, "both versions, and no delta"


async def test_a_maker_that_cannot_encode_says_so_at_once(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), with_base(tmp_path / "a")
    manifest = publish(maker, 1, files_of(1))
    async with asyncio.timeout(WAIT_S), node(maker) as (relay, link), asyncio.TaskGroup() as tasks:
        tasks.create_task(fetcher(a).fetch(manifest, lambda: [link.source()], base=0))
        await link.until_asked()
        with pytest.raises(StoreError, match="version 0 is complete neither in"):
            await relay.offer_delta(1, 0)
    assert held(a, 1) == files_of(1)


async def test_a_delta_that_nobody_offers_is_not_waited_for_long(tmp_path: Path) -> None:
    maker, a = maker_at(tmp_path / "maker"), with_base(tmp_path / "a")
    async with asyncio.timeout(WAIT_S), node(maker, limits=BRIEF) as (_, link):
        await fetcher(a).fetch(maker.manifest(1), lambda: [link.source()], base=0)
    assert held(a, 1) == files_of(1)


async def test_deltas_are_few_and_go_with_their_version(tmp_path: Path) -> None:
    maker = maker_at(tmp_path / "maker", versions=MAX_DELTAS + 2)
    async with asyncio.timeout(WAIT_S), node(maker, limits=BRIEF) as (relay, link):
        for version in range(1, MAX_DELTAS + 2):
            await relay.offer_delta(version, version - 1)
            await relay.offer_delta(version, version - 1)
        kept = [f"/deltas/{version - 1}-{version}/config.json" for version in range(1, MAX_DELTAS + 2)]
        assert [(await ask(link.url, path, START))[0] for path in kept] == [404] + [206] * MAX_DELTAS
        assert len(list(maker.memory_root.glob(".delta-*"))) == MAX_DELTAS
        await relay.stop(MAX_DELTAS + 1)
        assert len(list(maker.memory_root.glob(".delta-*"))) == MAX_DELTAS - 1
        assert (await ask(link.url, kept[-1], START))[0] == 503
        assert (await ask(link.url, "/deltas/1-2/other", START))[0] == 404


async def test_a_delta_outlives_the_ranks_that_made_its_version(tmp_path: Path) -> None:
    maker, a = maker_at(tmp_path / "maker"), with_base(tmp_path / "a")
    async with asyncio.timeout(WAIT_S), node(maker, limits=BRIEF) as (relay, link):
        await relay.offer_delta(1, 0)
        maker.unstage()
        await fetcher(a).fetch(maker.manifest(1), lambda: [link.source()], base=0)
    assert held(a, 1) == files_of(1)
    assert link.num_bytes < NUM_BYTES / 2


async def test_a_fetch_by_delta_ends_when_its_version_is_released(tmp_path: Path) -> None:
    maker, a = maker_at(tmp_path / "maker"), with_base(tmp_path / "a")
    async with asyncio.timeout(WAIT_S), node(maker, after=1_000) as (relay, link), node(a) as (relay_a, _):
        await relay.offer_delta(1, 0)
        fetching = asyncio.create_task(relay_a.fetch(maker.manifest(1), lambda: [link.source()], base=0))
        await link.until(1_000)
        await relay_a.stop(1)
        with pytest.raises(StoreError, match="versions/1 was released meanwhile"):
            await fetching
    assert left_in(a) == [a.folder(0)]


# -- checkpoints ------------------------------------------------------------------------------------------------------

NAME = "step-000007-0123abcd"
RANKS = {f"rank-{rank}.safetensors": random.Random(rank).randbytes(5 * PIECE + rank) for rank in range(4)}


def save(parent: Path, *names: str, name: str = NAME) -> tuple[dict[str, str], int]:
    """Write files of a checkpoint; return what is to be fetched, with their size."""
    (parent / name).mkdir(parents=True)
    for file in names:
        (parent / name / file).write_bytes(RANKS.get(file, b"{}"))
    paths = list((parent / name).iterdir())
    return {path.name: checksum_of(path) for path in paths}, sum(path.stat().st_size for path in paths)


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_the_files_of_a_checkpoint_come_from_the_nodes_that_have_them(tmp_path: Path) -> None:
    """Through another node, which passes them on while it fetches them."""
    (first, first_bytes), (second, second_bytes) = (
        save(tmp_path / "x", "rank-0.safetensors", "rank-1.safetensors", MANIFEST),
        save(tmp_path / "y", "rank-2.safetensors", "rank-3.safetensors"),
    )
    files, num_bytes = {**first, **second}, first_bytes + second_bytes
    into, through = tmp_path / "run", tmp_path / "through"
    into.mkdir()
    through.mkdir()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(WAIT_S))
        _, x = await stack.enter_async_context(node(store_at(tmp_path / "sx"), checkpoints=tmp_path / "x"))
        _, y = await stack.enter_async_context(
            node(store_at(tmp_path / "sy"), checkpoints=tmp_path / "y", after=7 * PIECE)
        )
        relay, link = await stack.enter_async_context(node(store_at(tmp_path / "st"), checkpoints=through))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                relay.fetch_checkpoint(NAME, files, num_bytes, lambda: [x.source(), y.source()], into=through)
            )
            tasks.create_task(
                fetcher(store_at(tmp_path / "sr")).fetch_checkpoint(
                    NAME, files, num_bytes, lambda: [link.source()], into=into
                )
            )
            await y.until(7 * PIECE)
            await link.until(8 * PIECE)
            assert list(through.glob("step-*")) == list(into.glob("step-*")) == []
            y.open()
    assert stored(into / NAME) == stored(through / NAME) == {**RANKS, MANIFEST: b"{}"}
    assert first_bytes < x.num_bytes < 1.1 * first_bytes
    assert second_bytes < y.num_bytes < 1.1 * second_bytes
    assert num_bytes < link.num_bytes < 1.1 * num_bytes


async def test_only_what_a_checkpoint_lacks_is_fetched_and_the_rest_stays(tmp_path: Path) -> None:
    files, num_bytes = save(tmp_path / "x", *RANKS, MANIFEST)
    save(tmp_path / "into", "rank-0.safetensors", "rank-1.safetensors")
    (tmp_path / "into" / NAME / "rank-1.safetensors").write_bytes(b"damaged")
    (tmp_path / "into" / NAME / "rank-9.safetensors").write_bytes(b"of another rank")
    async with node(store_at(tmp_path / "sx"), checkpoints=tmp_path / "x") as (_, x):
        for _ in range(2):
            await fetcher(store_at(tmp_path / "s")).fetch_checkpoint(
                NAME, files, num_bytes, lambda: [x.source()], into=tmp_path / "into"
            )
    assert stored(tmp_path / "into" / NAME) == {**RANKS, MANIFEST: b"{}", "rank-9.safetensors": b"of another rank"}
    assert {name for name, _ in x.asked} == {*RANKS, MANIFEST} - {"rank-0.safetensors"}
    assert [path.name for path in (tmp_path / "into").iterdir()] == [NAME]


@pytest.mark.parametrize("kind", ["wrong bytes", "more bytes than told", "absent"])
async def test_a_checkpoint_that_is_not_right_never_becomes_visible(tmp_path: Path, kind: str) -> None:
    files, num_bytes = save(tmp_path / "x", *RANKS)
    if kind == "wrong bytes":
        (tmp_path / "x" / NAME / "rank-3.safetensors").write_bytes(bytes(5 * PIECE + 3))
    elif kind == "more bytes than told":
        num_bytes -= 1
    else:
        files["rank-4.safetensors"] = "0" * 32
    (tmp_path / "into").mkdir()
    async with asyncio.timeout(WAIT_S), node(store_at(tmp_path / "sx"), checkpoints=tmp_path / "x") as (_, x):
        with pytest.raises(StoreError, match=rf"cannot fetch checkpoints/{NAME}/rank-[34].safetensors: {x.url}: "):
            await fetcher(store_at(tmp_path / "s")).fetch_checkpoint(
                NAME, files, num_bytes, lambda: [x.source()], into=tmp_path / "into"
            )
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("../out", "rank-0.safetensors"),
        ("step-000007/../../out", "rank-0.safetensors"),
        (".step-000007", "rank-0.safetensors"),
        (NAME, "../rank-0.safetensors"),
        (NAME, "/etc/passwd"),
        (NAME, "rank-0.safetensors\n"),
        (NAME, "other"),
    ],
)
async def test_names_that_lead_elsewhere_are_not_fetched(tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(StoreError, match="these are not names of a checkpoint and its files"):
        await fetcher(store_at(tmp_path / "s")).fetch_checkpoint(name, {file: "0"}, 1, list, into=tmp_path)


async def test_a_checkpoint_larger_than_the_disk_is_not_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="it has 4,611,686,018,427,387,904 bytes, for which there are"):
        await fetcher(store_at(tmp_path / "s")).fetch_checkpoint(NAME, {MANIFEST: "0"}, 2**62, list, into=tmp_path)


async def test_the_fence_holds_for_checkpoints(tmp_path: Path) -> None:
    def fence() -> None:
        raise StaleEpoch("another controller")

    files, num_bytes = save(tmp_path / "x", "rank-0.safetensors")
    (tmp_path / "into").mkdir()
    async with node(store_at(tmp_path / "sx"), checkpoints=tmp_path / "x") as (_, x):
        with pytest.raises(StaleEpoch):
            await fetcher(store_at(tmp_path / "s", fence=fence)).fetch_checkpoint(
                NAME, files, num_bytes, lambda: [x.source()], into=tmp_path / "into"
            )
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.parametrize("what", ["file", "folder"])
async def test_of_checkpoints_only_files_of_ranks_are_served(tmp_path: Path, what: str) -> None:
    save(tmp_path / "x", *RANKS, MANIFEST)
    folder = tmp_path / "x" / NAME
    (folder / "secret").write_bytes(b"secret")
    (tmp_path / "x" / ".step-000008").mkdir()
    (tmp_path / "x" / ".step-000008" / MANIFEST).write_bytes(b"secret")
    async with Relay(store_at(tmp_path / "s"), key=KEY, checkpoints=tmp_path / "x", limits=BRIEF).listening(
        "127.0.0.1", 0
    ) as url:
        assert (await ask(url, f"/checkpoints/{NAME}/rank-0.safetensors", START))[2] == RANKS["rank-0.safetensors"][:10]
        for path in (
            f"{NAME}/secret",
            f"{NAME}/../{NAME}/{MANIFEST}",
            f".step-000008/{MANIFEST}",
            f"step-1/{MANIFEST}",
        ):
            status, _, body = await ask(url, f"/checkpoints/{path}", START)
            assert status in (404, 503)
            assert b"secret" not in body
        linked = folder / "rank-0.safetensors" if what == "file" else folder
        linked.rename(tmp_path / "elsewhere")
        linked.symlink_to(tmp_path / "elsewhere")
        assert (await ask(url, f"/checkpoints/{NAME}/rank-0.safetensors", START))[0] == 404


async def test_a_relay_without_a_folder_of_checkpoints_serves_none(tmp_path: Path) -> None:
    async with Relay(store_at(tmp_path), key=KEY, limits=RelayLimits()).listening("127.0.0.1", 0) as url:
        assert (await ask(url, f"/checkpoints/{NAME}/{MANIFEST}", START))[0] == 404
