"""Control routes of the embedded engine: abort, pause, health, load and information; and the table of all of them.

Orders that touch rows run between steps, in the order of arrival.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from dora.embedded import adapter_routes, receiver, updates
from dora.embedded.bodies import error_body, read_body
from dora.embedded.dialect import Dialect
from dora.embedded.engine_state import ENGINE, EngineState
from dora.embedded.generation import Generation, SamplingParams
from dora.embedded.metrics import EngineMetrics
from dora.embedded.scheduler import Scheduler
from dora.engine.sglang import protocol

HEALTH_LIMIT_S = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PAUSE_MODES = ("abort", "retract", "in_place")


class _Abort(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: str = "abort"


# --- abort, pause, continue


async def abort_request(request: web.Request) -> web.Response:
    body, batcher = await read_body(request, _Abort), request.app[ENGINE].batcher
    if body.abort_all:
        batcher.abort_all()
    elif body.rid:
        batcher.abort(body.rid)
    return web.Response()


async def pause_generation(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await read_body(request, _Pause)
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
    await asyncio.shield(_continue(request.app[ENGINE]))  # to its end, even if the caller goes
    return web.json_response({"message": "Generation continued successfully.", "status": "ok"})


async def _continue(engine: EngineState) -> None:
    await engine.batcher.between_steps(engine.batcher.release)
    await engine.gate.resume()


async def _end_all(batcher: Scheduler) -> None:
    """Abort until nothing is live. No time limit: an abort takes one step at most, and the client has a deadline."""
    while batcher.live:
        batcher.abort_all()
        await batcher.between_steps(lambda: None)


# --- health


async def health(request: web.Request) -> web.Response:
    """Answer 200 once a token was generated after the call arrived: by a probe or, on a busy server, by any request."""
    engine = request.app[ENGINE]
    if engine.draining:
        return web.Response(status=503)
    batcher, begun = engine.batcher, time.monotonic()
    one_token = SamplingParams(max_new_tokens=1, temperature=0.0)
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
    model = engine.batcher.model
    return web.json_response(
        {
            "model_path": engine.model_path,
            "served_model_name": engine.arguments["served_model_name"],
            "tokenizer_path": engine.arguments["tokenizer_path"],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.label,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.model_type,
            "architectures": model.architectures,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """SGLang's flat arguments, as far as they exist here; API keys are never shown."""
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
            "weight_version": engine.label,
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
            "version": engine.dialect.version,
            "engine": "dora-embedded",
        }
    )


def _gauges(batcher: Scheduler) -> dict[str, float]:
    metrics, used = batcher.metrics, batcher.used_tokens
    hit_rate = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
    return {
        "num_running_reqs": len(batcher.rows),
        "num_queue_reqs": len(batcher.waiting),
        "num_paused_reqs": len(batcher.rows) if batcher.holding else 0,
        "num_retracted_reqs": sum(generation.num_retractions > 0 for generation in tuple(batcher.waiting)),
        "num_used_tokens": used,
        "max_total_num_tokens": batcher.kv_tokens,
        "token_usage": round(used / batcher.kv_tokens, 4),
        "kv_used_tokens": used,
        "kv_available_tokens": batcher.kv_tokens - used,
        "kv_evictable_tokens": batcher.model.cached_tokens,
        "gen_throughput": metrics.gen_throughput(),
        "cache_hit_rate": round(hit_rate, 4),
        "utilization": round(len(batcher.rows) / batcher.slots, 4),
        "context_len": batcher.model.context_tokens,
        **_acceptance(metrics),
    }


def _acceptance(metrics: EngineMetrics) -> dict[str, float]:
    """The figures that SGLang has while it makes drafts."""
    if not metrics.drafted_steps:
        return {}
    kept = metrics.generated_tokens - metrics.drafted_steps
    return {
        "spec_accept_length": metrics.generated_tokens / metrics.drafted_steps,
        "spec_accept_rate": kept / metrics.drafted_tokens if metrics.drafted_tokens else 0.0,
    }


