"""A trainer at work, for measuring servers that share its cores: one process per rank, which trains without an update.

Invariant: the processes end with the context, and by themselves if their parent is gone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

from dora.app.trainer_check import make_trial, outline_of, trial_sizes
from dora.config.schema import Config
from dora.errors import RemoteError

#: Limits of the waits for a process: until it trains, and until it has ended.
START_S: Final = 120.0
END_S: Final = 10.0


def shares_cores(config: Config) -> bool:
    """Return whether trainer and servers compute on the same cores at the same time."""
    on_cpu = config.trainer.device == "cpu" and config.engine.device == "cpu" and config.num_managed > 0
    return on_cpu and not config.num_training_nodes and config.max_staleness > 0


@asynccontextmanager
async def working_trainer(config: Config, model: Path) -> AsyncIterator[None]:
    """Have all ranks train while the context is open; RemoteError if one does not begin."""
    spawn = multiprocessing.get_context("spawn")
    ranks: list[tuple[SpawnProcess, Connection]] = []
    try:
        for rank in range(config.trainer.ranks):
            told, tells = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_train, args=(config, model, tells), name=f"rank-{rank}", daemon=True)
            process.start()
            tells.close()
            ranks.append((process, told))
        for process, told in ranks:
            await asyncio.to_thread(_require_begun, process.name, told)
        yield
    finally:
        for process, told in ranks:
            process.kill()
            await asyncio.to_thread(process.join, END_S)
            told.close()


def _require_begun(name: str, told: Connection) -> None:
    try:
        if told.poll(START_S) and told.recv():
            return
    except EOFError:
        raise RemoteError(f"{name} of the trainer ended before it trained; its output says why") from None
    raise RemoteError(f"{name} of the trainer did not train within {START_S:g} s")


def _train(config: Config, model: Path, tells: Connection) -> None:
    """Train passes until this process is killed, or its parent has ended."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    torch.set_num_threads(config.trainer.threads)
    parent = multiprocessing.parent_process()
    mode, outline = outline_of(config, model, None)
    tokens, longest = trial_sizes(config, outline)
    with make_trial(config, model, mode) as trial:
        tells.send(True)
        while parent is not None and parent.is_alive():
            trial.measure(tokens=tokens, longest=longest)
