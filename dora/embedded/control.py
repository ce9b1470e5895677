"""Control routes of the embedded engine: pause, update, abort, flush, health, load and information (sglang.md §2-5).

Orders that touch rows run between steps, in the order they arrive. Weight loading that fails half-way leaves weights
that are neither old nor new, so it ends the process, as SGLang's scheduler dies of it. Called by the server.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dora.embedded.batcher import Batcher
from dora.embedded.gate import Gate
from dora.embedded.generation import Generation, Sampling
from dora.embedded.requests import Limits
from dora.embedded.text import Tokenizer
from dora.engine import protocol
from dora.errors import ConfigError

VERSION = "0.5.20"  # the SGLang release whose dialect is spoken
HEALTH_LIMIT_S = 20.0
PAUSE_MODES = ("abort", "retract", "in_place")

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True)
class Engine:
    """What the routes share."""

    batcher: Batcher
    gate: Gate
    limits: Limits
    tokenizer: Tokenizer | None
    arguments: dict[str, Any]  # for /server_info
    api_key: str | None
    draining: bool = False
    unhealthy: bool = False  # the last health probe timed out
    started_at: float = field(default_factory=time.time)

    @property
    def model_path(self) -> str:
        return str(self.arguments["model_path"])


ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)


class _Abort(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: str = "abort"


class _Update(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: str | None = None


class _Relabel(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


def error_body(message: str, *, status: int = 400) -> dict[str, Any]:
    kind = "Bad Request" if status == 400 else str(status)
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


async def _read(request: web.Request, kind: type[Body]) -> Body:
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


# --- abort, pause, continue


async def abort_request(request: web.Request) -> web.Response:
    body, batcher = await _read(request, _Abort), request.app[ENGINE].batcher
    if body.abort_all:
        batcher.abort_all()
    elif body.rid:
        batcher.abort(body.rid)
    return web.Response()


async def pause_generation(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await _read(request, _Pause)
    if body.mode not in PAUSE_MODES:
        message = f"1 validation error:\n  mode should be 'abort', 'retract' or 'in_place', got {body.mode!r}"
        return web.json_response(error_body(message), status=400)
    await engine.gate.pause()
    batcher = engine.batcher
    if body.mode == "abort":
        await _end_all(batcher)
    await batcher.between_steps(lambda: batcher.hold(retract=body.mode == "retract"))
    return web.json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    await engine.batcher.between_steps(engine.batcher.release)
    await engine.gate.resume()
    return web.json_response({"message": "Generation continued successfully.", "status": "ok"})


async def _end_all(batcher: Batcher) -> None:
    """Aborts until nothing is live. No limit: an abort needs one step at most, and the client has a deadline."""
    while batcher.live:
        batcher.abort_all()
        await batcher.between_steps(lambda: None)


# --- weights


async def update_weights_from_disk(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await _read(request, _Update)
    if body.abort_all_requests:
        engine.batcher.abort_all()
    async with engine.gate.alone():
        failure = await engine.batcher.between_steps(lambda: _load(engine, body), on_thread=True)
    if failure is not None:
        return _update_answer(failure, success=False)
    message = "Succeeded to update model weights."
    if body.weight_version is not None:
        message += f" Weight version updated to {body.weight_version}."
    return _update_answer(message, success=True)


def _load(engine: Engine, body: _Update) -> str | None:
    """Runs between steps on the decoder thread. A text if nothing was changed; death if the change went wrong."""
    batcher, begun = engine.batcher, time.perf_counter()
    try:
        batcher.decoder.load(Path(body.model_path))
    except FileNotFoundError as err:
        return f"Failed to get weights iterator: {err}."
    except (ConfigError, OSError, RuntimeError, ValueError) as err:
        die(f"loading {body.model_path} failed with the weights half replaced: {err}")
    if body.flush_cache and not batcher.flush():
        die("cache flush failed after updating weights: requests were resident")  # SGLang 0.5.20 and before
    if body.weight_version is not None:
        batcher.relabel(body.weight_version)
    engine.arguments["model_path"] = body.model_path
    batcher.metrics.weight_load_s = time.perf_counter() - begun
    return None


def _update_answer(message: str, *, success: bool) -> web.Response:
    answer = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(answer, status=200 if success else 400)


async def update_weight_version(request: web.Request) -> web.Response:
    body, batcher = await _read(request, _Relabel), request.app[ENGINE].batcher
    if body.abort_all_requests:
        batcher.abort_all()
    await batcher.between_steps(lambda: batcher.relabel(body.new_version))
    message = f"Weight version updated to {body.new_version}"
    return web.json_response({"success": True, "message": message, "new_version": body.new_version})


async def flush_cache(request: web.Request) -> web.Response:
    batcher = request.app[ENGINE].batcher
    try:
        deadline = time.monotonic() + float(request.query.get("timeout", "0"))
    except ValueError:
        return web.json_response(error_body("1 validation error:\n  timeout should be a number"), status=400)
    while not (flushed := await batcher.between_steps(batcher.flush)):
        left = deadline - time.monotonic()
        if left <= 0 or not await batcher.emptied(timeout_s=left):
            break
    if not flushed:
        return web.Response(text="Flush cache failed.\n", status=400)
    return web.Response(
        text="Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests,"
        " the operation will not be performed.)\n"
    )


# --- health


async def health(request: web.Request) -> web.Response:
    """200 once a token was generated after the question came: by a probe of its own, or by anybody on a busy server."""
    engine = request.app[ENGINE]
    if engine.draining:
        return web.Response(status=503)
    batcher, begun = engine.batcher, time.monotonic()
    one_token = Sampling(max_new_tokens=1, temperature=0.0)
    probe = Generation(rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", prompt_ids=[0], sampling=one_token, namespace="\0health")
    batcher.submit(probe)
    try:
        engine.unhealthy = not await batcher.output_since(begun, timeout_s=HEALTH_LIMIT_S)
    finally:
        batcher.abort_only(probe.rid)
    return web.Response(status=503 if engine.unhealthy else 200)


async def ready(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    blocked = engine.gate.paused or engine.draining or engine.unhealthy
    return web.Response(status=503 if blocked else 200)


# --- information


async def model_info(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    decoder = engine.batcher.decoder
    return web.json_response(
        {
            "model_path": engine.model_path,
            "served_model_name": engine.arguments["served_model_name"],
            "tokenizer_path": engine.arguments["tokenizer_path"],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.batcher.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": decoder.model_type,
            "architectures": decoder.architectures,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """SGLang's flat arguments as far as they exist here; keys are never shown."""
    engine = request.app[ENGINE]
    batcher, limits = engine.batcher, engine.limits
    state = {
        "last_gen_throughput": batcher.metrics.gen_throughput(),
        "memory_usage": {"token_capacity": batcher.kv_tokens},
        "effective_max_running_requests_per_dp": batcher.slots,
    }
    return web.json_response(
        {
            **engine.arguments,
            "context_length": limits.context_tokens,
            "weight_version": batcher.weight_version,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "enable_metrics": True,
            "api_key": None,
            "admin_api_key": None,
            "status": "ready",
            "max_total_num_tokens": batcher.kv_tokens,
            "max_req_input_len": min(limits.context_tokens, batcher.kv_tokens),
            "internal_states": [state],
            "version": VERSION,
            "engine": "dora-embedded",
        }
    )


