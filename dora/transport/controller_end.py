"""The controller's end of the transport: one ROUTER socket, one `Link` per trainer rank.

Invariant: no message is sent before all ranks have sent HELLO with the same protocol and world size (the READY
barrier), and none is dropped: the window of `Link` bounds the messages in flight, and QUEUE_SIZE is larger than any
window needs, so that only a rank that breaks the protocol reaches it. Frames come only from holders of the token
(`curve`); the handshake of any other peer fails in ZeroMQ's own thread and is counted here. A rank is identified by its
random routing id, which it keeps when it reconnects and which no other rank can take. Ranks of an earlier incarnation,
which were replaced (`renew`), are refused, and what they still send is dropped and counted.

No call on the socket blocks: a send hands the message to ZeroMQ's own thread. The reader task yields to the event loop
after each burst of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import zmq

from dora.errors import ConfigError, ProtocolError, RemoteError
from dora.transport.codec import Buffer, decode, encode, require_size
from dora.transport.curve import MAX_TO_TRAINER_BYTES, guard_controller
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
from dora.transport.refusals import Refusals

SEND_TIMEOUT_S = 600.0  # a rank that has consumed none of MAX_UNACKED messages for this long is stuck
HEARTBEAT_MS = 2_000  # ZeroMQ's own ping, which detects a peer whose host has vanished
HEARTBEAT_TIMEOUT_MS = 10_000
CONNECT_MS = 3_000  # then another attempt begins: TCP repeats a lost request after 1, 3, 7, 15, 31 s
READ_BURST = 64  # messages to take before yielding to the event loop
# Messages queued to or from one connection. Both windows and their acknowledgements are at most 2 * MAX_UNACKED, and
# ZeroMQ learns only after every half queue how many messages the other side has received.
QUEUE_SIZE = 8 * MAX_UNACKED
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
MAX_NAMED = 16  # missing ranks in one message
STRANGER = (
    "a handshake failed: was this process stopped, or does that side lack this run's DORA_TOKEN, "
    "or the same version of DORA?"
)


class RankLost(RemoteError):
    """A rank broke the protocol; its further messages are ignored."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"trainer rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


@dataclass(slots=True)
class _Peer:
    """One admitted rank."""

    rank: int
    identity: bytes
    address: str  # host and pid, for error messages
    link: Link = field(default_factory=Link)
    room: asyncio.Event = field(default_factory=asyncio.Event)  # set when the window may have space again


