"""Keepers of the servers: up once, lost once, back again, or given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.controller import fleet as fleet_module
from dora.controller.fleet import HEALTH_STRIKES, MAX_START_FAILURES, ExternalServer, Fleet, FleetLimits, Started
from dora.controller.inbox import Inbox
from dora.controller.published import Published
from dora.core.events import Event, InstanceLost, InstanceUp, PrefillReported
from dora.core.ids import GroupId, InstanceId, TrajectoryId, VersionId
from dora.core.phases import WeightsPhase
from dora.core.tables import Group, Server
from dora.engine.api import Capabilities, KvUse
from dora.engine.errors import ServerGone
from dora.engine.names import UNCONFIRMED
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.errors import ConfigError, RemoteError, RunFailed
from dora.observe.facts import Down
from tests.controller.fakes import FakeEngines, FakeServer
from tests.engine.scripted_server import ScriptedServer

ZERO, ONE = InstanceId(0), InstanceId(1)
THEIRS = "http://theirs"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_PAUSE_S", 0.0)


class Kept:
    """A fleet of fakes, what it says, and what is resident on it."""

    def __init__(self, count: int, *, removed: Sequence[InstanceId] = (), **changes: Any) -> None:
        self.servers = [FakeServer(f"http://engine-{i}") for i in range(count)]
        self.engines = FakeEngines(1, count=count)
        self.inbox = Inbox()
        self.urls_at_fences: list[dict[InstanceId, str]] = []
        self.residents: dict[InstanceId, dict[TrajectoryId, int]] = {}
        self.rows: dict[InstanceId, Server] = {}
        self.published = Published("run", files={5: {"model.safetensors": "five"}})
        limits = {"streams": 12, "slots": 4, "kv_tokens": 1024, "context_tokens": 128, "model": Path(), "path_map": {}}
        self.fleet = Fleet(
            list(self.servers),
            engine=self.engines,
            limits=FleetLimits(**{**limits, **changes}),
            inbox=self.inbox,
            in_flight=self,  # type: ignore[arg-type]
            rows=self.rows,
            removed=removed,
            version_of=self.published.version_of,
            now=lambda: 0.0,
        )

    @property
    def is_silent(self) -> bool:
        return self.inbox.take_now() is None

    def fence(self, instance: InstanceId) -> dict[TrajectoryId, int]:
        self.urls_at_fences.append(dict(self.fleet.urls))
        return self.residents.pop(instance, {})

    async def next(self) -> Event:
        async with asyncio.timeout(10):
            return await self.inbox.take()


@asynccontextmanager
async def keeping(kept: Kept) -> AsyncIterator[Kept]:
    fleet = asyncio.create_task(kept.fleet.run(), name="fleet")
    yield kept
    fleet.cancel()
    await asyncio.gather(fleet, return_exceptions=True)


@asynccontextmanager
async def serving(kept: Kept) -> AsyncIterator[Kept]:
    """As `keeping`, once every server is up."""
    async with keeping(kept):
        for _ in kept.servers:
            assert isinstance(await kept.next(), InstanceUp)
        yield kept


async def given_up(kept: Kept, instance: InstanceId) -> Down:
    """Wait until an instance is given up."""
    keeper = kept.fleet._members[instance].keeper
    assert keeper is not None
    async with asyncio.timeout(10):
        await asyncio.wait({keeper})
    return kept.fleet.down[instance]


async def test_an_instance_comes_up_with_the_lesser_of_its_room_and_the_configured_one() -> None:
    async with keeping(Kept(1)) as kept:
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024)
        assert kept.fleet.urls == {ZERO: "http://engine-0"}
    async with keeping(Kept(1, slots=99, kv_tokens=10**6)) as kept:
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=8, kv_tokens=4096)


async def test_without_configured_limits_an_instance_has_all_the_room_that_its_server_says() -> None:
    async with keeping(Kept(1, slots=None, kv_tokens=None)) as kept:
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=8, kv_tokens=4096)


async def test_a_server_that_dies_is_lost_with_its_counts_and_comes_back_as_another_incarnation() -> None:
    async with serving(Kept(1)) as kept:
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


async def test_a_server_is_down_from_its_loss_until_it_is_back_with_the_latest_reason() -> None:
    kept = Kept(1)
    async with serving(kept):
        assert kept.fleet.down == {}
        kept.servers[0].failures = [RemoteError("http://engine-0: connection refused")]
        kept.servers[0].die()
        assert isinstance(await kept.next(), InstanceLost)
        assert kept.fleet.down == {ZERO: Down(0.0, "http://engine-0 died", "being restarted")}
        seen = []
        while ZERO not in kept.fleet.urls:
            seen.append(dict(kept.fleet.down))
            await asyncio.sleep(0)
        assert seen[-1] == {ZERO: Down(0.0, "http://engine-0: connection refused", "being restarted")}
        assert kept.fleet.down == {}


async def test_a_condemned_server_is_lost_killed_and_started_again() -> None:
    async with serving(Kept(1)) as kept:
        kept.fleet.condemn(ZERO, incarnation=1, reason="no token for 120 s")
        assert await kept.next() == InstanceLost(0.0, ZERO, 1, {}, "no token for 120 s")
        assert (await kept.next()).incarnation == 2  # type: ignore[attr-defined]
        assert kept.servers[0].kills == 1


async def test_a_condemnation_of_an_earlier_incarnation_is_ignored() -> None:
    async with serving(Kept(1)) as kept:
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
    async with serving(kept):
        kept.servers[0].die()
        await kept.next()
        assert kept.urls_at_fences == [{}]
        await kept.next()
        assert kept.fleet.urls == {ZERO: "http://engine-0"}


async def test_a_server_that_never_starts_is_given_up_and_the_others_go_on() -> None:
    kept = Kept(2)
    kept.servers[0].failures = [RemoteError("engine-0: no memory")] * 100
    async with asyncio.timeout(10):
        await kept.fleet.keep(ZERO)  # returns: given up
    assert kept.servers[0].starts == MAX_START_FAILURES
    assert kept.servers[0].kills == MAX_START_FAILURES
    assert kept.fleet.down[ZERO] == Down(0.0, "engine-0: no memory", "given up after 5 failed starts")
    async with keeping(Kept(1)) as other:
        assert isinstance(await other.next(), InstanceUp)


async def test_the_run_fails_when_no_server_is_left() -> None:
    kept = Kept(2)
    for server in kept.servers:
        server.failures = [RemoteError("no memory")] * 100
    async with asyncio.timeout(10):
        await kept.fleet.keep(ZERO)
        with pytest.raises(RunFailed, match="no inference server is left: each failed to start five times"):
            await kept.fleet.keep(ONE)
    assert kept.is_silent


async def test_a_server_that_does_not_end_after_a_kill_is_given_up_and_the_others_go_on() -> None:
    kept = Kept(2)

    async def stuck() -> None:
        raise RemoteError("engine-0: process 4711 does not end after SIGKILL")

    async with serving(kept):
        kept.servers[0].kill = stuck  # type: ignore[method-assign]
        kept.servers[0].failures = [RemoteError("engine-0: process 4711 does not end after SIGKILL")] * 100
        kept.fleet.condemn(ZERO, incarnation=1, reason="no token for 120 s")
        assert await kept.next() == InstanceLost(0.0, ZERO, 1, {}, "no token for 120 s")
        assert (await given_up(kept, ZERO)).then == "given up after 5 failed starts"
        kept.servers[1].die()
        assert isinstance(await kept.next(), InstanceLost)
        assert isinstance(await kept.next(), InstanceUp)


async def test_a_start_that_fails_now_and_then_is_forgiven() -> None:
    kept = Kept(1)
    kept.servers[0].failures = [RemoteError("not yet")] * (MAX_START_FAILURES - 1)
    async with keeping(kept):
        assert (await kept.next()).incarnation == 1  # type: ignore[attr-defined]


async def test_a_server_that_cannot_hold_the_longest_request_is_a_config_error() -> None:
    kept = Kept(1, context_tokens=5000)
    with pytest.raises(ConfigError, match=r"accepts requests of up to 4096 tokens, .* is 5000; lower one of them"):
        await kept.fleet.keep(ZERO)


async def test_a_config_error_at_the_start_ends_the_run() -> None:
    kept = Kept(1)
    kept.servers[0].failures = [ConfigError("engine-0: cannot read the model")]
    with pytest.raises(ConfigError, match="engine-0: cannot read the model"):
        await kept.fleet.keep(ZERO)
    assert kept.servers[0].starts == 1


async def test_a_server_of_the_configuration_that_is_wrong_from_the_beginning_ends_the_run_although_another_is_up() -> (
    None
):
    kept = Kept(2)
    kept.servers[1].failures = [ConfigError("engine-1: other weights")]
    first = asyncio.create_task(kept.fleet.keep(ZERO))
    assert isinstance(await kept.next(), InstanceUp)
    with pytest.raises(ConfigError, match="engine-1: other weights"):
        await kept.fleet.keep(ONE)
    first.cancel()


async def test_a_server_of_the_first_node_that_is_unfit_ends_the_run() -> None:
    kept = Kept(0)
    server = FakeServer("http://engine-0")
    server.failures = [RemoteError("node n0 is lost"), ConfigError("node n0: no CUDA device")]
    instance = kept.fleet.add(server)
    with pytest.raises(ConfigError, match="node n0: no CUDA device"):
        await kept.fleet.keep(instance)


async def test_a_server_that_was_up_and_cannot_be_started_again_is_given_up_and_the_others_go_on() -> None:
    async with serving(Kept(2)) as kept:
        kept.servers[0].failures = [ConfigError("engine-0: no CUDA device")] * 100
        kept.servers[0].die()
        assert isinstance(await kept.next(), InstanceLost)
        assert (await given_up(kept, ZERO)).reason == "engine-0: no CUDA device"
        kept.servers[1].die()
        assert isinstance(await kept.next(), InstanceLost)
        assert isinstance(await kept.next(), InstanceUp)


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_node_whose_server_is_unfit_does_not_end_a_run_that_serves(is_early: bool) -> None:
    """Early: its place is one of those with which the run began, but another node is up before it."""
    kept, server, begins = Kept(1), FakeServer("http://engine-1"), asyncio.Event()

    async def start() -> Started:
        await begins.wait()
        raise ConfigError("node n1: engine-1 ended with exit code 2")

    server.start = start  # type: ignore[method-assign]
    if is_early:
        kept.fleet.add(server)
    async with serving(kept):
        instance = ONE if is_early else kept.fleet.add(server)
        begins.set()
        assert (await given_up(kept, instance)).reason == "node n1: engine-1 ended with exit code 2"
        kept.servers[0].die()
        assert isinstance(await kept.next(), InstanceLost)


# -- servers that their node kept -------------------------------------------------------------------------------------


def with_a_kept_server(label: str, **changes: Any) -> Kept:
    kept = Kept(1, **changes)
    kept.servers[0].is_kept = True
    kept.engines.labels["http://engine-0"] = label
    return kept


async def test_a_kept_server_is_taken_over_and_comes_up_with_the_version_that_its_label_names() -> None:
    label = Kept(0).published.label(5)
    async with keeping(with_a_kept_server(label)) as kept:
        digest = label.rpartition("-")[2]
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024, version=5, digest=digest)
        assert kept.engines.taken_over == ["http://engine-0"]


@pytest.mark.parametrize("label", [UNCONFIRMED, "default", "other/5-", "run/4-", "run/5-00000000", "run/5"])
async def test_a_kept_server_with_a_label_of_no_journaled_version_comes_up_without_one(label: str) -> None:
    right = Kept(0).published.label(5)
    label += right.rpartition("-")[2] if label.endswith("-") else ""
    async with keeping(with_a_kept_server(label)) as kept:
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024)
        assert kept.servers[0].kills == 0


async def test_a_server_that_was_just_started_is_not_taken_over_whatever_its_label_says() -> None:
    kept = with_a_kept_server(Kept(0).published.label(5))
    kept.servers[0].is_kept = False
    async with keeping(kept):
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024)
        assert kept.engines.taken_over == []


async def test_a_kept_server_that_does_not_come_to_rest_is_killed_and_started_again() -> None:
    kept = with_a_kept_server(Kept(0).published.label(5))
    kept.engines.restless = {"http://engine-0"}
    async with keeping(kept):
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024)
        assert (kept.servers[0].starts, kept.servers[0].kills) == (2, 1)


async def test_a_kept_server_unfit_for_this_configuration_is_started_again_for_it() -> None:
    kept = with_a_kept_server("default")
    examine = kept.engines.examine

    async def small(url: str, *, timeout_s: float) -> Capabilities:
        found = await examine(url, timeout_s=timeout_s)
        return replace(found, kv_tokens=64) if kept.servers[0].is_kept else found

    kept.engines.examine = small  # type: ignore[method-assign]
    async with keeping(kept):
        assert await kept.next() == InstanceUp(0.0, ZERO, 1, slots=4, kv_tokens=1024)
        assert (kept.servers[0].starts, kept.servers[0].kills) == (2, 1)


# -- health -----------------------------------------------------------------------------------------------------------


class Checked:
    """Health checks of one server: how the next ones end, how often it was asked, and its KV in use."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.row = kept.rows[ZERO] = Server(ZERO)
        self.answers: list[bool] = []
        self.asked = 0
        self.kv = [0]  # in use, at one look after the other; the last one stays
        kept.engines.is_alive = self.is_alive  # type: ignore[method-assign]
        kept.engines.kv_use = self.kv_use  # type: ignore[method-assign]

    async def is_alive(self, url: str, *, timeout_s: float) -> bool:
        self.asked += 1
        await asyncio.sleep(0)
        return not self.answers or self.answers.pop(0)

    async def kv_use(self, url: str) -> KvUse:
        return KvUse(self.kv.pop(0) if len(self.kv) > 1 else self.kv[0], kv_tokens=4096)

    async def turns(self, count: int = 50) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """One server, whose health is checked without pauses."""
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.0)
    return Checked(Kept(1))


