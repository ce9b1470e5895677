"""How often the progress of answers is reported to the core, whose journal keeps each report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dora.controller.inbox import Inbox
from dora.controller.reporters import Reporters
from dora.core import events as ev
from tests.controller.fakes import TOKEN, Job, make_job

TICKS = 8


async def reports(job: Job, *, watchdog_s: float) -> list[list[int]]:
    """Return which instances report in each tick, while each of their answers gets a token."""
    inbox, residents = Inbox(), job.controller.state.trajectories
    reporters = Reporters(
        job.controller.state.instances,
        trajectories=job.io.trajectories,
        fleet=job.io.fleet,
        engine=job.io.engine,
        inbox=inbox,
        commits=job.commits,
        observer=job.watcher,
        now=job.io.now,
        watchdog_s=watchdog_s,
        tick_s=0.0,
    )
    loops = dict(reporters.loops())
    loops["event-loop-lag"].close()
    ticks = asyncio.create_task(loops["ticks"], name="ticks")
    found: list[list[int]] = [[]]
    while len(found) <= TICKS:
        match await inbox.take():
            case ev.ProgressReported() as event:
                found[-1].append(event.instance)
            case ev.Ticked():
                found.append([])
                for trajectory in residents.values():
                    job.io.trajectories.append(trajectory.id, trajectory.attempt, [TOKEN], [-1.0])
    ticks.cancel()
    return found[:TICKS]


@pytest.mark.parametrize(("watchdog_s", "ticks"), [(120.0, 4), (32.0, 2), (8.0, 1)])
async def test_an_instance_reports_every_few_seconds_and_twice_between_two_looks_of_the_watchdog(
    watchdog_s: float, ticks: int, tmp_path: Path
) -> None:
    job = make_job(tmp_path, steps=200)
    job.engines.frozen |= {"http://engine-0", "http://engine-1"}
    run = asyncio.create_task(job.run(), name="job")
    async with asyncio.timeout(20):
        while sum(bool(row.residents) for row in job.controller.state.instances.values()) < 2:  # noqa: ASYNC110 - turns
            await asyncio.sleep(0)
        found = await reports(job, watchdog_s=watchdog_s)
    of_each = [[tick for tick, instances in enumerate(found) if id in instances] for id in (0, 1)]
    assert of_each == [[*range(-id % ticks, TICKS, ticks)] for id in (0, 1)]
    job.controller.interrupt()
    await run
    job.close()
