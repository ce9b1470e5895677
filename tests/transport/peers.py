"""Ends, relays and raw sockets for the tests of the transport."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import zmq

from dora.transport.controller_end import ControllerEnd
from dora.transport.curve import guard_trainer
from dora.transport.messages import PROTOCOL_VERSION, Hello, MicroBatchDone
from dora.transport.trainer_end import TrainerEnd

WAIT_S = 20.0
TOKEN = "secret"


class Proxy:
    """A TCP relay that can drop all traffic and cut every connection."""

    def __init__(self, target: str) -> None:
        self._target = int(target.rsplit(":", 1)[1])
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.swallowing = False
        self.swallowed = asyncio.Event()
        self.connected = asyncio.Event()
        self.connections = 0
        self.recorded = b""  # what was relayed to the target

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self.connected.clear()
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.swallowing = False
        self.swallowed.clear()
        self.connected.set()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._relay(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                if self.swallowing:
                    self.swallowed.set()
                else:
                    if sink.get_extra_info("peername")[1] == self._target:
                        self.recorded += data
                    sink.write(data)
                    await sink.drain()
        sink.close()


@asynccontextmanager
async def controller(
    *, world_size: int | None = 1, epoch: int = 0, address: str = "tcp://127.0.0.1:0", token: str = TOKEN
):
    end = ControllerEnd(address=address, token=token, world_size=world_size, now=time.monotonic, epoch=epoch)
    try:
        bound = await end.start()
        yield end, bound
    finally:
        await end.close()


@asynccontextmanager
async def rank(
    address: str,
    *,
    number: int = 0,
    world_size: int = 1,
    token: str = TOKEN,
    timeout_s: float = WAIT_S,
    incarnation: int = 0,
    has_lease: bool = False,
) -> AsyncIterator[TrainerEnd]:
    end = TrainerEnd(
        address=address,
        token=token,
        rank=number,
        world_size=world_size,
        incarnation=incarnation,
        has_lease=has_lease,
    )
    try:
        await asyncio.to_thread(end.connect, timeout_s)
        yield end
    finally:
        await asyncio.to_thread(end.close)


def report(index: int) -> MicroBatchDone:
    return MicroBatchDone(rank=0, step=0, index=index, num_tokens=1, busy_s=0.5)


@contextmanager
def raw_peer(address: str, *, token: str | None = TOKEN) -> Iterator[zmq.Socket[bytes]]:
    """A raw DEALER socket, with the token's keys, or without keys if it is None."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        if token is not None:
            guard_trainer(dealer, token)
        dealer.connect(address)
        yield dealer


def hello(**changes: int) -> Hello:
    fields = {"protocol": PROTOCOL_VERSION, "rank": 0, "world_size": 1, "pid": 1, "last_id": 0}
    return Hello(host="h", **{**fields, **changes})
