"""What the routes of the embedded engine share: the engine itself, reading a body, the shape of an error, dying.

Called by the modules that hold routes: `generate`, `control`, `updates` and `server`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dora.embedded.dialect import Dialect
from dora.embedded.gate import Gate
from dora.embedded.requests import Limits
from dora.embedded.scheduler import Scheduler
from dora.embedded.text import Tokenizer

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True)
class Engine:
    """What the routes share."""

    batcher: Scheduler
    gate: Gate
    limits: Limits
    dialect: Dialect
    tokenizer: Tokenizer | None
    arguments: dict[str, Any]  # for /server_info
    api_key: str | None
    label: str  # that /model_info shows: of the last update that succeeded; the spans have the batcher's
    updating: bool = False  # between begin_ and end_weight_update
    groups: dict[str, Any] = field(default_factory=dict)  # process groups that bring weights, by name
    draining: bool = False
    unhealthy: bool = False  # the last health probe timed out
    started_at: float = field(default_factory=time.time)

    @property
    def model_path(self) -> str:
        return str(self.arguments["model_path"])


ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)


def error_body(message: str, *, status: int = 400) -> dict[str, Any]:
    kind = "Bad Request" if status == 400 else str(status)
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The request's body as `kind`; unknown keys are ignored, anything else wrong is SGLang's 400."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as err:
        text = msgspec.json.encode(error_body(f"1 validation error:\n  {err}")).decode()
        raise web.HTTPBadRequest(text=text, content_type="application/json") from err


def die(reason: str) -> None:
    """Ends the process: its weights or its state can no longer be trusted."""
    sys.stderr.write(f"engine stopped: {reason}\n")
    sys.stderr.flush()
    os._exit(1)
