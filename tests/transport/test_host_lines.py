"""The line of a host between two ends without sockets: whatever is lost or repeated, each piece arrives once."""

from __future__ import annotations

import asyncio
import random
from collections import deque

import pytest

from dora.errors import ProtocolError, RemoteError
from dora.transport.codec import Buffer, decode
from dora.transport.host_line import PIECE_BYTES, SILENCE_S, HostLine
from dora.transport.host_messages import FromHost, HostAck, HostBytes
from dora.transport.link import MAX_UNACKED


class Wire:
    """Two lines, and what is under way between them; nothing is while it is cut."""

    def __init__(self) -> None:
        self.under_way: tuple[deque[list[Buffer]], deque[list[Buffer]]] = (deque(), deque())
        self.is_up = True
        self.lines = (
            HostLine("left", lambda frames: self._put(0, frames)),
            HostLine("right", lambda frames: self._put(1, frames)),
        )

    def _put(self, sender: int, frames: list[Buffer]) -> None:
        if self.is_up:
            self.under_way[sender].append(frames)

    def deliver(self, sender: int) -> None:
        if self.under_way[sender]:
            message: HostBytes | HostAck = decode(self.under_way[sender].popleft(), FromHost)
            self.lines[1 - sender].on_message(message)

    def cut(self, draw: random.Random) -> None:
        """Lose what is under way, but for what the other side has got and not read yet."""
        self.is_up = False
        for one in self.under_way:
            for _ in range(draw.randint(0, len(one))):
                one.pop()

    def connect(self) -> None:
        """As the ends do: each says what it has, and gets the rest."""
        self.is_up = True
        has = [line.last_received for line in self.lines]
        for number, line in enumerate(self.lines):
            line.reconnected(has[1 - number])


@pytest.mark.parametrize("seed", range(5))
async def test_each_piece_arrives_once_and_in_order_over_any_cuts(seed: int) -> None:
    draw = random.Random(seed)
    wire = Wire()
    sent = [[b"%d %d" % (side, number) for number in range(300)] for side in (0, 1)]
    got: list[list[bytes]] = [[], []]

    async def send(side: int) -> None:
        for data in sent[side]:
            await wire.lines[side].send("pipe", data)
        await wire.lines[side].flushed()

    async def receive(side: int) -> None:
        while True:
            got[side].append((await wire.lines[side].receive()).data)

    receiving = [asyncio.create_task(receive(side)) for side in (0, 1)]
    sending = [asyncio.create_task(send(side)) for side in (0, 1)]
    num_cut = 0
    for _ in range(100_000):
        if all(task.done() for task in sending):
            break
        await asyncio.sleep(0)
        if draw.random() < 0.05:
            wire.cut(draw)
            num_cut += 1
        elif not wire.is_up and draw.random() < 0.5:
            wire.connect()
        else:
            wire.deliver(draw.randrange(2))
    for task in receiving:
        task.cancel()
    assert got == [sent[1], sent[0]]
    assert num_cut > 10


async def test_no_more_is_kept_than_the_window_and_the_sender_waits() -> None:
    wire = Wire()
    line, other = wire.lines
    sending = [asyncio.create_task(line.send("pipe", bytes(PIECE_BYTES))) for _ in range(MAX_UNACKED + 1)]
    await asyncio.wait(sending[:-1], timeout=10)
    assert [task.done() for task in sending] == [True] * MAX_UNACKED + [False]
    while wire.under_way[0]:
        wire.deliver(0)
    await asyncio.sleep(0)
    assert not sending[-1].done()  # they have arrived, and were not passed on
    await other.receive()
    other.passed_on()
    wire.deliver(1)
    await asyncio.wait_for(sending[-1], timeout=10)


async def test_a_line_is_lost_after_a_silence_and_everyone_who_waits_hears_of_it() -> None:
    wire = Wire()
    line = wire.lines[0]
    waiting = asyncio.create_task(line.receive())
    await asyncio.sleep(0)
    line.on_message(HostAck(last_id=0))
    for _ in range(round(SILENCE_S / 2)):
        line.beat()
    await asyncio.sleep(0)
    assert not waiting.done()
    line.beat()
    line.beat()
    for wait in (waiting, line.receive(), line.send("pipe", b""), line.flushed()):
        with pytest.raises(RemoteError, match=r"^left was not heard for 45 s$"):
            await asyncio.wait_for(wait, timeout=10)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (HostAck(last_id=1), "message 1 was acknowledged, but only 0 were sent"),
        (HostBytes(id=1, kind="pipe", data=bytes(PIECE_BYTES + 1)), "a piece of 65,537 bytes arrived; 65,536 are"),
        (HostBytes(id=MAX_UNACKED + 1, kind="pipe", data=b""), "message 65 arrived when only 0 were consumed"),
    ],
)
async def test_a_message_that_breaks_the_protocol_ends_the_line(message: HostAck | HostBytes, reason: str) -> None:
    line = Wire().lines[0]
    line.on_message(message)
    with pytest.raises(ProtocolError, match=reason):
        await line.receive()
