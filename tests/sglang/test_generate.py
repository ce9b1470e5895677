"""POST /generate as the controller relies on it, on both servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.engine.api import Capabilities
from dora.engine.errors import RequestRefused
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from tests.embedded.conftest import CONTEXT, EOS, Reference
from tests.sglang.conftest import (
    DIALECT,
    KV_TOKENS,
    LONG,
    PROMPT,
    QUEUE,
    SLOTS,
    START_LABEL,
    Tokens,
    Wire,
    request,
    spans_of,
)

pytestmark = pytest.mark.timeout(120, func_only=True)  # starting a server has a limit of its own

#: What the controller reads of an answer.
META = {"finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "num_retractions"}
LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
VERSIONS = {"weight_version", "weight_versions"} if DIALECT.has_spans else {"weight_version"}


async def test_the_probe_finds_what_the_server_was_started_with(
    wire: Wire, client: EngineClient, model_a: Path
) -> None:
    found = await probe(client, wire.server.url, timeout_s=30)
    assert found.context_tokens is not None
    assert CONTEXT - 8 < found.context_tokens <= CONTEXT
    assert replace(found, context_tokens=None, routing_doubt="") == Capabilities(
        release=DIALECT.version,
        kv_tokens=KV_TOKENS,
        slots=SLOTS,
        context_tokens=None,
        label=START_LABEL,
        model_path=str(model_a),
    )
    assert await client.has_route(wire.server.url, "/begin_weight_update") == DIALECT.has_update_gate
    assert await client.has_route(wire.server.url, "/weights_checker")


async def test_a_unary_answer_has_the_fields_that_are_relied_on(wire: Wire) -> None:
    answer = await wire.generate(sampling={"max_new_tokens": 7, "ignore_eos": True}, rid="unary-0")
    meta = answer["meta_info"]
    assert set(answer) == {"output_ids", "meta_info"}
    assert meta.keys() >= META | LOGPROBS | VERSIONS | {"id", "e2e_latency"}
    assert (meta["id"], meta["finish_reason"]) == ("unary-0", {"type": "length", "length": 7})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (len(PROMPT), 7, 0)
    assert [token for _, token, text in meta["output_token_logprobs"] if text is None] == answer["output_ids"]
    assert (meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 7)
    assert spans_of(meta) == [{"version": START_LABEL, "start": 0, "end": 7}]


async def test_a_stream_holds_new_tokens_and_totals_and_spans_at_its_end(wire: Wire) -> None:
    async with wire.stream(sampling={"max_new_tokens": 200, "ignore_eos": True}) as (stream, task):
        await task
    assert stream.done
    assert len(stream.events) > 1
    total = 0
    for event in stream.events:
        meta = event["meta_info"]
        total += len(event["output_ids"])
        assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (total, total)
        assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
        assert (meta["finish_reason"] is not None) == (event is stream.events[-1])
        assert ("weight_versions" in meta) == (DIALECT.has_spans and event is stream.events[-1])
    assert total == 200
    assert spans_of(stream.meta) == [{"version": START_LABEL, "start": 0, "end": 200}]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.5}, {"top_k": 3}, {"temperature": 0}],
    ids=str,
)
async def test_logprobs_are_those_of_a_plain_forward_at_the_temperature_before_any_cut(
    wire: Wire, reference_a: Reference, sampling: dict[str, Any]
) -> None:
    answers = await asyncio.gather(
        *(
            wire.generate(sampling={**sampling, "max_new_tokens": 60, "ignore_eos": True}, input_ids=PROMPT[: 2 + i])
            for i in range(4)
        )
    )
    for number, answer in enumerate(answers):
        prompt = PROMPT[: 2 + number]
        given = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
        plain = reference_a.logprobs(prompt + answer["output_ids"], temperature=sampling.get("temperature") or 1.0)
        assert given == pytest.approx(plain[len(prompt) - 1 :], abs=1e-3)


async def test_greedy_is_the_argmax_and_goes_on_from_the_tokens_so_far(wire: Wire, reference_a: Reference) -> None:
    """A resumed request is a new one whose input is prompt and tokens so far."""
    greedy = reference_a.greedy(PROMPT, 30)
    first = await wire.generate(sampling={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True})
    so_far = PROMPT + first["output_ids"]
    rest = await wire.generate(
        sampling={"temperature": 0, "max_new_tokens": 18, "ignore_eos": True}, input_ids=so_far, rid="resumed"
    )
    assert first["output_ids"] + rest["output_ids"] == greedy
    assert spans_of(rest["meta_info"]) == [{"version": START_LABEL, "start": 0, "end": 18}]


async def test_a_stop_token_ends_an_answer_and_stays_in_it(wire: Wire, reference_a: Reference) -> None:
    greedy = reference_a.greedy(PROMPT, 30)
    stop = greedy[10]
    sampling = {"temperature": 0, "max_new_tokens": 30, "stop_token_ids": [stop], "no_stop_trim": True}
    answer = await wire.generate(sampling=sampling)
    end = min(greedy.index(stop), greedy.index(EOS) if EOS in greedy else 30) + 1
    assert answer["output_ids"] == greedy[:end]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": greedy[end - 1]}
    assert len(answer["meta_info"]["output_token_logprobs"]) == end


async def test_the_end_of_sequence_of_the_model_stops_an_answer(wire: Wire) -> None:
    answer = await wire.generate(sampling={"max_new_tokens": CONTEXT - 100})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1


async def test_the_client_reads_a_stream(wire: Wire, client: EngineClient, reference_a: Reference) -> None:
    tokens = Tokens()
    result = await client.generate(wire.server.url, request("client-0"), tokens)
    assert result.spans == ((START_LABEL, 0, result.num_tokens),)
    assert result.num_tokens == len(tokens.token_ids)
    assert result.finish_reason == ("stop" if tokens.token_ids[-1] == EOS else "length")
    plain = reference_a.logprobs(PROMPT + tokens.token_ids)[len(PROMPT) - 1 :]
    assert tokens.logprobs == pytest.approx(plain, abs=1e-3)


async def test_a_prefix_is_cached_within_its_namespace_only(wire: Wire) -> None:
    one_token = {"max_new_tokens": 1, "ignore_eos": True}
    seen = [
        (await wire.generate(sampling=one_token, **key))["meta_info"]["cached_tokens"]
        for key in ({"extra_key": "run/1"}, {"extra_key": "run/1"}, {"extra_key": "run/2"}, {"cache_salt": "s"}, {})
    ]
    assert seen == [0, len(PROMPT) - 1, 0, 0, 0]


# --- refusals


async def test_a_live_rid_is_refused_and_a_finished_one_may_come_again(wire: Wire, client: EngineClient) -> None:
    async with wire.stream(sampling=LONG, rid="twice-00") as (stream, task):
        await stream.until(1)
        duplicate = {"error": {"message": "Duplicate request ID detected: twice-00"}}
        assert await wire.post("/generate", {"input_ids": PROMPT, "rid": "twice-00"}) == (400, duplicate)
        with pytest.raises(RequestRefused, match="Duplicate request ID detected: twice-00") as refused:
            await client.generate(wire.server.url, request("twice-00"), Tokens())
        assert not refused.value.retryable
        seen = len(stream.token_ids)
        await stream.until(seen + 5)  # the first one has not noticed
        await wire.post("/abort_request", {"rid": "twice-00"})
        await task
    await client.generate(wire.server.url, request("twice-00"), Tokens())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [5] * CONTEXT}, f"The input ({CONTEXT} tokens) is longer than the model's context length"),
        (
            {"input_ids": [5] * (CONTEXT - 20), "sampling_params": {"max_new_tokens": 21}},
            f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens",
        ),
        ({"input_ids": []}, "cannot be empty"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0"),
    ],
    ids=["input", "total", "empty", "budget"],
)
async def test_a_bad_request_is_a_400_and_inside_a_stream_an_error_event(
    wire: Wire, fields: dict[str, Any], words: str
) -> None:
    status, body = await wire.post("/generate", fields)
    assert status == 400
    assert words in body["error"]["message"]
    async with wire.http.post("/generate", json={**fields, "stream": True}) as answer:
        event, done, rest = (await answer.text()).split("\n\n")
        assert (answer.status, done, rest) == (200, "data: [DONE]", "")
    assert words in event
    assert '"code":400,"retryable":false' in event.replace(" ", "")


@pytest.mark.parametrize(
    "raw",
    ["{half", '{"input_ids": "five"}', '{"input_ids": [5], "sampling_params": 7}'],
    ids=["not JSON", "wrong type", "wrong type inside"],
)
async def test_a_body_that_cannot_be_read_is_a_400_with_a_message_at_its_top(wire: Wire, raw: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with wire.http.post("/generate", data=raw, headers=headers) as answer:
        body = await answer.json()
    assert (answer.status, body["object"], body["type"], body["code"]) == (400, "error", "Bad Request", 400)
    assert body["message"]


async def test_a_request_that_leaves_room_as_the_probe_says_runs_to_its_budget(
    wire: Wire, client: EngineClient
) -> None:
    """However it was cut: the longest input with one token left, and the shortest with all."""
    room = (await probe(client, wire.server.url, timeout_s=30)).context_tokens
    assert room is not None
    for num_tokens, rid in ((room - 1, "room-one"), (room - 30, "room-many")):
        answer = await wire.generate(
            sampling={"max_new_tokens": room - num_tokens, "ignore_eos": True}, input_ids=[5] * num_tokens, rid=rid
        )
        assert answer["meta_info"]["completion_tokens"] == room - num_tokens


async def test_an_unknown_sampling_key_is_an_error_and_an_unknown_field_is_ignored(wire: Wire) -> None:
    status, body = await wire.post("/generate", {"input_ids": PROMPT, "sampling_params": {"no_such_key": 1}})
    if DIALECT.names_unknown_sampling_key:
        assert status == 400
        assert body["error"].startswith("unknown field `no_such_key`, expected one of ")
    else:
        assert (status, body) == (500, "Internal Server Error")
    await wire.generate(sampling={"max_new_tokens": 1}, no_such_field=1)


async def test_a_full_queue_is_a_503_and_inside_a_stream_an_abort_that_may_be_tried_again(
    wire: Wire, client: EngineClient
) -> None:
    calls = [asyncio.create_task(wire.generate(sampling=LONG, rid=f"runs-{i}")) for i in range(SLOTS)]
    await wire.until_load(num_running_reqs=SLOTS)
    calls += [asyncio.create_task(wire.generate(sampling=LONG, rid=f"waits-{i}")) for i in range(QUEUE)]
    await wire.until_load(num_waiting_reqs=QUEUE)
    status, body = await wire.post("/generate", {"input_ids": PROMPT})
    assert (status, body["message"], body["code"]) == (503, "The request queue is full.", 503)
    with pytest.raises(RequestRefused, match="The request queue is full") as refused:
        await client.generate(wire.server.url, request("full-000"), Tokens())
    assert refused.value.retryable
    await wire.post("/abort_request", {"abort_all": True})
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in await asyncio.gather(*calls)]
    assert reasons == ["abort"] * (SLOTS + QUEUE)


# --- aborts


async def test_a_running_request_that_is_aborted_keeps_its_tokens(wire: Wire, reference_a: Reference) -> None:
    async with wire.stream(sampling=LONG, rid="abort-00") as (stream, task):
        await stream.until(5)
        assert await wire.post("/abort_request", {"rid": "abort-00", "abort_all": False}) == (200, "")
        await task
    assert stream.done
    aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert stream.meta["finish_reason"] == aborted
    assert spans_of(stream.meta) == [{"version": START_LABEL, "start": 0, "end": len(stream.token_ids)}]
    assert stream.meta["completion_tokens"] == len(stream.token_ids)
    assert stream.logprobs == pytest.approx(
        reference_a.logprobs(PROMPT + stream.token_ids)[len(PROMPT) - 1 :], abs=1e-3
    )


async def test_a_request_aborted_while_it_waits_ends_without_tokens(wire: Wire, client: EngineClient) -> None:
    running = [asyncio.create_task(wire.generate(sampling=LONG, rid=f"busy-{i}")) for i in range(SLOTS)]
    await wire.until_load(num_running_reqs=SLOTS)
    queued = asyncio.create_task(wire.generate(sampling=LONG, rid="queued-0"))
    through_us = asyncio.create_task(client.generate(wire.server.url, request("queued-1"), Tokens()))
    await wire.until_load(num_waiting_reqs=2)
    for rid in ("queued-0", "queued-1"):
        await client.abort(wire.server.url, rid)
    answer, result = await queued, await through_us
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert "prompt_tokens" not in answer["meta_info"]
    assert (result.finish_reason, result.num_tokens) == ("abort", 0)
    await wire.post("/abort_request", {"abort_all": True})
    await asyncio.gather(*running)


async def test_aborting_an_unknown_request_is_not_an_error(wire: Wire) -> None:
    assert await wire.post("/abort_request", {"rid": "nobody-0"}) == (200, "")
    assert await wire.post("/abort_request", {"abort_all": True}) == (200, "")


async def test_an_abort_ends_no_other_request(wire: Wire) -> None:
    async with (
        wire.stream(sampling=LONG, rid="pair-0") as (one, first),
        wire.stream(sampling=LONG, rid="pair-1") as (other, _),
    ):
        await asyncio.gather(one.until(1), other.until(1))
        await wire.post("/abort_request", {"rid": "pair-0"})
        await first
        await other.until(len(other.token_ids) + 10)


async def test_a_client_that_leaves_a_unary_call_frees_the_slot(wire: Wire) -> None:
    call = asyncio.create_task(wire.generate(sampling=LONG))
    await wire.until_load(num_running_reqs=1)
    call.cancel()
    await asyncio.wait({call})
    await wire.until_load(num_running_reqs=0)


async def test_a_client_that_leaves_its_stream_frees_the_slot(wire: Wire) -> None:
    async with wire.stream(sampling=LONG) as (stream, _):
        await stream.until(20)
        await wire.until_load(num_running_reqs=1)
    await wire.until_load(num_running_reqs=0)
