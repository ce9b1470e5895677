"""Peers without the run's token receive nothing, learn nothing, and cost almost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from dora.errors import RemoteError
from dora.transport import curve, refusals, trainer_end
from dora.transport.codec import encode
from dora.transport.curve import guard_controller
from dora.transport.messages import Stop
from dora.transport.refusals import LOG_EVERY_S, Refusals
from dora.transport.trainer_end import TrainerEnd
from tests.transport.peers import TOKEN, WAIT_S, Proxy, controller, hello, rank, raw_peer, report

MIB = 1 << 20
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def greeting(mechanism: bytes) -> bytes:
    """The greeting of ZMTP 3.0."""
    return SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def frame(data: bytes) -> bytes:
    return struct.pack(">BQ", 2, len(data)) + data


@dataclass
class Victim:
    """A controller in another process."""

    address: str
    pid: int
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024


@asynccontextmanager
async def victim(tmp_path: Path, *, ranks: int = 1) -> AsyncIterator[Victim]:
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.transport.victim", str(ranks), stdout=PIPE, stderr=log
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(WAIT_S):
                address = (await process.stdout.readline()).decode().strip()
            yield Victim(address, process.pid, tmp_path / "log")
        finally:
            process.kill()
            await process.wait()


async def answer(trainer: TrainerEnd, index: int) -> str:
    """The victim's answer to report `index`."""
    trainer.send(report(index))
    message = await asyncio.to_thread(trainer.receive, WAIT_S)
    assert isinstance(message, Stop)
    return message.reason


