"""Hosts on another machine: the programs at both ends, which carry what a host and the controller write to each other.

On the machine of the environment, `serve_hosts` starts a host for each line of a controller, below the same guards as
a host of the controller's own. On the controller's machine, `carry_host` is the host as far as the controller can tell:
it has its stdin, stdout and stderr. Both carry bytes, and know nothing of the protocol.

Invariant: each byte arrives once and in order, or the line is lost; then both processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any, Final

from dora.environments.process import HOST_VARIABLES, host_command
from dora.errors import ConfigError, RemoteError
from dora.tasks.child import GuardedProcess
from dora.transport.host_ends import HostConnection, HostHub
from dora.transport.host_line import PIECE_BYTES, HostLine

#: Pieces of a host's stderr that wait for the line, each of at most 4 KiB; more is dropped, with a mark.
_MAX_LOG_PIECES: Final = 64
#: Time for the last pieces to arrive, when a host or its controller has ended.
_LAST_S: Final = 5.0
#: Time in which a host whose stdin is closed has ended.
_EXIT_S: Final = 1.0


async def serve_hosts(
    listen: str,
    stop: asyncio.Event,
    *,
    token: str,
    max_hosts: int,
    memory_mb: int,
    python: str = "",
    command: Sequence[str] = (),
    tell: Callable[[str], None],
) -> None:
    """Serve hosts at HOST:PORT until `stop` is set; ConfigError if the address cannot be used.

    `memory_mb` limits the address space of each process of a host, and the memory of all of them together. `command`
    starts a host, in place of `python`.
    """
    hub = HostHub(listen, token=token, max_hosts=max_hosts)
    argv = [str(memory_mb), "", *(command or host_command(python))]
    hosts: set[asyncio.Task[None]] = set()

    async def admit() -> None:
        number = 0
        async for line in hub.admit():
            number += 1
            tell(f"host {number} starts")
            task = asyncio.create_task(_run_host(line, hub, argv, memory_mb=memory_mb, number=number, tell=tell))
            hosts.add(task)
            task.add_done_callback(hosts.discard)

    try:
        tell(f"environments of a controller at {hub.start()}, at most {max_hosts} hosts of {memory_mb} MB")
        watching = asyncio.create_task(hub.watch(), name="host-beats")
        admitting = asyncio.create_task(admit(), name="host-lines")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait([watching, admitting, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(admitting, stopping, *hosts)
            await _cancel(watching)  # last: the lines are alive until their hosts have ended
        for task in (watching, admitting):
            if not task.cancelled():
                task.result()
    finally:
        await hub.close()


async def _run_host(
    line: HostLine, hub: HostHub, argv: Sequence[str], *, memory_mb: int, number: int, tell: Callable[[str], None]
) -> None:
    log = _Log()
    process = GuardedProcess(
        "host", max_bytes=0, argv=argv, environment=HOST_VARIABLES, total_mb=memory_mb, on_output=log.put
    )
    how = "it was stopped"
    try:
        await process.spawn()
        how = await _carry(process, line, log)
    except (RemoteError, OSError) as err:
        how = str(err)
    finally:
        await process.kill()
        hub.forget(line, reason=how)
        tell(f"host {number} has ended: {how}")


async def _carry(process: GuardedProcess, line: HostLine, log: _Log) -> str:
    """Carry everything until the host has ended; return how. RemoteError if the line is lost, or the controller wants
    the host to end."""
    requests = asyncio.create_task(_pass_requests(line, process), name="host-requests")
    replies = asyncio.create_task(_pass_replies(process, line), name="host-replies")
    output = asyncio.create_task(_pass_log(log, line), name="host-output")
    try:
        await asyncio.wait([requests, replies, output], return_when=asyncio.FIRST_COMPLETED)
        if requests.done() and isinstance(requests.exception(), ConnectionError):
            await asyncio.wait([replies], timeout=_EXIT_S)  # the host has ended, or closed its stdin
        for task in (replies, output, requests):
            if task.done():
                task.result()
                break
    except ConnectionError:
        pass
    finally:
        await _cancel(requests, replies, output)
    how = await process.ending(ConnectionError())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_S):
            while piece := log.take():
                await line.send("log", piece)
            await line.send("end", how.encode()[:PIECE_BYTES])
            await line.flushed()
    return how


async def _pass_requests(line: HostLine, process: GuardedProcess) -> None:
    while True:
        piece = await line.receive()
        if piece.kind == "end":
            line.passed_on()
            raise RemoteError("the controller has ended it")
        process.write_bytes(piece.data)
        await process.drained()


async def _pass_replies(process: GuardedProcess, line: HostLine) -> None:
    while data := await process.read_bytes(PIECE_BYTES):
        await line.send("pipe", data)


async def _pass_log(log: _Log, line: HostLine) -> None:
    while True:
        await log.filled.wait()
        while piece := log.take():
            await line.send("log", piece)


class _Log:
    """What a host has written to stderr and is not sent yet."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._num_dropped = 0  # bytes

    def put(self, data: bytes) -> None:
        if len(self._pieces) < _MAX_LOG_PIECES:
            self._pieces.append(data)
        else:
            self._num_dropped += len(data)
        self.filled.set()

    def take(self) -> bytes:
        if self._pieces:
            return self._pieces.popleft()
        self.filled.clear()
        dropped, self._num_dropped = self._num_dropped, 0
        return f"\n| [{dropped:,} bytes of output dropped]\n".encode() if dropped else b""


async def carry_host(address: str, *, token: str) -> None:
    """Be the host at this address, on stdin, stdout and stderr, until stdin closes.

    ConfigError if the other side does not admit this one; RemoteError, which says how, if the host ends or is lost.
    """
    for file in (sys.stdin, sys.stdout):
        _require_pipe(file)
    requests = await _reader(sys.stdin)
    replies = await _writer(sys.stdout)
    async with HostConnection(address, token=token) as line:
        sending = asyncio.create_task(_send_requests(requests, line), name="host-requests")
        receiving = asyncio.create_task(_write_replies(line, replies), name="host-replies")
        try:
            await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
            if not requests.at_eof():  # otherwise the host has ended because it should
                (receiving if receiving.done() else sending).result()
        finally:
            await _cancel(sending, receiving)
            replies.close()


async def _send_requests(requests: asyncio.StreamReader, line: HostLine) -> None:
    while data := await requests.read(PIECE_BYTES):
        await line.send("pipe", data)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_S):
            await line.send("end", b"")
            await line.flushed()


async def _write_replies(line: HostLine, replies: asyncio.StreamWriter) -> None:
    try:
        while True:
            piece = await line.receive()
            if piece.kind == "end":
                line.passed_on()
                raise RemoteError(f"the host has ended: {piece.data.decode(errors='replace')}")
            if piece.kind == "log":
                await asyncio.to_thread(os.write, sys.stderr.fileno(), piece.data)
            else:
                replies.write(piece.data)
                await replies.drain()
    except (BrokenPipeError, ConnectionResetError):
        raise RemoteError("the controller does not read any more") from None


async def _reader(file: IO[str]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=PIECE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


async def _writer(file: IO[str]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, file)
    return asyncio.StreamWriter(transport, protocol, None, loop)


def _require_pipe(file: IO[str]) -> None:
    mode = os.fstat(file.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise ConfigError("dora environments connect: stdin and stdout must be pipes; a run starts it")


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
