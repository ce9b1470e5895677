"""The controller's pool of sender processes: started on demand, reused after success, killed after any failure.

Invariant: a sender carries out one order at a time and is reused only if that succeeded. Any other end, including a
cancelled push, kills it and so ends a collective that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dora.engine.sglang.orders import Failed, Order, Reply, SenderReady, Sent
from dora.errors import ProtocolError, RemoteError

START_TIMEOUT_S: Final = 60.0  # a sender imports torch
FAILURE_TIMEOUT_S: Final = 1.0  # both ends of a broken connection notice at once
KILL_TIMEOUT_S: Final = 10.0  # exceeded only by a process that is stuck in the kernel
MAX_REPLY_BYTES: Final = 2**26  # tensor names of a large mixture-of-experts model take a few megabytes

_Reply = TypeVar("_Reply")
_DECODER: Final[msgspec.json.Decoder[Reply]] = msgspec.json.Decoder(Reply)


def read_reply(line: bytes) -> Reply:
    """Parse one line from a sender."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"the sender wrote an invalid reply: {err}") from err


class Sender:
    """One sender process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, order: Order, expected: type[_Reply], *, timeout_s: float) -> _Reply:
        """Send an order and return the first reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        return await self.receive(expected, timeout_s=timeout_s)

    async def receive(self, expected: type[_Reply], *, timeout_s: float) -> _Reply:
        """Wait for the next reply, or for the end of the process."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError as err:
            raise RemoteError(f"the sender sent no '{expected.__name__}' within {timeout_s:g} s") from err
        except ValueError as err:
            raise ProtocolError(f"the sender wrote a line of more than {MAX_REPLY_BYTES} bytes") from err
        if not line.endswith(b"\n"):
            raise RemoteError("the sender has ended; see its log")
        reply = read_reply(line)
        if isinstance(reply, Failed):
            raise RemoteError(f"the sender failed: {reply.reason}")
        if not isinstance(reply, expected):
            raise ProtocolError(f"the sender replied '{type(reply).__name__}', expected '{expected.__name__}'")
        return reply

    async def failure(self) -> str:
        """Describe the state of an order that failed at the server; the sender may be the cause."""
        try:
            await self.receive(Sent, timeout_s=FAILURE_TIMEOUT_S)
        except RemoteError as err:
            return str(err)
        return "the sender has sent everything"

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        with contextlib.suppress(ProcessLookupError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)  # the sender leads its own session
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await self._process.wait()


class Senders:
    """A pool of senders, one per concurrent push."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self._argv = argv
        self._env = env
        self._log = log
        self._idle: list[Sender] = []  # the most recently used last

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Sender]:
        """Lend a sender to one caller, exclusively."""
        self._idle = [sender for sender in self._idle if sender.is_alive]
        sender = self._idle.pop() if self._idle else await self._start()
        try:
            yield sender
        except BaseException:
            await sender.kill()
            raise
        self._idle.append(sender)

    async def close(self) -> None:
        """Kill the idle senders. Call this when none is lent."""
        for sender in self._idle:
            await sender.kill()
        self._idle = []

    async def _start(self) -> Sender:
        try:
            log = self._log.open("ab")
        except OSError as err:
            raise RemoteError(f"{self._log}: cannot be written ({err.strerror})") from err
        with log:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=dict(self._env),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=MAX_REPLY_BYTES,
                start_new_session=True,
            )
        sender = Sender(process)
        try:
            await sender.receive(SenderReady, timeout_s=START_TIMEOUT_S)
        except BaseException:
            await sender.kill()
            raise
        return sender