async def push(port: int, opening: bytes, *, num_bytes: int) -> int:
    """Open a connection and write until the other side closes it; return the number of bytes written."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = 0
    with contextlib.suppress(ConnectionError):
        writer.write(opening)
        while taken < num_bytes:
            writer.write(bytes(MIB))
            await writer.drain()
            taken += MIB
        await reader.read()
    writer.close()
    return taken


@pytest.mark.parametrize(
    "opening",
    [
        greeting(b"NULL") + READY + struct.pack(">BQ", 2, 900 * MIB),
        greeting(b"CURVE") + struct.pack(">BQ", 6, 900 * MIB),
        SIGNATURE + b"\x01\x05\x00\x00" + struct.pack(">BQ", 2, 900 * MIB),
    ],
    ids=["without encryption", "within the handshake", "of an old release of ZeroMQ"],
)
async def test_a_huge_frame_from_a_stranger_allocates_no_memory(tmp_path, opening):
    async with victim(tmp_path) as target, rank(target.address) as trainer:
        before = target.peak_bytes()
        pushing = [asyncio.create_task(push(target.port, opening, num_bytes=50 * MIB)) for _ in range(3)]
        await asyncio.wait(pushing, timeout=2 * curve.HANDSHAKE_MS / 1000, return_when=asyncio.ALL_COMPLETED)
        assert await answer(trainer, 1) == "1"
        grown = target.peak_bytes() - before
        for task in pushing:
            task.cancel()
        assert grown < 4 * MIB
        assert max(task.result() for task in pushing) < 50 * MIB


@pytest.mark.parametrize(("size", "count"), [(10 * MIB, 100), (20, 20_000)], ids=["100 of 10 MB", "20,000 of 20 bytes"])
async def test_messages_from_a_stranger_are_never_received(tmp_path, size, count):
    async with victim(tmp_path) as target, rank(target.address) as trainer:
        assert await answer(trainer, 1) == "1"
        before = target.peak_bytes()
        with raw_peer(target.address, token=None) as stranger:
            data = bytes(size)
            with contextlib.suppress(zmq.Again):  # ZeroMQ may have given the connection up
                for _ in range(count):
                    stranger.send(data, zmq.NOBLOCK, copy=size < MIB)
            while not target.log.stat().st_size:
                await asyncio.to_thread(stranger.poll, 100)
            assert await answer(trainer, 2) == "2"
            assert not stranger.poll(0)
        assert target.peak_bytes() - before < 4 * MIB
        assert target.log.read_text().count("\n") == 1
        assert "DORA_TOKEN" in target.log.read_text()


async def test_idle_connections_are_closed_after_the_time_limit_of_a_handshake(monkeypatch):
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 300)
    async with controller() as (end, address), rank(address) as trainer:
        port = int(address.rsplit(":", 1)[1])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in idle[:100]:
            writer.write(greeting(b"CURVE"))
        async with asyncio.timeout(WAIT_S):
            for reader, writer in idle:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
        trainer.send(report(1))
        assert await end.receive() == (0, report(1))


@pytest.mark.parametrize(
    "opening",
    [
        greeting(b"NULL") + READY,
        greeting(b"PLAIN") + b"\x04\x0f\x05HELLO\x01a\x06secret",
        greeting(b"CURVE") + READY,
        SIGNATURE + b"\x01\x05\x00\x00",
        b"\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["NULL", "PLAIN", "CURVE left out", "ZMTP 2", "ZMTP 1", "HTTP"],
)
async def test_the_handshake_cannot_be_bypassed(opening, monkeypatch):
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 300)
    async with controller() as (end, address):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
        writer.write(opening)
        answered = b""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(WAIT_S):
                if b"NULL" in opening:  # a controller that lets it in says so, and only then takes messages
                    answered += await reader.readuntil(b"READY")
                writer.write(b"".join(frame(bytes(part)) for part in encode(hello())))
                answered += await reader.read()
        writer.close()
        assert len(answered) <= len(greeting(b""))
        with pytest.raises(RemoteError, match="sent no HELLO"):
            await end.wait_ready(0.05)


async def test_a_recorded_connection_reveals_nothing_and_cannot_be_replayed(monkeypatch):
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 300)
    async with controller() as (end, address), Proxy(address) as proxy:
        async with rank(proxy.address) as trainer:
            await end.wait_ready(WAIT_S)
            trainer.send(report(1))
            await end.receive()
        recorded = proxy.recorded
        assert b"CURVE" in recorded
        assert TOKEN.encode() not in recorded
        assert b"Hello" not in recorded
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
        with capture_logs() as logged, contextlib.suppress(ConnectionError):
            writer.write(recorded)
            async with asyncio.timeout(WAIT_S):
                await reader.read()
            trainers = [line["reason"] for line in logged]
        writer.close()
        assert all("handshake" in reason for reason in trainers)


@pytest.mark.parametrize("token", [None, "guess"], ids=["in the clear", "with another token"])
async def test_an_impostor_of_the_controller_receives_nothing(token):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as false:
        if token is not None:
            guard_controller(false, token)
        address = f"tcp://127.0.0.1:{false.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(RemoteError, match="DORA_TOKEN"):
            async with rank(address, timeout_s=1.0):
                pass
        assert not false.poll(0)


async def test_a_wrong_token_is_named_on_both_ends_and_logged_once():
    with capture_logs() as logged:
        async with controller() as (end, address):
            with pytest.raises(RemoteError, match=rf"with the controller at {address} fails; .* does this side lack"):
                async with rank(address, token="guess", timeout_s=1.5):
                    pass
            with pytest.raises(RemoteError, match=r"a handshake failed: .* does that side lack this run"):
                await end.wait_ready(0.05)
            of_rank = [line for line in logged if "rank" in line]
            assert len(of_rank) == len(logged) - 1 == 1


async def test_a_rank_behind_a_forwarder_waits_for_the_controller():
    """The forwarder accepts connections before there is a controller, and closes them."""

    async def turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turned_away.release()
        writer.close()

    turned_away = asyncio.Semaphore(0)
    forwarder = await asyncio.start_server(turn_away, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{forwarder.sockets[0].getsockname()[1]}"
    trainer = TrainerEnd(address=address, token=TOKEN, rank=0, world_size=1)
    joining = asyncio.create_task(asyncio.to_thread(trainer.connect, WAIT_S))
    for _ in range(trainer_end.SUSPICIOUS + 1):
        await turned_away.acquire()
    forwarder.close()
    await forwarder.wait_closed()
    async with controller(address=address) as (end, _):
        assert await end.wait_ready(WAIT_S) == 1
        await joining
        await asyncio.to_thread(trainer.close)


async def test_a_rank_gives_up_when_another_server_answers_at_its_controllers_address(monkeypatch):
    monkeypatch.setattr(trainer_end, "UNREACHABLE_LIMIT_S", 4.0)
    monkeypatch.setattr(trainer_end, "POLL_MS", 50)
    async with controller() as (end, address):
        trainer = TrainerEnd(address=address, token=TOKEN, rank=0, world_size=1)
        await asyncio.to_thread(trainer.connect, WAIT_S)
        await end.wait_ready(WAIT_S)
    async with controller(address=address, token="of the next run"):
        with pytest.raises(RemoteError, match=r"was unreachable for 4 s; the handshake .* DORA_TOKEN"):
            await asyncio.to_thread(trainer.receive, WAIT_S)
    await asyncio.to_thread(trainer.close)


async def test_a_rank_ends_when_another_program_has_taken_the_address(monkeypatch):
    """ZeroMQ gives up a connection to a peer with another protocol, and a blocking send would then never return."""
    monkeypatch.setattr(trainer_end, "UNREACHABLE_LIMIT_S", 2.0)
    monkeypatch.setattr(trainer_end, "POLL_MS", 50)
    given_up = asyncio.Event()

    async def serve_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        given_up.set()

    async with controller() as (end, address):
        trainer = TrainerEnd(address=address, token=TOKEN, rank=0, world_size=1)
        await asyncio.to_thread(trainer.connect, WAIT_S)
        await end.wait_ready(WAIT_S)
    async with await asyncio.start_server(serve_http, "127.0.0.1", int(address.rsplit(":", 1)[1])):
        async with asyncio.timeout(WAIT_S):
            await given_up.wait()
        for index in range(2):  # the first may still find the connection as it was
            with contextlib.suppress(RemoteError):
                trainer.send(report(index))
        with pytest.raises(RemoteError, match=f"the controller at {address} (fails|was unreachable)"):
            await asyncio.to_thread(trainer.receive, 5.0)
        await asyncio.to_thread(trainer.close)


async def test_a_rank_of_another_release_is_told_that_the_handshake_fails():
    """A controller without encryption answers in its place."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as old:
        address = f"tcp://127.0.0.1:{old.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(RemoteError, match=r"the handshake .* same version of DORA"):
            async with rank(address):
                pass


async def test_failed_handshakes_do_not_halt_the_connections_of_a_busy_controller():
    """The event loop is blocked while they fail, so that nothing consumes ZeroMQ's reports of them."""
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        for _ in range(2_500):
            with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), WAIT_S) as stranger:
                stranger.sendall(greeting(b"NULL"))
                with contextlib.suppress(ConnectionError):
                    while stranger.recv(100):
                        pass
        trainer.send(report(1))
        assert await end.receive() == (0, report(1))


def test_refusals_are_logged_at_once_and_then_once_in_a_while():
    now = 0.0
    turned_away = Refusals(lambda: now)
    with capture_logs() as logged:
        for now in (0.0, 1.0, 2.0, LOG_EVERY_S + 1, LOG_EVERY_S + 2):
            turned_away.add(f"at {now:g}")
        turned_away.close()
        turned_away.close()
    assert [(line["reason"], line["number"]) for line in logged] == [("at 0", 1), ("at 61", 3), ("at 62", 1)]
    turned_away.add("x" * 10_000)
    assert len(turned_away.newest[-1]) == refusals.MAX_REASON
