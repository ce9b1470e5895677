"""A trainer rank's end of the transport: a DEALER socket owned by an I/O thread, behind a blocking interface.

Invariant: only the I/O thread uses the socket, so that a rank that computes for a minute still reconnects and still
sends its publisher's reports at once. A message is acknowledged after `receive` has returned it: with ACK_EVERY others,
with the next message sent, or when the thread has been idle for POLL_MS. So at most MAX_UNACKED messages are queued.
`send` and `receive` may be called from different threads. A fault ends the I/O thread, and is raised by the next `send`
or `receive`.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from dora.errors import ProtocolError, RemoteError
from dora.transport.codec import Buffer, decode, encode, require_size
from dora.transport.controller_end import CONNECT_MS, FAILED_HANDSHAKES, HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from dora.transport.curve import MAX_TO_CONTROLLER_BYTES, guard_trainer
from dora.transport.link import MAX_UNACKED, Link
from dora.transport.messages import (
    PROTOCOL_VERSION,
    Ack,
    ControllerData,
    Hello,
    Refused,
    ToController,
    ToTrainer,
    TrainerData,
    TrainerFrame,
    Welcome,
)

UNREACHABLE_LIMIT_S = 60.0  # a rank ends when the controller was unreachable for this long, so as not to outlive it
SEND_TIMEOUT_S = 120.0  # a controller that has consumed none of MAX_UNACKED messages for this long is stuck
STOPPED_LIMIT_S = 24 * 3600.0  # in place of both limits, if a rank ends with its controller
CLOSE_TIMEOUT_S = 5.0  # for the acknowledgement of the last messages
POLL_MS = 1_000  # how often UNREACHABLE_LIMIT_S is checked, and the longest delay of an acknowledgement
ACK_EVERY = MAX_UNACKED // 4  # number of consumed messages after which the thread is woken to acknowledge them
# Failed handshakes in a row before one is logged, after some 0.5 s. The rank keeps trying: a forwarder in front of a
# controller that has not started yet fails them too.
SUSPICIOUS = 4

log = structlog.get_logger(__name__)


class TrainerEnd:
    """Typed, acknowledged messages to and from the controller."""

    def __init__(
        self, *, address: str, token: str, rank: int, world_size: int, incarnation: int = 0, has_lease: bool = False
    ) -> None:
        """`incarnation`: of the ranks. `has_lease`: this process ends with its controller, so a controller that is
        silent is still alive."""
        self._address = address
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._incarnation = incarnation
        self._has_lease = has_lease
        self._link = Link()
        self._epoch: int | None = None  # of the controller; None until welcomed
        self._fault: RemoteError | None = None
        self._failed_handshakes = 0  # in a row
        self._changed = threading.Condition()  # guards link, epoch, fault and outgoing; notified of changes
        self._outgoing: list[list[Buffer]] = []  # to be transmitted by the thread; bounded by the link's window
        self._acked = 0  # newest message that was acknowledged
        self._called = False  # whether the I/O thread has a wake-up to handle
        # Bounded by the controller's window for this rank; None: there is a fault.
        self._incoming: queue.SimpleQueue[TrainerData | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._wake_address = f"inproc://wake-{id(self)}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(self._wake_address)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="transport", daemon=True)

    def connect(self, timeout_s: float) -> None:
        """Send HELLO and wait to be welcomed; RemoteError if the rank is refused or not answered."""
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._epoch is not None or self._fault is not None, timeout_s):
                if self._failed_handshakes:
                    raise RemoteError(f"{self._why_no_handshake()} (tried for {timeout_s:g} s)")
                raise RemoteError(
                    f"no answer from the controller at {self._address} within {timeout_s:g} s; "
                    "is it running, and is DORA_CONTROLLER its address?"
                )
        self._raise_fault()

    def receive(self, timeout_s: float) -> ToTrainer:
        """Return the next message, which also acknowledges it."""
        try:
            data = self._incoming.get(timeout=timeout_s)
        except queue.Empty:
            raise RemoteError(f"no message from the controller at {self._address} for {timeout_s:g} s") from None
        if data is None:
            self._incoming.put(None)  # so that every further call raises the fault too
            self._raise_fault()
            raise AssertionError("woken without a fault")
        with self._changed:
            self._link.last_consumed = data.id
            if data.id - self._acked >= ACK_EVERY:
                self._call()
        return data.message

    def send(self, message: ToController) -> None:
        """Send `message`, after waiting for space in the window."""
        limit_s = STOPPED_LIMIT_S if self._has_lease else SEND_TIMEOUT_S
        with self._changed:
            if not self._changed.wait_for(lambda: not self._link.full or self._fault is not None, limit_s):
                raise RemoteError(f"the controller at {self._address} consumed nothing for {limit_s:g} s")
            self._raise_fault()
            assert self._epoch is not None, "send before connect"
            id = self._link.next_id
            frames = encode(ControllerData(epoch=self._epoch, incarnation=self._incarnation, id=id, message=message))
            require_size(message, frames, max_bytes=MAX_TO_CONTROLLER_BYTES, receiver="the controller")
            self._link.keep(frames)
            self._outgoing.append(frames)
            self._call()

    def try_send(self, message: ToController) -> None:
        """Send `message` if the link works; for the last message of a rank that fails."""
        with self._changed:
            if self._epoch is None or self._fault is not None or self._link.full:
                return
        self.send(message)

    def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT_S for acknowledgements, then end the thread."""
        if self._thread.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: not self._link.num_unacked or self._fault is not None, CLOSE_TIMEOUT_S)
                self._call()
                self._closing = True  # the thread does not see it before the lock is released
            self._thread.join()
        self._wake.close()
        self._context.term()

    def _call(self) -> None:
        """Wake the socket thread. The caller holds the lock, which also serializes use of the wake socket.

        After a fault the thread closes its end, and a send would never return.
        """
        if not self._called and self._fault is None:
            self._called = True
            self._wake.send(b"")

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # ---- I/O thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        wake = self._context.socket(zmq.PAIR)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES)
        try:
            self._loop(dealer, wake, monitor)
        except RemoteError as err:
            self._fail(err)
        except BaseException as err:
            self._fail(RemoteError(f"the transport failed: {err!r}"))
            raise
        finally:
            dealer.disable_monitor()
            for used in (monitor, wake, dealer):
                used.close()

    def _loop(self, dealer: zmq.Socket[bytes], wake: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 1_000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2_000),
            (zmq.CONNECT_TIMEOUT, CONNECT_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            dealer.setsockopt(option, value)
        dealer.setsockopt(zmq.ROUTING_ID, secrets.token_hex(16).encode())
        guard_trainer(dealer, self._token)
        wake.connect(self._wake_address)
        dealer.connect(self._address)
        unreachable_since: float | None = time.monotonic()
        poller = zmq.Poller()
        for watched in (dealer, wake, monitor):
            poller.register(watched, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(POLL_MS))
            if monitor in ready:
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    unreachable_since, self._failed_handshakes = None, 0
                    self._transmit(dealer, encode(self._hello()))
                elif event & FAILED_HANDSHAKES:
                    self._on_failed_handshake(is_final=event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
                elif unreachable_since is None:
                    unreachable_since = time.monotonic()
            if dealer in ready:
                self._on_frames(dealer, [part.buffer for part in dealer.recv_multipart(copy=False)])
            if wake in ready:
                wake.recv()
            for frames in self._take_outgoing(was_called=wake in ready, is_idle=not ready):
                self._transmit(dealer, frames)
            limit_s = STOPPED_LIMIT_S if self._has_lease and self._epoch is not None else UNREACHABLE_LIMIT_S
            if unreachable_since is not None and time.monotonic() - unreachable_since > limit_s:
                why = f"; {self._why_no_handshake()}" if self._failed_handshakes else ""
                raise RemoteError(f"the controller at {self._address} was unreachable for {limit_s:g} s{why}")

    def _take_outgoing(self, *, was_called: bool, is_idle: bool) -> list[list[Buffer]]:
        """Return the messages to transmit, with an acknowledgement if one is due."""
        with self._changed:
            outgoing, self._outgoing = self._outgoing, []
            self._called = self._called and not was_called
            consumed = self._link.last_consumed - self._acked
            if self._epoch is not None and consumed and (outgoing or is_idle or consumed >= ACK_EVERY):
                self._acked = self._link.last_consumed
                outgoing.append(encode(self._ack(self._epoch)))
        return outgoing

    def _ack(self, epoch: int) -> Ack:
        return Ack(epoch=epoch, incarnation=self._incarnation, last_id=self._acked)

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            last_id=self._link.last_received,
            incarnation=self._incarnation,
        )

    def _transmit(self, dealer: zmq.Socket[bytes], frames: list[Buffer]) -> None:
        try:
            dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # the queue is unbounded, so ZeroMQ has given up the connection
            raise RemoteError(self._why_no_handshake()) from None

    def _on_failed_handshake(self, *, is_final: bool) -> None:
        """`is_final`: the other side is not a controller, and ZeroMQ does not retry."""
        if is_final:
            raise RemoteError(self._why_no_handshake())
        self._failed_handshakes += 1
        if self._failed_handshakes == SUSPICIOUS:
            log.warning("trainer_refused", rank=self._rank, reason=self._why_no_handshake())

    def _why_no_handshake(self) -> str:
        return (
            f"the handshake with the controller at {self._address} fails; is that process stopped, or "
            "does this side lack its run's DORA_TOKEN, or the same version of DORA?"
        )

    def _on_frames(self, dealer: zmq.Socket[bytes], buffers: list[Buffer]) -> None:
        frame: TrainerFrame = decode(buffers, TrainerFrame)
        match frame:
            case Refused(reason=reason):
                raise RemoteError(f"the controller at {self._address} refused rank {self._rank}: {reason}")
            case Welcome():
                self._on_welcome(dealer, frame)
            case _ if (frame.epoch, frame.incarnation) != (self._epoch, self._incarnation):
                raise ProtocolError(
                    f"a message of controller epoch {frame.epoch} and incarnation {frame.incarnation}, in epoch "
                    f"{self._epoch} and incarnation {self._incarnation}"
                )
            case Ack(last_id=last_id):
                with self._changed:
                    self._link.acknowledge(last_id)
                    self._changed.notify_all()
            case TrainerData():
                if self._link.take(frame.id):
                    self._incoming.put(frame)

    def _on_welcome(self, dealer: zmq.Socket[bytes], welcome: Welcome) -> None:
        with self._changed:
            if self._epoch not in (None, welcome.epoch):
                raise RemoteError(
                    f"the controller at {self._address} was restarted (epoch {self._epoch} -> {welcome.epoch}); "
                    "restart the trainer too"
                )
            if welcome.incarnation != self._incarnation:
                raise ProtocolError(f"welcomed as incarnation {welcome.incarnation}, but it is {self._incarnation}")
            self._epoch = welcome.epoch
            again = self._link.redelivery(welcome.last_id)
            self._acked = self._link.last_consumed
            again.append(encode(self._ack(welcome.epoch)))
            self._changed.notify_all()
        for frames in again:
            self._transmit(dealer, frames)

    def _fail(self, fault: RemoteError) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()
        self._incoming.put(None)
