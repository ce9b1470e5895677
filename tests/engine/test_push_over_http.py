"""The push through the real client: every failure that was seen on a server, at every stage, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer, captured, reset

from dora.engine.errors import PushFailed
from dora.engine.names import UNCONFIRMED
from dora.engine.sglang import push as push_module
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.push import push, take_over
from dora.engine.sglang.target import PushTarget
from dora.errors import RemoteError

STAGES = {
    "drain": ("/v1/loads", 1),
    "flush": ("/flush_cache", 1),  # the last step of the drain
    "pause": ("/pause_generation", 1),
    "label before": ("/model_info", 1),  # the last step of the pause
    "label": ("/update_weight_version", 1),  # the first step of the update
    "update": ("/update_weights_from_disk", 1),
    "flush after update": ("/flush_cache", 2),
    "continue": ("/continue_generation", 1),
    "read back": ("/model_info", 2),
}
AFTER_UPDATE = {"update", "flush after update", "read back", "continue"}
CHANGED_BUT_400 = "Weights were updated, but the cache was not flushed because requests are resident."


class PushServer:
    """SGLang's control routes over one set of weights; from `dies_at` on, every connection is reset."""

    def __init__(self, server: ScriptedServer) -> None:
        self.scripted = server
        self.weights = "run/1"
        self.label = "run/1"
        self.is_paused = False
        self.is_dead = False
        self.dies_at: tuple[str, int] | None = None
        self.dies_after_acting = False
        for path, _ in STAGES.values():
            server.answers[path] = self._answer
        self.update_status = 200

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        is_last = (request.path, self.scripted.paths().count(request.path)) == self.dies_at
        if self.is_dead or (is_last and not self.dies_after_acting):
            return self._die(request)
        body = self._act(request.path)
        if is_last:
            return self._die(request)
        status = self.update_status if request.path == "/update_weights_from_disk" else 200
        return web.json_response(body, status=status)

    def _die(self, request: web.Request) -> web.Response:
        self.is_dead = True
        reset(request)
        return web.Response()

    def _act(self, path: str) -> Any:
        match path:
            case "/v1/loads":
                return captured("GET_v1_loads.json")
            case "/model_info":
                return {**captured("GET_model_info.json"), "weight_version": self.label}
            case "/update_weight_version":
                self.label = self.scripted.calls[-1][1]["new_version"]
            case "/pause_generation":
                self.is_paused = True
            case "/continue_generation":
                self.is_paused = False
            case "/update_weights_from_disk":
                self.weights = self.scripted.calls[-1][1]["weight_version"]
                if self.update_status == 400:
                    return {"success": False, "message": CHANGED_BUT_400, "num_paused_requests": 0}
                self.label = self.weights
                return {"success": True, "message": "Weight version updated.", "num_paused_requests": 0}
        return {"message": "ok", "status": "ok"}


@pytest.fixture
def sglang(server: ScriptedServer) -> PushServer:
    return PushServer(server)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=1) as client:
        yield client


async def push_to(client: EngineClient, sglang: PushServer, *, timeout_s: float = 30.0) -> None:
    endpoint = PushTarget(client, sglang.scripted.url)
    await push(endpoint, folder=Path("/store/v000002"), label="run/2", timeout_s=timeout_s)


async def test_a_push_is_the_recommended_sequence_with_every_flag_explicit(
    client: EngineClient, sglang: PushServer
) -> None:
    await push_to(client, sglang)
    assert (sglang.weights, sglang.is_paused) == ("run/2", False)
    assert sglang.scripted.paths() == [path for path, _ in STAGES.values()]
    bodies = dict(sglang.scripted.calls)
    assert bodies["/pause_generation"] == {"mode": "in_place"}
    assert bodies["/update_weight_version"] == {"new_version": UNCONFIRMED, "abort_all_requests": False}
    assert bodies["/update_weights_from_disk"] == {
        "model_path": "/store/v000002",
        "weight_version": "run/2",
        "flush_cache": False,
        "abort_all_requests": False,
    }


@pytest.mark.parametrize("dies_after_acting", [False, True])
@pytest.mark.parametrize("stage", list(STAGES))
async def test_a_server_that_dies_during_a_push_is_doubtful_unless_it_was_not_touched(
    client: EngineClient, sglang: PushServer, stage: str, dies_after_acting: bool
) -> None:
    sglang.dies_at, sglang.dies_after_acting = STAGES[stage], dies_after_acting
    with pytest.raises(PushFailed, match="the connection broke off") as failed:
        await push_to(client, sglang)
    assert failed.value.stage == {"flush": "drain", "label before": "pause", "label": "update"}.get(stage, stage)
    assert failed.value.doubtful is (failed.value.stage != "drain")  # from the pause on: it may have stayed paused