async def loads(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    batcher = engine.batcher
    gauges = _gauges(batcher)
    waiting_tokens = sum(generation.num_tokens for generation in tuple(batcher.waiting))
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
    if acceptance := _acceptance(batcher.metrics):
        load["speculative"] = {name.removeprefix("spec_"): value for name, value in acceptance.items()}
    head = {"timestamp": datetime.now(UTC).isoformat(), "version": engine.dialect.version}
    return web.json_response({**head, "accelerator": None, "num_accelerators": 1, "loads": [load]})


async def get_load(request: web.Request) -> web.Response:
    """The older, shorter form of /v1/loads."""
    batcher = request.app[ENGINE].batcher
    load = {
        "dp_rank": 0,
        "num_reqs": len(batcher.rows) + len(batcher.waiting),
        "num_waiting_reqs": len(batcher.waiting),
        "num_tokens": batcher.used_tokens,
        "num_pending_tokens": sum(generation.num_tokens for generation in tuple(batcher.waiting)),
        "ts_tic": time.perf_counter(),
    }
    return web.json_response([load])


async def metrics(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    text = engine.batcher.metrics.text(_gauges(engine.batcher), model_name=engine.model_path)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


_POST: Mapping[str, Handler] = {
    protocol.ABORT_REQUEST: abort_request,
    protocol.PAUSE_GENERATION: pause_generation,
    protocol.CONTINUE_GENERATION: continue_generation,
    protocol.UPDATE_WEIGHTS_FROM_DISK: updates.update_weights_from_disk,
    protocol.UPDATE_WEIGHT_VERSION: updates.update_weight_version,
    protocol.FLUSH_CACHE: updates.flush_cache,
    protocol.BEGIN_WEIGHT_UPDATE: updates.begin_weight_update,
    protocol.END_WEIGHT_UPDATE: updates.end_weight_update,
    protocol.INIT_WEIGHTS_UPDATE_GROUP: receiver.init_weights_update_group,
    protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED: receiver.update_weights_from_distributed,
    protocol.DESTROY_WEIGHTS_UPDATE_GROUP: receiver.destroy_weights_update_group,
    protocol.WEIGHTS_CHECKER: receiver.weights_checker,
    protocol.LOAD_LORA_ADAPTER: adapter_routes.load_lora_adapter,
    protocol.UNLOAD_LORA_ADAPTER: adapter_routes.unload_lora_adapter,
}
_GET: Mapping[str, Handler] = {
    protocol.FLUSH_CACHE: updates.flush_cache,
    protocol.HEALTH: health,
    protocol.HEALTH_GENERATE: health,
    protocol.READY: ready,
    protocol.MODEL_INFO: model_info,
    protocol.MODELS: adapter_routes.models,
    protocol.SERVER_INFO: server_info,
    protocol.LOADS: loads,
    protocol.GET_LOAD: get_load,
    protocol.METRICS: metrics,
}


def _absent(dialect: Dialect) -> set[str]:
    """Paths of the routes that the dialect does not have."""
    has = {
        protocol.READY: dialect.has_ready,
        protocol.GET_LOAD: dialect.has_get_load,
        protocol.BEGIN_WEIGHT_UPDATE: dialect.has_update_gate,
        protocol.END_WEIGHT_UPDATE: dialect.has_update_gate,
        protocol.LOAD_LORA_ADAPTER: dialect.has_adapters,
        protocol.UNLOAD_LORA_ADAPTER: dialect.has_adapters,
    }
    return {path for path, present in has.items() if not present}


def add_routes(app: web.Application) -> None:
    absent = _absent(app[ENGINE].dialect)
    for path in _POST.keys() - absent:
        app.router.add_post(path, _POST[path])
    for path in _GET.keys() - absent:
        app.router.add_get(path, _GET[path])
