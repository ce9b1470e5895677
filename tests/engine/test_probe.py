"""The probe: a server that cannot prove C1 is refused in one line, before any work is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer, captured

from dora.engine.api import Capabilities
from dora.engine.errors import ServerGone
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.engine.sglang.probe import probe
from dora.errors import ConfigError, RemoteError


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=1) as client:
        yield client


@pytest.fixture
def sglang(server: ScriptedServer) -> ScriptedServer:
    """Answers as the captured SGLang 0.5.20 does."""
    server.says("/server_info", captured("GET_server_info.json"))
    server.says("/v1/loads", captured("GET_v1_loads.json"))
    server.says("/model_info", captured("GET_model_info.json"))
    server.streams(one_token())
    return server


def one_token(**changes: Any) -> bytes:
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
        "weight_versions": [{"version": "v9", "start": 0, "end": 1}],
        **changes,
    }
    return f"data: {json.dumps({'output_ids': [7], 'meta_info': meta})}\n\ndata: [DONE]\n\n".encode()


async def test_a_captured_sglang_is_understood(sglang: ScriptedServer, client: EngineClient) -> None:
    found = await probe(client, sglang.url, timeout_s=10)
    assert found.model_path
    assert replace(found, model_path="", routing_doubt="") == Capabilities(
        release="0.5.20",
        kv_tokens=65536,
        slots=64,
        context_tokens=4090,
        label="v9",
        model_path="",
    )
    assert set(sglang.paths()) == {"/server_info", "/v1/loads", "/model_info", "/generate"}


async def test_a_route_is_found_without_calling_it(sglang: ScriptedServer, client: EngineClient) -> None:
    """SGLang answers 405 if a route does not support the method, and 404 if there is no such route."""
    sglang.says("/begin_weight_update", {"detail": "Method Not Allowed"}, status=405)
    assert await client.has_route(sglang.url, "/begin_weight_update")
    assert not await client.has_route(sglang.url, "/weights_checker")
    assert {method for method, _ in sglang.methods} == {"DELETE"}


@pytest.mark.parametrize(
    ("lacks", "says"),
    [("weight_versions", "the answer contains no version of the weights"), ("output_token_logprobs", "log-probs")],
)
async def test_a_server_without_versions_or_logprobs_is_refused_with_what_it_lacks_and_its_release(
    sglang: ScriptedServer, client: EngineClient, lacks: str, says: str
) -> None:
    sglang.says("/server_info", {**captured("GET_server_info.json"), "version": "0.4.1"})
    sglang.streams(one_token(**{lacks: None}))
    with pytest.raises(ConfigError, match=rf"^{sglang.url}: .*{says}.*\(SGLang 0.5.18 or newer\); this is 0.4.1$"):
        await probe(client, sglang.url, timeout_s=10)


async def test_a_server_with_a_label_but_no_spans_is_accepted(sglang: ScriptedServer, client: EngineClient) -> None:
    sglang.streams(one_token(weight_versions=None, weight_version="v9"))
    assert (await probe(client, sglang.url, timeout_s=10)).label == "v9"


async def test_a_server_that_refuses_our_request_is_refused(sglang: ScriptedServer, client: EngineClient) -> None:
    sglang.says("/generate", {"error": "unknown field `no_stop_trim`"}, status=400)
    with pytest.raises(ConfigError, match="unknown field `no_stop_trim`"):
        await probe(client, sglang.url, timeout_s=10)


async def test_an_unreachable_server_is_one_line_that_names_it(unused_url: str, client: EngineClient) -> None:
    with pytest.raises(ServerGone, match=rf"^{unused_url}: cannot connect .*; is the server running\?$"):
        await probe(client, unused_url, timeout_s=10)
    assert not await SglangEngine(client).is_alive(unused_url, timeout_s=10)


async def test_a_server_that_does_not_answer_times_out(sglang: ScriptedServer, client: EngineClient) -> None:
    release = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    sglang.answers["/generate"] = hang  # as a paused SGLang does
    sglang.answers["/health"] = hang
    with pytest.raises(RemoteError, match=rf"^{sglang.url}: .* within 0.2 s"):
        await probe(client, sglang.url, timeout_s=0.2)
    engine = SglangEngine(client)
    assert not await engine.is_alive(sglang.url, timeout_s=0.1)
    release.set()
    assert await engine.is_alive(sglang.url, timeout_s=10)


async def test_an_unhealthy_server_is_not_alive(server: ScriptedServer, client: EngineClient) -> None:
    server.says("/health", "", status=503)
    assert not await SglangEngine(client).is_alive(server.url, timeout_s=10)