class ControllerEnd:
    """Typed, acknowledged messages to and from every rank."""

    def __init__(
        self, *, address: str, token: str, world_size: int | None, now: Callable[[], float], epoch: int = 0
    ) -> None:
        """`world_size`: None to take that of the first HELLO. `epoch`: number of this start of the controller."""
        self._address = address
        self._token = token
        self._world_size = world_size
        self._strangers = Refusals(now)
        self._epoch = epoch
        self._incarnation = 0
        self.num_dropped = 0  # messages of earlier incarnations
        self._peers: dict[int, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._cut_off: set[bytes] = set()  # identities of ranks that broke the protocol
        self._refusals = Refusals(now)  # of peers with the token
        self._complete = asyncio.Event()
        # At most MAX_UNACKED messages of each rank, which `Link` enforces, and one RankLost.
        self._incoming: asyncio.Queue[tuple[_Peer, ControllerData] | BaseException] = asyncio.Queue()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._monitor: zmq.Socket[bytes] | None = None
        self._readable = asyncio.Event()  # set when a socket may have frames; its descriptor is edge-triggered
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind; return the address with the real port."""
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, QUEUE_SIZE),
            (zmq.RCVHWM, QUEUE_SIZE),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            self._router.setsockopt(option, value)
        guard_controller(self._router, self._token)
        self._context.setsockopt(zmq.RCVHWM, 0)  # for the monitor: a full one would block ZeroMQ's thread
        self._monitor = self._router.get_monitor_socket(FAILED_HANDSHAKES)
        try:
            self._router.bind(self._address)
        except zmq.ZMQError as err:
            await self.close()
            raise ConfigError(f"trainer.address: cannot listen on {self._address}: {err}; choose another port") from err
        for watched in (self._router, self._monitor):
            asyncio.get_running_loop().add_reader(watched.FD, self._readable.set)
        self._reader = asyncio.create_task(self._read(), name="transport-reader")
        self._reader.add_done_callback(self._on_reader_done)
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def renew(self, incarnation: int) -> None:
        """Forget the ranks, and admit those of this incarnation from now on, as many as the first of them says.

        No other call may be under way.
        """
        self._incarnation, self._world_size = incarnation, None
        for identity in self._by_identity:
            self._transmit(identity, encode(Refused(reason="this start of the ranks was replaced")))
        self._peers, self._by_identity = {}, {}
        self._complete.clear()
        self._incoming = asyncio.Queue()

    async def wait_ready(self, timeout_s: float) -> int:
        """Wait until all ranks have sent HELLO; return the world size."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            raise RemoteError(self._why_not_ready(timeout_s)) from None
        assert self._world_size is not None
        return self._world_size

    async def send(self, rank: int, message: ToTrainer) -> None:
        """Send `message`; if MAX_UNACKED are in flight, first wait until the rank has consumed one."""
        assert self._complete.is_set(), "nothing is sent before the READY barrier"
        peer = self._peers[rank]
        if peer.link.full:
            await self._room(peer)
        frames = encode(self._data(peer.link.next_id, message))
        require_size(message, frames, max_bytes=MAX_TO_TRAINER_BYTES, receiver=f"trainer rank {rank}")
        peer.link.keep(frames)
        self._transmit(peer.identity, frames)

    async def receive(self) -> tuple[int, ToController]:
        """Return the next message of any rank, in order for each rank; RankLost if a rank breaks the protocol."""
        item = await self._incoming.get()
        if isinstance(item, BaseException):
            raise item
        peer, data = item
        peer.link.last_consumed = data.id
        self._transmit(peer.identity, encode(self._ack(data.id)))
        return peer.rank, data.message

    def _data(self, id: int, message: ToTrainer) -> TrainerData:
        return TrainerData(epoch=self._epoch, incarnation=self._incarnation, id=id, message=message)

    def _ack(self, last_id: int) -> Ack:
        return Ack(epoch=self._epoch, incarnation=self._incarnation, last_id=last_id)

    def link(self, rank: int) -> Link:
        """Return the link with its counters of the traffic with `rank`."""
        return self._peers[rank].link

    async def close(self) -> None:
        """Close the socket and drop unacknowledged messages."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._monitor is not None:
            for watched in (self._router, self._monitor):
                asyncio.get_running_loop().remove_reader(watched.FD)
            self._router.disable_monitor()
            self._monitor.close()
            self._monitor = None
        for refusals in (self._strangers, self._refusals):
            refusals.close()
        self._router.close()
        self._context.term()

    # ---- reader task ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            await self._readable.wait()
            self._readable.clear()
            if self._take_burst():
                self._readable.set()
            await asyncio.sleep(0)  # waiting for an event that is already set does not yield

    def _take_burst(self) -> bool:
        """Take a burst of messages from each socket; return whether there may be more."""
        assert self._monitor is not None
        messages, failed = _burst(self._router), _burst(self._monitor)
        for identity, *frames in messages:
            self._on_frames(identity.bytes, [frame.buffer for frame in frames])
        if failed:
            self._strangers.add(STRANGER, len(failed))
        return READ_BURST in (len(messages), len(failed))

    def _on_frames(self, identity: bytes, frames: list[Buffer]) -> None:
        if identity in self._cut_off:
            return
        peer = self._by_identity.get(identity)
        try:
            frame: ControllerFrame = decode(frames, ControllerFrame)
            if isinstance(frame, Hello):
                self._on_hello(identity, frame)
            elif (frame.epoch, frame.incarnation) != (self._epoch, self._incarnation):
                self.num_dropped += 1  # or its HELLO to this controller follows
            elif peer is not None:
                self._on_frame(peer, frame)
        except ProtocolError as err:
            if peer is None:
                self._refuse(identity, "an unknown peer", str(err))
            else:
                self._cut(peer, str(err))

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
            peer = _Peer(hello.rank, identity, f"host {hello.host}, pid {hello.pid}")
            self._peers[hello.rank] = self._by_identity[identity] = peer
        link = peer.link
        welcome = Welcome(epoch=self._epoch, incarnation=self._incarnation, last_id=link.last_received)
        self._transmit(identity, encode(welcome))
        self._transmit(identity, encode(self._ack(link.last_consumed)))
        for frames in link.redelivery(hello.last_id):
            self._transmit(identity, frames)
        if len(self._peers) == self._world_size:
            self._complete.set()

    def _why_refused(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"it has protocol {hello.protocol}, this controller {PROTOCOL_VERSION}; install the same version"
        if hello.incarnation != self._incarnation:
            return f"it belongs to start {hello.incarnation} of the ranks, but this is start {self._incarnation}"
        if self._world_size is not None and hello.world_size != self._world_size:
            return f"its world size is {hello.world_size}, but that of this run is {self._world_size}"
        if not 0 <= hello.rank < hello.world_size:
            return f"rank {hello.rank} does not exist in world size {hello.world_size}"
        if hello.rank in self._peers:
            return f"rank {hello.rank} is taken by {self._peers[hello.rank].address}"
        return None

    def _refuse(self, identity: bytes, who: str, reason: str) -> None:
        self._refusals.add(f"{who} was refused: {reason}")
        self._transmit(identity, encode(Refused(reason=reason)))

    def _cut(self, peer: _Peer, reason: str) -> None:
        """Refuse `peer`, which broke the protocol, and ignore it from now on."""
        del self._by_identity[peer.identity]
        self._cut_off.add(peer.identity)
        self._incoming.put_nowait(RankLost(peer.rank, reason))
        self._transmit(peer.identity, encode(Refused(reason=reason)))

    async def _room(self, peer: _Peer) -> None:
        """Wait until `peer` has acknowledged enough messages for another one."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                while peer.link.full:
                    peer.room.clear()
                    await peer.room.wait()
        except TimeoutError:
            reason = f"consumed none of {MAX_UNACKED} messages in {SEND_TIMEOUT_S:g} s"
            raise RankLost(peer.rank, reason) from None

    def _transmit(self, identity: bytes, frames: list[Buffer]) -> None:
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if identity in self._by_identity:
                self._cut(self._by_identity[identity], f"it reads nothing: {QUEUE_SIZE} messages are queued for it")
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            # The rank is not connected. Its link keeps the data and sends it again after the next HELLO.
        self._readable.set()  # sending may have consumed the descriptor's only signal for an arrived message

    def _why_not_ready(self, timeout_s: float) -> str:
        size = "unknown" if self._world_size is None else str(self._world_size)
        absent = (rank for rank in range(self._world_size or 0) if rank not in self._peers)
        missing = [str(rank) for rank in islice(absent, MAX_NAMED)]
        if len(missing) == MAX_NAMED:
            missing[-1] = "..."
        which = f"ranks {', '.join(missing)}" if missing else "all ranks"
        reasons = [f"trainer: {which} of world size {size} sent no HELLO within {timeout_s:g} s"]
        if self._strangers.count:
            reasons.append(f"{STRANGER} ({self._strangers.count} times)")
        return "; ".join([*reasons, *self._refusals.newest])

    def _on_reader_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (err := task.exception()) is not None:
            self._incoming.put_nowait(err)


def _burst(socket: zmq.Socket[bytes]) -> list[list[zmq.Frame]]:
    """Receive up to READ_BURST messages that have arrived at `socket`."""
    messages: list[list[zmq.Frame]] = []
    with contextlib.suppress(zmq.Again):
        while len(messages) < READ_BURST:
            messages.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
    return messages