async def test_a_server_is_lost_after_three_missed_checks_in_a_row(checked: Checked) -> None:
    kept = checked.kept
    checked.answers = [True, False, False, True, False, False, False]
    async with serving(kept):
        lost = await kept.next()
        assert lost == InstanceLost(0.0, ZERO, 1, {}, "http://engine-0: missed 3 health checks in a row")
        assert kept.servers[0].kills == 1
        assert (await kept.next()).incarnation == 2  # type: ignore[attr-defined]


@pytest.fixture
async def external(checked: Checked) -> AsyncIterator[Server]:
    """The row of a further server, of others: instance 1, which came up without a version."""
    kept = checked.kept
    async with serving(kept):
        row = kept.rows[ONE] = Server(ONE)
        kept.fleet.join(THEIRS, slots=4)
        assert isinstance(await kept.next(), InstanceUp)
        yield row


async def test_an_idle_external_server_that_was_started_again_is_lost_by_its_label(
    checked: Checked, external: Server
) -> None:
    kept = checked.kept
    await checked.turns()
    assert kept.is_silent  # it has no version yet, and its label is of none
    external.full.phase, external.full.version = WeightsPhase.SERVING, VersionId(5)
    kept.engines.labels[THEIRS] = kept.published.label(VersionId(5))
    await checked.turns()
    assert kept.is_silent
    async with kept.fleet.stream(ONE):
        kept.engines.labels[THEIRS] = "default"
        await checked.turns()
        assert kept.is_silent  # the answer will tell
    reason = f"{THEIRS}: was started again, and has none of its versions any more"
    assert await kept.next() == InstanceLost(0.0, ONE, 1, {}, reason)
    assert (await kept.next()).incarnation == 2  # type: ignore[attr-defined]


