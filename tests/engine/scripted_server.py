"""A server on a real socket whose answers each test writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CAPTURES = Path(__file__).parent / "captures"


class ScriptedServer:
    """Answers with `answers[path]`, with 404 like SGLang for any other path, and records all requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Handler] = {}
        self.calls: list[tuple[str, Any]] = []  # (path, JSON body or None)
        self.methods: list[tuple[str, str]] = []  # (method, path)
        self.authorizations: list[str | None] = []
        self.url = ""

    async def run(self) -> AsyncIterator[ScriptedServer]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        yield self
        await runner.cleanup()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def says(self, path: str, body: object, *, status: int = 200) -> None:
        """Answer `path` with JSON, or with plain text if `body` is a str."""

        async def answer(_: web.Request) -> web.Response:
            if isinstance(body, str):
                return web.Response(text=body, status=status)
            return web.json_response(body, status=status)

        self.answers[path] = answer

    def streams(self, *pieces: bytes | asyncio.Event | None) -> None:
        """Answer /generate piece by piece; an event is waited for, None resets the connection."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            for piece in pieces:
                if isinstance(piece, asyncio.Event):
                    await piece.wait()
                elif piece is None:
                    reset(request)
                else:
                    await response.write(piece)
            return response

        self.answers["/generate"] = answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.calls.append((request.path, json.loads(body) if body else None))
        self.methods.append((request.method, request.path))
        self.authorizations.append(request.headers.get("Authorization"))
        if (answer := self.answers.get(request.path)) is not None:
            return await answer(request)
        return web.json_response({"detail": "Not Found"}, status=404)


def reset(request: web.Request) -> None:
    """Reset a connection as a dying process does: no answer, no end of the body."""
    assert request.transport is not None
    request.transport.abort()


def captured(name: str) -> Any:
    """The body of a captured control answer."""
    return json.loads((CAPTURES / name).read_text())["body"]
