"""Shared by the routes of the embedded engine: its state, request bodies, answers, and `die`."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dora.embedded.dialect import Dialect
from dora.embedded.gate import Gate
from dora.embedded.requests import NOT_A_BODY, RequestLimits
from dora.embedded.scheduler import Scheduler
from dora.embedded.text import TextCodec
from dora.errors import one_line

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True)
class Engine:
    """The state that the routes share."""

    batcher: Scheduler
    gate: Gate
    limits: RequestLimits
    dialect: Dialect
    tokenizer: TextCodec | None
    arguments: dict[str, Any]  # for /server_info
    api_key: str | None
    label: str  # label of the last successful update, shown by /model_info; version spans use the batcher's label
    updating: bool = False  # between begin_ and end_weight_update
    groups: dict[str, Any] = field(default_factory=dict)  # process groups that transfer weights, by name
    draining: bool = False
    unhealthy: bool = False  # the last health probe timed out

    @property
    def model_path(self) -> str:
        return str(self.arguments["model_path"])


ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)


def error_body(message: str, *, status: int = 400) -> dict[str, Any]:
    kind = "Bad Request" if status == 400 else str(status)
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def outcome(message: str, *, success: bool, **more: Any) -> web.Response:
    """SGLang's answer to an update: 200, or 400 if it failed."""
    return web.json_response({"success": success, "message": message, **more}, status=200 if success else 400)


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """Decode the request's body as `kind`. Unknown keys are ignored; any other mistake is answered with a 400."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except NOT_A_BODY as err:
        text = msgspec.json.encode(error_body(f"1 validation error:\n  {err}")).decode()
        raise web.HTTPBadRequest(text=text, content_type="application/json") from err


def die(reason: str) -> None:
    """End the process, because its weights or its state can no longer be trusted."""
    sys.stderr.write(one_line(f"engine stopped: {reason}") + "\n")
    sys.stderr.flush()
    os._exit(1)
