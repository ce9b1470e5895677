"""Versions from node to node: one link beside a bare stream, 32 receivers in a row, and from published to served.

Run: python bench/relay.py [--full] [--folder FOLDER]. All on loopback, versions in shared memory if there is room.

One link: a process serves a version, this one fetches it. Ceiling: a bare stream over the same loopback, sent with
sendfile by another process, received into one buffer, hashed (XXH3) and written to a file. Both take turns; figures are
medians over the rounds, and ratios those within a round. The relay also computes checksums of pieces at both ends.

32 receivers in a row, in four processes, each link paced by the kernel to B (SO_MAX_PACING_RATE), and a version of S
bytes in pieces of P bytes. Ceiling: S/B + 32 P/B seconds until the last has all: it cannot begin before each of the
others has its first piece. The ratio is of the seconds measured to these.

From published to served: a node that has no part in making a version fetches it by its relay, and pushes it from its
folder to two embedded servers. Servers are paused only during the push.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop
import xxhash
from result import Report, number, parser
from weights import make_model, servers

from dora.core.ids import VersionId
from dora.core.strategies import Pause
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from dora.weights.arrival import RelayLimits
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import Manifest, VersionStore

KEY = "bench"
RECEIVERS = 32
PROCESSES = 4
BANDWIDTH = 8_000_000  # bytes/s, of each link
SO_MAX_PACING_RATE = 47  # Linux
PUSH_S = 300.0


def store_at(root: Path) -> VersionStore:
    return VersionStore(memory_root=root, durable_root=root)


def publish(store: VersionStore, size: int) -> Manifest:
    staged = store.stage(VersionId(1))
    (staged / "model.safetensors").write_bytes(os.urandom(size))
    return store.seal(VersionId(1), staged)


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """This file again, with other work."""
    command = [sys.executable, __file__, "--as", json.dumps([str(argument) for argument in arguments])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


# --- the work of other processes


async def serve(root: str) -> None:
    async with Relay(store_at(Path(root)), key=KEY).listening("127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def stream(path: str) -> None:
    """Send the file to each client that connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, Path(path).open("rb") as file:
                connection.sendfile(file)


class PacedLoop(asyncio.SelectorEventLoop):
    """What comes from its ports is paced."""

    async def create_server(self, *arguments, **options):  # type: ignore[no-untyped-def]
        server = await super().create_server(*arguments, **options)
        for listener in server.sockets:
            listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, BANDWIDTH)
        return server


async def receive(root: str, indexes: str, piece_bytes: str) -> None:
    """Run some receivers: print their URLs, read their sources and what to fetch, and print when each has all of it."""
    limits = RelayLimits(piece_bytes=int(piece_bytes))
    relays = {i: Relay(store_at(Path(root) / i), key=KEY, limits=limits) for i in json.loads(indexes)}
    async with AsyncExitStack() as stack:
        opened = {i: await stack.enter_async_context(relay.listening("127.0.0.1", 0)) for i, relay in relays.items()}
        print(json.dumps(opened), flush=True)
        orders = await asyncio.to_thread(sys.stdin.readline)
        while orders:
            before, encoded = json.loads(orders)
            manifest = msgspec.json.decode(encoded, type=Manifest)

            async def fetch(i: str, url: str, manifest: Manifest = manifest) -> float:
                await relays[i].fetch(manifest, lambda: [VersionSource(url, KEY)])
                return time.monotonic()

            fetches = [fetch(i, url) for i, url in before.items() if i in relays]
            print(max(await asyncio.gather(*fetches), default=0.0), flush=True)
            orders = await asyncio.to_thread(sys.stdin.readline)


def work(name: str, *arguments: str) -> None:
    if name == "serve":
        uvloop.run(serve(*arguments))
    elif name == "stream":
        stream(*arguments)
    else:
        with asyncio.Runner(loop_factory=PacedLoop) as runner:
            runner.run(receive(*arguments))


# --- one link


def bare(port: int, into: Path) -> str:
    """Receive, hash and write; return the checksum."""
    buffer, hasher = memoryview(bytearray(1 << 20)), xxhash.xxh3_128()
    with socket.create_connection(("127.0.0.1", port)) as link, into.open("wb") as file:
        while num_bytes := link.recv_into(buffer):
            hasher.update(buffer[:num_bytes])
            file.write(buffer[:num_bytes])
    return hasher.hexdigest()


