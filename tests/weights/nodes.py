"""Nodes for the tests of the relay: relays on loopback, with a proxy before each that counts, holds and cuts."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dora.weights.arrival import RelayLimits
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import MANIFEST, Manifest, StoreError, VersionStore

KEY = "the-key-of-the-maker"
WAIT_S = 30.0
PIECE = 64 << 10
NUM_PIECES = 16
AHEAD = 3  # pieces that are on their way at the same time
FILES = {
    "config.json": b"{}",
    "empty.txt": b"",
    "model.safetensors": random.Random(0).randbytes(PIECE * (NUM_PIECES - 1) + 1_000),
    "sub/tokenizer.json": b"[" + b"0," * 100 + b"0]",
}
NUM_BYTES = sum(map(len, FILES.values()))
LIMITS = RelayLimits(piece_bytes=PIECE, attempts=7, pause_s=0.001)
BRIEF = RelayLimits(piece_bytes=PIECE, wait_s=0.2)  # of a node that is asked for what it does not have


def store_at(folder: Path, **options: object) -> VersionStore:
    return VersionStore(memory_root=folder / "memory", durable_root=folder / "durable", **options)


def publish(store: VersionStore, version: int = 3, files: dict[str, bytes] = FILES) -> Manifest:
    staged = store.stage(version)
    for name, content in files.items():
        (staged / name).parent.mkdir(exist_ok=True)
        (staged / name).write_bytes(content)
    return store.seal(version, staged, chain="c")


def held(store: VersionStore, version: int = 3) -> dict[str, bytes]:
    folder = store.folder(version)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def left_in(store: VersionStore) -> list[Path]:
    return [path for root in store.roots for path in root.iterdir()]


class Proxy:
    """A TCP proxy before a node. It counts what the node sends, and holds or cuts that after a number of bytes."""

    def __init__(self, url: str, *, after: int | None = None, cuts: bool = False, pace: float = 0.0) -> None:
        """`pace`: seconds that each 64 KiB take."""
        self._port = int(url.rsplit(":", 1)[1])
        self._after = after
        self._cuts = cuts
        self._pace = pace
        self._changed = asyncio.Condition()
        self._opened = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_bytes = 0  # that the node has sent
        self.connections = 0
        self.asked: list[tuple[str, int]] = []  # file and first byte of each request

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def source(self) -> VersionSource:
        return VersionSource(self.url, KEY)

    async def until(self, num_bytes: int) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.num_bytes >= num_bytes)

    async def until_asked(self) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.connections > 0)

    def open(self) -> None:
        self._after = None
        self._opened.set()

    def pieces_asked_of(self, name: str) -> list[int]:
        return [start // PIECE for asked, start in self.asked if asked == name]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        async with self._changed:
            self._changed.notify_all()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:
            writer.transport.abort()
            return
        asking = asyncio.create_task(self._ask(reader, back))
        try:
            with suppress(ConnectionError):
                await self._answer(there, writer)
        finally:
            asking.cancel()
            for end in (writer, back):
                end.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                found = re.findall(rb"GET /[a-z]+/[0-9a-z-]+/(\S+).*?Range: bytes=(\d+)", data, re.DOTALL)
                self.asked += [(name.decode(), int(start)) for name, start in found]
                back.write(data)
            back.close()

    async def _answer(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await there.read(1 << 16):
            passed = data if self._after is None else data[: self._after - self.num_bytes]
            await self._pass(passed, writer)
            if len(passed) < len(data):
                if self._cuts:
                    self._after = None
                    return
                await self._opened.wait()
                await self._pass(data[len(passed) :], writer)

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._pace * len(data) / (1 << 16))
        writer.write(data)
        await writer.drain()
        self.num_bytes += len(data)
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def node(
    store: VersionStore, *, limits: RelayLimits = LIMITS, checkpoints: Path | None = None, **proxied: object
) -> AsyncIterator[tuple[Relay, Proxy]]:
    """A relay that listens behind a proxy."""
    relay = Relay(store, key=KEY, checkpoints=checkpoints, limits=limits)
    async with relay.listening("127.0.0.1", 0) as url, Proxy(url, **proxied) as proxy:
        yield relay, proxy


def fetcher(store: VersionStore, *, limits: RelayLimits = LIMITS) -> Relay:
    return Relay(store, key=KEY, limits=limits)


async def fetched(
    store: VersionStore, manifest: Manifest, *sources: VersionSource, limits: RelayLimits = LIMITS
) -> None:
    async with asyncio.timeout(WAIT_S):
        await fetcher(store, limits=limits).fetch(manifest, lambda: sources)


async def refused(
    store: VersionStore, manifest: Manifest, *sources: VersionSource, limits: RelayLimits = LIMITS
) -> str:
    """The error of a fetch, after which nothing is left."""
    with pytest.raises(StoreError) as caught:
        await fetched(store, manifest, *sources, limits=limits)
    assert left_in(store) == []
    assert len(str(caught.value).splitlines()) == 1
    assert KEY not in str(caught.value)
    return str(caught.value)


SERVE = """
import asyncio, sys
from pathlib import Path
import uvloop
from dora.weights.relay import Relay
from dora.weights.source import PIECE_CHECKSUM, VersionSource
from dora.weights.store import VersionStore

async def serve():
    store = VersionStore(memory_root=Path(sys.argv[1]) / "memory", durable_root=Path(sys.argv[1]) / "durable")
    tls = TlsFiles(*map(Path, sys.argv[3:])) if sys.argv[3:] else None
    async with Relay(store, key=sys.argv[2], tls=tls).listening("127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

uvloop.run(serve())
"""


@asynccontextmanager
async def process_of(folder: Path, *tls: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A node in a process of its own, on uvloop."""
    command = (sys.executable, "-c", SERVE, str(folder), KEY, *map(str, tls))
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            url = (await process.stdout.readline()).decode().strip()
        yield process, url
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ask(
    url: str, path: str, *headers: str, method: str = "GET", key: str | None = f"Bearer {KEY}", body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; the path is sent as it is."""
    host, port = url.removeprefix("http://").split(":")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    lines += [f"Authorization: {key}"] if key is not None else []
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        async with asyncio.timeout(WAIT_S):
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *given = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in given), content
