"""One connection to an MCP server, by the official SDK: the only file that imports the package `mcp`.

A connection is a task of its own, because the SDK's contexts must be left by the task that entered them. It is never
used again once it is lost: when the process has ended, the server cannot be reached, has forgotten the session, or has
left UNANSWERED calls in a row without an answer.

Invariant: a call is sent at most once. Nothing that a server sends is trusted: a message takes at most MAX_MESSAGE
bytes, and a longer answer, or one that cannot be read, is an error of that call alone; a list has at most MAX_TOOLS
tools. A process ends with its connection, with its whole process group.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
import httpx2
import mcp_types as types
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from dora.environments.api import EnvironmentLost
from dora.errors import ConfigError, one_line

#: Largest message of a server; of a result, `environment.output_bytes` are kept at most.
MAX_MESSAGE: Final = 8 << 20
#: Most tools of a server, and most bytes of one as JSON: all of them are in the prompt of every episode.
MAX_TOOLS, MAX_TOOL_BYTES = 128, 64 << 10
#: Calls in a row that ended without an answer, after which the connection is given up.
UNANSWERED: Final = 8
#: Seconds that a process has to end by itself once its stdin is closed, and a session to be closed.
GRACE_S: Final = 2.0

#: Variables that a process sees without being named in `variables`.
_PLAIN: Final = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
#: Codes of errors made here, in the range of implementations: the answer is lost; it is too large.
_LOST, _TOO_LARGE = -32_098, -32_097
#: How the SDK's own errors begin that have CONNECTION_CLOSED, which is a code that servers use for any error.
_CLOSED: Final = ("Connection closed", "SSE stream ")
#: The id of an answer that is not read, at its beginning, or at its end if it begins with what it is.
_HEAD: Final = re.compile(rb'\s*\{"jsonrpc": ?"2\.0", ?"id": ?(\d+)(?:\}|, ?"(?:result|error)")')
_IS_ANSWER, _TAIL = re.compile(rb'\s*\{"(?:result|error)"'), re.compile(rb', ?"id": ?(\d+)\}\s*$')
_EDGE: Final = 256

_LOSSES = itertools.count(1)


class ServerFailed(Exception):
    """A server that cannot be used; the message says why."""


class Losses:
    """The number of a server's loss, the same for all that fails until it answers again."""

    def __init__(self) -> None:
        self._number = 0

    def number(self) -> int:
        """Return the number of the loss, in this process."""
        self._number = self._number or next(_LOSSES)
        return self._number

    def end(self) -> None:
        """Note that the server answers."""
        self._number = 0


