"""Text of inference servers that would control a terminal, in every field of every answer: it is shown harmlessly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from dora.engine.api import AdapterNeeds, GenerateRequest
from dora.engine.sglang import answers
from dora.engine.sglang.adapters import clear, require_adapters
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.engine.sglang.stream import _Event
from dora.errors import DoraError
from dora.log import show_warnings
from tests.escapes import HOSTILE, Answering, answering, as_json, hostile_answers, require_harmless, show
from tests.made import plain, poisoned

Call = Callable[[EngineClient, str], Awaitable[object]]


def generate(client: EngineClient, url: str) -> Awaitable[object]:
    request = GenerateRequest("a", [1], max_new_tokens=1, temperature=1.0, stop_tokens=[], seed=0, label="v0")
    return client.generate(url, request, lambda tokens, logprobs: None)


CALLS: dict[type, Call] = {
    answers.ModelInfo: lambda client, url: client.weight_version(url),
    answers.LoadsAnswer: lambda client, url: client.loads(url),
    answers.ServerInfo: lambda client, url: probe(client, url, timeout_s=10),
    answers.UpdateAnswer: lambda client, url: client.update(url, "/update", {}),
    answers.ChecksumsAnswer: lambda client, url: client.weights_checksum(url, timeout_s=10),
    answers.AdapterAnswer: lambda client, url: client.load_adapter(url, "dora-1", "/v1", timeout_s=10),
    answers.ModelsAnswer: lambda client, url: clear(client, url, timeout_s=10),
    answers.AdapterInfo: lambda client, url: require_adapters(client, url, AdapterNeeds(2, 8, ("q_proj",))),
    answers.PromptAnswer: lambda client, url: client.prompt_logprobs(url, [1, 2], timeout_s=10),
}


@pytest.fixture
def server() -> Iterator[Answering]:
    with answering() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    show_warnings()
    async with EngineClient(max_connections=1) as client:
        yield client


async def require_shown(call: Awaitable[object], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        show(await call)
    except DoraError as err:
        show(err)
    shown = capfd.readouterr()
    assert shown.out + shown.err
    require_harmless(shown.out + shown.err)


def test_every_kind_of_answer_is_asked_for() -> None:
    inner = {answers.Loads, answers.RankLoad, answers.PromptMeta, answers.ModelCard}
    found = {each for each in vars(answers).values() if isinstance(each, type) and each.__module__ == answers.__name__}
    assert found - inner == CALLS.keys()


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
async def test_an_answer_is_shown_harmlessly(
    kind: type, server: Answering, client: EngineClient, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):  # an update has failed, or not
        good = plain(kind, text="x", number=number) | ({"success": False} if kind is answers.UpdateAnswer else {})
        for bad in poisoned(good, HOSTILE):
            server.answer = as_json(bad)
            await require_shown(CALLS[kind](client, server.url), capfd)


def events() -> Iterator[Any]:
    """A last chunk, one whose spans cover nothing, and each shape of an error."""
    every = plain(_Event, text="x")
    span = every["meta_info"]["weight_versions"][0]
    for first in (0, 1):
        for reason in ("stop", "x"):
            meta = every["meta_info"] | {"weight_versions": [span | {"start": first}]}
            meta["finish_reason"] = meta["finish_reason"] | {"type": reason}
            yield every | {"meta_info": meta}
    yield every | {"meta_info": every["meta_info"] | {"weight_versions": None}}
    for error in (every["error"], {"message": "x", "code": "x"}, "x", None):
        yield every | {"meta_info": None, "error": error}


async def test_a_stream_is_shown_harmlessly(
    server: Answering, client: EngineClient, capfd: pytest.CaptureFixture[str]
) -> None:
    for event in [bad for good in events() for bad in poisoned(good, HOSTILE)]:
        server.answer = as_json(f"data: {json.dumps(event)}\n\n".encode(), kind="text/event-stream")
        await require_shown(generate(client, server.url), capfd)
    server.answer = as_json(f"data: {HOSTILE}\n\n".encode(), kind="text/event-stream")
    await require_shown(generate(client, server.url), capfd)


@pytest.mark.parametrize("call", [generate, CALLS[answers.UpdateAnswer]], ids=["stream", "control"])
async def test_a_refusal_and_what_is_no_answer_are_shown_harmlessly(
    call: Call, server: Answering, client: EngineClient, capfd: pytest.CaptureFixture[str]
) -> None:
    for bad in [HOSTILE, *(bad for good in events() for bad in poisoned(good, HOSTILE) if not good["meta_info"])]:
        server.answer = as_json(bad, status=400)
        await require_shown(call(client, server.url), capfd)
    for answer in hostile_answers():
        server.answer = answer
        await require_shown(call(client, server.url), capfd)
