"""Weights from a process group, as in SGLang: join a group, receive buckets of tensors, leave; and checksums.

Invariant: a bucket is received whole or not at all. An update of several buckets that fails midway leaves weights that
are neither old nor new, and the client must push again. Everything runs between steps on the decoder thread, as in
SGLang's scheduler, so that the server decodes nothing while a group is formed or a bucket is received. A wait for the
other ranks ends when their processes end, or after torch's default time limit. torch is imported inside the functions,
because `server` must be importable without torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from dora.embedded.bodies import outcome, read_body
from dora.embedded.engine_state import ENGINE, EngineState, die
from dora.embedded.updates import finish_update, outside_gate
from dora.errors import ConfigError


class _Join(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class _Leave(msgspec.Struct):
    group_name: str = "weight_update_group"


class _Receive(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class _Check(msgspec.Struct):
    action: str = "checksum"


async def init_weights_update_group(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await read_body(request, _Join)
    failure = await _on_thread(engine, lambda: engine.groups.update({body.group_name: _join(body)}))
    if failure is not None:
        return outcome(f"Failed to initialize custom process group: {failure}.", success=False)
    return outcome("Succeeded to initialize custom process group.", success=True)


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await read_body(request, _Leave)
    if body.group_name not in engine.groups:
        return outcome("The group to be destroyed does not exist.", success=False)
    group = engine.groups.pop(body.group_name)
    await _on_thread(engine, group.shutdown)
    return outcome("Succeeded to destroy custom process group.", success=True)


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await read_body(request, _Receive)
    if (refusal := outside_gate(engine, "update_weights_from_distributed")) is not None:
        return refusal
    if body.group_name not in engine.groups:
        die(f"group {body.group_name} was never joined")  # an assertion in SGLang's scheduler
    if body.abort_all_requests:
        engine.batcher.abort_all()
    async with engine.gate.alone():
        failure = await _on_thread(engine, lambda: _receive(engine, body))
    if failure is not None:
        text = f"Failed to update parameter online: {failure}. The full weights of the ModelRunner are partially "
        return outcome(text + "updated. Please discard the whole weights.", success=False)
    message = "Succeeded to update parameter online."
    if body.weight_version is not None:
        message += f" Weight version updated to {body.weight_version}."
    return outcome(message, success=True)


async def weights_checker(request: web.Request) -> web.Response:
    """Compute checksums, the only one of SGLang's four actions that changes nothing."""
    engine, body = request.app[ENGINE], await read_body(request, _Check)
    if body.action != "checksum":
        return outcome(f"Unsupported action={body.action!r}", success=False)
    checksums = await engine.batcher.between_steps(engine.batcher.model.checksums, on_thread=True)
    overall = hashlib.sha256()
    for name in sorted(checksums):
        overall.update(name.encode() + checksums[name].encode())
    rank = {"checksums": checksums, "per_gpu_checksum": overall.hexdigest(), "parallelism_info": _PARALLELISM}
    whole = hashlib.sha256(overall.hexdigest().encode()).hexdigest()
    return web.json_response({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole})


_PARALLELISM = {
    **dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0),
    **dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1),
}


async def _on_thread(engine: EngineState, act: Callable[[], object]) -> str | None:
    """Run `act` between steps on the decoder thread; return its error message, or None."""
    try:
        failure = await engine.batcher.between_steps(act, on_thread=True)
    except (ConfigError, AttributeError, RuntimeError, ValueError) as err:  # torch raises RuntimeErrors
        return str(err)
    return failure if isinstance(failure, str) else None


def _join(body: _Join) -> Any:
    """Join a group; its name prefixes the keys, as in SGLang's `init_custom_process_group`."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
    from torch.distributed.constants import default_pg_timeout

    if body.backend != "gloo":
        raise ValueError(f"backend {body.backend!r}: the embedded engine supports only gloo")
    store: Store = TCPStore(body.master_address, body.master_port, world_size=body.world_size, is_master=False)
    for prefix in (body.group_name, f"{body.group_name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, body.rank_offset, body.world_size, default_pg_timeout)


def _receive(engine: EngineState, body: _Receive) -> str | None:
    """Receive one bucket between steps; the last one also flushes and relabels."""
    import torch
    from torch._C._distributed_c10d import BroadcastOptions

    begun = time.perf_counter()
    options = BroadcastOptions()
    options.rootRank = 0
    tensors = [
        torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(body.dtypes, body.shapes, strict=True)
    ]
    group = engine.groups[body.group_name]
    for work in [group.broadcast([tensor], options) for tensor in tensors]:
        work.wait()
    engine.batcher.model.put(zip(body.names, tensors, strict=True))
    engine.batcher.metrics.weight_load_s = time.perf_counter() - begun
    return finish_update(engine, label=body.weight_version, flush=body.flush_cache)
