"""Neighbors on the network of a relay that do not wish it well: nothing changes, and memory stays flat."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from dora.weights.arrival import RelayLimits
from dora.weights.relay import MAX_CONNECTIONS
from dora.weights.source import VersionSource
from tests.weights.nodes import FILES, KEY, PIECE, WAIT_S, ask, fetched, held, process_of, publish, store_at

NUM_NEIGHBORS = 150  # at the same time
ROUNDS = 3
#: What a process may grow by: 64 connections with the buffers of a request each, and what Python keeps.
MAX_GROWTH_BYTES = 48 << 20


def request(*lines: str, key: str = "wrong") -> bytes:
    return "\r\n".join(["GET /versions/3/config.json HTTP/1.1", "Host: localhost", *lines, ""]).encode()


SAID: dict[str, bytes] = {
    "nothing": b"",
    "half a request": request("Authorization: Bearer "),
    "a wrong key": request("Authorization: Bearer wrong", "Range: bytes=0-9", "") * 20,
    "no key": request("Range: bytes=0-9", "") * 20,
    "a long line": b"GET /" + b"x" * 400_000,
    "many headers": request(*[f"X-{number}: {'y' * 60}" for number in range(5_000)]),
    "a long body": request("Content-Type: application/json", "Content-Length: 9999999999", "") + b"{" * 400_000,
    "endless chunks": request("Transfer-Encoding: chunked", "") + b"ffff\r\n" * 50_000,
    "noise": bytes(range(256)) * 1_000,
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 10_000,
}
QUICK = ("nothing", "a wrong key", "many headers")


def flood(port: int, said: bytes) -> None:
    """Open many connections and leave them as they are."""
    with ExitStack() as stack:
        for _ in range(NUM_NEIGHBORS):
            with suppress(OSError):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5.0))
                one.settimeout(0.01)
                one.sendall(said)


def below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def memory_of(process: int, work: Callable[[], None]) -> int:
    """How much more memory a process has after more of the same."""
    watched = psutil.Process(process)
    await asyncio.to_thread(work)
    before: int = watched.memory_info().rss
    for _ in range(ROUNDS):
        await asyncio.to_thread(work)
    grown: int = watched.memory_info().rss - before
    return grown


@pytest.mark.parametrize("said", [pytest.param(said, marks=() if said in QUICK else pytest.mark.deep) for said in SAID])
async def test_neighbors_without_the_key_change_nothing(tmp_path: Path, said: str) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    before = below(tmp_path)
    async with process_of(tmp_path / "maker") as (process, url):
        port = int(url.rsplit(":", 1)[1])
        grown = await memory_of(process.pid, lambda: flood(port, SAID[said]))
        assert grown < MAX_GROWTH_BYTES
        assert len(psutil.Process(process.pid).net_connections("tcp")) <= MAX_CONNECTIONS + 1
        assert below(tmp_path) == before
        await fetched(a, manifest, VersionSource(url, KEY), limits=RelayLimits(piece_bytes=PIECE))
    assert held(a) == FILES


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=00000000000000000000-9",
        "bytes=0-9,0-9",
        "bytes= 0-9",
        "bytes=0-٩",
        "bytes=-1-9",
        "bytes=0x0-9",
        "BYTES=0-9",
        "bytes=999999999999999999-999999999999999999",
    ],
)
async def test_ranges_with_a_trick_are_refused(tmp_path: Path, asked: str) -> None:
    maker = store_at(tmp_path / "maker")
    publish(maker)
    async with process_of(tmp_path / "maker") as (_, url):
        for name in ("config.json", "empty.txt"):
            status, _, body = await ask(url, f"/versions/3/{name}", f"Range: {asked}")
            assert status in (400, 416)
            assert len(body) < 200


async def test_a_recorded_request_is_of_no_use_to_another_node(tmp_path: Path) -> None:
    """Each node draws a key of its own, so that what was heard on the way to one is refused by the others."""
    publish(store_at(tmp_path / "maker"))
    async with asyncio.timeout(WAIT_S), process_of(tmp_path / "maker") as (_, url):
        recorded = f"Bearer {KEY}-of-another-node"
        assert (await ask(url, "/versions/3/config.json", "Range: bytes=0-1", key=recorded))[0] == 401