class Connection:
    """A connection to the server that `settings` describe (config/schema.py), called `name` in errors; `losses` are
    those of the server."""

    def __init__(self, settings: Mapping[str, Any], *, name: str, losses: Losses) -> None:
        self._losses = losses
        self._settings = settings
        self._name = name
        #: Why it cannot be used any more; "" while it can.
        self.lost = ""
        self._session: Any = None
        self._tools: list[Any] = []
        self._ready, self._over = asyncio.Event(), asyncio.Event()  # `_over`: closed, or lost
        self._task: asyncio.Task[None] | None = None
        self._num_unanswered = 0
        self._cancelled: set[asyncio.Task[Any]] = set()  # calls that have not ended yet

    async def open(self, *, timeout_s: float) -> list[Any]:
        """Connect, and return the server's tools. ServerFailed if that fails or takes longer than `timeout_s`."""
        self._task = asyncio.create_task(self._run(), name=f"connection to {self._name}")
        ready = asyncio.create_task(self._ready.wait(), name=f"start of {self._name}")
        try:
            await asyncio.wait([self._task, ready], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            self._lose(f"not ready after {timeout_s:.3g} s")
            await self.close()
            raise ServerFailed(self.lost)
        return self._tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result as text, which begins with "error: " if it is one. EnvironmentLost if it is unknown whether
        the server has acted."""
        calling = asyncio.create_task(self._session.call_tool(tool, dict(arguments)), name=f"call of {tool}")
        try:
            result = await asyncio.shield(calling)
        except asyncio.CancelledError:
            self._cancel(calling)
            self._num_unanswered += 1
            if self._num_unanswered >= UNANSWERED:
                self._lose(f"has not answered {UNANSWERED} calls in a row")
            raise
        except MCPError as err:
            if err.code == _TOO_LARGE or "byte limit" in err.message:  # the latter is a streamed answer
                return f"error: the result has more than {MAX_MESSAGE >> 20} MiB"
            if err.code == _LOST or (err.code == types.CONNECTION_CLOSED and err.message.startswith(_CLOSED)):
                raise self._lost_call(tool, err.message) from None
            self._answered()
            return f"error: {err.message}"
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            raise self._lost_call(tool, "the connection is closed") from None
        self._answered()
        return as_text(result)

    async def close(self) -> None:
        """End the session, and the process; at once if it is lost."""
        self._over.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=0.0 if self.lost else 2 * GRACE_S)
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            transport = self._http() if self._settings["url"] else self._stdio()
            async with Client(transport, cache=None) as client:
                self._tools = await _listed(client.session)
                self._session = client.session
                self._ready.set()
                await self._over.wait()
        except Exception as err:  # noqa: BLE001  whatever the SDK makes of what a server sends
            self._lose(_reason(err))
        finally:
            self._lose("closed")

    def _cancel(self, calling: asyncio.Task[Any]) -> None:
        """Cancel a call without waiting for its end: the SDK first notifies the server, which may block for seconds."""
        self._cancelled.add(calling)
        calling.add_done_callback(self._cancelled.discard)
        calling.cancel()

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = one_line(why)
            if not self._over.is_set():
                sys.stderr.write(f"| {self._name}: {self.lost}\n")
        self._over.set()

    def _lost_call(self, tool: str, why: str) -> EnvironmentLost:
        reason = f"{self._name} was lost in a call of {tool}: {self.lost or why}"
        return EnvironmentLost(reason, loss=self._losses.number())

    def _answered(self) -> None:
        self._num_unanswered = 0
        self._losses.end()

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[tuple[Any, Any]]:
        """Start the process; yield the streams of its messages."""
        command, variables = self._settings["command"], (*_PLAIN, *self._settings["variables"])
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={name: os.environ[name] for name in variables if name in os.environ},
                limit=MAX_MESSAGE,
                start_new_session=True,  # a process group, so that what it starts ends with it
            )
        except OSError as err:
            raise ServerFailed(f"{command[0]} cannot be started ({err.strerror})") from err
        assert process.stdin is not None
        assert process.stdout is not None
        to_session, from_server = anyio.create_memory_object_stream[Any](0)
        from_session, to_server = anyio.create_memory_object_stream[Any](0)[::-1]
        reading = asyncio.create_task(self._read(process, to_session), name=f"output of {self._name}")
        writing = asyncio.create_task(self._write(process, from_session), name=f"input of {self._name}")
        try:
            yield from_server, to_server
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.wait([reading, writing])
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.0 if self.lost else GRACE_S):
                    while await process.stdout.read(1 << 16):  # what it still says must not block it
                        pass
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_S)
            process._transport.close()  # type: ignore[attr-defined]  # a process outside of the group may have its pipes

    async def _read(self, process: asyncio.subprocess.Process, to_session: Any) -> None:
        """Pass what the process says on, until it ends."""
        assert process.stdout is not None
        async with to_session:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while line := await _line(process.stdout):
                    if (message := _message(line)) is not None:
                        await to_session.send(message)
                    elif line.strip():
                        sys.stderr.write(f"| {self._name}: {line.decode(errors='replace').rstrip()[:1000]}\n")
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_S)
            code = process.returncode
            how = "closed its output" if code is None else f"ended with signal {-code}" if code < 0 else ""
            self._lose(how or f"ended with exit code {code}")

    async def _write(self, process: asyncio.subprocess.Process, from_session: Any) -> None:
        """Write the messages of the session to the standard input of the process."""
        assert process.stdin is not None
        async with from_session:
            try:
                async for message in from_session:
                    line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
            except ConnectionError:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), GRACE_S)
                if process.returncode is None:  # otherwise `_read` says how it ended
                    self._lose("closed its input")

    def _http(self) -> Any:
        """Return the transport to `url`."""
        headers = {"accept-encoding": "identity"}  # no bombs
        if name := self._settings["token"]:
            headers["authorization"] = f"Bearer {os.environ[name]}"
        return _http_streams(self._settings["url"], headers, on_lost=self._lose)


@asynccontextmanager
async def _http_streams(
    url: str, headers: Mapping[str, str], *, on_lost: Callable[[str], None]
) -> AsyncIterator[tuple[Any, Any]]:
    transport = _BoundedTransport(on_lost)
    timeout = httpx2.Timeout(None, connect=30.0)  # each call has its limit
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE) as streams,
    ):
        yield streams


class _BoundedTransport(httpx2.AsyncHTTPTransport):  # type: ignore[misc]
    """Makes an error of the call of a request that cannot be sent, and of an answer that is too long or no message; the
    SDK would end the whole session, or read without a bound."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        super().__init__(limits=httpx2.Limits(max_connections=None))
        self._on_lost = on_lost

    async def handle_async_request(self, request: Any) -> Any:
        if request.method != "POST":
            return await super().handle_async_request(request)
        try:
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                return await _error(request, _LOST, "a compressed answer, which was not asked for")
            if response.is_success and "text/event-stream" in response.headers.get("content-type", ""):
                return response  # the SDK bounds it
            body = bytearray()
            async for piece in response.stream:
                body += piece
                if len(body) > MAX_MESSAGE:
                    break
            await response.aclose()
        except httpx2.TransportError as err:
            why = f"cannot be reached ({_reason(err)})"
            self._on_lost(why)
            return await _error(request, _LOST, why)
        if len(body) > MAX_MESSAGE:
            return await _error(request, _TOO_LARGE, "too large")
        code = _error_code(bytes(body)) if response.status_code >= 400 else 0
        is_unknown = response.status_code == 404 or (response.status_code == 400 and code == types.CONNECTION_CLOSED)
        if is_unknown and "mcp-session-id" in request.headers:  # servers answer in either way
            self._on_lost("has forgotten its session")
            return await _error(request, _LOST, "has forgotten its session")
        if code is None:
            return await _error(request, _LOST, f"answered with HTTP status {response.status_code}")
        return httpx2.Response(response.status_code, headers=response.headers, content=bytes(body), request=request)


async def _error(request: Any, code: int, message: str) -> Any:
    """Return an answer to a request that has none."""
    asked = json.loads(await request.aread())
    if "id" not in asked:  # a notification
        return httpx2.Response(202, request=request)
    error = {"jsonrpc": "2.0", "id": asked["id"], "error": {"code": code, "message": message}}
    return httpx2.Response(200, json=error, request=request)


def _error_code(body: bytes) -> int | None:
    """Return the code of an error; None if the body is no message of one."""
    with suppress(ValueError, RecursionError):
        told = types.jsonrpc_message_adapter.validate_json(body)
        return int(told.error.code) if isinstance(told, types.JSONRPCError) else None
    return None


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line; of one that is longer than MAX_MESSAGE, an error with its id, or nothing that is a message.
    b"" at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as err:
        return err.partial
    except asyncio.LimitOverrunError:
        pass
    head = await stream.readexactly(_EDGE)
    tail = b""
    while True:
        try:
            tail = (tail + await stream.readuntil())[-_EDGE:]
            break
        except asyncio.IncompleteReadError as err:
            return err.partial
        except asyncio.LimitOverrunError as err:
            tail = (await stream.readexactly(err.consumed))[-_EDGE:]
    unknown = b"a message that is too long, and of which the id is not known\n"
    return _instead(head, tail, _TOO_LARGE, "too large") or unknown


def _instead(head: bytes, tail: bytes, code: int, message: str) -> bytes:
    """Return an error in place of the answer that begins and ends so; b"" if its id is not known."""
    found = _HEAD.match(head) or (_IS_ANSWER.match(head) and _TAIL.search(tail))
    error = {"code": code, "message": message}
    return json.dumps({"jsonrpc": "2.0", "id": int(found[1]), "error": error}).encode() if found else b""


def _message(line: bytes) -> Any:
    """Return a line as a message; an error for an answer that cannot be read; None if it is none, as lines that a
    program prints by mistake."""
    with suppress(ValueError, RecursionError):
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    if error := _instead(line[:_EDGE], line[-_EDGE:], types.PARSE_ERROR, "the answer cannot be read"):
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(error, by_name=False))
    return None


