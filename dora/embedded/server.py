"""The embedded engine over HTTP: routes, error shapes and life cycle, as in SGLang (`dialect.py`).

`run_server` loads a model, prints `ready http://host:port` and serves until SIGTERM or SIGINT. Then /health answers
503, running calls finish, and the process ends; a second signal ends it at once. Only `run_server` imports torch.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiohttp import web

from dora.embedded import control
from dora.embedded.adapters import NamedAdapters
from dora.embedded.batcher import Batcher, Decoder
from dora.embedded.bodies import error_body
from dora.embedded.dialect import DEFAULT_DIALECT, dialect_of
from dora.embedded.engine_state import ENGINE, EngineState
from dora.embedded.gate import Gate
from dora.embedded.generate import generate
from dora.embedded.requests import RequestLimits
from dora.embedded.scheduler import AdapterRoom, Scheduler
from dora.embedded.text import TextCodec
from dora.engine.sglang import protocol
from dora.errors import ConfigError
from dora.guard import CONNECTION_LOG, guard, knows

DRAIN_LIMIT_S = 600.0  # a request paused in place never ends by itself
MAX_BODY_BYTES = 256 * 2**20
OPEN_PATHS = frozenset({protocol.HEALTH, protocol.HEALTH_GENERATE, protocol.READY, protocol.METRICS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    model_path: Path
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    slots: int = 64  # requests that run at the same time
    kv_tokens: int = 65536  # tokens of all running requests together
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    min_step_ms: float = 0.0  # least duration of a decoding step; 0: none
    draft_tokens: int = 0  # drafted for a request in a step, at most
    weight_version: str = "default"
    incremental_streaming_output: bool = False
    skip_tokenizer_init: bool = False
    max_queued_requests: int | None = None  # None: no limit
    api_key: str | None = None
    seed: int = 0  # for requests without one
    dialect: str = DEFAULT_DIALECT  # the release of SGLang to imitate
    max_lora_rank: int = 0  # 0: no adapters
    lora_target_modules: tuple[str, ...] = ()
    max_loras_per_batch: int = 8  # adapters that are loaded at the same time
    routed_experts: bool = False  # the choice of experts is kept, and returned if asked for

    @property
    def adapters(self) -> AdapterRoom | None:
        """None: no adapters. ConfigError unless rank and targets are given together, for a release that has them."""
        if not self.max_lora_rank and not self.lora_target_modules:
            return None
        if not self.max_lora_rank or not self.lora_target_modules:
            raise ConfigError("adapters: give both --max-lora-rank and --lora-target-modules, or neither")
        if not dialect_of(self.dialect).has_adapters:
            raise ConfigError(f"adapters: not as SGLang {self.dialect} serves them; give --dialect 0.5.23")
        return AdapterRoom(self.max_loras_per_batch, self.max_lora_rank, self.lora_target_modules)

    def require_possible(self) -> None:
        """Raise ConfigError unless the options go together."""
        dialect, _ = dialect_of(self.dialect), self.adapters
        if self.routed_experts and not dialect.returns_experts:
            raise ConfigError(f"--routed-experts: not as SGLang {self.dialect} does; give --dialect 0.5.23")
        if self.routed_experts and self.draft_tokens:
            raise ConfigError(
                "--routed-experts: DORA refuses servers that return experts and draft; drop --draft-tokens"
            )


def run_server(options: ServeOptions) -> None:
    """Serve until a signal arrives. ConfigError if the dialect, the model or the address cannot be used."""
    options.require_possible()  # before the model is loaded
    gc.disable()  # the imports create a million objects that stay: collecting them takes a fifth of the start
    from dora.embedded.decoder import CausalDecoder

    decoder = CausalDecoder(
        options.model_path,
        slots=options.slots,
        kv_tokens=options.kv_tokens,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        adapters=options.adapters,
        returns_experts=options.routed_experts,
    )
    tokenizer = None if options.skip_tokenizer_init else _tokenizer(options.model_path)
    gc.freeze()  # exempt them from later collections too
    gc.enable()
    uvloop.run(serve(options, decoder, tokenizer))


def _tokenizer(folder: Path) -> TextCodec:
    from transformers import AutoTokenizer

    try:
        tokenizer: TextCodec = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as err:  # anything that the class of a tokenizer raises
        reason = "it needs code from the folder, which is never run" if "trust_remote_code" in str(err) else err
        raise ConfigError(
            f"model folder {folder} has no usable tokenizer ({reason}): add one, or pass --skip-tokenizer-init"
        ) from err
    return tokenizer


def running(
    options: ServeOptions, decoder: Decoder, tokenizer: TextCodec | None
) -> AbstractAsyncContextManager[tuple[EngineState, str, asyncio.Task[None]]]:
    """Return `listening` for a model."""
    is_one_thread = options.device == "cpu" and options.threads == 1  # whose time other processes do not change
    batcher = Batcher(
        decoder,
        slots=options.slots,
        kv_tokens=options.kv_tokens,
        weight_version=options.weight_version,
        max_queued_requests=options.max_queued_requests,
        min_step_s=options.min_step_ms / 1_000,
        draft_tokens=options.draft_tokens,
        step_clock=time.thread_time if is_one_thread else time.monotonic,
    )
    return listening(options, batcher, tokenizer)


@asynccontextmanager
async def listening(
    options: ServeOptions, batcher: Scheduler, tokenizer: TextCodec | None
) -> AsyncIterator[tuple[EngineState, str, asyncio.Task[None]]]:
    """A listening engine: its shared state, its URL, and its batcher's task, which ends only with an error."""
    engine = _engine(options, batcher, tokenizer)
    runner = web.AppRunner(
        build_app(engine), access_log=None, logger=CONNECTION_LOG, handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    batching = asyncio.create_task(engine.batcher.run(), name="batcher")
    try:
        await _listen(runner, options)
        host, port = runner.addresses[0][:2]
        yield engine, f"http://{host}:{port}", batching
    finally:
        await runner.cleanup()
        engine.adapters.close()
        batching.cancel()
        await asyncio.wait({batching})
        await asyncio.to_thread(engine.batcher.close)  # it may wait for a process group: signals still arrive


async def _listen(runner: web.AppRunner, options: ServeOptions) -> None:
    try:
        await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
    except OSError as err:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {err.strerror or err}") from err


async def serve(options: ServeOptions, decoder: Decoder, tokenizer: TextCodec | None) -> None:
    """Serve `decoder` until a signal arrives, then until no call is running."""
    stopping = asyncio.Event()
    async with running(options, decoder, tokenizer) as (engine, url, batching):
        _on_signals(engine, stopping)
        sys.stdout.write(f"ready {url}\n")
        sys.stdout.flush()
        stopped = asyncio.create_task(_drained(engine, stopping), name="wait for a signal")
        await asyncio.wait({batching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if batching.done():
            batching.result()


async def _drained(engine: EngineState, stopping: asyncio.Event) -> None:
    await stopping.wait()
    await engine.batcher.emptied(timeout_s=DRAIN_LIMIT_S)


def _engine(options: ServeOptions, batcher: Scheduler, tokenizer: TextCodec | None) -> EngineState:
    drawn = itertools.count()
    limits = RequestLimits(
        context_tokens=batcher.model.context_tokens,
        kv_tokens=options.kv_tokens,
        vocab_size=batcher.model.vocab_size,
        eos_token_ids=batcher.model.eos_token_ids,
        draw_seed=lambda: (options.seed << 32) + next(drawn),
        encode=tokenizer.encode if tokenizer is not None else None,
        returns_experts=options.routed_experts,
    )
    arguments = {
        "model_path": str(options.model_path),
        "tokenizer_path": str(options.model_path),
        "served_model_name": str(options.model_path),
        "skip_tokenizer_init": options.skip_tokenizer_init,
        "trust_remote_code": False,
        "host": options.host,
        "port": options.port,
        "device": options.device,
        "dtype": options.dtype,
        "random_seed": options.seed,
        "max_running_requests": options.slots,
        "max_queued_requests": options.max_queued_requests,
        "max_total_tokens": options.kv_tokens,
        "incremental_streaming_output": options.incremental_streaming_output,
        "speculative_algorithm": "NGRAM" if options.draft_tokens else None,
        "speculative_num_draft_tokens": options.draft_tokens + 1 if options.draft_tokens else None,
        "enable_return_routed_experts": options.routed_experts,
        "enable_lora": options.adapters is not None,
        "max_lora_rank": options.max_lora_rank or None,
        "lora_target_modules": list(options.lora_target_modules) or None,
        "max_loras_per_batch": options.max_loras_per_batch,
        "max_loaded_loras": None,
        "lora_strict_loading": True,
    }
    return EngineState(
        batcher=batcher,
        gate=Gate(),
        limits=limits,
        dialect=dialect_of(options.dialect),
        label=options.weight_version,
        tokenizer=tokenizer,
        arguments=arguments,
        adapters=NamedAdapters(batcher),
        api_key=options.api_key,
    )


def build_app(engine: EngineState) -> web.Application:
    # GET /flush_cache changes something, so reads are guarded too.
    guarded = guard(name=engine.arguments["host"], open_reads=False, refuse=_refuse)
    app = web.Application(middlewares=[_errors, guarded, _authorized], client_max_size=MAX_BODY_BYTES)
    app[ENGINE] = engine
    app.router.add_post(protocol.GENERATE, generate)
    app.router.add_put(protocol.GENERATE, generate)
    control.add_routes(app)
    return app


@web.middleware
async def _errors(request: web.Request, handler: control.Handler) -> web.StreamResponse:
    """Give aiohttp's own errors SGLang's shapes."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed:
        return web.json_response({"detail": "Method Not Allowed"}, status=405)
    except web.HTTPRequestEntityTooLarge as err:
        return web.json_response(error_body(str(err.text), status=413), status=413)


@web.middleware
async def _authorized(request: web.Request, handler: control.Handler) -> web.StreamResponse:
    key = request.app[ENGINE].api_key
    if key is not None and request.path not in OPEN_PATHS and not knows(key, request.headers):
        return web.json_response({"error": "Unauthorized"}, status=401)
    return await handler(request)


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response(error_body(message, status=status), status=status)


def _on_signals(engine: EngineState, stopping: asyncio.Event) -> None:
    def stop() -> None:
        if engine.draining:
            os._exit(1)  # second signal
        engine.draining = True
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
