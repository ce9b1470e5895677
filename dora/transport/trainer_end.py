"""A trainer rank's end of the transport: a DEALER socket owned by one thread, a blocking interface in front of it.

Invariant: only the I/O thread touches the socket, so a rank that computes for a minute still sends its publisher's
reports at once and answers reconnections. A message is acknowledged after `receive` has returned it (with ACK_EVERY
others, with the next message sent, or when the thread has been idle for POLL_MS), so at most MAX_UNACKED of them wait
here. `send` and `receive` may be called from different threads.

I/O thread: consumes frames of the controller, connection events and messages handed to `send`; produces messages for
`receive`; waits for its three sockets; unblocked by any of them, ended by `close` or a fault, which the next `send` or
`receive` raises.
Called by: dora.trainer.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from dora.errors import ProtocolError, RemoteError
from dora.transport.codec import Buffer, decode, encode
from dora.transport.controller_end import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
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

UNREACHABLE_LIMIT_S = 60.0  # a controller gone for so long does not come back; ranks must not outlive the job
SEND_TIMEOUT_S = 120.0  # a controller that consumed none of MAX_UNACKED messages for so long is stuck
CLOSE_TIMEOUT_S = 5.0  # for the last messages to be acknowledged
POLL_MS = 1_000  # how often UNREACHABLE_LIMIT_S is looked at, and the longest that an acknowledgement waits
ACK_EVERY = MAX_UNACKED // 4  # consumed messages for which the thread is woken to acknowledge them


class TrainerEnd:
    """Typed, acknowledged messages to and from the controller."""

    def __init__(self, *, address: str, token: str, rank: int, world_size: int) -> None:
        self._address = address
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._link = Link()
        self._epoch: int | None = None  # of the controller; None until welcomed
        self._fault: RemoteError | None = None
        self._changed = threading.Condition()  # guards link, epoch, fault and outgoing; notified when one changes
        self._outgoing: list[list[Buffer]] = []  # to be transmitted by the thread; bounded by the link's window
        self._acked = 0  # newest message of which consumption was acknowledged
        self._called = False  # the thread has been woken and has not looked yet
        # Bounded by the controller's window for this rank; None: look at the fault.
        self._incoming: queue.SimpleQueue[TrainerData | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._wake_address = f"inproc://wake-{id(self)}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(self._wake_address)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="transport", daemon=True)

    def connect(self, timeout_s: float) -> None:
        """Say HELLO; returns when welcomed, raises RemoteError when refused or not answered."""
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._epoch is not None or self._fault is not None, timeout_s):
                raise RemoteError(
                    f"no answer from the controller at {self._address} within {timeout_s:g} s; "
                    "is it running, and is DORA_CONTROLLER its address?"
                )
        self._raise_fault()

    def receive(self, timeout_s: float) -> ToTrainer:
        """The next message, acknowledged by returning it."""
        try:
            data = self._incoming.get(timeout=timeout_s)
        except queue.Empty:
            raise RemoteError(f"no message from the controller at {self._address} for {timeout_s:g} s") from None
        if data is None:
            self._incoming.put(None)  # every further call meets the fault as well
            self._raise_fault()
            raise AssertionError("woken without a fault")
        with self._changed:
            self._link.last_consumed = data.id
            if data.id - self._acked >= ACK_EVERY:
                self._call()
        return data.message

    def send(self, message: ToController) -> None:
        """Hand `message` over for delivery; waits while the window is full."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._link.full or self._fault is not None, SEND_TIMEOUT_S):
                raise RemoteError(f"the controller at {self._address} consumed nothing for {SEND_TIMEOUT_S:g} s")
            self._raise_fault()
            assert self._epoch is not None, "send before connect"
            frames = encode(ControllerData(epoch=self._epoch, id=self._link.next_id, message=message))
            self._link.keep(frames)
            self._outgoing.append(frames)
            self._call()

    def try_send(self, message: ToController) -> None:
        """Send if the link still works: for the last word of a rank that fails, perhaps because of the link."""
        with self._changed:
            if self._epoch is None or self._fault is not None or self._link.full:
                return
        self.send(message)

    def close(self) -> None:
        """Wait a little until all messages are acknowledged, then end the thread."""
        if self._thread.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: not self._link.num_unacked or self._fault is not None, CLOSE_TIMEOUT_S)
                self._closing = True
                self._call()
            self._thread.join()
        self._wake.close()
        self._context.term()

    @property
    def link(self) -> Link:
        """Counters of the traffic."""
        return self._link

    def _call(self) -> None:
        """Have the thread look; the caller holds the lock, which also serialises use of the wake socket."""
        if not self._called:
            self._called = True
            self._wake.send(b"")

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # ---- I/O thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        wake = self._context.socket(zmq.PAIR)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
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
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            dealer.setsockopt(option, value)
        dealer.setsockopt(zmq.ROUTING_ID, secrets.token_hex(16).encode())
        wake.connect(self._wake_address)
        dealer.connect(self._address)
        unreachable_since: float | None = time.monotonic()
        poller = zmq.Poller()
        for watched in (dealer, wake, monitor):
            poller.register(watched, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(POLL_MS))
            if monitor in ready:
                if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    unreachable_since = None
                    dealer.send_multipart(encode(self._hello()))
                else:
                    unreachable_since = time.monotonic()
            if dealer in ready:
                self._on_frames(dealer, [part.buffer for part in dealer.recv_multipart(copy=False)])
            if wake in ready:
                wake.recv()
            for frames in self._take_outgoing(was_called=wake in ready, is_idle=not ready):
                dealer.send_multipart(frames, copy=False)
            if unreachable_since is not None and time.monotonic() - unreachable_since > UNREACHABLE_LIMIT_S:
                raise RemoteError(f"the controller at {self._address} was unreachable for {UNREACHABLE_LIMIT_S:g} s")

    def _take_outgoing(self, *, was_called: bool, is_idle: bool) -> list[list[Buffer]]:
        """What there is to transmit; an acknowledgement goes along, or else waits for others or a quiet moment."""
        with self._changed:
            outgoing, self._outgoing = self._outgoing, []
            self._called = self._called and not was_called
            consumed = self._link.last_consumed - self._acked
            if self._epoch is not None and consumed and (outgoing or is_idle or consumed >= ACK_EVERY):
                self._acked = self._link.last_consumed
                outgoing.append(encode(Ack(epoch=self._epoch, last_id=self._acked)))
        return outgoing

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            token=self._token,
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            last_id=self._link.last_received,
        )

    def _on_frames(self, dealer: zmq.Socket[bytes], buffers: list[Buffer]) -> None:
        frame: TrainerFrame = decode(buffers, TrainerFrame)
        match frame:
            case Refused(reason=reason):
                raise RemoteError(f"the controller at {self._address} refused rank {self._rank}: {reason}")
            case Welcome():
                self._on_welcome(dealer, frame)
            case _ if frame.epoch != self._epoch:
                raise ProtocolError(f"a message of controller epoch {frame.epoch} in epoch {self._epoch}")
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
                    f"the controller at {self._address} was started anew (epoch {self._epoch} -> {welcome.epoch}); "
                    "start the trainer again"
                )
            self._epoch = welcome.epoch
            again = self._link.redelivery(welcome.last_id)
            self._acked = self._link.last_consumed
            again.append(encode(Ack(epoch=welcome.epoch, last_id=self._acked)))
            self._changed.notify_all()
        for frames in again:
            dealer.send_multipart(frames, copy=False)

    def _fail(self, fault: RemoteError) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()
        self._incoming.put(None)
