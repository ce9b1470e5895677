"""Bodies of requests and answers that have the same shape in all routes, as in SGLang."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dora.embedded.requests import NOT_A_BODY

Body = TypeVar("Body", bound=msgspec.Struct)


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
