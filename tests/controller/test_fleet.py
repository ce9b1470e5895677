"""Keepers of the servers: up once, lost once, back again, or given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dora.controller import fleet as fleet_module
from dora.controller.fleet import MAX_START_FAILURES, ExternalServer, Fleet, Limits
from dora.core.events import Event, InstanceLost, InstanceUp
from dora.core.ids import InstanceId, TrajectoryId
from dora.engine.client import EngineClient
from dora.errors import ConfigError, RemoteError, RunFailed
from tests.controller.fakes import FakeEngines, FakeServer
from tests.engine.scripted_server import ScriptedServer

ZERO = InstanceId(0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_PAUSE_S", 0.0)


class Kept:
    """A fleet of fakes, what it says, and what is resident on it."""

    def __init__(self, count: int, **changes: Any) -> None:
        self.servers = [FakeServer(f"http://engine-{i}") for i in range(count)]
        self.said: asyncio.Queue[Event] = asyncio.Queue()
        self.residents: dict[InstanceId, dict[TrajectoryId, int]] = {}
        limits = {"slots": 4, "kv_tokens": 1024, "context_tokens": 128}
        self.fleet = Fleet(
            list(self.servers),
            client=FakeEngines(1, count=count),  # type: ignore[arg-type]
            limits=Limits(**{**limits, **changes}),
            emit=self.said.put,
            fence=lambda instance: self.residents.pop(instance, {}),
            now=lambda: 0.0,
            incarnations={},
        )

    async def next(self) -> Event:
        async with asyncio.timeout(10):
            return await self.said.get()


@asynccontextmanager
async def keeping(kept: Kept) -> AsyncIterator[Kept]:
    tasks = [asyncio.create_task(kept.fleet.keep(i), name=f"keep-{i}") for i in range(kept.fleet.size)]
    yield kept
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_instance_comes_up_with_the_lesser_of_its_room_and_the_configured_one() -> None:
    async with keeping(Kept(1)) as kept:
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024)
        assert kept.fleet.urls == {ZERO: "http://engine-0"}
    async with keeping(Kept(1, slots=99, kv_tokens=10**6)) as kept:
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=8, kv_tokens=4096)


async def test_a_server_that_dies_is_lost_with_its_counts_and_comes_back_as_another_incarnation() -> None:
    async with keeping(Kept(1)) as kept:
        await kept.next()
        for incarnation in (1, 2, 3):
            kept.residents = {ZERO: {TrajectoryId(7): 40 + incarnation}}
            kept.servers[0].die()
            lost = await kept.next()
            counts = {TrajectoryId(7): 40 + incarnation}
            assert lost == InstanceLost(0.0, ZERO, incarnation, counts, "http://engine-0 died")
            up = await kept.next()
            assert isinstance(up, InstanceUp)
            assert up.incarnation == incarnation + 1
        assert kept.servers[0].starts == 4


async def test_a_condemned_server_is_lost_killed_and_started_again() -> None:
    async with keeping(Kept(1)) as kept:
        await kept.next()
        kept.fleet.condemn(ZERO, incarnation=1, reason="no token for 120 s")
        assert await kept.next() == InstanceLost(0.0, ZERO, 1, {}, "no token for 120 s")
        assert (await kept.next()).incarnation == 2  # type: ignore[attr-defined]
        assert kept.servers[0].kills == 1


async def test_a_condemnation_of_an_earlier_incarnation_is_ignored() -> None:
    async with keeping(Kept(1)) as kept:
        await kept.next()
        kept.servers[0].die()
        await kept.next()
        await kept.next()
        kept.fleet.condemn(ZERO, incarnation=1, reason="late")
        for _ in range(10):  # turns of the loop in which a keeper that heard it would act
            await asyncio.sleep(0)
        kept.servers[0].die()
        assert (await kept.next()).reason == "http://engine-0 died"  # type: ignore[attr-defined]


async def test_a_lost_instance_has_no_address_until_it_is_back() -> None:
    kept = Kept(1)
    seen: list[dict[InstanceId, str]] = []

    def fence(instance: InstanceId) -> dict[TrajectoryId, int]:
        seen.append(dict(kept.fleet.urls))
        return {}

    kept.fleet._fence = fence
    async with keeping(kept):
        await kept.next()
        kept.servers[0].die()
        await kept.next()
        assert seen == [{}]
        await kept.next()
        assert kept.fleet.urls == {ZERO: "http://engine-0"}


async def test_a_server_that_never_starts_is_given_up_and_the_others_go_on() -> None:
    kept = Kept(2)
    kept.servers[0].failures = [RemoteError("engine-0: no memory")] * 100
    async with asyncio.timeout(10):
        await kept.fleet.keep(0)  # returns: given up
    assert kept.servers[0].starts == MAX_START_FAILURES
    assert kept.servers[0].kills == MAX_START_FAILURES
    async with keeping(Kept(1)) as other:
        assert isinstance(await other.next(), InstanceUp)


async def test_the_run_fails_when_no_server_is_left() -> None:
    kept = Kept(2)
    for server in kept.servers:
        server.failures = [RemoteError("no memory")] * 100
    async with asyncio.timeout(10):
        await kept.fleet.keep(0)
        with pytest.raises(RunFailed, match="no inference server is left: each failed to start five times"):
            await kept.fleet.keep(1)
    assert kept.said.empty()


async def test_a_start_that_fails_now_and_then_is_forgiven() -> None:
    kept = Kept(1)
    kept.servers[0].failures = [RemoteError("not yet")] * (MAX_START_FAILURES - 1)
    async with keeping(kept):
        assert (await kept.next()).incarnation == 1  # type: ignore[attr-defined]


async def test_a_server_that_cannot_hold_the_longest_request_is_a_config_error() -> None:
    kept = Kept(1, context_tokens=5000)
    with pytest.raises(ConfigError, match=r"holds 4096 tokens of one request, .* is 5000; lower one of them"):
        await kept.fleet.keep(0)


async def test_input_that_no_second_start_would_change_ends_the_run() -> None:
    kept = Kept(1)
    kept.servers[0].failures = [ConfigError("engine-0: cannot read the model")]
    with pytest.raises(ConfigError, match="engine-0: cannot read the model"):
        await kept.fleet.keep(0)
    assert kept.servers[0].starts == 1


# -- servers of others ----------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async for running in ScriptedServer().run():
        yield running


def well(server: ScriptedServer, *answers: int) -> Callable[[Any], Awaitable[Any]]:
    """Answers health checks with these statuses in turn, the last one for ever."""
    from aiohttp import web

    left = list(answers)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=left.pop(0) if len(left) > 1 else left[0])

    server.answers["/health"] = answer
    return answer


async def test_an_external_server_is_gone_after_three_missed_checks_in_a_row(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.0)
    async with EngineClient(max_connections=1) as client, asyncio.timeout(20):
        external = ExternalServer(server.url, client=client)
        well(server, 200, 200, 503, 503, 200, 503, 503, 503)
        assert await external.start() == server.url
        assert await external.ended() == f"{server.url}: missed 3 health checks in a row"
        assert server.paths().count("/health") == 8


async def test_a_lost_external_server_is_waited_for(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.0)
    async with EngineClient(max_connections=1) as client, asyncio.timeout(20):
        external = ExternalServer(server.url, client=client)
        well(server, 503, 503, 200)
        assert await external.start() == server.url
        monkeypatch.setattr(fleet_module, "RETURN_TIMEOUT_S", 0.0)
        with pytest.raises(RemoteError, match="did not answer its health check for 0 s"):
            await external.start()


async def test_an_external_server_is_never_killed(server: ScriptedServer) -> None:
    async with EngineClient(max_connections=1) as client:
        await ExternalServer(server.url, client=client).kill()
    assert server.calls == []