async def test_a_label_that_a_push_may_have_changed_meanwhile_says_nothing(checked: Checked, external: Server) -> None:
    kept, full = checked.kept, external.full

    async def label(url: str) -> str:
        full.phase, full.version, full.pushing = WeightsPhase.UPDATING, None, VersionId(5)
        return UNCONFIRMED

    kept.engines.label = label  # type: ignore[method-assign]
    full.phase, full.version = WeightsPhase.SERVING, VersionId(4)
    async with kept.fleet.stream(ONE):
        assert kept.is_silent


async def test_a_server_is_not_asked_for_its_health_while_a_push_may_have_paused_it(checked: Checked) -> None:
    kept = checked.kept
    checked.answers = [False] * 100
    checked.row.full.pushing = 3
    async with serving(kept):
        await checked.turns()
        assert (checked.asked, kept.is_silent) == (0, True)
        checked.row.full.pushing, checked.row.full.phase = None, WeightsPhase.QUARANTINED
        await checked.turns()
        assert (checked.asked, kept.is_silent) == (0, True)
        checked.row.full.phase = WeightsPhase.LOADING
        assert isinstance(await kept.next(), InstanceLost)


async def test_a_server_that_is_gone_in_a_push_is_lost_long_before_the_push_is_given_up(checked: Checked) -> None:
    kept = checked.kept

    async def refused(url: str) -> str:
        checked.asked += 1
        raise ServerGone(f"{url}: cannot connect")

    async with serving(kept):
        checked.row.full.pushing = 3
        kept.engines.label = refused  # type: ignore[method-assign]
        assert isinstance(await kept.next(), InstanceLost)
        assert checked.asked == 3


