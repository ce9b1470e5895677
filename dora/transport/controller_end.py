"""The controller's end of the transport: one ROUTER socket, one `Link` per trainer rank.

Invariant: no message is sent before all ranks have said HELLO with the same token, protocol and world size (the READY
barrier), and none is dropped: the window of `Link` bounds what is under way, so ZeroMQ's own high-water marks are off.
A rank is known by its random routing id, so a stranger cannot take its place, and a reconnecting rank keeps it.

The socket is used without waiting: a send only hands over to ZeroMQ's own thread, which has room for every window.

Reader task: consumes frames of all ranks; produces (rank, message) for `receive`; waits for the socket's descriptor;
unblocked by any frame, ended by `close`.
Called by: dora.controller.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq

from dora.errors import ConfigError, ProtocolError, RemoteError
from dora.transport.codec import Buffer, decode, encode
from dora.transport.link import MAX_UNACKED, Link
from dora.transport.messages import (
    PROTOCOL_VERSION,
    Ack,
    ControllerData,
    ControllerFrame,
    Hello,
    Refused,
    ToController,
    ToTrainer,
    TrainerData,
    Welcome,
)

SEND_TIMEOUT_S = 600.0  # a rank that consumed none of MAX_UNACKED messages for so long is stuck
HEARTBEAT_MS = 2_000  # ZeroMQ's own ping, so that a peer whose host vanished is noticed
HEARTBEAT_TIMEOUT_MS = 10_000
READ_BURST = 256  # frames taken before the event loop gets its turn

log = structlog.get_logger(__name__)


class TrainerLost(RemoteError):
    """A rank broke the protocol; nothing more is taken from it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"trainer rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


@dataclass(slots=True)
class _Peer:
    """One admitted rank."""

    rank: int
    identity: bytes
    address: str  # host and pid, for messages
    heard_at: float
    link: Link = field(default_factory=Link)
    room: asyncio.Event = field(default_factory=asyncio.Event)  # set when the window may have room again


