"""Trains on rollouts from disk, without servers or decisions, to debug the trainer alone.

Every rank receives the same micro-batches as in a run; the staleness bound does not apply.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from dora.app.build import listen_for_ranks
from dora.app.episodes import enter_inputs
from dora.app.fetch import fetch
from dora.app.inputs import weights_digest
from dora.app.prepare import new_folder
from dora.app.ranks import HostRanks
from dora.app.settings import RankPaths, configure_message, drift_watch, lineage_settings
from dora.config.schema import Config, EngineConfig
from dora.controller.lineage import Lineage, base_chain
from dora.controller.recorder import log_changes
from dora.controller.rollouts import rollout_files, train_rollouts
from dora.controller.trainer_link import StepReport, TrainerLink
from dora.core import events as ev
from dora.core.training import Feed
from dora.errors import RunFailed
from dora.journal.access import require_group, set_umask
from dora.journal.run_folder import RunFolder
from dora.log import configure_logging
from dora.node.cuda import require_cuda
from dora.node.supervise import Node
from dora.observe.drift import DriftWatch
from dora.weights.checkpoints import drop
from dora.weights.fence import raise_fence


class _Listener:
    """Handles the events of the ranks: deletes old checkpoints, writes metrics, and detects the last version."""

    def __init__(
        self, folder: RunFolder, *, steps: int, drift: DriftWatch, report: Callable[[StepReport, int], None]
    ) -> None:
        self.done = asyncio.Event()  #: the last version is published
        self._folder = folder
        self._steps = steps
        self._drift = drift
        self._report = report
        self._checkpoints = Feed(num_ranks=1, budget=1, groups_per_update=1)

    async def on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.TrainerLost):
            raise RunFailed(event.reason)  # there is no journal from which its waves could be sent again
        if isinstance(event, ev.CheckpointSaved):
            for _, old in self._checkpoints.checkpointed(event.step, event.folder):
                if old:
                    drop(Path(old))
        if isinstance(event, ev.VersionPublished) and event.version == self._steps:
            self.done.set()

    def on_step(self, step: StepReport) -> None:
        self._report(step, self._steps)
        log_changes(self._drift.note(step.step, step.metrics))
        with self._folder.metrics.open("ab") as metrics:
            row = {"kind": "step", "step": step.step, "trainer": step.metrics}
            metrics.write(msgspec.json.encode(row) + b"\n")


async def train(
    config: Config, rollouts: Path, *, report: Callable[[StepReport, int], None], tell: Callable[[str], None]
) -> tuple[int, RunFolder]:
    """Feed every step in the folder to the ranks and wait for the last one.

    `report` receives each trained step and the number of steps, `tell` messages for the user. Returns that number and
    the run folder.
    """
    rollout = rollout_files(rollouts)
    await asyncio.to_thread(require_cuda, config.model_copy(update={"engine": EngineConfig()}), environ=os.environ)
    config = await fetch(config, tell=tell)
    require_group(config.run.group)
    set_umask(config.run.group)
    run = config.run.model_copy(update={"steps": len(rollout)})  # the learning-rate schedule ends with them
    config = config.model_copy(update={"run": run})
    async with AsyncExitStack() as opening:
        inputs, _ = await enter_inputs(opening, config)
    folder = new_folder(config)
    raise_fence(folder.fence, epoch=0)
    model_chain = base_chain(await asyncio.to_thread(weights_digest, inputs))
    configure_logging(folder.log, level=config.log.level, run=folder.run_id, role="controller")
    listener = _Listener(folder, steps=len(rollout), drift=drift_watch(config), report=report)
    lease = folder.lease(0)
    async with AsyncExitStack() as stack:
        stack.callback(folder.remove_leases)
        node = await stack.enter_async_context(Node(logs=folder.logs, lease=lease))
        end, address, token = await listen_for_ranks(config, stack, now=time.monotonic)
        ranks = HostRanks(config, node, address=address, token=token, lease=lease)
        await ranks.start()
        link = TrainerLink(
            end=end,
            ranks=ranks,
            num_ranks=config.trainer.ranks,
            configure=lambda rank: configure_message(
                config,
                RankPaths.here(
                    folder,
                    model=inputs.model,
                    reference=inputs.reference,
                    adapter=inputs.adapter,
                    memory_root=folder.versions,
                ),
                run_id=folder.run_id,
                may_start_over=True,
                chain=model_chain,
                epoch=0,
                max_staleness=len(rollout),
            ),
            start_timeout_s=config.trainer.start_timeout_s,
            now=time.monotonic,
            emit=listener.on_event,
            on_ready=lambda num_ready, num_ranks: None,
            on_step=listener.on_step,
            durable=_at_once,
            lineage=Lineage(base=model_chain, settings=lineage_settings(config), trained={}),
            tell=lambda line: None,
        )
        await _run(link, rollout, config=config, done=listener.done)
    return len(rollout), folder


async def _at_once(position: int) -> None:
    """Return at once: there is no journal to wait for."""


async def _run(link: TrainerLink, rollout: list[Path], *, config: Config, done: asyncio.Event) -> None:
    """Run the link's loops and the feed until the last version is published."""
    loops = [asyncio.ensure_future(loop) for _, loop in link.loops()]
    feed = asyncio.create_task(
        train_rollouts(
            rollout,
            link=link,
            num_parts=config.data_groups,
            budget=config.pass_tokens,
            group_size=config.rollout.group_size,
            updates=config.trainer.updates,
            shared_prompts=config.trainer.shared_prompts != "off",
        ),
        name="feed",
    )
    end = asyncio.create_task(done.wait(), name="last-version")
    pending: set[asyncio.Future[Any]] = {*loops, feed, end}
    try:
        while not end.done():
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task.done()]:
                pending.remove(task)
                task.result()
        await link.stop("all steps are trained")
    finally:
        for task in (*loops, feed, end):
            task.cancel()
        await asyncio.gather(*loops, feed, end, return_exceptions=True)
