"""The promises of `dora/engine/api.py`, on which the rest of DORA relies, tested through that interface alone.

A suite for another engine begins with these tests; only the fixtures `engine` and `url` are SGLang's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from dora.core.strategies import Pause
from dora.engine.api import GenerateResult, InferenceEngine
from dora.engine.errors import ServerGone
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.errors import ConfigError, RemoteError
from tests.embedded.conftest import CONTEXT, VOCAB, Reference
from tests.sglang.conftest import KV_TOKENS, PROMPT, SETTLE_S, SLOTS, START_LABEL, Tokens, Wire, request

LIMIT_S = 30.0
UNUSED_URL = "http://127.0.0.1:9"


@pytest.fixture
def engine(client: EngineClient) -> InferenceEngine:
    return SglangEngine(client)


@pytest.fixture
def url(wire: Wire) -> str:
    """One server, which holds model a under START_LABEL and is put back so afterwards."""
    return wire.server.url


async def begin(engine: InferenceEngine, url: str, name: str) -> tuple[asyncio.Task[GenerateResult], Tokens]:
    """A request that does not end by itself, in the middle of its answer."""
    tokens = Tokens()
    call = asyncio.create_task(engine.generate(url, request(name, endless=True), tokens))
    await tokens.until(5)
    return call, tokens


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SETTLE_S):
        while not await holds():  # noqa: ASYNC110 - another process's state can only be polled
            await asyncio.sleep(0.02)


def is_covered(result: GenerateResult) -> bool:
    """Every token has the version that it was sampled under."""
    borders = [0, *(end for _, _, end in result.spans)]
    return [start for _, start, _ in result.spans] == borders[:-1] and borders[-1] == result.num_tokens


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_every_token_is_delivered_once_with_its_log_prob_and_the_version_of_its_weights(
    engine: InferenceEngine, url: str, reference_a: Reference
) -> None:
    tokens = Tokens()
    result = await engine.generate(url, request("whole-0"), tokens)
    assert not result.was_stopped
    assert result.num_tokens == len(tokens.token_ids) == len(tokens.logprobs)
    assert result.spans == ((START_LABEL, 0, result.num_tokens),)
    expected = reference_a.logprobs([*PROMPT, *tokens.token_ids])[len(PROMPT) - 1 :]
    assert tokens.logprobs == pytest.approx(expected, abs=1e-3)


async def test_an_answer_that_ignores_its_ends_has_as_many_tokens_as_its_budget(
    engine: InferenceEngine, url: str
) -> None:
    anything = replace(request("ends-00"), stop_tokens=[*range(VOCAB)])
    assert (await engine.generate(url, anything, Tokens())).num_tokens == 1
    result = await engine.generate(url, replace(anything, id="ends-01", ignore_end=True), Tokens())
    assert (result.finish_reason, result.num_tokens) == ("length", anything.max_new_tokens)


async def test_a_stopped_request_returns_its_tokens_and_can_be_resumed_under_another_id(
    engine: InferenceEngine, url: str
) -> None:
    call, tokens = await begin(engine, url, "stop-00")
    await engine.stop(url, "stop-00")
    result = await call
    assert result.was_stopped
    assert result.num_tokens == len(tokens.token_ids)
    assert is_covered(result)
    rest = Tokens()
    again = replace(request("stop-01"), tokens=[*PROMPT, *tokens.token_ids], max_new_tokens=3, stop_tokens=[])
    resumed = await engine.generate(url, again, rest)
    assert resumed.spans == ((START_LABEL, 0, len(rest.token_ids)),)
    assert not resumed.was_stopped


async def test_stopping_one_request_stops_no_other_and_an_unknown_id_is_not_an_error(
    engine: InferenceEngine, url: str
) -> None:
    first, _ = await begin(engine, url, "one-00")
    second, tokens = await begin(engine, url, "one-01")
    await engine.stop(url, "unknown")
    await engine.stop(url, "one-00")
    assert (await first).was_stopped
    await tokens.until(len(tokens.token_ids) + 20)
    assert not second.done()
    await engine.stop(url, "one-01")
    assert (await second).was_stopped


async def test_what_would_harm_a_server_is_refused_before_it_is_sent(engine: InferenceEngine, url: str) -> None:
    for change in ({"tokens": [VOCAB]}, {"tokens": []}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError):
            await engine.generate(url, replace(request("harm-0"), **change), Tokens())  # type: ignore[arg-type]
    assert await engine.is_alive(url, timeout_s=LIMIT_S)


# -- servers ----------------------------------------------------------------------------------------------------------


async def test_a_server_says_what_it_is_and_asking_changes_nothing(engine: InferenceEngine, url: str) -> None:
    found = await engine.examine(url, timeout_s=LIMIT_S)
    assert (found.slots, found.kv_tokens, found.label) == (SLOTS, KV_TOKENS, START_LABEL)
    assert found.release
    assert CONTEXT - 8 < found.longest_request <= CONTEXT
    assert await engine.examine(url, timeout_s=LIMIT_S) == found


async def test_a_server_says_how_much_of_its_kv_room_is_in_use(engine: InferenceEngine, url: str) -> None:
    call, tokens = await begin(engine, url, "room-0")

    async def is_counted() -> bool:
        return (await engine.kv_use(url)).used_tokens >= len(PROMPT)

    await until(is_counted)
    assert (await engine.kv_use(url)).kv_tokens == KV_TOKENS
    await engine.stop(url, "room-0")
    assert (await call).num_tokens == len(tokens.token_ids)


async def test_to_resume_a_server_that_is_not_paused_changes_nothing(engine: InferenceEngine, url: str) -> None:
    call, tokens = await begin(engine, url, "resume-0")
    await engine.resume(url)
    await tokens.until(len(tokens.token_ids) + 20)
    await engine.stop(url, "resume-0")
    assert (await call).was_stopped


async def test_an_address_without_a_server_is_not_alive(engine: InferenceEngine, url: str) -> None:
    assert await engine.is_alive(url, timeout_s=LIMIT_S)
    assert not await engine.is_alive(UNUSED_URL, timeout_s=LIMIT_S)
    with pytest.raises(ServerGone, match=UNUSED_URL):
        await engine.label(UNUSED_URL)
    with pytest.raises(ServerGone, match=UNUSED_URL):
        await engine.generate(UNUSED_URL, request("nobody-0"), Tokens())


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_after_a_push_all_tokens_are_of_the_new_weights_and_no_kv_of_the_old_ones_is_found(
    engine: InferenceEngine, url: str, model_b: Path, reference_b: Reference
) -> None:
    await engine.generate(url, request("warm-0"), Tokens())
    await engine.push(url, folder=model_b, label="run/1", timeout_s=LIMIT_S, live=None)
    assert await engine.label(url) == "run/1"
    tokens = Tokens()
    result = await engine.generate(url, replace(request("pushed-0"), label="run/1"), tokens)
    assert result.spans == (("run/1", 0, result.num_tokens),)
    assert result.cached_tokens == 0
    expected = reference_b.logprobs([*PROMPT, *tokens.token_ids])[len(PROMPT) - 1 :]
    assert tokens.logprobs == pytest.approx(expected, abs=1e-3)


async def test_a_push_to_a_server_that_holds_a_request_fails_and_the_request_continues(
    engine: InferenceEngine, url: str, model_b: Path
) -> None:
    call, tokens = await begin(engine, url, "busy-0")
    await tokens.until(30)  # by now real SGLang has counted it
    with pytest.raises(RemoteError):  # well before the request ends: a fast machine takes a second for its tokens
        await engine.push(url, folder=model_b, label="run/1", timeout_s=0.3, live=None)
    assert await engine.label(url) == START_LABEL
    await tokens.until(len(tokens.token_ids) + 20)
    await engine.stop(url, "busy-0")
    assert {label for label, _, _ in (await call).spans} == {START_LABEL}


async def test_a_cancelled_request_is_dropped_so_that_its_server_accepts_a_push(
    engine: InferenceEngine, url: str, model_b: Path
) -> None:
    call, _ = await begin(engine, url, "given-up-0")
    call.cancel()
    await asyncio.wait({call})
    await engine.push(url, folder=model_b, label="run/1", timeout_s=LIMIT_S, live=None)
    assert await engine.label(url) == "run/1"


@pytest.mark.parametrize("pause", get_args(Pause))
async def test_a_live_push_drains_nothing_and_each_token_keeps_its_version(
    engine: InferenceEngine, url: str, model_b: Path, pause: Pause
) -> None:
    call, tokens = await begin(engine, url, f"live-{pause}")
    await engine.push(url, folder=model_b, label="run/1", timeout_s=LIMIT_S, live=pause)
    assert not call.done()
    await tokens.until(len(tokens.token_ids) + 10)
    await engine.stop(url, f"live-{pause}")
    result = await call
    assert is_covered(result)
    assert result.spans[-1][0] == "run/1"