async def one_link(root: Path, *, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of the relay and of the bare stream; the first round is left out."""
    maker, receiver = store_at(root / "maker"), store_at(root / "receiver")
    manifest = publish(maker, size)
    file = maker.folder(VersionId(1)) / "model.safetensors"
    relayed, streamed = [], []
    with process("serve", root / "maker") as serving, process("stream", file) as streaming:
        url, port = line_of(serving), int(line_of(streaming))
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            assert await asyncio.to_thread(bare, port, root / "bare") == manifest.files[file.name]
            streamed.append(time.perf_counter() - begun)
            (root / "bare").unlink()
            begun = time.perf_counter()
            await Relay(receiver, key=KEY).fetch(manifest, lambda: [VersionSource(url, KEY)])
            relayed.append(time.perf_counter() - begun)
            receiver.discard(VersionId(1))
    return relayed[1:], streamed[1:]


# --- a row of receivers


def in_a_row(root: Path, *, size: int, piece_bytes: int) -> float:
    """Return the seconds from the order to fetch until the last receiver has the version."""
    manifest = publish(store_at(root / "0"), size)
    numbers = [[str(i) for i in range(RECEIVERS + 1) if i % PROCESSES == p] for p in range(PROCESSES)]
    with ExitStack() as stack:
        children = [stack.enter_context(process("receive", root, json.dumps(mine), piece_bytes)) for mine in numbers]
        urls = {i: url for child in children for i, url in json.loads(line_of(child)).items()}
        before = {str(i): urls[str(i - 1)] for i in range(1, RECEIVERS + 1)}
        begun = time.monotonic()
        for child in children:
            assert child.stdin is not None
            child.stdin.write(json.dumps([before, manifest.encode().decode()]) + "\n")
            child.stdin.flush()
        return max(float(line_of(child)) for child in children) - begun


# --- from published to served


@dataclass(frozen=True)
class Watched(PushTarget):
    """A server of which is noted when it was paused and resumed."""

    times: list[float] = field(default_factory=list)

    async def pause(self, mode: Pause) -> None:
        self.times.append(time.perf_counter())
        await super().pause(mode)

    async def resume(self) -> None:
        await super().resume()
        self.times.append(time.perf_counter())


async def to_served(root: Path, *, rounds: int) -> tuple[int, list[list[float]]]:
    """Return the size of the version and, of each round, the seconds in all, of the relay, and of the longest pause."""
    make_model(root / "model", seed=1)
    maker, store = store_at(root / "maker"), store_at(root / "node")
    staged = maker.stage(VersionId(1))
    shutil.copytree(root / "model", staged, dirs_exist_ok=True)
    manifest = maker.seal(VersionId(1), staged)
    took = []
    with process("serve", root / "maker") as serving, servers("embedded", root / "model") as urls:
        url = line_of(serving)
        async with EngineClient(max_connections=4) as client:
            for _ in range(rounds + 1):
                watched = [Watched(client, server) for server in urls]
                begun = time.perf_counter()
                await Relay(store, key=KEY).fetch(manifest, lambda: [VersionSource(url, KEY)])
                relayed = time.perf_counter()
                folder = store.folder(VersionId(1))
                async with asyncio.TaskGroup() as pushes:
                    for server in watched:
                        pushes.create_task(push(server, folder=folder, label="bench", timeout_s=PUSH_S))
                pause = max(server.times[-1] - server.times[0] for server in watched)
                took.append([time.perf_counter() - begun, relayed - begun, pause])
                store.discard(VersionId(1))
    return manifest.num_bytes, took[1:]


def main() -> None:
    arguments = parser(__doc__)
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 12 << 30 else None
    arguments.add_argument("--folder", default=in_memory or tempfile.gettempdir(), help="where versions lie")
    arguments.add_argument("--as", dest="work", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.work:
        return work(*json.loads(options.work))
    rounds, size = (9, 1 << 30) if options.full else (5, 512 << 20)
    row_size, piece = (256 << 20, 2 << 20) if options.full else (64 << 20, 512 << 10)
    shape = f"{RECEIVERS} receivers: {row_size >> 20} MiB in pieces of {piece >> 10} KiB at {BANDWIDTH / 1e6:g} MB/s"
    sizes = f"one link: {size >> 20} MiB, {rounds} rounds; {shape}; all in {options.folder}"
    report = Report(__doc__, full=options.full, sizes=sizes)

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        relayed, streamed = uvloop.run(one_link(Path(name), size=size, rounds=rounds))
    report.row(
        "one link: relay",
        size / statistics.median(relayed) / 1e6,
        "MB/s",
        against=f"bare stream, {number(size / statistics.median(streamed) / 1e6)} MB/s",
        ratio=statistics.median(b / r for r, b in zip(relayed, streamed, strict=True)),
        bar="ratio >= 0.7",
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        seconds = in_a_row(Path(name), size=row_size, piece_bytes=piece)
    ceiling = (row_size + RECEIVERS * piece) / BANDWIDTH
    report.row(
        f"{RECEIVERS} receivers in a row: all have it",
        seconds,
        "s",
        against=f"S/B + {RECEIVERS} P/B, {number(ceiling)} s",
        ratio=seconds / ceiling,
        bar="ratio <= 1.3",
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        num_bytes, took = asyncio.run(to_served(Path(name), rounds=rounds))
    whole, relay, pause = (statistics.median(column) for column in zip(*took, strict=True))
    report.row(f"{num_bytes / 1e6:.0f} MB from published to served by two servers", whole, "s")
    report.row("of these: the relay", relay, "s", against="the whole", ratio=relay / whole)
    report.row("of these: the longest pause of a server", pause, "s", against="the whole", ratio=pause / whole)
    report.print()
    return None


if __name__ == "__main__":
    main()
