"""Weight updates, labels and the prefix cache of the embedded engine, as in the chosen dialect.

Orders that touch rows run between steps, in the order of arrival. A load that fails midway leaves weights that are
neither old nor new, so it ends the process, as it ends SGLang's scheduler.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from aiohttp import web

from dora.embedded.bodies import error_body, outcome, read_body
from dora.embedded.engine_state import ENGINE, EngineState, die

UNFLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or "
    "finish them, then call /flush_cache."
)


class _Update(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _Relabel(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


# --- from disk


async def update_weights_from_disk(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await read_body(request, _Update)
    if body.abort_all_requests:
        engine.batcher.abort_all()
    async with engine.gate.alone():
        failure = await engine.batcher.between_steps(lambda: _load(engine, body), on_thread=True)
    if failure is not None:
        return outcome(failure, success=False, num_paused_requests=0)
    message = "Succeeded to update model weights."
    if body.weight_version is not None:
        message += f" Weight version updated to {body.weight_version}."
    return outcome(message, success=True, num_paused_requests=0)


def _load(engine: EngineState, body: _Update) -> str | None:
    """Load weights, between steps on the decoder thread. Returns an error message if nothing was changed; ends the
    process if the load failed midway."""
    batcher, begun = engine.batcher, time.perf_counter()
    try:
        batcher.model.load(Path(body.model_path))
    except OSError as err:
        return f"Failed to get weights iterator: {err}."
    except Exception as err:  # noqa: BLE001  anything that torch or a conversion raises
        die(f"loading {body.model_path} failed with the weights half replaced: {err}")
    failure = finish_update(engine, label=body.weight_version, flush=body.flush_cache)
    if failure is None:
        engine.arguments["model_path"] = body.model_path
    batcher.metrics.weight_load_s = time.perf_counter() - begun
    return failure


def finish_update(engine: EngineState, *, label: str | None, flush: bool) -> str | None:
    """Flush and relabel after the weights were replaced, between steps. If the flush fails, returns an error message or
    ends the process, depending on the dialect."""
    flushed = not flush or engine.batcher.flush(over_queue=engine.dialect.flushes_over_queue)
    if not flushed and not engine.dialect.outlives_failed_flush:
        die("cache flush failed after updating weights: requests were resident")
    if label is not None:
        engine.batcher.relabel(label)
    if not flushed:
        return UNFLUSHED
    if label is not None:
        engine.label = label
    return None


# --- the gate around updates that send their tensors (0.5.21 and later)


async def begin_weight_update(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    if engine.updating:
        return outcome("a weight-update session is already open; call end_weight_update() first", success=False)
    engine.updating = True
    return outcome("Success", success=True)


async def end_weight_update(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    if not engine.updating:
        return outcome("no weight-update session is open; call begin_weight_update() first", success=False)
    engine.updating = False
    return outcome("Success", success=True)


def outside_gate(engine: EngineState, call: str) -> web.Response | None:
    """The refusal of `call` if the dialect requires it between begin_ and end_weight_update and it is not."""
    if engine.updating or not engine.dialect.has_update_gate:
        return None
    return outcome(f"{call} must run between begin_weight_update() and end_weight_update()", success=False)


# --- label and cache


async def update_weight_version(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await read_body(request, _Relabel)
    if body.abort_all_requests:
        engine.batcher.abort_all()
    await engine.batcher.between_steps(lambda: _relabel(engine, body.new_version))
    return outcome(f"Weight version updated to {body.new_version}", success=True, new_version=body.new_version)


def _relabel(engine: EngineState, label: str) -> None:
    engine.batcher.relabel(label)
    engine.label = label


async def flush_cache(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    batcher, over_queue = engine.batcher, engine.dialect.flushes_over_queue
    try:
        deadline = time.monotonic() + float(request.query.get("timeout", "0"))
    except ValueError:
        return web.json_response(error_body("1 validation error:\n  timeout should be a number"), status=400)
    while not (flushed := await batcher.between_steps(lambda: batcher.flush(over_queue=over_queue))):
        left = deadline - time.monotonic()
        if left <= 0 or not await batcher.emptied(timeout_s=left):
            break
    if not flushed:
        return web.Response(text="Flush cache failed.\n", status=400)
    return web.Response(
        text="Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests,"
        " the operation will not be performed.)\n"
    )
