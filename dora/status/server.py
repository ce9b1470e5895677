"""The run's HTTP endpoint: /status (JSON), /metrics (Prometheus), /healthz, a page for people at /, and /instances/.

Invariant: it listens on loopback unless the configuration says otherwise. A GET is answered from a new snapshot and
changes nothing; POST /instances/add, drain and remove need the run's bearer token; web pages of other sites are refused
(`guard.py`). The number of connections is bounded, because the run needs file descriptors itself. The server runs in
the controller's event loop, so that an answer also shows that the loop is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.resources import files
from types import TracebackType
from typing import Protocol, Self

import msgspec
from aiohttp import web

from dora.errors import ConfigError, DoraError
from dora.guard import CONNECTION_LOG, guard, knows
from dora.status import metrics
from dora.status.snapshot import Snapshot, encode

#: Maximum size of a request.
MAX_BODY_BYTES = 16 * 2**10
#: Maximum number of connections. For one more, the oldest is closed; a page or a scraper connects again.
MAX_CONNECTIONS = 64
#: Maximum number of bytes to parse at once: aiohttp copies all of them, several times, into the error for a malformed
#: request.
MAX_ARRIVING_BYTES = 4 * MAX_BODY_BYTES
#: The page has its script and style inline, fetches only /status, and may not be framed.
_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class Requests(Protocol):
    """Requests about an instance, given by its number or address. They return a sentence, or refuse by ConfigError."""

    async def add(self, which: str) -> str: ...

    async def drain(self, which: str) -> str: ...

    async def remove(self, which: str) -> str: ...


class InstanceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a POST."""

    instance: str  #: its number or address


class InstanceReply(msgspec.Struct, frozen=True):
    """Body of the answer to a POST; unless the status is 200, it says why nothing was done."""

    said: str


class _Connection(asyncio.Protocol):
    """Passes a connection on to aiohttp, and closes it if far more bytes arrive than a request may have."""

    def __init__(self, handler: web.RequestHandler) -> None:
        self._handler = handler
        self.connection_lost = handler.connection_lost  # type: ignore[method-assign]
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if len(data) > MAX_ARRIVING_BYTES:
            _cut(self._handler)
        else:
            self._handler.data_received(data)


def _cut(handler: web.RequestHandler) -> None:
    """Close a connection at once, without waiting until the peer has read the answer."""
    transport = handler.transport
    handler.force_close()
    if transport is not None:
        transport.abort()


class StatusServer:
    """Serves what `snapshot` returns. An async context manager that listens at `url` while it is open."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], *, host: str, port: int, requests: Requests, token: str
    ) -> None:
        self._snapshot = snapshot
        self._token = token
        self._verbs = {"add": requests.add, "drain": requests.drain, "remove": requests.remove}
        self._host = host
        self._port = port
        self.url = ""  #: with the real port; "" until it listens
        app = web.Application(
            middlewares=[guard(name=host, open_reads=True, refuse=_reply)], client_max_size=MAX_BODY_BYTES
        )
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/", self._page)
        app.router.add_post("/instances/{verb:add|drain|remove}", self._request)
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(app, access_log=None, logger=CONNECTION_LOG, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._connect, self._host, self._port)
        except OSError as err:
            await self._runner.cleanup()
            raise ConfigError(
                f"status.port: cannot listen on {self._host}:{self._port} ({err.strerror}); "
                "choose another, or 0 for any free port"
            ) from err
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _connect(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection; closes the oldest ones if there are too many."""
        assert self._runner.server is not None
        open_ones = [handler for handler in self._runner.server.connections if handler.transport is not None]
        for oldest in open_ones[: max(0, len(open_ones) - MAX_CONNECTIONS + 1)]:
            _cut(oldest)
        return _Connection(self._runner.server())

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(body=encode(self._snapshot()), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics.render(self._snapshot()), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.Response:
        """Answer 200, or 503 if the run has failed."""
        now = self._snapshot()
        return web.Response(text=f"{now.phase}\n", status=503 if now.phase == "failed" else 200)

    async def _request(self, request: web.Request) -> web.Response:
        """Answer 401 without the token, 400 if the body is not a request, 413 if too long, 409 if the run refuses."""
        if not knows(self._token, request.headers):
            return _reply(401, "the token is missing or wrong")
        try:
            body = msgspec.json.decode(await request.read(), type=InstanceRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            return _reply(400, f"not a request: {err}")
        except web.HTTPRequestEntityTooLarge:
            return _reply(413, f"not a request: longer than {MAX_BODY_BYTES} bytes")
        try:
            return _reply(200, await self._verbs[request.match_info["verb"]](body.instance))
        except DoraError as err:
            return _reply(409, str(err))

    async def _page(self, request: web.Request) -> web.Response:
        page = files("dora.status").joinpath("page.html").read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})


def _reply(status: int, text: str) -> web.Response:
    return web.Response(body=msgspec.json.encode(InstanceReply(text)), content_type="application/json", status=status)
