"""A host without the run's token, which tries everything at a port of a controller."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from functools import partial
from typing import Final

import zmq

from dora.transport.codec import encode
from dora.transport.messages import Message
from tests.cluster.network import Host
from tests.transport.peers import raw_peer
from tests.transport.test_strangers import READY, SIGNATURE, greeting

MIB: Final = 1 << 20
CONNECTIONS: Final = 200
#: A controller closes a connection that has not shown the token by then.
PATIENCE_S: Final = 20.0

HUGE: Final = (
    greeting(b"NULL") + READY + struct.pack(">BQ", 2, 900 * MIB),
    greeting(b"CURVE") + struct.pack(">BQ", 6, 900 * MIB),
    SIGNATURE + b"\x01\x05\x00\x00" + struct.pack(">BQ", 2, 900 * MIB),
    b"GET / HTTP/1.1\r\n\r\n",
)


def attack(host: Host, address: str, port: int, *, messages: tuple[Message, ...] = ()) -> None:
    """Open many connections that say nothing, some that say too much or little by little, and some without the key.

    Return when the controller has closed those that it must.
    """
    host.inside(lambda: asyncio.run(_open(address, port)))
    for token in (None, "a guess"):
        host.inside(partial(_send, f"tcp://{address}:{port}", token, messages))


async def _open(address: str, port: int) -> None:
    silent = [await asyncio.open_connection(address, port) for _ in range(CONNECTIONS)]
    for _, writer in silent[: CONNECTIONS // 2]:
        writer.write(greeting(b"CURVE"))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for opening in HUGE:
            group.create_task(_push(address, port, opening))
        group.create_task(_trickle(address, port, greeting(b"CURVE") * 10))
        for reader, writer in silent:
            group.create_task(_until_closed(reader, writer))


async def _until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def _push(address: str, port: int, opening: bytes) -> None:
    """Write 50 MiB, or as much as the controller takes."""
    reader, writer = await asyncio.open_connection(address, port)
    with contextlib.suppress(ConnectionError):
        writer.write(opening)
        for _ in range(50):
            writer.write(bytes(MIB))
            await writer.drain()
        await reader.read()
    writer.close()


async def _trickle(address: str, port: int, data: bytes) -> None:
    """Write a byte every tenth of a second until the controller has had enough."""
    reader, writer = await asyncio.open_connection(address, port)
    answered = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            if (await asyncio.wait({answered}, timeout=0.1))[0] and reader.at_eof():
                break
    writer.close()
    await asyncio.gather(answered, return_exceptions=True)


def _send(url: str, token: str | None, messages: tuple[Message, ...]) -> None:
    with raw_peer(url, token=token) as peer:
        with contextlib.suppress(zmq.Again):  # ZeroMQ may have given the connection up
            for message in messages:
                peer.send_multipart(encode(message), zmq.NOBLOCK)
        assert not peer.poll(2_000), "an answer to a stranger"
