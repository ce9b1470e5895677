"""The routes of adapters, as in SGLang 0.5.23: load, unload, and the list of models."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec
from aiohttp import web

from dora.embedded.adapters import AdapterRefused, NamedAdapters
from dora.embedded.bodies import read_body
from dora.embedded.engine_state import ENGINE


class _Load(msgspec.Struct):
    lora_name: str
    lora_path: str
    pinned: bool = False  # accepted without effect: every adapter keeps its place


class _Unload(msgspec.Struct):
    lora_name: str


async def load_lora_adapter(request: web.Request) -> web.Response:
    adapters, body = request.app[ENGINE].adapters, await read_body(request, _Load)
    return await _answer(adapters, adapters.load(body.lora_name, body.lora_path))


async def unload_lora_adapter(request: web.Request) -> web.Response:
    adapters, body = request.app[ENGINE].adapters, await read_body(request, _Unload)
    return await _answer(adapters, adapters.unload(body.lora_name))


async def _answer(adapters: NamedAdapters, change: Awaitable[None]) -> web.Response:
    error = ""
    try:
        await change
    except AdapterRefused as err:
        error = str(err)
    shape = {"rid": None, "http_worker_ipc": None, "success": not error, "error_message": error}
    return web.json_response({**shape, "loaded_adapters": adapters.paths}, status=400 if error else 200)


async def models(request: web.Request) -> web.Response:
    """The model and its loaded adapters, in the shape of OpenAI's route."""
    engine = request.app[ENGINE]
    base = engine.arguments["served_model_name"]
    shape = {"object": "model", "created": 0, "owned_by": "sglang"}
    cards = [{**shape, "id": base, "root": base, "parent": None, "max_model_len": engine.limits.context_tokens}]
    cards += [
        {**shape, "id": name, "root": path, "parent": base, "max_model_len": None}
        for name, path in engine.adapters.paths.items()
    ]
    return web.json_response({"object": "list", "data": cards})
