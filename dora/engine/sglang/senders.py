"""The sender processes of a run, as the controller holds them: started when needed, reused, killed when in doubt.

Invariant: a sender carries out one order at a time, and is lent again only if the order before ended well; any other
end, a cancelled push included, kills it, and with it whatever hung in a collective.
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

START_TIMEOUT_S: Final = 60.0  # it imports torch
COMPLAINT_TIMEOUT_S: Final = 1.0  # both sides of a broken connection see it at once
KILL_TIMEOUT_S: Final = 10.0  # SIGKILL needs no longer unless the kernel holds the process
MAX_REPLY_BYTES: Final = 2**26  # the names of a large mixture-of-experts model take some megabytes

_Reply = TypeVar("_Reply")
_DECODER: Final[msgspec.json.Decoder[Reply]] = msgspec.json.Decoder(Reply)


def read_reply(line: bytes) -> Reply:
    """One line of a sender."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"the sender said what is no reply: {err}") from err


class Sender:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, order: Order, expected: type[_Reply], *, timeout_s: float) -> _Reply:
        """Give an order; returns the first reply to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        return await self.hear(expected, timeout_s=timeout_s)

    async def hear(self, expected: type[_Reply], *, timeout_s: float) -> _Reply:
        """The next reply; unblocked by it, or by the end of the process."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError as err:
            raise RemoteError(f"the sender did not say '{expected.__name__}' within {timeout_s:g} s") from err
        except ValueError as err:
            raise ProtocolError(f"the sender said more than {MAX_REPLY_BYTES} bytes at once") from err
        if not line.endswith(b"\n"):
            raise RemoteError("the sender has ended; see its log")
        reply = read_reply(line)
        if isinstance(reply, Failed):
            raise RemoteError(f"the sender failed: {reply.reason}")
        if not isinstance(reply, expected):
            raise ProtocolError(f"the sender said '{type(reply).__name__}', not '{expected.__name__}'")
        return reply

    async def complaint(self) -> str:
        """What it has to say of an order that failed elsewhere: it may have been the cause."""
        try:
            await self.hear(Sent, timeout_s=COMPLAINT_TIMEOUT_S)
        except RemoteError as err:
            return str(err)
        return "the sender has sent everything"

    async def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await self._process.wait()


class Senders:
    """As many as are lent at the same time, which is at most `engine.max_parallel_pushes`."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self._argv = argv
        self._env = env
        self._log = log
        self._idle: list[Sender] = []  # newest last: the one that has worked is warm

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Sender]:
        """A sender for the orders of one caller."""
        idle = [sender for sender in self._idle if sender.is_alive]
        sender = idle.pop() if idle else None
        self._idle = idle
        if sender is None:
            sender = await self._start()
        try:
            yield sender
        except BaseException:
            await sender.kill()
            raise
        self._idle.append(sender)

    async def close(self) -> None:
        """End the idle ones; none is lent any more."""
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
            await sender.hear(SenderReady, timeout_s=START_TIMEOUT_S)
        except BaseException:
            await sender.kill()
            raise
        return sender
