"""The pipes of one host, carried over connections that may break. No sockets.

Invariant: each piece is passed on exactly once and in order (`Link`), or the line is lost. It is lost when the other
side has been silent for SILENCE_S, or has forgotten it; nothing is carried after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from dora.errors import ProtocolError, RemoteError
from dora.transport.codec import Buffer, encode
from dora.transport.host_messages import HostAck, HostBytes
from dora.transport.link import MAX_UNACKED, Link

#: Largest piece. MAX_UNACKED of them, 4 MiB, are kept in each direction until they are acknowledged; then the pipe
#: waits.
PIECE_BYTES: Final = 1 << 16
BEAT_S: Final = 2.0
#: A line without a connection is kept for this long. More would not help: a call that is not answered has failed after
#: `environment.call_timeout_s` (30 s) and 5 s more. It is less than the default `start_timeout_s`, so that the reason
#: why a host could not be reached is known before it is killed.
SILENCE_S: Final = 45.0
_MAX_BEATS: Final = round(SILENCE_S / BEAT_S)
#: Pieces that are passed on before they are acknowledged, if more are waiting.
_ACK_EVERY: Final = MAX_UNACKED // 4


class HostLine:
    """One end of the line of a host. `transmit` sends a message, or drops it while there is no connection."""

    def __init__(self, peer: str, transmit: Callable[[list[Buffer]], None]) -> None:
        """`peer` is the other side, in errors."""
        self._peer = peer
        self._transmit = transmit
        self._link = Link()
        self._changed = asyncio.Event()  # set when pieces are acknowledged, and when the line is lost
        self._incoming: asyncio.Queue[HostBytes | None] = asyncio.Queue()  # bounded by the window of `Link`; None: lost
        self._acked = 0  # newest piece that was acknowledged
        self._fault: RemoteError | None = None
        #: Beats since the other side was heard. They are counted, so that a stop of this process is no silence.
        self.num_silent = 0

    @property
    def last_received(self) -> int:
        return self._link.last_received

    async def send(self, kind: Literal["pipe", "log", "end"], data: bytes) -> None:
        """Send a piece, after waiting for space in the window; RemoteError if the line is lost, which ends the wait."""
        await self._until(lambda: not self._link.full)
        frames = encode(HostBytes(id=self._link.next_id, kind=kind, data=data))
        self._link.keep(frames)
        self._transmit(frames)

    async def flushed(self) -> None:
        """Wait until the other side has passed on all that was sent; RemoteError if the line is lost."""
        await self._until(lambda: not self._link.num_unacked)

    async def receive(self) -> HostBytes:
        """Return the next piece; asking for it says that the one before was passed on. RemoteError if the line is
        lost."""
        if self._incoming.empty() or self._link.last_consumed - self._acked >= _ACK_EVERY:
            self._acknowledge()
        piece = await self._incoming.get()
        if piece is None:
            self._incoming.put_nowait(None)  # so that each further call raises, too
            assert self._fault is not None
            raise self._fault
        self._link.last_consumed = piece.id
        return piece

    def passed_on(self) -> None:
        """Acknowledge the last piece that was received."""
        self._acknowledge()

    def beat(self) -> None:
        """Show the other side that this one is there; call it every BEAT_S."""
        self.num_silent += 1
        if self.num_silent > _MAX_BEATS:
            self.lose(RemoteError(f"{self._peer} was not heard for {SILENCE_S:g} s"))
        self._transmit(encode(HostAck(last_id=self._acked)))

    def lose(self, fault: RemoteError) -> None:
        """End the line: whoever waits for it gets this error."""
        if self._fault is None:
            self._fault = fault
            self._changed.set()
            self._incoming.put_nowait(None)

    def on_message(self, message: HostBytes | HostAck) -> None:
        """Note a message of the other side; one that breaks the protocol ends the line."""
        self.num_silent = 0
        try:
            if isinstance(message, HostAck):
                self._link.acknowledge(message.last_id)
                self._changed.set()
            elif len(message.data) > PIECE_BYTES:
                raise ProtocolError(f"a piece of {len(message.data):,} bytes arrived; {PIECE_BYTES:,} are allowed")
            elif self._link.take(message.id):
                self._incoming.put_nowait(message)
        except ProtocolError as err:
            self.lose(err)

    def reconnected(self, last_id: int) -> None:
        """Send again what the other side, which has all pieces up to `last_id`, lacks."""
        self.num_silent = 0
        for frames in self._link.redelivery(last_id):
            self._transmit(frames)
        self._transmit(encode(HostAck(last_id=self._acked)))

    def _acknowledge(self) -> None:
        if self._acked != self._link.last_consumed:
            self._acked = self._link.last_consumed
            self._transmit(encode(HostAck(last_id=self._acked)))

    async def _until(self, is_done: Callable[[], bool]) -> None:
        while self._fault is None and not is_done():
            self._changed.clear()
            await self._changed.wait()
        if self._fault is not None:
            raise self._fault
