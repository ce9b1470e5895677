"""Users' requests to a running fleet: what the core decides is carried out, in a job on fakes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dora.controller import fleet as fleet_module
from dora.controller import inbox as inbox_module
from dora.controller.inbox import Inbox
from dora.controller.user_requests import UserRequests
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId
from dora.errors import ConfigError, RemoteError
from dora.journal.audit import audit_entries
from dora.journal.reader import Journal
from dora.observe.snapshot import Snapshot
from dora.status.server import StatusServer
from tests.controller.fakes import Job, make_job

ZERO, ONE = InstanceId(0), InstanceId(1)
BY = ev.RequestTag(by="ada")


class Asked:
    """A job under way, frozen in the middle of its answers until it is released, and the object that takes requests."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.desk = UserRequests(
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
        said = await asked.desk.drain("0", BY)
        assert said.startswith("instance 0 drains: ")
        await asked.until(lambda: not asked.state.instances[ZERO].residents)
        before = len(asked.job.engines.requests)
        trained = asked.state.feed.trained
        await asked.until(lambda: asked.state.feed.trained >= trained + 3)
        assert {url for url, _ in asked.job.engines.requests[before:]} == {"http://engine-1"}
        assert not asked.state.instances[ZERO].is_member


async def test_the_last_instance_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        await asked.desk.drain("1", BY)
        with pytest.raises(ConfigError, match="instance 0: no other instance is there to take its work; add one first"):
            await asked.desk.remove("http://engine-0/", BY)
        assert asked.state.instances[ZERO].is_member


