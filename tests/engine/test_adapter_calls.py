"""The client's calls about adapters: each is made once, and says what is known after a failure; and a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer, captured, reset

from dora.engine.api import AdapterNeeds
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.sglang.adapters import require_adapters
from dora.engine.sglang.client import EngineClient
from dora.errors import ConfigError, ProtocolError, RemoteError
from tests.embedded.adapted import ATTENTION, RANK, AdaptedReference, write_adapter
from tests.embedded.conftest import model_a  # noqa: F401 - a fixture
from tests.engine.adapter_server import serving_adapters
from tests.engine.test_against_embedded import REQUEST, Tokens

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
DONE = {"success": True, "error_message": "", "loaded_adapters": {"run/1": "/store/v000001"}}


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=8, vocab_size=64) as client:
        yield client


async def test_a_load_and_an_unload_send_the_name_and_the_folder(server: ScriptedServer, client: EngineClient) -> None:
    for path in (LOAD, UNLOAD):
        server.says(path, DONE)
    await client.load_adapter(server.url, "run/1", "/store/v000001", timeout_s=5)
    await client.unload_adapter(server.url, "run/1", timeout_s=5)
    assert server.calls == [
        (LOAD, {"lora_name": "run/1", "lora_path": "/store/v000001"}),
        (UNLOAD, {"lora_name": "run/1"}),
    ]


@pytest.mark.parametrize("status", [200, 400])
async def test_a_refusal_says_why_and_that_nothing_changed(
    server: ScriptedServer, client: EngineClient, status: int
) -> None:
    server.says(LOAD, {**DONE, "success": False, "error_message": "it is already loaded"}, status=status)
    with pytest.raises(RequestRefused, match="it is already loaded") as caught:
        await client.load_adapter(server.url, "run/1", "/store/v000001", timeout_s=5)
    assert not caught.value.retryable


async def test_a_change_whose_answer_is_lost_is_not_repeated_and_not_called_refused(
    server: ScriptedServer, client: EngineClient
) -> None:
    async def lose(request: web.Request) -> web.Response:
        reset(request)
        return web.Response()

    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    server.answers.update({LOAD: lose, UNLOAD: hang})
    with pytest.raises(ServerGone):
        await client.load_adapter(server.url, "run/1", "/store/v000001", timeout_s=5)
    with pytest.raises(RemoteError, match=r"no answer to /unload_lora_adapter within 0\.1 s") as caught:
        await client.unload_adapter(server.url, "run/1", timeout_s=0.1)
    assert not isinstance(caught.value, RequestRefused)
    assert server.paths() == [LOAD, UNLOAD]


async def test_a_server_without_the_routes_or_with_another_answer_is_an_error(
    server: ScriptedServer, client: EngineClient
) -> None:
    with pytest.raises(RequestRefused, match="Not Found"):
        await client.load_adapter(server.url, "run/1", "/store/v000001", timeout_s=5)
    server.says(LOAD, {"object": "error", "message": "1 validation error"}, status=400)
    with pytest.raises(ProtocolError, match="unexpected answer"):
        await client.load_adapter(server.url, "run/1", "/store/v000001", timeout_s=5)


def test_a_request_has_the_name_of_its_adapter_only_if_it_has_one() -> None:
    assert "lora_path" not in json.loads(EngineClient.encode(REQUEST))
    assert json.loads(EngineClient.encode(replace(REQUEST, adapter="run/1")))["lora_path"] == "run/1"


# --- what a server must be

SERVED: dict[str, Any] = {
    "version": "0.5.23", "dp_size": 1, "enable_lora": True, "max_loras_per_batch": 5, "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "v_proj", "o_proj"], "max_loaded_loras": None, "lora_strict_loading": True,
}  # fmt: skip
FLAGS = (
    "--enable-lora --lora-strict-loading --max-loras-per-batch 5 --max-lora-rank 8 --lora-target-modules q_proj v_proj"
)


async def require(server: ScriptedServer, client: EngineClient, **changes: Any) -> None:
    server.says("/server_info", {**captured("GET_server_info.json"), **SERVED, **changes})
    await require_adapters(client, server.url, AdapterNeeds(4, 8, ("v_proj", "q_proj")))


@pytest.mark.parametrize(
    "changes", [{}, {"version": "0.6.0"}, {"version": "main"}, {"max_lora_rank": 64}, {"max_loras_per_batch": 9}]
)
async def test_a_server_with_room_is_accepted(
    server: ScriptedServer, client: EngineClient, changes: dict[str, Any]
) -> None:
    await require(server, client, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "0.5.22"}, ["adapters need SGLang 0.5.23 or newer; this is 0.5.22"]),
        ({"enable_lora": None}, [f"serves no adapters; start it with {FLAGS}"]),
        ({"dp_size": 2}, ["adapters can be loaded only with --dp-size 1, this server has 2"]),
        ({"max_loras_per_batch": 4}, [f"has no room for these adapters; start it with {FLAGS}"]),
        ({"max_lora_rank": 4}, [f"has no room for these adapters; start it with {FLAGS}"]),
        ({"max_lora_rank": None}, [f"has no room for these adapters; start it with {FLAGS}"]),
        ({"lora_target_modules": ["all"]}, [f"has no room for these adapters; start it with {FLAGS}"]),
        (
            {"max_loaded_loras": 9, "lora_strict_loading": False},
            [
                "would unload adapters by itself; start it without --max-loaded-loras",
                "would serve a part of an adapter; start it with --lora-strict-loading",
            ],
        ),
    ],
)
async def test_a_server_without_room_is_refused_with_the_flags_that_it_lacks(
    server: ScriptedServer, client: EngineClient, changes: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        await require(server, client, **changes)
    assert str(caught.value).splitlines() == [f"{server.url}: {line}" for line in says]


# --- a real engine


@pytest.fixture(scope="module")
def embedded(model_a: Path) -> Iterator[str]:  # noqa: F811
    with serving_adapters(model_a) as url:
        yield url


async def test_the_embedded_engine_is_served_by_the_same_calls(
    embedded: str,
    client: EngineClient,
    model_a: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    await require_adapters(client, embedded, AdapterNeeds(2, RANK, ATTENTION))
    with pytest.raises(ConfigError, match="has no room for these adapters"):
        await require_adapters(client, embedded, AdapterNeeds(3, RANK, ATTENTION))
    folder = write_adapter(tmp_path / "one", model_a, seed=1)
    await client.load_adapter(embedded, "run/1", str(folder), timeout_s=30)
    assert await client.adapters(embedded) == {"run/1": str(folder)}
    with pytest.raises(RequestRefused, match="already loaded"):
        await client.load_adapter(embedded, "run/1", str(folder), timeout_s=30)
    tokens, reference = Tokens(), AdaptedReference(model_a, folder)
    result = await client.generate(embedded, replace(REQUEST, adapter="run/1"), tokens)
    assert result.spans == (("default", 0, result.num_tokens),)
    prompt = list(REQUEST.tokens)
    assert tokens.logprobs == pytest.approx(reference.logprobs(prompt + tokens.token_ids)[len(prompt) - 1 :], abs=1e-4)
    probed = await client.prompt_logprobs(embedded, prompt, timeout_s=30, adapter="run/1")
    assert probed == pytest.approx(reference.logprobs(prompt), abs=1e-4)
    assert await client.prompt_logprobs(embedded, prompt, timeout_s=30) != pytest.approx(probed, abs=1e-2)
    await client.unload_adapter(embedded, "run/1", timeout_s=30)
    assert await client.adapters(embedded) == {}
    with pytest.raises(RequestRefused, match=r"never been loaded: run/2 \(400\)"):
        await client.generate(embedded, replace(REQUEST, id="r-2", adapter="run/2"), tokens)
