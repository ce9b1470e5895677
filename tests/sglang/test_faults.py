"""What goes wrong in a run on three servers, on both kinds: survived, nothing lost, the audit clean.

One fleet for the module; the test that kills one of its servers comes last.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.seed.policy import path as seed_path
from tests.e2e.runs import (
    Run,
    assert_audit_clean,
    assert_one_clear_error,
    events_of,
    orders_of,
    run_to_end,
    settings,
    until,
)
from tests.sglang.conftest import LAUNCH, Kind, serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600, func_only=True)]

SERVERS = 3
STEPS = 8
#: Steps of a run that continues until it is ended.
FOR_EVER = 100_000
STOPPED_S = {"embedded": 20.0, "sglang": 60.0}
WATCHDOG_S = 15.0
#: Every so many answers the proxy breaks one off in the middle.
CUT_EVERY = 5


@dataclass(frozen=True)
class Member:
    """One server of the fleet."""

    launcher: psutil.Process
    url: str

    def processes(self) -> list[psutil.Process]:
        """The one that listens, and what it started."""
        port = int(self.url.rpartition(":")[2])
        for process in (self.launcher, *self.launcher.children(recursive=True)):
            if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp4")):
                return [process, *process.children(recursive=True)]
        raise AssertionError(f"nobody listens on {port}")

    def model_process(self) -> psutil.Process:
        main, *children = self.processes()
        return next((child for child in children if "scheduler" in " ".join(child.cmdline())), main)


@contextmanager
def launched(command: Sequence[str], *, servers: int) -> Iterator[list[Member]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            lines = [launcher.stdout.readline() for _ in range(servers)]
            assert all(line.startswith("ready http://") for line in lines), lines
            yield [Member(psutil.Process(launcher.pid), line.split()[1]) for line in lines]
        finally:
            launcher.terminate()
            launcher.communicate(timeout=60)


@contextmanager
def several(kind: Kind, count: int, logs: Path) -> Iterator[list[Member]]:
    shared = ["--slots", "16", "--kv-tokens", "8192"]
    if kind == "sglang":
        command = [sys.executable, str(LAUNCH / "serve.py"), str(seed_path()), "--servers", str(count)]
        with launched([*command, "--logs", str(logs), *shared], servers=count) as members:
            yield members
        return
    command = [sys.executable, "-m", "dora", "serve", "--model", "seed", "--port", "0"]
    flags = ["--incremental-streaming-output", "--skip-tokenizer-init"]
    with launched([*command, *flags, *shared], servers=1) as members:
        if count == 1:
            yield members
            return
        with several(kind, count - 1, logs) as others:
            yield [*members, *others]


@pytest.fixture(scope="module")
def fleet(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    with several(kind, SERVERS, tmp_path_factory.mktemp("logs")) as members:
        yield members


def job(folder: Path, urls: Sequence[str], **changes: object) -> list[str]:
    quoted = ", ".join(f'"{url}"' for url in urls)
    values: dict[str, object] = {
        "run__folder": folder,
        "run__steps": STEPS,
        "rollout__groups_per_step": 8,
        "rollout__group_size": 4,
        "rollout__filter_zero_variance": False,
        "rollout__watchdog_s": WATCHDOG_S,
        "engine__urls": f"[{quoted}]",
        "trainer__ranks": 1,
        "eval__sets": "[]",
        "status__port": 0,
    }
    return settings(**{**values, **changes})


def assert_nothing_lost(folder: RunFolder) -> None:
    """Every admitted group was trained, once; the audit agrees."""
    trained = [group for order in orders_of(folder, cmd.ForgetGroups) for group in order.groups]
    assert sorted(trained) == [order.group for order in orders_of(folder, cmd.AdmitGroup)]
    assert len(trained) == STEPS * 8
    assert_audit_clean(folder)


# -- between the controller and a server ------------------------------------------------------------------------------


@dataclass
class Proxy:
    """A proxy of one server that lies or breaks off on demand."""

    target: str
    cut_every: int = 0  # of streams: one is broken off inside its second event; 0: none
    false_refusals: int = 0  # updates still to be answered with 400 although they were done
    streams: int = 0
    cut: int = 0
    refused: int = 0
    url: str = ""
    _http: aiohttp.ClientSession | None = field(default=None, repr=False)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Proxy]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._http:
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._http is not None
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with self._http.request(
            request.method, self.target + request.path_qs, data=body or None, headers=headers
        ) as answer:
            if request.path == "/generate":
                return await self._stream(request, answer)
            text = await answer.read()
            if request.path == "/update_weights_from_disk" and self.false_refusals:
                self.false_refusals -= 1
                self.refused += 1
                message = "Weights were updated, but the cache was not flushed"
                return web.json_response({"success": False, "message": message}, status=400)
            return web.Response(status=answer.status, body=text, content_type=answer.content_type)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        self.streams += 1
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await response.prepare(request)
        # An answer that is due but has one event only leaves it to the next one.
        to_be_cut = self.cut_every > 0 and self.streams // self.cut_every > self.cut
        events = 0
        async for line in answer.content:  # events, and the empty lines after them
            events += line.startswith(b"data: ") and b"[DONE]" not in line
            if to_be_cut and events == 2:
                await response.write(line[: len(line) // 2])
                self.cut += 1
                assert request.transport is not None
                request.transport.abort()
                break
            await response.write(line)
        return response


async def test_truncated_replies_cost_no_token_and_no_server(fleet: list[Member], tmp_path: Path) -> None:
    async with Proxy(fleet[0].url, cut_every=CUT_EVERY).listening() as proxy:
        urls = [proxy.url, *(member.url for member in fleet[1:])]
        with Run(*job(tmp_path, urls)) as run:
            folder = await asyncio.to_thread(lambda: run.folder)
            code = await asyncio.to_thread(run.end)
    assert code == 0, run.told()
    assert proxy.cut >= 1
    assert any(event.num_tokens for event in events_of(folder, ev.GenerationFailed))
    assert events_of(folder, ev.InstanceLost) == []
    assert_nothing_lost(folder)


async def test_a_server_that_refuses_an_update_that_it_has_made_serves_only_after_another(
    fleet: list[Member], tmp_path: Path
) -> None:
    async with Proxy(fleet[0].url, false_refusals=1).listening() as proxy:
        urls = [proxy.url, *(member.url for member in fleet[1:])]
        with Run(*job(tmp_path, urls, run__steps=FOR_EVER)) as run:
            folder = await asyncio.to_thread(lambda: run.folder)
            await asyncio.to_thread(run.until_trained, 1)
            await asyncio.to_thread(until, lambda: "asked" in work_of(folder, 0), what="it is asked for answers")
            run.interrupt()
            await asyncio.to_thread(run.end)
    assert len(events_of(folder, ev.WeightPushFailed)) == proxy.refused == 1
    told = work_of(folder, 0)
    assert told[:2] == ["refused", "updated"]
    assert_audit_clean(folder)


def work_of(folder: RunFolder, instance: int) -> list[str]:
    """The results of an instance's pushes, and the times of its requests."""
    told = []
    for event, orders in Journal(folder.journal):
        if isinstance(event, ev.WeightPushFailed) and event.instance == instance:
            told.append("refused")
        if isinstance(event, ev.WeightPushFinished) and event.instance == instance:
            told.append("updated")
        told += ["asked" for order in orders if isinstance(order, cmd.Generate) and order.instance == instance]
    return told


