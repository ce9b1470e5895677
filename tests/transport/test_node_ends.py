"""The connection between the controller and its nodes, with strangers and broken peers beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from dora.errors import ConfigError
from dora.transport.codec import decode, encode
from dora.transport.curve import CURVE_BYTES, MAX_TO_CONTROLLER_BYTES
from dora.transport.node_ends import NodeEnd, NodeHub
from dora.transport.node_messages import Beat, FromNode, Join, NodeOrders, Rejected, ServerOrder, Superseded, ToNode
from tests.transport.peers import TOKEN, WAIT_S, raw_peer
from tests.transport.test_strangers import MIB, greeting, push

JOIN = Join(protocol=1, release="1", name="n", run_id="")


class Listener:
    """A hub, and what has reached it."""

    def __init__(self) -> None:
        self.hub = NodeHub(address="tcp://127.0.0.1:0", token=TOKEN)
        self.address = self.hub.start().removeprefix("tcp://")
        self.received: asyncio.Queue[tuple[bytes, FromNode]] = asyncio.Queue()

    async def listen(self) -> None:
        async for received in self.hub.receive():
            self.received.put_nowait(received)

    async def next(self) -> tuple[bytes, FromNode]:
        async with asyncio.timeout(WAIT_S):
            return await self.received.get()


@asynccontextmanager
async def listener() -> AsyncIterator[Listener]:
    there = Listener()
    listening = asyncio.create_task(there.listen())
    try:
        yield there
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        there.hub.close()


async def joined(there: Listener, end: NodeEnd, *, name: str = "n") -> bytes:
    """Send a first message until it arrives; return who sent it."""
    join = msgspec.structs.replace(JOIN, name=name)
    async with asyncio.timeout(WAIT_S):
        while True:
            await end.send(there.address, join)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    identity, message = await there.received.get()
                    if message == join:
                        return identity


async def received(end: NodeEnd) -> list[tuple[str, ToNode]]:
    async with asyncio.timeout(WAIT_S):
        return await end.receive(WAIT_S)


async def test_messages_go_both_ways_and_name_their_sender() -> None:
    async with listener() as there:
        with contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end:
            identity = await joined(there, end)
            await there.hub.send(identity, Beat(term=3, serial=4))
            assert await received(end) == [(there.address, Beat(term=3, serial=4))]


async def test_a_node_is_connected_to_every_address_by_itself() -> None:
    async with listener() as one, listener() as other:
        with contextlib.closing(NodeEnd((one.address, other.address), token=TOKEN)) as end:
            assert end.addresses == [one.address, other.address]
            assert await joined(one, end) != await joined(other, end)
            assert one.received.empty()


async def test_what_is_sent_to_nobody_is_dropped_and_takes_no_time() -> None:
    async with listener() as there:
        with contextlib.closing(NodeEnd(("127.0.0.1:9",), token=TOKEN)) as end:
            for _ in range(1_000):
                await end.send("127.0.0.1:9", JOIN)
            for _ in range(1_000):
                await there.hub.send(b"nobody", Beat(term=0, serial=0))
            assert await end.receive(0) == []


async def test_orders_of_several_megabytes_arrive() -> None:
    orders = NodeOrders(
        term=0, serial=1, servers=dict.fromkeys(range(1 << 17), ServerOrder(start=1)), ranks=None, versions={}
    )
    async with listener() as there:
        with contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end:
            await there.hub.send(await joined(there, end), orders)
            [(_, message)] = await received(end)
            assert message == orders


async def test_a_node_with_another_token_reaches_nobody() -> None:
    async with listener() as there:
        with (
            contextlib.closing(NodeEnd((there.address,), token="another")) as stranger,
            contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end,
        ):
            for _ in range(20):
                await stranger.send(there.address, Superseded(term=99))
                await joined(there, end)
            assert await stranger.receive(0) == []
            assert there.received.empty()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff" * 100],
        encode(Beat(term=0, serial=0)),
        [*encode(JOIN), b"more"],
        [msgspec.msgpack.encode({"type": "Join", "protocol": "one"})],
        [b"\x81" * 100_000],
    ],
    ids=["empty", "garbage", "a message of the other side", "one frame too many", "a wrong field", "deeply nested"],
)
async def test_what_violates_the_protocol_is_refused_with_a_reason_and_reaches_nobody(frames: list[bytes]) -> None:
    async with listener() as there:
        with (
            raw_peer(f"tcp://{there.address}") as peer,
            contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end,
        ):
            peer.send_multipart(frames)
            assert await asyncio.to_thread(peer.poll, 1000 * WAIT_S)
            answer = decode(peer.recv_multipart(), ToNode)
            assert isinstance(answer, Rejected)
            assert answer.reason.endswith("; is it the same version of DORA?")
            assert len(answer.reason) < 400
            await joined(there, end)
            assert there.received.empty()


async def test_a_node_believes_no_message_that_violates_the_protocol() -> None:
    async with listener() as there:
        with contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end:
            identity = await joined(there, end)
            await there.hub._router.send_multipart([identity, b"garbage"])
            await there.hub.send(identity, Beat(term=1, serial=1))
            while not (found := await received(end)):
                pass
            assert [message for _, message in found] == [Beat(term=1, serial=1)]


async def test_a_frame_above_the_limit_closes_its_connection_and_no_other() -> None:
    async with listener() as there:
        with (
            raw_peer(f"tcp://{there.address}") as peer,
            contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end,
        ):
            await joined(there, end)
            monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.send(bytes(MAX_TO_CONTROLLER_BYTES + CURVE_BYTES))
            assert await asyncio.to_thread(monitor.poll, 1000 * WAIT_S)
            peer.disable_monitor()
            monitor.close()
            await joined(there, end)
            assert there.received.empty()


async def test_a_huge_frame_of_a_stranger_takes_no_memory() -> None:
    opening = greeting(b"CURVE") + b"\x06" + (900 * MIB).to_bytes(8, "big")
    async with listener() as there:
        before = psutil.Process().memory_info().rss
        taken = await push(int(there.address.rpartition(":")[2]), opening, num_bytes=50 * MIB)
        assert taken < 50 * MIB
        assert psutil.Process().memory_info().rss - before < 16 * MIB
        with contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end:
            await joined(there, end)


async def test_a_node_that_reads_nothing_keeps_a_bounded_number_of_messages() -> None:
    """What it lacks is sent again later, since messages are states."""
    orders: dict[str, Any] = {
        "servers": dict.fromkeys(range(1000), ServerOrder(start=1)),
        "ranks": None,
        "versions": {},
    }
    async with listener() as there:
        with contextlib.closing(NodeEnd((there.address,), token=TOKEN)) as end:
            identity = await joined(there, end)
            async with asyncio.timeout(WAIT_S):
                for serial in range(5_000):
                    await there.hub.send(identity, NodeOrders(term=0, serial=serial, **orders))
            arrived = 0
            while await end.receive(0.5):
                arrived += 1
            assert arrived < 4_000
            await there.hub.send(identity, Beat(term=0, serial=1))
            assert await received(end) == [(there.address, Beat(term=0, serial=1))]


async def test_an_address_that_is_taken_or_is_none_is_a_clear_error() -> None:
    async with listener() as there:
        with pytest.raises(ConfigError, match=r"nodes.address: cannot listen on tcp://.*; choose another port"):
            NodeHub(address=f"tcp://{there.address}", token=TOKEN).start()
    with pytest.raises(ConfigError, match=r"DORA_CONTROLLER: h:port: .*; write it as HOST:PORT"):
        NodeEnd(("127.0.0.1:1", "h:port"), token=TOKEN)
