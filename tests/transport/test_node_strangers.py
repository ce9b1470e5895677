"""What comes to the port for nodes without the run's token reaches nobody, and with it, what breaks the protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from dora.transport import curve
from dora.transport.codec import decode, encode
from dora.transport.curve import MAX_TO_CONTROLLER_BYTES
from dora.transport.node_ends import NodeEnd, NodeHub
from dora.transport.node_messages import NODE_PROTOCOL, Beat, FromNode, Join, Rejected
from tests.transport.peers import TOKEN, WAIT_S, Proxy, hello, raw_peer
from tests.transport.test_strangers import READY, SIGNATURE, greeting

JOIN = Join(protocol=NODE_PROTOCOL, release="1.0", name="node-1", run_id="")


@asynccontextmanager
async def hub() -> AsyncIterator[tuple[str, asyncio.Queue[FromNode]]]:
    """The controller's end, which answers each message with a beat; what it has received."""
    end = NodeHub(address="tcp://127.0.0.1:0", token=TOKEN)
    received: asyncio.Queue[FromNode] = asyncio.Queue()

    async def answer() -> None:
        async for identity, message in end.receive():
            received.put_nowait(message)
            await end.send(identity, Beat(term=0, serial=0))

    task = asyncio.create_task(answer())
    try:
        yield end.start(), received
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        end.close()


async def join(address: str) -> None:
    """Join as a node with the token until it is answered."""
    end = NodeEnd((address.removeprefix("tcp://"),), token=TOKEN)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                await end.send(end.addresses[0], JOIN)
                if await end.receive(0.1):
                    return
    finally:
        end.close()


@pytest.mark.parametrize("token", [None, "a guess"], ids=["no token", "another token"])
async def test_what_a_stranger_sends_is_not_received(token: str | None) -> None:
    async with hub() as (address, received):
        with raw_peer(address, token=token) as stranger:
            with contextlib.suppress(zmq.Again):  # ZeroMQ may have given the connection up
                for _ in range(1_000):
                    stranger.send_multipart(encode(JOIN), zmq.NOBLOCK)
            await join(address)
            assert not stranger.poll(100)
        assert {received.get_nowait() for _ in range(received.qsize())} == {JOIN}
        assert received.qsize() < 100  # those of the node


@pytest.mark.parametrize(
    "opening",
    [greeting(b"NULL") + READY, greeting(b"CURVE") + READY, SIGNATURE + b"\x01\x05\x00\x00", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["NULL", "CURVE left out", "ZMTP 2", "HTTP"],
)
async def test_the_handshake_cannot_be_left_out(opening: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 300)
    async with hub() as (address, received):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(opening + b"".join(bytes(frame) for frame in encode(JOIN)))
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        assert received.empty()


async def test_a_recorded_connection_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 300)
    async with hub() as (address, received), Proxy(address) as proxy:
        await join(proxy.address)
        assert TOKEN.encode() not in proxy.recorded
        assert b"node-1" not in proxy.recorded
        while not received.empty():
            received.get_nowait()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(proxy.recorded)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        assert received.empty()


@pytest.mark.parametrize(
    "frames",
    [[b"\xc1"], [b""], encode(hello()), [*encode(JOIN), b"more"], encode(Beat(term=1, serial=1))],
    ids=["garbage", "nothing", "of a rank", "more frames", "of a controller"],
)
async def test_a_holder_of_the_token_that_breaks_the_protocol_is_told_so_and_others_go_on(frames: list[bytes]) -> None:
    async with hub() as (address, received):
        with raw_peer(address) as peer:
            peer.send_multipart(frames)
            assert await asyncio.to_thread(peer.poll, 1000 * WAIT_S)
            answer = decode(peer.recv_multipart(), Rejected)
            assert "same version" in answer.reason
            assert received.empty()
        await join(address)


async def test_a_frame_over_the_limit_costs_the_connection_and_nothing_else() -> None:
    async with hub() as (address, received):
        with raw_peer(address) as peer:
            with contextlib.suppress(zmq.Again):
                peer.send(bytes(2 * MAX_TO_CONTROLLER_BYTES), zmq.NOBLOCK)
            await join(address)
            assert not peer.poll(0)
        assert {received.get_nowait() for _ in range(received.qsize())} == {JOIN}
