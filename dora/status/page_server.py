"""The HTTP server that shows a run: the page at /, its files below /page/, its data below /data/, and for programs
/status (JSON), /metrics (Prometheus) and /healthz.

Invariant: a GET changes nothing. The server listens on loopback by default. On any other address samples, which have
prompts and answers, need the token. Web pages of other sites are refused (`guard.py`). The number of connections is
bounded, because a run needs file descriptors itself. The page's addresses are relative, so that a path prefix or a
tunnel works.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from dora.errors import ConfigError, DoraError, one_line
from dora.guard import CONNECTION_LOG, guard, is_loopback, knows
from dora.observe.snapshot import encode
from dora.status import metrics
from dora.status.assets import add_page
from dora.status.data import CURRENT, NAMES, RunData

#: Maximum size of a request.
MAX_BODY_BYTES = 16 * 2**10
#: Maximum number of connections. A new one then closes the oldest; a page or a scraper connects again.
MAX_CONNECTIONS = 64
#: Maximum number of bytes to parse at once: aiohttp copies all of them, several times, into the error for a malformed
#: request.
MAX_ARRIVING_BYTES = 4 * MAX_BODY_BYTES
#: Time in seconds for which an answer about the present is reused.
SHARED_S = 1.0


class InstanceReply(msgspec.Struct, frozen=True):
    """Body of the answer to a POST, and of a refusal; unless the status is 200, it says why nothing was done."""

    said: str


def reply(status: int, text: str) -> web.Response:
    """Return an answer of one sentence."""
    return web.Response(body=msgspec.json.encode(InstanceReply(text)), content_type="application/json", status=status)


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 503 if the run cannot be read."""
    try:
        return await handler(request)
    except DoraError as err:
        return reply(503, one_line(str(err)))


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


class PageServer:
    """Serves the page of one run. An async context manager that listens at `url` while it is open."""

    def __init__(
        self,
        data: RunData,
        *,
        host: str,
        port: int,
        token: str,
        setting: str = "--port",
    ) -> None:
        """`token`: samples need it unless `host` is loopback. `setting`: the option that sets the port."""
        self._data = data
        self.token = token  #: needed for samples and requests
        self._host = host
        self._port = port
        self._setting = setting
        self.url = ""  #: with the real port; "" until it listens
        self.app = web.Application(
            middlewares=[guard(name=host, open_reads=True, refuse=reply), _explain], client_max_size=MAX_BODY_BYTES
        )
        add_page(self.app.router)
        self.app.router.add_get(f"/data/{{name:{'|'.join(NAMES)}}}", self._answer)
        self.app.router.add_get("/status", self._status)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/healthz", self._healthz)
        self._present: dict[str, bytes] = {}  # the answers about the present
        self._present_at = -math.inf  # when they were made
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(self.app, access_log=None, logger=CONNECTION_LOG, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._connect, self._host, self._port)
        except OSError as err:
            await self._runner.cleanup()
            raise ConfigError(
                f"{self._setting}: cannot listen on {self._host}:{self._port} ({err.strerror}); "
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
        return web.Response(body=encode(await self._data.snapshot()), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=metrics.render(await self._data.snapshot()), headers={"Content-Type": metrics.CONTENT_TYPE}
        )

    async def _healthz(self, request: web.Request) -> web.Response:
        """Answer 200, or 503 if the run has failed."""
        now = await self._data.snapshot()
        return web.Response(text=f"{now.phase}\n", status=503 if now.phase == "failed" else 200)

    async def _answer(self, request: web.Request) -> web.Response:
        """Answer 400 if `from` is not a line number, 401 without the token."""
        name, since = request.match_info["name"], request.query.get("from", "0")
        if name == "samples" and not self._is_local and not knows(self.token, request.headers):
            return reply(401, "samples need the status token, as this server is not on loopback")
        if not (since.isascii() and since.isdecimal() and len(since) < 16):
            return reply(400, "from: give the number of a line, 0 or more")
        body = await self._current(name) if name in CURRENT else await self._data.rows(name, since=int(since))
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _current(self, name: str) -> bytes:
        """Return an answer that all pages share for a moment, so that any number of them costs a run no more."""
        if time.monotonic() - self._present_at > SHARED_S:
            self._present = await self._data.present()
            self._present_at = time.monotonic()
        return self._present[name]

    @property
    def _is_local(self) -> bool:
        return self._host == "localhost" or is_loopback(self._host)