async def test_an_instance_that_leaves_is_stopped_and_forgotten(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        assert (await asked.desk.remove("1", BY)).startswith("instance 1 leaves when it is empty: ")
        await asked.until(lambda: ONE not in asked.state.instances)
        assert asked.job.servers[1].stops == 1
        assert asked.job.io.fleet.urls == {ZERO: "http://engine-0"}
        assert asked.job.watcher.of(cmd.DismissInstance) == [cmd.DismissInstance(ONE)]
        with pytest.raises(ConfigError, match="1: there is no such instance"):
            await asked.desk.drain("1", BY)


async def test_a_drained_instance_is_called_back_by_its_number_or_its_address(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        for which in ("1", "http://engine-1"):
            await asked.desk.drain("1", BY)
            assert await asked.desk.add(which, BY) == "instance 1 gets work again"
            assert asked.state.instances[ONE].is_member
        with pytest.raises(ConfigError, match="instance 1: it takes part already"):
            await asked.desk.add("1", BY)


async def test_a_server_that_joins_gets_weights_and_work(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        assert await asked.desk.add("http://engine-9/", BY) == "instance 2 joins: http://engine-9, fake"
        await asked.until(lambda: "http://engine-9" in {url for url, _ in asked.job.engines.requests})
        up = [e for e in asked.job.watcher.of(ev.InstanceUp) if e.instance == 2]
        assert [e.incarnation for e in up] == [1]
        await asked.desk.remove("0", BY)
        await asked.until(lambda: ZERO not in asked.state.instances)


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("engine-9:1", "engine-9:1: neither an instance number nor an http:// or https:// address"),
        ("http://[", "http://[: neither an instance number nor an http:// or https:// address"),
        ("http://a:99999", "http://a:99999: neither an instance number nor an http:// or https:// address"),
        ("http:// ", "http:// : neither an instance number nor an http:// or https:// address"),
        ("http://a\r\nX: y", "http://a X: y: neither an instance number nor an http:// or https:// address"),
        ("٣", "٣: neither an instance number nor an http:// or https:// address"),
        ("9" * 500, f"{'9' * 500}: neither an instance number nor an http:// or https:// address"),
        ("http://ada:pw@a:1", "a: an address has no name or password; the key is DORA_ENGINE_API_KEY"),
        ("7", "instance 7: there is no such instance, or it has not come up yet"),
    ],
)
async def test_an_unfit_server_is_refused_in_one_line(tmp_path: Path, which: str, says: str) -> None:
    async with under_way(tmp_path) as asked:
        with pytest.raises(ConfigError) as refused:
            await asked.desk.add(which, BY)
        assert str(refused.value) == says


async def test_an_address_of_no_instance_is_refused(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        with pytest.raises(
            ConfigError, match="http://engine-7: not an instance of this run; `dora instances URL list`"
        ):
            await asked.desk.drain("http://engine-7", BY)


# -- evaluate, stop, and who asked ------------------------------------------------------------------------------------


async def test_an_address_that_is_added_twice_at_once_joins_once(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        both = await asyncio.gather(*(asked.desk.add("http://engine-9", BY) for _ in range(2)), return_exceptions=True)
        assert str(both[0]) == "instance 2 joins: http://engine-9, fake"
        assert re.fullmatch(
            "instance 2: (there is no such instance, or it has not come up yet|it takes part already)", str(both[1])
        )
        assert asked.job.io.fleet.find("http://engine-9") == 2


async def test_a_stop_ends_the_run_as_a_signal_does_and_says_who(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        said = await asked.desk.stop(BY)
        assert said == "the run stops; everything in flight is kept for a resume"
        with pytest.raises(ConfigError, match=r"^the run (is being stopped|has ended): nothing was changed$"):
            await asked.desk.stop(BY)
        await asked.until(lambda: asked.job.inbox.is_closed)
        for late in (asked.desk.drain("0", BY), asked.desk.evaluate(BY), asked.desk.stop(BY), asked.desk.add("1", BY)):
            with pytest.raises(ConfigError, match=rf"^{ev.ENDED}$"):
                await late
        assert asked.state.instances[ZERO].is_member
    stops = asked.job.watcher.of(ev.StopRequested)
    assert [event.request.by for event in stops if event.request == BY][:1] == ["ada"]
    assert asked.job.watcher.of(cmd.StopRun) == [cmd.StopRun()]


async def test_who_asked_is_in_the_journal_which_replays_and_audits(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked:
        for id in ("one", "one", "two"):
            with suppress(ConfigError):
                await asked.desk.drain("1", ev.RequestTag(id, "ada (::1)"))
        with pytest.raises(ConfigError, match=r"the run has no held-out set \(eval\.sets\)"):
            await asked.desk.evaluate(BY)
        settings = asked.job.settings
    journal = Journal(tmp_path / "journal.msgpack")
    events = [event for event, _ in journal if isinstance(event, ev.UserRequest)]
    assert [(event.request.id, event.request.by) for event in events] == [
        *[("one", "ada (::1)")] * 2,
        ("two", "ada (::1)"),
        ("", "ada"),
        ("", "a signal"),
    ]
    assert audit_entries(settings, journal).violations == ()


# -- over the status endpoint -----------------------------------------------------------------------------------------

KEY = "open sesame"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
#: Bodies and headers that must not change anything, and the status codes with which they are refused.
HOSTILE_CLICKS: dict[str, tuple[str, bytes, dict[str, str], set[int]]] = {
    "no token": ("run/stop", b"{}", {"Authorization": ""}, {401}),
    "wrong token": ("run/stop", b"{}", {"Authorization": "Bearer guess"}, {401}),
    "token in the address": (f"run/stop?token={KEY}", b"{}", {"Authorization": ""}, {401}),
    "foreign origin": ("run/stop", b"{}", {"Origin": "http://evil.example"}, {403}),
    "another port": ("run/stop", b"{}", {"Origin": "http://127.0.0.1:1"}, {403}),
    "cross-site": ("run/stop", b"{}", {"Sec-Fetch-Site": "cross-site"}, {403}),
    "rebound": ("run/stop", b"{}", {"Host": "evil.example"}, {421}),
    "a form": ("run/stop", b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, {415}),
    "garbage": ("run/stop", b"\x00\xff{", {}, {400}),
    "a list": ("run/stop", b"[]", {}, {400}),
    "nothing": ("run/stop", b"", {}, {400}),
    "an unknown field": ("run/stop", b'{"force": true}', {}, {400}),
    "a long id": ("run/stop", b'{"id": "%s"}' % (b"x" * 65), {}, {400}),
    "a long name": ("run/stop", b'{"by": "%s"}' % (b"x" * 65), {}, {400}),
    "deep": ("run/stop", b"[" * 9_000, {}, {400}),
    "huge": ("run/stop", b'{"by": "%s"}' % (b"x" * 20_000), {}, {413}),
    "a lone surrogate": ("instances/drain", b'{"instance": "\\ud800"}', {}, {400, 409}),
    "a huge number": ("instances/drain", b'{"instance": "%s"}' % (b"9" * 900), {}, {409}),
    "more than 64 bits": ("instances/drain", b'{"instance": "%s"}' % (b"9" * 25), {}, {409}),
    "a negative number": ("instances/drain", b'{"instance": "-1"}', {}, {409}),
    "half an address": ("instances/add", b'{"instance": "http://["}', {}, {409}),
    "a file": ("instances/add", b'{"instance": "file:///etc/passwd"}', {}, {409}),
    "a password": ("instances/add", b'{"instance": "http://ada:pw@a:1"}', {}, {409}),
}


async def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=JSON | (headers or {})) as answer,
    ):
        return answer.status, (await answer.json())["said"]


def served(asked: Asked) -> StatusServer:
    """The status endpoint of the job; its status itself is not asked for."""

    def snapshot() -> Snapshot:
        raise AssertionError("nobody reads")

    return StatusServer(snapshot, host="127.0.0.1", port=0, requests=asked.desk, token=KEY)


async def test_hostile_clicks_change_nothing(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked, served(asked) as server:
        for name, (path, body, headers, codes) in HOSTILE_CLICKS.items():
            code, said = await post(f"{server.url}/{path}", body, headers)
            assert code in codes, (name, code, said)
            assert said.isprintable()
            assert "pw" not in said, name
        assert all(instance.is_member for instance in asked.state.instances.values())
        assert not asked.state.stopping
        assert asked.job.io.fleet.urls.keys() == {ZERO, ONE}
        assert not asked.job.watcher.of(ev.StopRequested)
        assert not asked.job.watcher.of(ev.ServerOffered)


async def test_eight_clicks_at_once_drain_once(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked, served(asked) as server:
        body = b'{"instance": "1", "id": "one", "by": "ada"}'
        answers = await asyncio.gather(*(post(f"{server.url}/instances/drain", body) for _ in range(8)))
        assert sorted(code for code, _ in answers) == [200, *[409] * 7]
        assert (await post(f"{server.url}/instances/add", b'{"instance": "1"}'))[0] == 200
        again = "instance 1: this request was answered before: nothing was changed again"
        assert await post(f"{server.url}/instances/drain", body) == (409, again)
        assert asked.state.instances[ONE].is_member


async def test_a_click_on_a_run_that_has_just_ended_changes_nothing_and_says_so(tmp_path: Path) -> None:
    async with under_way(tmp_path) as asked, served(asked) as server:
        assert (await post(f"{server.url}/run/stop", b'{"by": "ada"}'))[0] == 200
        await asked.until(lambda: asked.job.inbox.is_closed)
        for path, body in (
            *(("run/stop", b"{}"), ("run/evaluate", b"{}"), ("instances/drain", b'{"instance": "0"}')),
            ("instances/add", b'{"instance": "http://127.0.0.1:9"}'),
        ):
            assert await post(f"{server.url}/{path}", body) == (409, ev.ENDED)
        assert asked.state.instances[ZERO].is_member
    assert [event.request.by for event in asked.job.watcher.of(ev.StopRequested)][:1] == ["ada (127.0.0.1)"]


async def test_a_request_whose_time_is_up_just_as_it_is_answered_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its task learns of the time limit only after the controller, whose turn it was."""
    monkeypatch.setattr(inbox_module, "ASK_TIMEOUT_S", 0.0)
    inbox, event = Inbox(), ev.StopRequested(0.0)

    async def answered() -> None:
        inbox.answer(await inbox.take(), [])

    controller = asyncio.create_task(answered())
    await asyncio.sleep(0)
    with pytest.raises(RemoteError, match="the run did not respond"):
        await inbox.ask(event)
    await controller
