"""Every release of SGLang from 0.5.18 on, as recorded in `captures/releases/`: probe, parser, refusals and pushes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_server import Handler, ScriptedServer, reset

from dora.embedded.dialect import DIALECTS
from dora.engine.api import Capabilities, GenerateResult
from dora.engine.errors import PushFailed, RequestRefused, ServerGone
from dora.engine.sglang import push as push_module
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.engine.sglang.push import push
from dora.engine.sglang.stream import StreamParser
from dora.engine.sglang.target import PushTarget

FOLDER = Path(__file__).parent / "captures" / "releases"
RELEASES = sorted(file.stem for file in FOLDER.glob("*.json"))

every_release = pytest.mark.parametrize("release", RELEASES)


def recorded(release: str) -> dict[str, dict[str, Any]]:
    exchanges: dict[str, dict[str, Any]] = json.loads((FOLDER / f"{release}.json").read_text())
    return exchanges


def replay(server: ScriptedServer, release: str, *names: str) -> None:
    """Answer each path as in these exchanges; of two with one method and path, as in the later one."""
    by_path: dict[str, dict[str, dict[str, Any]]] = {}
    for name in names:
        exchange = recorded(release)[name]
        by_path.setdefault(exchange["path"], {})[exchange["method"]] = exchange
    for path, by_method in by_path.items():
        server.answers[path] = _answering(by_method)


def of_one_token(text: str) -> str:
    """Return what the server would have answered to a request for one token."""
    first = text.partition("\n\n")[0].replace('"finish_reason":null', '"finish_reason":{"type":"length","length":1}')
    return f"{first}\n\ndata: [DONE]\n\n"


def _answering(by_method: dict[str, dict[str, Any]]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        exchange = by_method[request.method]
        if exchange["status"] is None:
            reset(request)
            return web.Response()
        text: str = exchange["text"]
        kind = "text/event-stream" if text.startswith("data:") else "application/json" if text[:1] in "{[" else None
        return web.Response(status=exchange["status"], text=text, content_type=kind)

    return answer


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=1) as client:
        yield client


def read(text: str, *, split: int) -> tuple[list[int], list[float], GenerateResult]:
    token_ids, logprobs = list[int](), list[float]()
    parser = StreamParser("http://server", lambda ids, values: (token_ids.extend(ids), logprobs.extend(values)))
    data = text.encode()
    for piece in (data[:split], data[split:]):
        parser.feed(piece)
    return token_ids, logprobs, parser.close()


def test_every_release_that_the_embedded_engine_speaks_is_recorded() -> None:
    assert set(DIALECTS) == set(RELEASES)


@every_release
async def test_the_probe_finds_what_the_release_can_do(
    server: ScriptedServer, client: EngineClient, release: str
) -> None:
    replay(
        server,
        release,
        *("/server_info", "/v1/loads", "/model_info", "answer"),
        *("/begin_weight_update exists", "/weights_checker exists"),
    )
    answer = recorded(release)["answer"]  # to a request for more tokens than the probe asks for
    server.answers[answer["path"]] = _answering({answer["method"]: {**answer, "text": of_one_token(answer["text"])}})
    found = await probe(client, server.url, timeout_s=10)
    assert replace(found, routing_doubt="") == Capabilities(
        release=release,
        kv_tokens=8192,
        slots=4,
        context_tokens=2042,
        label="start",
        model_path="",  # not in the captures
    )
    assert await client.has_route(server.url, "/begin_weight_update") == DIALECTS[release].has_update_gate
    assert await client.has_route(server.url, "/weights_checker")


@every_release
def test_an_answer_gives_each_token_once_at_every_split_and_one_span(release: str) -> None:
    text = recorded(release)["answer"]["text"]
    whole = read(text, split=0)
    token_ids, logprobs, result = whole
    assert (len(token_ids), len(logprobs), result.num_tokens, result.finish_reason) == (4, 4, 4, "length")
    assert result.spans == (("start", 0, 4),)
    for split in range(len(text)):
        assert read(text, split=split) == whole


@every_release
def test_an_answer_aborted_while_retracted_gives_each_token_once(release: str) -> None:
    """Its last chunk repeats what was sent."""
    exchange = recorded(release)["answer aborted while retracted"]
    last = json.loads(exchange["text"].split("data: ")[-2])["meta_info"]
    token_ids, logprobs, result = read(exchange["text"], split=0)
    assert (result.finish_reason, result.num_tokens) == ("abort", last["completion_tokens"])
    assert [[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)] == last[
        "output_token_logprobs"
    ][-len(token_ids) :]
    assert result.spans == (("run/1", 0, len(token_ids)),)


@every_release
async def test_an_update_of_a_missing_folder_is_refused_with_the_reason(
    server: ScriptedServer, client: EngineClient, release: str
) -> None:
    replay(server, release, "pause", "update of a missing folder")
    await client.pause(server.url, "in_place")
    with pytest.raises(RequestRefused, match="Failed to get weights iterator"):
        await client.update_weights_from_disk(server.url, "/absent", "run/2", timeout_s=10)


@every_release
async def test_an_update_that_flushes_under_a_running_request_is_never_taken_for_done(
    server: ScriptedServer, client: EngineClient, release: str
) -> None:
    """Our client does not flush there; another user of the server may."""
    replay(server, release, "pause", "update with flush in a pause in place")
    await client.pause(server.url, "in_place")
    error: type[Exception] = RequestRefused
    says = "Weights were updated, but the cache was not flushed"
    if not DIALECTS[release].outlives_failed_flush:
        error, says = ServerGone, "the connection broke off"
    with pytest.raises(error, match=says):
        await client.update_weights_from_disk(server.url, "/store/v000003", "run/3", timeout_s=10)


@every_release
async def test_a_busy_server_does_not_flush_and_an_idle_one_does(
    server: ScriptedServer, client: EngineClient, release: str
) -> None:
    for name, flushes in (
        ("flush of a busy server", False),
        ("flush over a retracted request", DIALECTS[release].flushes_over_queue),
        ("flush", True),
    ):
        replay(server, release, name)
        assert await client.flush_cache(server.url) is flushes


@every_release
async def test_a_push_by_disk_goes_through(server: ScriptedServer, client: EngineClient, release: str) -> None:
    replay(server, release, "/v1/loads", "pause", "flush", "update", "/model_info after update", "continue")
    server.says("/update_weight_version", {"success": True})  # not in the captures
    await push(PushTarget(client, server.url), folder=Path("/store/v000001"), label="run/1", timeout_s=10)
    assert server.paths()[-2:] == ["/continue_generation", "/model_info"]


@every_release
async def test_a_push_that_finds_a_request_resident_touches_nothing(
    server: ScriptedServer, client: EngineClient, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_module, "DRAIN_TIMEOUT_S", 0.05)
    replay(server, release, "/v1/loads", "flush of a busy server")
    with pytest.raises(PushFailed, match="still holds requests after") as failed:
        await push(PushTarget(client, server.url), folder=Path("/store/v000001"), label="run/1", timeout_s=10)
    assert not failed.value.doubtful
    assert set(server.paths()) == {"/v1/loads", "/flush_cache"}
