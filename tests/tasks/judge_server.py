"""A judge: a server of the chat API whose replies a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

#: What a request is answered with; a function gets the body.
Said = web.Response | str | Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


def completion(text: str, *, finish: str = "stop", usage: Any = None) -> web.Response:
    """A reply as the chat API has it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    usage = {"prompt_tokens": 100, "completion_tokens": 7} if usage is None else usage
    return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})


@dataclass
class JudgeServer:
    """Replies in their order; the last one again and again."""

    replies: list[Said]
    url: str = ""
    key: str = ""  # that it wants
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies
    keys: list[str] = field(default_factory=list)  # Authorization headers
    runner: web.AppRunner | None = None
    at_once: int = 0
    most_at_once: int = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            if not isinstance(said, str | web.Response):
                return await said(self.asked[-1])
            await asyncio.sleep(0)  # so that others may come
            if isinstance(said, str):
                return completion(said)
            headers = {name: said.headers[name] for name in ("Retry-After", "Location") if name in said.headers}
            return web.Response(status=said.status, body=said.body, headers=headers)  # a response is sent once only
        finally:
            self.at_once -= 1

    async def close(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()

    async def models(self, request: web.Request) -> web.Response:
        is_known = not self.key or request.headers.get("Authorization") == f"Bearer {self.key}"
        return web.json_response({"object": "list", "data": []}, status=200 if is_known else 401)


@asynccontextmanager
async def judging(*replies: Said, key: str = "", port: int = 0) -> AsyncIterator[JudgeServer]:
    """Serve while the context is open."""
    server = JudgeServer([*replies], key=key)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/v1/models", server.models)
    server.runner = web.AppRunner(app, shutdown_timeout=0.1)
    await server.runner.setup()
    await web.TCPSite(server.runner, "127.0.0.1", port, reuse_address=True).start()
    server.url = f"http://127.0.0.1:{server.runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await server.close()
