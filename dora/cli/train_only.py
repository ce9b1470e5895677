"""`dora run --train-only`: train on rollouts from disk. No servers, no decisions; for debugging the trainer alone.

Every rank gets what it would have got; the staleness bound does not apply, since nothing was waiting for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dora.cli.assemble import configure_message, open_inputs
from dora.config.load import dump
from dora.config.schema import Config
from dora.controller.rollouts import rollout_files, train_rollouts
from dora.controller.trainer_link import StepReport, TrainerLink
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from dora.log import configure_logging
from dora.node.plan import plan_trainer
from dora.node.supervise import Node
from dora.transport.controller_end import ControllerEnd


async def train(config: Config, rollouts: Path) -> None:
    """Feed every step of the folder to the ranks and wait for the last one."""
    files = rollout_files(rollouts)
    inputs = await asyncio.to_thread(open_inputs, config)
    folder = RunFolder.create(config.run.folder, name=config.run.name)
    folder.config.write_text(dump(config), encoding="utf-8")
    configure_logging(folder.log, level=config.log.level, run=folder.run_id, role="controller")
    last_step = len(files) - 1
    done = asyncio.Event()

    async def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.VersionPublished) and event.version == last_step + 1:
            done.set()

    def on_step(report: StepReport) -> None:
        reward, norm = report.metrics.get("all/reward_mean", 0.0), report.metrics["grad_norm"]
        sys.stdout.write(f"step {report.step + 1}/{len(files)}  reward {reward:.3f}  gradient norm {norm:.3f}\n")
        with folder.metrics.open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps({"kind": "step", "step": report.step, "trainer": report.metrics}) + "\n")

    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(Node(logs=folder.logs, lease=folder.lease))
        token = config.trainer.token or secrets.token_hex(16)
        end = ControllerEnd(
            address=config.trainer.address, token=token, world_size=config.trainer.ranks, now=time.monotonic
        )
        address = await end.start()
        stack.push_async_callback(end.close)
        lease = folder.lease.resolve()
        plan = plan_trainer(config, controller=address, token=token, lease=lease, environ=os.environ)
        child = node.add(plan) if plan is not None else None
        if child is not None:
            await child.start()
        link = TrainerLink(
            end=end,
            num_ranks=config.trainer.ranks,
            configure=configure_message(
                config,
                run_id=folder.run_id,
                model=inputs.model,
                memory_root=folder.versions,
                durable_root=folder.versions,
                checkpoints=folder.checkpoints,
                resume_from=None,
                max_staleness=len(files),
            ),
            start_timeout_s=config.trainer.start_timeout_s,
            process_ended=child.ended if child is not None else None,
            now=time.monotonic,
            emit=on_event,
            on_step=on_step,
        )
        await _run(link, files, config=config, done=done)
    sys.stdout.write(f"{len(files)} steps are trained; versions and metrics are in {folder.root}\n")


async def _run(link: TrainerLink, files: list[Path], *, config: Config, done: asyncio.Event) -> None:
    """The link's loops beside the feed; ended when the last version is published."""
    loops = [asyncio.ensure_future(loop) for _, loop in link.loops()]
    feed = asyncio.create_task(
        train_rollouts(
            files, link=link, budget=config.trainer.micro_batch_tokens, group_size=config.rollout.group_size
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