async def _listed(session: Any) -> list[Any]:
    """Return all tools. ServerFailed if they are too many."""
    tools: list[Any] = []
    cursor = None
    for _ in range(MAX_TOOLS):
        page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if not cursor or len(tools) > MAX_TOOLS:
            break
    if cursor or len(tools) > MAX_TOOLS:
        raise ServerFailed(f"it has more than {MAX_TOOLS} tools")
    return tools


def as_text(result: Any) -> str:
    """Return a result as text. What is no text, as an image, becomes a mark; an error begins with "error: "."""
    parts = []
    for block in result.content:
        text = getattr(getattr(block, "resource", block), "text", None)
        parts.append(text if isinstance(text, str) else f"[{block.type} left out]")
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content)]
    return f"{'error: ' if result.is_error else ''}" + "\n".join(parts)


def _reason(err: BaseException) -> str:
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return str(err) if isinstance(err, ServerFailed | MCPError) else f"{type(err).__name__}: {err}"


def require_variables(settings: Mapping[str, Any], *, field: str) -> None:
    """Raise ConfigError if a variable that is named is not set."""
    for key, names in (("variables", settings["variables"]), ("token", [settings["token"]])):
        for name in filter(None, names):
            if name not in os.environ:
                own = "; those of DORA are not passed on to tools" if name.startswith("DORA_") else ""
                raise ConfigError(f"{field}.{key}: the environment variable {name} is not set{own}")