async def test_a_check_that_fails_because_a_push_began_meanwhile_does_not_count(checked: Checked) -> None:
    kept = checked.kept

    async def fails_at_last_in_a_pause(url: str, *, timeout_s: float) -> bool:
        checked.asked += 1
        if checked.asked % HEALTH_STRIKES == 0:
            checked.row.full.pushing = 3
        return False

    kept.engines.is_alive = fails_at_last_in_a_pause  # type: ignore[method-assign]
    async with serving(kept):
        for number in (3, 6, 9):
            await checked.turns()
            assert checked.asked == number
            assert kept.is_silent
            checked.row.full.pushing = None


async def test_concurrent_inquiries_about_a_server_are_shared(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checked.kept
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 3600.0)
    async with serving(kept):
        checked.answers = [True, False]
        assert await asyncio.gather(*(kept.fleet.inquire(ZERO) for _ in range(64))) == ["default"] * 64
        assert checked.asked == 1
        assert await asyncio.gather(*(kept.fleet.inquire(ZERO) for _ in range(64))) == [None] * 64
        assert checked.asked == 2


async def test_a_cancelled_inquiry_is_repeated_for_the_next_caller(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checked.kept
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 3600.0)
    async with serving(kept):
        first, second = (asyncio.create_task(kept.fleet.inquire(ZERO)) for _ in range(2))
        await checked.turns(1)
        assert checked.asked == 1
        first.cancel()
        assert await second == "default"
        assert checked.asked == 2


