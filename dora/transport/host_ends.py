"""Both ends of the lines to hosts of environments on another machine: a ROUTER socket there, a DEALER for each host.

Invariant: frames come only from holders of the token (`curve`), and are bounded in size and number. A line belongs to
the random routing id of its DEALER, which is kept over reconnections, and which nobody else knows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dora.errors import ConfigError, DoraError, ProtocolError, RemoteError
from dora.transport.codec import Buffer, decode, encode
from dora.transport.controller_end import (
    CONNECT_MS,
    FAILED_HANDSHAKES,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    QUEUE_SIZE,
)
from dora.transport.curve import MAX_TO_CONTROLLER_BYTES, guard_controller, guard_trainer
from dora.transport.host_line import BEAT_S, SILENCE_S, HostLine
from dora.transport.host_messages import (
    HOST_PROTOCOL,
    FromHost,
    HostAck,
    HostBytes,
    HostLeft,
    HostOpened,
    HostRefused,
    OpenHost,
    ToHost,
)

#: Failed handshakes in a row, some 3 s, after which the first connection is given up. A few may fail in front of a
#: tunnel whose other end starts.
_MAX_FAILED: Final = 5
#: Longest time in which the last messages may leave, when this end is closed.
_LINGER_MS: Final = 5_000
#: Time in which the other sides may read why their hosts have ended, before this end is closed: a connection that is
#: closed with unread bytes is reset, which can take the last message with it.
_LEAVE_S: Final = 2.0
#: A line that was silent for this many beats gives its place to a new one: its controller may have ended.
_GIVES_WAY: Final = 4


class HostHub:
    """The end where the hosts are, at most `max_hosts` at a time."""

    def __init__(self, address: str, *, token: str, max_hosts: int) -> None:
        self._address = address
        self._max_hosts = max_hosts
        self._lines: dict[bytes, HostLine] = {}
        self._told: set[bytes] = set()  # why their hosts have ended, and that they have not read yet
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        guard_controller(self._router, token)
        _set_up(self._router)

    def start(self) -> str:
        """Bind; return the address with the real port."""
        try:
            self._router.bind(f"tcp://{self._address}")
        except zmq.ZMQError as err:
            raise ConfigError(f"--listen {self._address}: {err}; write it as HOST:PORT, with a free port") from err
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    async def admit(self) -> AsyncIterator[HostLine]:
        """Yield each new line. All lines are read here; `forget` each one."""
        while True:
            identity, *frames = await self._router.recv_multipart()
            line = self._lines.get(identity)
            try:
                message: ToHost = decode(frames, ToHost)
            except ProtocolError as err:
                self._transmit(identity, encode(HostRefused(reason=f"{err}; is it the same version of DORA?")))
                continue
            if isinstance(message, HostLeft):
                self._told.discard(identity)
                continue
            if not isinstance(message, OpenHost):
                if line is not None:
                    line.on_message(message)
                continue
            refused = self._why_refused(message) if line is None else None
            if refused is not None:
                self._transmit(identity, encode(refused))
                continue
            if line is None:
                line = self._new_line(identity)
                yield line
            self._transmit(identity, encode(HostOpened(last_id=line.last_received)))
            line.reconnected(message.last_id)

    async def watch(self) -> None:
        """Keep the lines alive, and find those that are lost."""
        while True:
            await asyncio.sleep(BEAT_S)
            for line in [*self._lines.values()]:
                line.beat()

    def forget(self, line: HostLine, *, reason: str) -> None:
        """End a line; the other side is told why."""
        for identity in [identity for identity, known in self._lines.items() if known is line]:
            del self._lines[identity]
            self._transmit(identity, encode(HostRefused(reason=reason)))
            if line.num_silent < _GIVES_WAY:
                self._told.add(identity)

    async def close(self) -> None:
        """Wait a while until the other sides have read what they were told, and close."""
        with suppress(TimeoutError, ProtocolError):
            async with asyncio.timeout(_LEAVE_S):
                while self._told:
                    identity, *frames = await self._router.recv_multipart()
                    if isinstance(decode(frames, ToHost), HostLeft):
                        self._told.discard(identity)
        self._router.close()
        self._context.term()

    def _new_line(self, identity: bytes) -> HostLine:
        line = self._lines[identity] = HostLine("the controller", lambda frames: self._transmit(identity, frames))
        return line

    def _why_refused(self, message: OpenHost) -> HostRefused | None:
        if message.protocol != HOST_PROTOCOL:
            return HostRefused(
                reason=f"this side has protocol {message.protocol}, that side {HOST_PROTOCOL}; install the same "
                "version of DORA on both"
            )
        if not message.is_new:
            return HostRefused(reason="it was restarted, or has ended this host, and does not know it any more")
        if len(self._lines) < self._max_hosts:
            return None
        silent = max(self._lines.values(), key=lambda line: line.num_silent)
        if silent.num_silent >= _GIVES_WAY:
            silent.lose(RemoteError("the controller was not heard, and another one needs the place"))
        return HostRefused(reason=f"all {self._max_hosts} hosts are in use; raise --hosts there", is_busy=True)

    def _transmit(self, identity: bytes, frames: list[Buffer]) -> None:
        """Send a message, or drop it while that side is not connected."""
        _send(self._router, [identity, *frames])


class HostConnection:
    """The controller's end of the line of one host: a context with the line, which raises what happens to it.

    Entering it raises ConfigError if the other side does not admit this one, and RemoteError without an answer in
    SILENCE_S.
    """

    def __init__(self, address: str, *, token: str) -> None:
        self._address = address
        self._peer = f"dora environments serve at {address}"
        self._context = zmq.asyncio.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, secrets.token_hex(16).encode()),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2_000),
            (zmq.CONNECT_TIMEOUT, CONNECT_MS),
            (zmq.IMMEDIATE, 1),
        ):
            self._dealer.setsockopt(option, value)
        guard_trainer(self._dealer, token, max_bytes=MAX_TO_CONTROLLER_BYTES)
        _set_up(self._dealer)
        self._line = HostLine(self._peer, self._transmit)
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_open = False  # the current connection
        self._num_failed = 0  # handshakes in a row
        self._is_busy = ""  # why there was no place yet
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> HostLine:
        self._monitor = self._dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES
        )
        self._tasks = [
            asyncio.create_task(self._follow(self._monitor), name="host-connection"),
            asyncio.create_task(self._read(), name="host-messages"),
            asyncio.create_task(self._beat(), name="host-beats"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end)
        try:
            self._dealer.connect(f"tcp://{self._address}")
            async with asyncio.timeout(SILENCE_S):
                await self._opened
        except zmq.ZMQError as err:
            await self._close()
            raise ConfigError(f"{self._address}: {err}; write it as HOST:PORT") from err
        except TimeoutError:
            await self._close()
            raise RemoteError(self._is_busy or f"no answer from {self._peer} for {SILENCE_S:g} s") from None
        except BaseException:
            await self._close()
            raise
        return self._line

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dealer.disable_monitor()  # before its other end is closed: it sends a last event, and waits for space
        if self._monitor is not None:
            self._monitor.close()
        self._dealer.close()
        self._context.term()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    async def _follow(self, monitor: zmq.asyncio.Socket) -> None:
        """Open the host on each new connection."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            self._is_open = False
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_failed = 0
                self._dealer.getsockopt(zmq.EVENTS)  # has it learn of the connection
                self._ask()
            elif event & FAILED_HANDSHAKES:
                self._num_failed += 1
                if self._num_failed >= _MAX_FAILED or event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._refuse(
                        ConfigError(
                            f"the handshake with {self._peer} fails: is it another program, or does this side "
                            "lack its token, or the same version of DORA?"
                        )
                    )

    async def _read(self) -> None:
        while True:
            frames = await self._dealer.recv_multipart()
            try:
                self._on_message(decode(frames, FromHost))
            except ProtocolError as err:
                self._line.lose(err)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if not self._is_open:
                self._ask()
            if self._opened.done():
                self._line.beat()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._line.lose(RemoteError(f"the transport failed: {error!r}"))
            self._refuse(RemoteError(f"the transport failed: {error!r}"))

    def _on_message(self, message: FromHost) -> None:
        match message:
            case HostOpened(last_id=last_id):
                self._is_open = True
                self._line.reconnected(last_id)
                if not self._opened.done():
                    self._opened.set_result(None)
            case HostRefused(reason=reason, is_busy=True):
                self._is_busy = f"{self._peer}: {reason}"
            case HostRefused(reason=reason):
                _send(self._dealer, encode(HostLeft()))
                self._line.lose(RemoteError(f"{self._peer}: {reason}"))
                self._refuse(ConfigError(f"{self._peer}: {reason}"))
            case HostBytes() | HostAck():
                self._line.on_message(message)

    def _refuse(self, error: DoraError) -> None:
        """Give up, if there was no host yet."""
        if not self._opened.done():
            self._opened.set_exception(error)

    def _ask(self) -> None:
        message = OpenHost(protocol=HOST_PROTOCOL, is_new=not self._opened.done(), last_id=self._line.last_received)
        _send(self._dealer, encode(message))

    def _transmit(self, frames: list[Buffer]) -> None:
        """Send a message, or drop it while there is no connection on which the host was opened."""
        if self._is_open:
            _send(self._dealer, frames)


def _send(socket: zmq.asyncio.Socket, frames: list[Any]) -> None:
    """Send without waiting, or not at all."""
    sent: Any = socket.send_multipart(frames, zmq.NOBLOCK)
    assert sent.done(), "a send without waiting"
    error = sent.exception()
    if error is not None and not isinstance(error, zmq.Again):
        raise error


def _set_up(socket: zmq.asyncio.Socket) -> None:
    for option, value in (
        (zmq.SNDHWM, QUEUE_SIZE),
        (zmq.RCVHWM, QUEUE_SIZE),
        (zmq.LINGER, _LINGER_MS),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
