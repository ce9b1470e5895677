"""The run's HTTP endpoint: /status (JSON), /metrics (Prometheus), /healthz, a page for people at /, and /instances/.

Invariant: on loopback unless the config says otherwise. Every answer to a GET is made from a snapshot taken for it and
changes nothing; POST /instances/add, drain and remove need the run's bearer token. Runs inside the controller's event
loop, so that an answer is also proof that the loop turns. Called by `cli`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from importlib.resources import files
from types import TracebackType
from typing import Protocol, Self

import msgspec
from aiohttp import web

from dora.errors import ConfigError, DoraError
from dora.status import metrics
from dora.status.snapshot import Snapshot, encode

#: The page has its script and style inline, fetches /status and nothing else, and is framed by nobody.
_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class Requests(Protocol):
    """What may be asked of the fleet: an instance by its number or address in, a sentence out. ConfigError refuses."""

    async def add(self, which: str) -> str: ...

    async def drain(self, which: str) -> str: ...

    async def remove(self, which: str) -> str: ...


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a POST."""

    instance: str  #: its number or address


class Answer(msgspec.Struct, frozen=True):
    """Body of the answer to a POST; with a status other than 200 it says why nothing was done."""

    said: str


class StatusServer:
    """Serves what `snapshot` returns. An async context manager: it listens while it is open, at `url`."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], *, host: str, port: int, requests: Requests, token: str
    ) -> None:
        self._snapshot = snapshot
        self._token = token
        self._verbs = {"add": requests.add, "drain": requests.drain, "remove": requests.remove}
        self._host = host
        self._port = port
        self.url = ""  #: with the real port; "" until it listens
        app = web.Application()
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/", self._page)
        app.router.add_post("/instances/{verb:add|drain|remove}", self._ask)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as err:
            await self._runner.cleanup()
            raise ConfigError(
                f"status.port: cannot listen on {self._host}:{self._port} ({err.strerror}); "
                "choose another, or 0 for any free port"
            ) from err
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(body=encode(self._snapshot()), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics.render(self._snapshot()), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.Response:
        """200 unless the run has failed."""
        now = self._snapshot()
        return web.Response(text=f"{now.phase}\n", status=503 if now.phase == "failed" else 200)

    async def _ask(self, request: web.Request) -> web.Response:
        """401 without the token, 400 if it is no request, 409 if it is refused."""
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return _said("the token is missing or wrong", status=401)
        try:
            ask = msgspec.json.decode(await request.read(), type=Ask)
        except msgspec.DecodeError as err:
            return _said(f"not a request: {err}", status=400)
        try:
            return _said(await self._verbs[request.match_info["verb"]](ask.instance), status=200)
        except DoraError as err:
            return _said(str(err), status=409)

    async def _page(self, request: web.Request) -> web.Response:
        page = files("dora.status").joinpath("page.html").read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})


def _said(text: str, *, status: int) -> web.Response:
    return web.Response(body=msgspec.json.encode(Answer(text)), content_type="application/json", status=status)