async def test_a_server_that_a_push_may_have_paused_is_asked_for_its_label_alone(checked: Checked) -> None:
    kept = checked.kept
    checked.answers = [False] * 100
    checked.row.full.pushing = 3
    async with serving(kept):
        assert await kept.fleet.inquire(ZERO) == "default"
        assert checked.asked == 0


def with_a_resident(checked: Checked) -> None:
    group = Group(GroupId(0), version=0, deadline=1, num_prompt_tokens=3, group_size=2, admitted_at=0.0)
    checked.row.full.phase, checked.row.full.version = WeightsPhase.SERVING, 0
    checked.row.add(group.trajectories[0])


async def test_a_prefill_longer_than_the_health_check_is_reported_and_counts_as_healthy(checked: Checked) -> None:
    kept = checked.kept
    checked.answers = [False] * 1000
    checked.kv = [100, 200, 300, 400, 500]
    with_a_resident(checked)
    async with serving(kept):
        said = [await kept.next() for _ in range(5)]
        assert said[:4] == [PrefillReported(0.0, ZERO)] * 4
        assert isinstance(said[4], InstanceLost)  # it has stopped growing: three checks later it is gone


async def test_kv_that_rises_while_tokens_come_is_no_prefill(checked: Checked) -> None:
    kept = checked.kept
    checked.kv = list(range(1, 1000))
    with_a_resident(checked)

    async def grow(url: str, *, timeout_s: float) -> bool:
        checked.asked += 1
        checked.row.reported = {TrajectoryId(0): checked.asked}
        await asyncio.sleep(0)
        return True

    kept.engines.is_alive = grow  # type: ignore[method-assign]
    async with serving(kept):
        await checked.turns()
        assert checked.asked > 5
        assert kept.is_silent


