"""The other form of stream, where each chunk repeats the answer so far: SGLang's default, on both servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dora.engine.sglang.client import EngineClient
from tests.embedded.conftest import Reference
from tests.sglang.conftest import (
    LONG,
    PROMPT,
    START_LABEL,
    Kind,
    Server,
    Tokens,
    Wire,
    request,
    serving,
    spans_of,
)

pytestmark = pytest.mark.timeout(120, func_only=True)  # starting a server has a limit of its own


@pytest.fixture(scope="module")
def server(kind: Kind, model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(kind, model_a, tmp_path_factory.mktemp("logs"), incremental=False) as server:
        yield server


async def test_each_chunk_holds_the_answer_so_far(wire: Wire) -> None:
    async with wire.stream(sampling={"max_new_tokens": 200, "ignore_eos": True}) as (stream, task):
        await task
    assert stream.done
    answers = [event["output_ids"] for event in stream.events]
    assert len(answers) > 1
    for shorter, longer in pairwise(answers):
        assert longer[: len(shorter)] == shorter
    for event in stream.events:
        meta = event["meta_info"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
        assert meta["completion_tokens"] == len(event["output_ids"])
    assert spans_of(stream.meta) == [{"version": START_LABEL, "start": 0, "end": 200}]


@pytest.mark.parametrize("mode", [None, "retract"])
async def test_our_client_hands_each_token_on_once_also_when_the_request_is_aborted(
    wire: Wire, client: EngineClient, reference_a: Reference, mode: str | None
) -> None:
    url, tokens, rid = wire.server.url, Tokens(), f"cumulative-{mode}"
    call = asyncio.create_task(client.generate(url, request(rid, endless=True), tokens))
    await tokens.until(10)
    if mode == "retract":
        await client.pause(url, "retract")
    await client.abort(url, rid)
    async with asyncio.timeout(10):
        result = await call
    assert (result.finish_reason, result.num_tokens) == ("abort", len(tokens.token_ids))
    assert result.spans == ((START_LABEL, 0, result.num_tokens),)
    plain = reference_a.logprobs(PROMPT + tokens.token_ids)[len(PROMPT) - 1 :]
    assert tokens.logprobs == pytest.approx(plain, abs=1e-3)


async def test_a_slot_is_free_again_when_its_stream_is_left(wire: Wire) -> None:
    async with wire.stream(sampling=LONG) as (stream, _):
        await stream.until(20)
        await wire.until_load(num_running_reqs=1)
    await wire.until_load(num_running_reqs=0)