async def test_a_400_after_the_weights_changed_is_doubtful_and_the_server_is_not_left_paused(
    client: EngineClient, sglang: PushServer
) -> None:
    """0.5.22 and later: the weights are new, the label is not."""
    sglang.update_status = 400
    with pytest.raises(PushFailed, match="Weights were updated, but") as failed:
        await push_to(client, sglang)
    assert (failed.value.stage, failed.value.doubtful) == ("update", True)
    assert (sglang.weights, sglang.label, sglang.is_paused) == ("run/2", UNCONFIRMED, False)


async def test_a_busy_server_is_left_as_it_was(
    client: EngineClient, sglang: PushServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_module, "DRAIN_TIMEOUT_S", 0.05)
    sglang.scripted.says("/flush_cache", captured("flush_busy.json"), status=400)
    with pytest.raises(PushFailed, match=r"still holds requests after 0.05 s") as failed:
        await push_to(client, sglang)
    assert (failed.value.stage, failed.value.doubtful) == ("drain", False)
    assert (sglang.weights, sglang.is_paused) == ("run/1", False)


async def test_an_update_that_never_answers_ends_at_the_push_deadline(client: EngineClient, sglang: PushServer) -> None:
    never = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    sglang.scripted.answers["/update_weights_from_disk"] = hang
    with pytest.raises(PushFailed, match=r"within 1.5 s") as failed:
        await push_to(client, sglang, timeout_s=1.5)
    never.set()
    assert (failed.value.stage, failed.value.doubtful, sglang.is_paused) == ("update", True, False)


# -- taking a server over ---------------------------------------------------------------------------------------------


async def test_a_server_at_rest_is_only_resumed_flushed_and_asked(client: EngineClient, sglang: PushServer) -> None:
    assert await take_over(PushTarget(client, sglang.scripted.url), timeout_s=30) == "run/1"
    assert sglang.scripted.paths() == ["/continue_generation", "/flush_cache", "/v1/loads", "/model_info"]


async def test_requests_are_aborted_until_the_server_flushes_and_counts_none(
    client: EngineClient, sglang: PushServer
) -> None:
    """Those that a pause held back arrive late, and the counts lag behind."""
    server = sglang.scripted
    server.says("/abort_request", "")
    refusals = [400, 400, 200, 400, 200]

    async def flush(_: web.Request) -> web.Response:
        status = refusals.pop(0)
        return web.Response(status=status, text="Cache flushed." if status == 200 else "Flush cache failed.")

    server.answers["/flush_cache"] = flush
    counts = [1, 0]

    async def loads(_: web.Request) -> web.Response:
        load = captured("GET_v1_loads.json")
        load["loads"][0]["num_running_reqs"] = counts.pop(0)
        return web.json_response(load)

    server.answers["/v1/loads"] = loads
    assert await take_over(PushTarget(client, server.url), timeout_s=30) == "run/1"
    assert server.paths().count("/abort_request") == 4
    assert (refusals, counts) == ([], [])
    assert {tuple(body.items()) for path, body in server.calls if path == "/abort_request"} == {
        (("rid", ""), ("abort_all", True))
    }


async def test_the_gate_of_an_update_that_was_not_ended_is_closed(client: EngineClient, sglang: PushServer) -> None:
    sglang.label = UNCONFIRMED
    sglang.scripted.says("/end_weight_update", {"success": True, "message": ""})
    assert await take_over(PushTarget(client, sglang.scripted.url), timeout_s=30) == UNCONFIRMED
    assert sglang.scripted.paths()[-1] == "/end_weight_update"
    del sglang.scripted.answers["/end_weight_update"]  # a release without gates
    assert await take_over(PushTarget(client, sglang.scripted.url), timeout_s=30) == UNCONFIRMED


async def test_a_server_that_does_not_come_to_rest_is_an_error(client: EngineClient, sglang: PushServer) -> None:
    sglang.scripted.says("/abort_request", "")
    sglang.scripted.says("/flush_cache", captured("flush_busy.json"), status=400)
    with pytest.raises(RemoteError, match=r"was not at rest within 0\.3 s"):
        await take_over(PushTarget(client, sglang.scripted.url), timeout_s=0.3)


async def test_a_server_that_never_ends_the_update_of_a_dead_controller_is_an_error(
    client: EngineClient, sglang: PushServer
) -> None:
    never = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    sglang.scripted.answers["/flush_cache"] = hang
    with pytest.raises(RemoteError, match=r"was not at rest within 0\.3 s|no answer to /flush_cache within 0\.3 s"):
        await take_over(PushTarget(client, sglang.scripted.url), timeout_s=0.3)
    never.set()


@pytest.mark.parametrize("path", ["/continue_generation", "/flush_cache", "/v1/loads", "/model_info"])
async def test_a_server_that_dies_while_it_is_taken_over_is_an_error(
    client: EngineClient, sglang: PushServer, path: str
) -> None:
    sglang.dies_at = (path, 1)
    with pytest.raises(RemoteError, match="the connection broke off"):
        await take_over(PushTarget(client, sglang.scripted.url), timeout_s=30)