# -- joining and leaving ----------------------------------------------------------------------------------------------


async def test_a_server_that_joins_gets_an_id_that_was_never_given() -> None:
    async with serving(Kept(2)) as kept:
        await kept.fleet.dismiss(ONE)
        assert kept.fleet.join("http://engine-1", slots=4) == 2
        assert kept.fleet.join("http://engine-2", slots=4) == 3


async def test_a_server_that_leaves_is_stopped_and_reported_no_more() -> None:
    async with serving(Kept(2)) as kept:
        await kept.fleet.dismiss(ZERO)
        assert (kept.servers[0].stops, kept.servers[0].kills) == (1, 0)
        assert kept.fleet.urls == {ONE: "http://engine-1"}
        kept.servers[1].die()
        assert isinstance(await kept.next(), InstanceLost)
        assert isinstance(await kept.next(), InstanceUp)
        assert kept.is_silent


async def test_servers_join_while_this_host_allows_a_connection_for_each_of_their_slots() -> None:
    refusal = r"http://engine-3: the requests of 4 instances need up to 16 connections, but this host allows 12; raise"
    async with serving(Kept(2)) as kept:
        kept.fleet.join("http://engine-2", slots=8)  # of which the run uses 4
        with pytest.raises(ConfigError, match=refusal):
            kept.fleet.join("http://engine-3", slots=8)
    async with serving(Kept(1, slots=None)) as kept:
        kept.rows[ZERO] = Server(ZERO, slots=2)
        kept.rows[kept.fleet.join("http://engine-1", slots=5)] = Server(ONE, slots=5)
        with pytest.raises(ConfigError, match=r"of 3 instances need up to 13 connections, but this host allows 12"):
            kept.fleet.join("http://engine-3", slots=6)


async def test_a_server_that_joined_and_turns_out_unfit_does_not_end_the_run() -> None:
    kept = Kept(1)
    async with serving(kept):
        kept.fleet._limits = replace(kept.fleet._limits, context_tokens=5000)
        instance = kept.fleet.join("http://engine-9", slots=4)
        assert (await given_up(kept, instance)).then == "given up after 5 failed starts"
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
        external = ExternalServer(server.url, engine=SglangEngine(client))
        well(server, 503, 503, 200)
        assert await external.start() == Started(server.url, is_kept=False)
        monkeypatch.setattr(fleet_module, "RETURN_TIMEOUT_S", 0.0)
        with pytest.raises(RemoteError, match="did not answer its health check for 0 s"):
            await external.start()


async def test_an_external_server_is_never_killed_and_left_unpaused(server: ScriptedServer) -> None:
    async with EngineClient(max_connections=1) as client:
        external = ExternalServer(server.url, engine=SglangEngine(client))
        well(server, 200)
        await external.kill()
        assert server.calls == []
        server.answers["/continue_generation"] = server.answers["/health"]
        await external.stop()
    assert server.paths() == ["/continue_generation"]


async def test_the_number_of_an_instance_that_has_left_is_not_given_again() -> None:
    async with keeping(Kept(1, removed=[InstanceId(4)])) as kept:
        await kept.next()
        assert kept.fleet.join("http://another", slots=4) == 5