class ControllerEnd:
    """Typed, acknowledged messages to and from every rank."""

    def __init__(
        self, *, address: str, token: str, world_size: int | None, now: Callable[[], float], epoch: int = 0
    ) -> None:
        """`world_size` None: that of the first rank to say HELLO. `epoch`: number of this start of the controller."""
        self._address = address
        self._token = token
        self._world_size = world_size
        self._now = now
        self._epoch = epoch
        self._peers: dict[int, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._refusals: deque[str] = deque(maxlen=8)  # the newest reasons, for the message of wait_ready
        self._complete = asyncio.Event()
        # Bounded by the window of each rank: a message is acknowledged when it is taken out.
        self._incoming: asyncio.Queue[tuple[_Peer, ControllerData] | BaseException] = asyncio.Queue()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._readable = asyncio.Event()  # set when the router may hold frames; its descriptor tells changes only
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind; returns the address with the real port."""
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            self._router.setsockopt(option, value)
        try:
            self._router.bind(self._address)
        except zmq.ZMQError as err:
            await self.close()
            raise ConfigError(f"trainer.address: cannot listen on {self._address}: {err}; choose another port") from err
        asyncio.get_running_loop().add_reader(self._router.FD, self._readable.set)
        self._reader = asyncio.create_task(self._read(), name="transport-reader")
        self._reader.add_done_callback(self._on_reader_done)
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    async def wait_ready(self, timeout_s: float) -> int:
        """Wait until all ranks have said HELLO; returns the world size."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            raise RemoteError(self._why_not_ready(timeout_s)) from None
        assert self._world_size is not None
        return self._world_size

    async def send(self, rank: int, message: ToTrainer) -> None:
        """Hand `message` over for delivery. Waits while MAX_UNACKED are under way; unblocked when the rank consumes."""
        assert self._complete.is_set(), "nothing is sent before the READY barrier"
        peer = self._peers[rank]
        if peer.link.full:
            await self._room(peer)
        frames = encode(TrainerData(epoch=self._epoch, id=peer.link.next_id, message=message))
        peer.link.keep(frames)
        self._transmit(peer.identity, frames)

    async def receive(self) -> tuple[int, ToController]:
        """The next message of any rank, in the order of each; raises TrainerLost when a rank breaks the protocol."""
        item = await self._incoming.get()
        if isinstance(item, BaseException):
            raise item
        peer, data = item
        peer.link.last_consumed = data.id
        self._transmit(peer.identity, encode(Ack(epoch=self._epoch, last_id=data.id)))
        return peer.rank, data.message

    def silent_s(self, rank: int) -> float:
        """Seconds since the last frame of `rank`."""
        return self._now() - self._peers[rank].heard_at

    def link(self, rank: int) -> Link:
        """Counters of the traffic with `rank`."""
        return self._peers[rank].link

    async def close(self) -> None:
        """Close the socket; what is unacknowledged is given up."""
        if self._reader is not None:
            asyncio.get_running_loop().remove_reader(self._router.FD)
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._router.close()
        self._context.term()

    # ---- reader task ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            await self._readable.wait()
            self._readable.clear()
            if self._take_burst() == READ_BURST:
                asyncio.get_running_loop().call_soon(self._readable.set)

    def _take_burst(self) -> int:
        """Take in what the socket holds; the number of messages."""
        for number in range(READ_BURST):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return number
            self._on_frames(identity.bytes, [frame.buffer for frame in frames])
        return READ_BURST

    def _on_frames(self, identity: bytes, frames: list[Buffer]) -> None:
        peer = self._by_identity.get(identity)
        try:
            frame: ControllerFrame = decode(frames, ControllerFrame)
            if isinstance(frame, Hello):
                self._on_hello(identity, frame)
            elif peer is not None and frame.epoch == self._epoch:  # else: its HELLO to this controller follows
                peer.heard_at = self._now()
                self._on_frame(peer, frame)
        except ProtocolError as err:
            if peer is None:
                self._refuse(identity, "an unknown peer", str(err))
            else:
                del self._by_identity[identity]
                self._incoming.put_nowait(TrainerLost(peer.rank, str(err)))

    def _on_frame(self, peer: _Peer, frame: Ack | ControllerData) -> None:
        if isinstance(frame, Ack):
            peer.link.acknowledge(frame.last_id)
            peer.room.set()
        elif peer.link.take(frame.id):
            self._incoming.put_nowait((peer, frame))

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        who = f"rank {hello.rank} (host {hello.host}, pid {hello.pid})"
        peer = self._by_identity.get(identity)
        if peer is None:
            reason = self._why_refused(hello)
            if reason is not None:
                self._refuse(identity, who, reason)
                return
            self._world_size = hello.world_size
            peer = _Peer(hello.rank, identity, f"host {hello.host}, pid {hello.pid}", heard_at=self._now())
            self._peers[hello.rank] = self._by_identity[identity] = peer
        link = peer.link
        self._transmit(identity, encode(Welcome(epoch=self._epoch, last_id=link.last_received)))
        self._transmit(identity, encode(Ack(epoch=self._epoch, last_id=link.last_consumed)))
        for frames in link.redelivery(hello.last_id):
            self._transmit(identity, frames)
        if len(self._peers) == self._world_size:
            self._complete.set()

    def _why_refused(self, hello: Hello) -> str | None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "wrong token (DORA_TOKEN must be the one this run printed)"
        if hello.protocol != PROTOCOL_VERSION:
            return f"it speaks protocol {hello.protocol}, this controller {PROTOCOL_VERSION}; install the same version"
        if self._world_size is not None and hello.world_size != self._world_size:
            return f"its world size is {hello.world_size}, that of this run {self._world_size}"
        if not 0 <= hello.rank < hello.world_size:
            return f"rank {hello.rank} does not exist in world size {hello.world_size}"
        if hello.rank in self._peers:
            return f"rank {hello.rank} is taken by {self._peers[hello.rank].address}"
        return None

    def _refuse(self, identity: bytes, who: str, reason: str) -> None:
        self._refusals.append(f"{who} was refused: {reason}")
        log.warning("trainer_refused", who=who, reason=reason)
        self._transmit(identity, encode(Refused(reason=reason)))

    async def _room(self, peer: _Peer) -> None:
        """Wait until the window of `peer` has room; unblocked by its acknowledgements."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                while peer.link.full:
                    peer.room.clear()
                    await peer.room.wait()
        except TimeoutError:
            reason = f"consumed none of {MAX_UNACKED} messages in {SEND_TIMEOUT_S:g} s"
            raise TrainerLost(peer.rank, reason) from None

    def _transmit(self, identity: bytes, frames: list[Buffer]) -> None:
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            # The rank is not connected. Data is kept in its link and sent again after its next HELLO.
        self._readable.set()  # sending may have taken notice of what arrived, which the descriptor tells only once

    def _why_not_ready(self, timeout_s: float) -> str:
        size = "unknown" if self._world_size is None else str(self._world_size)
        missing = [] if self._world_size is None else sorted(set(range(self._world_size)) - set(self._peers))
        which = f"ranks {', '.join(map(str, missing))}" if missing else "all ranks"
        return "; ".join(
            [f"trainer: {which} of world size {size} said no HELLO within {timeout_s:g} s", *self._refusals]
        )

    def _on_reader_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (err := task.exception()) is not None:
            self._incoming.put_nowait(err)
