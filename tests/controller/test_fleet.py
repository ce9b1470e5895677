"""Keepers of the servers: up once, lost once, back again, or given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.controller import fleet as fleet_module
from dora.controller.fleet import HEALTH_STRIKES, MAX_START_FAILURES, ExternalServer, Fleet, Limits
from dora.core.events import Event, InstanceLost, InstanceUp, PrefillReported
from dora.core.groups import Group
from dora.core.ids import GroupId, InstanceId, TrajectoryId
from dora.core.instances import Instance, InstancePhase
from dora.engine.client import EngineClient, Loads
from dora.engine.errors import ServerGone
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
        self.engines = FakeEngines(1, count=count)
        self.said: asyncio.Queue[Event] = asyncio.Queue()
        self.residents: dict[InstanceId, dict[TrajectoryId, int]] = {}
        self.rows: dict[InstanceId, Instance] = {}
        limits = {"instances": 3, "slots": 4, "kv_tokens": 1024, "context_tokens": 128, "model": Path(), "path_map": {}}
        self.fleet = Fleet(
            list(self.servers),
            client=self.engines,  # type: ignore[arg-type]
            limits=Limits(**{**limits, **changes}),
            emit=self.said.put,
            fence=lambda instance: self.residents.pop(instance, {}),
            rows=self.rows,
            now=lambda: 0.0,
        )

    async def next(self) -> Event:
        async with asyncio.timeout(10):
            return await self.said.get()


@asynccontextmanager
async def keeping(kept: Kept) -> AsyncIterator[Kept]:
    fleet = asyncio.create_task(kept.fleet.run(), name="fleet")
    yield kept
    fleet.cancel()
    await asyncio.gather(fleet, return_exceptions=True)


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
        await kept.fleet.keep(ZERO)  # returns: given up
    assert kept.servers[0].starts == MAX_START_FAILURES
    assert kept.servers[0].kills == MAX_START_FAILURES
    async with keeping(Kept(1)) as other:
        assert isinstance(await other.next(), InstanceUp)


async def test_the_run_fails_when_no_server_is_left() -> None:
    kept = Kept(2)
    for server in kept.servers:
        server.failures = [RemoteError("no memory")] * 100
    async with asyncio.timeout(10):
        await kept.fleet.keep(ZERO)
        with pytest.raises(RunFailed, match="no inference server is left: each failed to start five times"):
            await kept.fleet.keep(InstanceId(1))
    assert kept.said.empty()


async def test_a_start_that_fails_now_and_then_is_forgiven() -> None:
    kept = Kept(1)
    kept.servers[0].failures = [RemoteError("not yet")] * (MAX_START_FAILURES - 1)
    async with keeping(kept):
        assert (await kept.next()).incarnation == 1  # type: ignore[attr-defined]


async def test_a_server_that_cannot_hold_the_longest_request_is_a_config_error() -> None:
    kept = Kept(1, context_tokens=5000)
    with pytest.raises(ConfigError, match=r"holds 4096 tokens of one request, .* is 5000; lower one of them"):
        await kept.fleet.keep(ZERO)


async def test_input_that_no_second_start_would_change_ends_the_run() -> None:
    kept = Kept(1)
    kept.servers[0].failures = [ConfigError("engine-0: cannot read the model")]
    with pytest.raises(ConfigError, match="engine-0: cannot read the model"):
        await kept.fleet.keep(ZERO)
    assert kept.servers[0].starts == 1


# -- health -----------------------------------------------------------------------------------------------------------


class Checked:
    """Health checks of one server: how the next ones end, how often it was asked, and its KV in use."""

    def __init__(self, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.0)
        self.kept = kept
        self.row = kept.rows[ZERO] = Instance(ZERO)
        self.answers: list[bool] = []
        self.asked = 0
        self.kv = [0]  # in use, at one look after the other; the last one stays
        kept.engines.health = self.health  # type: ignore[method-assign]
        kept.engines.loads = self.loads  # type: ignore[method-assign]

    async def health(self, url: str, *, timeout_s: float) -> None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.answers and not self.answers.pop(0):
            raise RemoteError("no answer")

    async def loads(self, url: str) -> Loads:
        used = self.kv.pop(0) if len(self.kv) > 1 else self.kv[0]
        return Loads(num_running=1, num_waiting=0, used_tokens=used, max_total_tokens=4096, max_running=8)

    async def turns(self, count: int = 50) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


async def test_a_server_is_lost_after_three_missed_checks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(1)
    checked = Checked(kept, monkeypatch)
    checked.answers = [True, False, False, True, False, False, False]
    async with keeping(kept):
        await kept.next()
        lost = await kept.next()
        assert lost == InstanceLost(0.0, ZERO, 1, {}, "http://engine-0: missed 3 health checks in a row")
        assert kept.servers[0].kills == 1
        assert (await kept.next()).incarnation == 2  # type: ignore[attr-defined]


async def test_a_server_is_not_asked_for_its_health_while_a_push_may_have_paused_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(1)
    checked = Checked(kept, monkeypatch)
    checked.answers = [False] * 100
    checked.row.pushing = 3
    async with keeping(kept):
        await kept.next()
        await checked.turns()
        assert (checked.asked, kept.said.empty()) == (0, True)
        checked.row.pushing, checked.row.phase = None, InstancePhase.QUARANTINED
        await checked.turns()
        assert (checked.asked, kept.said.empty()) == (0, True)
        checked.row.phase = InstancePhase.LOADING
        assert isinstance(await kept.next(), InstanceLost)


async def test_a_server_that_is_gone_in_a_push_is_lost_long_before_the_push_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(1)
    checked = Checked(kept, monkeypatch)

    async def refused(url: str) -> str:
        checked.asked += 1
        raise ServerGone(f"{url}: cannot connect")

    async with keeping(kept):
        await kept.next()
        checked.row.pushing = 3
        kept.engines.weight_version = refused  # type: ignore[method-assign]
        assert isinstance(await kept.next(), InstanceLost)
        assert checked.asked == 3


async def test_a_check_that_fails_because_a_push_began_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(1)
    checked = Checked(kept, monkeypatch)

    async def fails_at_last_in_a_pause(url: str, *, timeout_s: float) -> None:
        checked.asked += 1
        if checked.asked % HEALTH_STRIKES == 0:
            checked.row.pushing = 3
        raise RemoteError("503")

    kept.engines.health = fails_at_last_in_a_pause  # type: ignore[method-assign]
    async with keeping(kept):
        await kept.next()
        for number in (3, 6, 9):
            await checked.turns()
            assert checked.asked == number
            assert kept.said.empty()
            checked.row.pushing = None


def with_a_resident(checked: Checked) -> None:
    group = Group(GroupId(0), version=0, deadline=1, num_prompt_tokens=3, group_size=2, at=0.0)
    checked.row.phase, checked.row.version = InstancePhase.SERVING, 0
    checked.row.add(group.trajectories[0])


async def test_a_prefill_longer_than_the_health_check_is_told_and_is_no_missed_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(1)
    checked = Checked(kept, monkeypatch)
    checked.answers = [False] * 1000
    checked.kv = [0, 100, 200, 300, 400, 500]  # the first one for the probe
    with_a_resident(checked)
    async with keeping(kept):
        await kept.next()
        said = [await kept.next() for _ in range(5)]
        assert said[:4] == [PrefillReported(0.0, ZERO)] * 4
        assert isinstance(said[4], InstanceLost)  # it has stopped growing: three checks later it is gone


async def test_kv_that_rises_while_tokens_come_is_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(1)
    checked = Checked(kept, monkeypatch)
    checked.kv = list(range(1, 1000))
    with_a_resident(checked)

    async def grow(url: str, *, timeout_s: float) -> None:
        checked.asked += 1
        checked.row.reported = {TrajectoryId(0): checked.asked}
        await asyncio.sleep(0)

    kept.engines.health = grow  # type: ignore[method-assign]
    async with keeping(kept):
        await kept.next()
        await checked.turns()
        assert checked.asked > 5
        assert kept.said.empty()


# -- joining and leaving ----------------------------------------------------------------------------------------------


async def test_a_server_that_joins_gets_an_id_that_was_never_given() -> None:
    async with keeping(Kept(2)) as kept:
        await kept.next()
        await kept.next()
        await kept.fleet.dismiss(InstanceId(1))
        assert kept.fleet.join("http://engine-1") == 2
        assert kept.fleet.join("http://engine-2") == 3


async def test_a_server_that_leaves_is_stopped_and_reported_no_more() -> None:
    async with keeping(Kept(2)) as kept:
        await kept.next()
        await kept.next()
        await kept.fleet.dismiss(ZERO)
        assert (kept.servers[0].stops, kept.servers[0].kills) == (1, 0)
        assert kept.fleet.urls == {InstanceId(1): "http://engine-1"}
        kept.servers[1].die()
        assert isinstance(await kept.next(), InstanceLost)
        assert isinstance(await kept.next(), InstanceUp)
        assert kept.said.empty()


async def test_no_more_servers_join_than_there_are_streams_for() -> None:
    async with keeping(Kept(2)) as kept:
        await kept.next()
        kept.fleet.join("http://engine-2")
        with pytest.raises(ConfigError, match="http://engine-3: the run has 3 instances, and no more can join"):
            kept.fleet.join("http://engine-3")


async def test_a_server_that_joined_and_turns_out_unfit_does_not_end_the_run() -> None:
    kept = Kept(1)
    async with keeping(kept):
        await kept.next()
        kept.fleet._limits = replace(kept.fleet._limits, context_tokens=5000)
        instance = kept.fleet.join("http://engine-9")
        member = kept.fleet._members[instance]
        async with asyncio.timeout(10):
            assert member.keeper is not None
            await asyncio.wait({member.keeper})
        assert member.given_up
        assert kept.fleet.urls == {ZERO: "http://engine-0"}


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


async def test_a_lost_external_server_is_waited_for(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.0)
    async with EngineClient(max_connections=1) as client, asyncio.timeout(20):
        external = ExternalServer(server.url, client=client)
        well(server, 503, 503, 200)
        assert await external.start() == server.url
        monkeypatch.setattr(fleet_module, "RETURN_TIMEOUT_S", 0.0)
        with pytest.raises(RemoteError, match="did not answer its health check for 0 s"):
            await external.start()


async def test_an_external_server_is_never_killed_and_left_unpaused(server: ScriptedServer) -> None:
    async with EngineClient(max_connections=1) as client:
        external = ExternalServer(server.url, client=client)
        well(server, 200)
        await external.kill()
        assert server.calls == []
        server.answers["/continue_generation"] = server.answers["/health"]
        await external.stop()
    assert server.paths() == ["/continue_generation"]
