"""The run's HTTP endpoint: /status (JSON), /metrics (Prometheus), /healthz, and a page for people at /.

Invariant: read-only, and on loopback unless the config says otherwise; every answer is made from a snapshot taken for
it. Runs inside the controller's event loop, so that an answer is also proof that the loop turns. Called by `cli`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from types import TracebackType
from typing import Self

from aiohttp import web

from dora.errors import ConfigError
from dora.status import metrics
from dora.status.snapshot import Snapshot, encode

#: The page has its script and style inline, fetches /status and nothing else, and is framed by nobody.
_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class StatusServer:
    """Serves what `snapshot` returns. An async context manager: it listens while it is open, at `url`."""

    def __init__(self, snapshot: Callable[[], Snapshot], *, host: str, port: int) -> None:
        self._snapshot = snapshot
        self._host = host
        self._port = port
        self.url = ""  #: with the real port; "" until it listens
        app = web.Application()
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/", self._page)
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

    async def _page(self, request: web.Request) -> web.Response:
        page = files("dora.status").joinpath("page.html").read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})