def _gauges(batcher: Batcher) -> dict[str, float]:
    metrics, used = batcher.metrics, batcher.used_tokens
    hit_rate = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
    return {
        "num_running_reqs": len(batcher.rows),
        "num_queue_reqs": len(batcher.waiting),
        "num_paused_reqs": len(batcher.rows) if batcher.holding else 0,
        "num_retracted_reqs": sum(generation.num_retractions > 0 for generation in batcher.waiting),
        "num_used_tokens": used,
        "max_total_num_tokens": batcher.kv_tokens,
        "token_usage": round(used / batcher.kv_tokens, 4),
        "kv_used_tokens": used,
        "kv_available_tokens": batcher.kv_tokens - used,
        "kv_evictable_tokens": batcher.decoder.cached_tokens,
        "gen_throughput": metrics.gen_throughput(),
        "cache_hit_rate": round(hit_rate, 4),
        "utilization": round(len(batcher.rows) / batcher.slots, 4),
        "context_len": batcher.decoder.context_tokens,
    }


async def loads(request: web.Request) -> web.Response:
    batcher = request.app[ENGINE].batcher
    gauges = _gauges(batcher)
    waiting_tokens = sum(len(generation.prompt_ids) + len(generation.output_ids) for generation in batcher.waiting)
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": len(batcher.rows),
        "num_waiting_reqs": len(batcher.waiting),
        "num_waiting_uncached_tokens": waiting_tokens,
        "num_used_tokens": batcher.used_tokens,
        "num_total_tokens": batcher.used_tokens + waiting_tokens,
        "num_active_tokens": batcher.used_tokens + waiting_tokens,
        "max_total_num_tokens": batcher.kv_tokens,
        "max_running_requests": batcher.slots,
        **{name: gauges[name] for name in ("token_usage", "gen_throughput", "cache_hit_rate", "utilization")},
        "queues": {
            "waiting": len(batcher.waiting),
            "grammar": 0,
            "paused": gauges["num_paused_reqs"],
            "retracted": gauges["num_retracted_reqs"],
            "prealloc_ready": 0,
        },
    }
    head = {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "accelerator": None, "num_accelerators": 1}
    return web.json_response({**head, "loads": [load]})


async def metrics(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    text = engine.batcher.metrics.text(_gauges(engine.batcher), model_name=engine.model_path)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


_POST: Mapping[str, Handler] = {
    protocol.ABORT_REQUEST: abort_request,
    protocol.PAUSE_GENERATION: pause_generation,
    protocol.CONTINUE_GENERATION: continue_generation,
    protocol.UPDATE_WEIGHTS_FROM_DISK: update_weights_from_disk,
    protocol.UPDATE_WEIGHT_VERSION: update_weight_version,
    protocol.FLUSH_CACHE: flush_cache,
}
_GET: Mapping[str, Handler] = {
    protocol.FLUSH_CACHE: flush_cache,
    protocol.HEALTH: health,
    protocol.HEALTH_GENERATE: health,
    protocol.READY: ready,
    protocol.MODEL_INFO: model_info,
    protocol.SERVER_INFO: server_info,
    protocol.LOADS: loads,
    protocol.METRICS: metrics,
}


def add_routes(app: web.Application) -> None:
    for path, handler in _POST.items():
        app.router.add_post(path, handler)
    for path, handler in _GET.items():
        app.router.add_get(path, handler)
