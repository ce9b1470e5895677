"""Users' requests to a running fleet: what the core decides is carried out, in a job on fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dora.controller import fleet as fleet_module
from dora.controller.membership import MembershipRequests
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId
from dora.errors import ConfigError
from tests.controller.fakes import Job, make_job

ZERO, ONE = InstanceId(0), InstanceId(1)


class Asked:
    """A job under way, frozen in the middle of its answers until it is released, and the object that takes requests."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.desk = MembershipRequests(
            job.io.fleet,
            state=job.controller.state,
            engine=job.io.engine,
            inbox=job.inbox,
            now=job.io.now,
        )

    @property
    def state(self) -> Any:
        return self.job.controller.state

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - turns of the loop, no clock
                await asyncio.sleep(0)


@asynccontextmanager
async def under_way(folder: Path, *, instances: int = 2, steps: int = 200, **changes: Any) -> AsyncIterator[Asked]:
    """Every server holds version 0; the job is interrupted at the end."""
    job = make_job(folder, instances=instances, steps=steps, **changes)
    asked = Asked(job)
    run = asyncio.create_task(job.run(), name="job")
    try:
        await asked.until(lambda: len(job.io.fleet.urls) == instances and bool(job.engines.requests))
        yield asked
    finally:
        job.controller.interrupt()
        await run
        job.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_PAUSE_S", 0.0)


async def test_a_drained_instance_gets_no_more_work_and_the_run_continues(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        said = await asked.desk.drain("0")
        assert said.startswith("instance 0 drains: ")
        await asked.until(lambda: not asked.state.instances[ZERO].residents)
        before = len(asked.job.engines.requests)
        trained = asked.state.feed.trained
        await asked.until(lambda: asked.state.feed.trained >= trained + 3)
        assert {url for url, _ in asked.job.engines.requests[before:]} == {"http://engine-1"}
        assert not asked.state.instances[ZERO].is_member


async def test_the_last_instance_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        await asked.desk.drain("1")
        with pytest.raises(ConfigError, match="instance 0: no other instance is there to take its work; add one first"):
            await asked.desk.remove("http://engine-0/")
        assert asked.state.instances[ZERO].is_member


async def test_an_instance_that_leaves_is_stopped_and_forgotten(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        assert (await asked.desk.remove("1")).startswith("instance 1 leaves when it is empty: ")
        await asked.until(lambda: ONE not in asked.state.instances)
        assert asked.job.servers[1].stops == 1
        assert asked.job.io.fleet.urls == {ZERO: "http://engine-0"}
        assert asked.job.watcher.of(cmd.DismissInstance) == [cmd.DismissInstance(ONE)]
        with pytest.raises(ConfigError, match="1: there is no such instance"):
            await asked.desk.drain("1")


async def test_a_drained_instance_is_called_back_by_its_number_or_its_address(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        for which in ("1", "http://engine-1"):
            await asked.desk.drain("1")
            assert await asked.desk.add(which) == "instance 1 gets work again"
            assert asked.state.instances[ONE].is_member
        with pytest.raises(ConfigError, match="instance 1: it takes part already"):
            await asked.desk.add("1")


async def test_a_server_that_joins_gets_weights_and_work(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        assert await asked.desk.add("http://engine-9/") == "instance 2 joins: http://engine-9, fake"
        await asked.until(lambda: "http://engine-9" in {url for url, _ in asked.job.engines.requests})
        up = [e for e in asked.job.watcher.of(ev.InstanceUp) if e.instance == 2]
        assert [e.incarnation for e in up] == [1]
        await asked.desk.remove("0")
        await asked.until(lambda: ZERO not in asked.state.instances)


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("engine-9:1", "engine-9:1: neither an instance number nor an http:// or https:// address"),
        ("7", "instance 7: there is no such instance, or it has not come up yet"),
    ],
)
async def test_an_unfit_server_is_refused_in_one_line(tmp_path: Path, which: str, says: str) -> None:
    async with under_way(tmp_path) as asked:
        with pytest.raises(ConfigError) as refused:
            await asked.desk.add(which)
        assert str(refused.value) == says


async def test_an_address_of_no_instance_is_refused(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        with pytest.raises(
            ConfigError, match="http://engine-7: not an instance of this run; `dora instances URL list`"
        ):
            await asked.desk.drain("http://engine-7")
