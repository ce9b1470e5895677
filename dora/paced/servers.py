"""Several paced engines in one process, each on its own port. To the controller they are separate servers."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from dora.embedded.server import ServeOptions, listening
from dora.paced.engine import PacedEngine, PacedModel
from dora.sim.workload import Workload, load
from dora.tasks.tokenizer import load_tokenizer


def run_servers(
    workload_path: Path, *, model: Path, first: int, count: int, seed: int, time_scale: float, api_key: str | None
) -> None:
    """Serve instances [first, first + count) of a workload until SIGTERM."""
    gc.freeze()
    workload = load(workload_path)
    options = ServeOptions(
        model_path=model,
        slots=workload.fleet.server.slots,
        kv_tokens=workload.fleet.server.kv_tokens,
        incremental_streaming_output=True,
        skip_tokenizer_init=True,
        api_key=api_key,
    )
    instances = range(first, first + count)
    uvloop.run(_serve(workload, options, instances=instances, seed=seed, time_scale=time_scale))


async def _serve(workload: Workload, options: ServeOptions, *, instances: range, seed: int, time_scale: float) -> None:
    server, fleet = workload.fleet.server, workload.fleet
    answers = workload.answers(seed=seed)
    urls, loops = [], []
    async with AsyncExitStack() as stack:
        for index in instances:
            engine = PacedEngine(
                paced_model(options.model_path, context_tokens=server.kv_tokens + 1),
                answers=answers,
                server=server,
                slowness=1 / fleet.slow_speed if index < fleet.slow_instances else 1.0,
                push_s=workload.push_s,
                time_scale=time_scale,
            )
            _, url, loop = await stack.enter_async_context(listening(options, engine, None))
            urls.append(url)
            loops.append(loop)
        sys.stdout.write(f"ready {','.join(urls)}\n")
        sys.stdout.flush()
        stopped = asyncio.create_task(_signaled(), name="wait for a signal")
        done, _ = await asyncio.wait({stopped, *loops}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopped}:
            task.result()  # an engine ends only with an error
        stopped.cancel()


def paced_model(folder: Path, *, context_tokens: int) -> PacedModel:
    """A paced model whose tokens come from the run's own tokenizer."""
    tokenizer = load_tokenizer(folder)
    [passing], [failing] = (tokenizer.encode(text, special_tokens=False) for text in ("1", "0"))
    return PacedModel(
        context_tokens=context_tokens,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset(tokenizer.eos_ids),
        pass_id=passing,
        fail_id=failing,
    )


async def _signaled() -> None:
    """Wait for SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await stopping.wait()