def test_a_server_that_hangs_for_a_while_is_lost_and_recovers(kind: Kind, fleet: list[Member], tmp_path: Path) -> None:
    urls = [member.url for member in fleet]
    with Run(*job(tmp_path, urls, run__steps=FOR_EVER)) as run:
        folder = run.folder
        run.until_trained(1)
        until(lambda: stopped_in_an_answer(run, fleet[1]), what="it stands still with an answer on it")
        with standing_still(fleet[1], until_s=time.monotonic() + STOPPED_S[kind]):
            before = run.until_status(lambda s: not instance(s, 1)["url"], what="the server is lost")
            run.until_trained(before["steps_trained"] + 2)  # with fewer instances than K + 1
        back = run.until_status(lambda s: instance(s, 1)["incarnation"] == 2, what="the server is back")
        run.until_trained(back["steps_trained"] + 2)
        run.interrupt()
        run.end()
    lost = events_of(folder, ev.InstanceLost)
    assert [int(event.instance) for event in lost] == [1]
    assert_audit_clean(folder)


def stopped_in_an_answer(run: Run, member: Member) -> bool:
    """Stop a server (SIGSTOP) while it answers; during a push, which has its own limits, the stop would be noticed
    later."""
    if not instance(run.status(), 1)["residents"]:
        return False
    for process in member.processes():
        process.suspend()
    ticks = len(events_of(run.folder, ev.Ticked))
    until(lambda: len(events_of(run.folder, ev.Ticked)) >= ticks + 3, what="three ticks")
    if instance(run.status(), 1)["residents"]:
        return True
    for process in member.processes():
        process.resume()
    return False


@contextmanager
def standing_still(member: Member, *, until_s: float) -> Iterator[None]:
    """Continue a stopped server at that time, or at once if something goes wrong."""
    processes = member.processes()
    try:
        yield
        until(lambda: time.monotonic() > until_s, what="its time is over")
    finally:
        for process in processes:
            process.resume()


def instance(status: dict[str, Any], number: int) -> dict[str, Any]:
    return next(one for one in status["instances"] if one["instance"] == number)


def test_a_killed_model_process_costs_no_answer(fleet: list[Member], tmp_path: Path) -> None:
    """A server killed while it is empty is found by its health, so the run goes on until it is found."""
    urls = [member.url for member in fleet]
    model_process = fleet[2].model_process()
    with Run(*job(tmp_path, urls, run__steps=FOR_EVER)) as run:
        folder = run.folder
        run.until_status(lambda s: s["steps_trained"] and len(s["instances"]) == len(urls), what="all servers are up")
        model_process.kill()
        before = run.until_status(lambda s: not instance(s, 2)["url"], what="the server is lost")
        run.until_trained(before["steps_trained"] + 2)  # with fewer instances than K + 1
        run.interrupt()
        run.end()
    assert [int(event.instance) for event in events_of(folder, ev.InstanceLost)] == [2]
    assert_audit_clean(folder)


def test_a_server_of_another_shape_is_refused_before_the_start(
    kind: Kind, model_of_other_shape: Path, tmp_path: Path
) -> None:
    with serving(kind, model_of_other_shape, tmp_path / "logs") as server:
        result = run_to_end("run", *job(tmp_path, [server.url], rollout__max_staleness=0))
    assert_one_clear_error(result, code=2, says=rf"{server.url}.*(vocab_size|hidden_size)")
