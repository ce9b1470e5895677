"""POST /generate over a real socket, against captured SGLang answers (`samples/`, from 0.5.20)."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dora.embedded.server import ServeOptions
from dora.errors import ConfigError
from tests.embedded.conftest import EOS, VOCAB, Reference, Served, Serving

LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def sample(name: str) -> Any:
    return json.loads((Path(__file__).parent / "samples" / f"{name}.json").read_text())


def keys(answer: dict[str, Any]) -> dict[str, set[str]]:
    return {"answer": set(answer), "meta_info": set(answer["meta_info"])}


async def running(served: Served, rid: str, **fields: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """Start a unary call in the background and wait until it is live."""
    call = asyncio.create_task(served.generate([5, 6, 7, 8], sampling=LONG, rid=rid, **fields), name=rid)
    async with asyncio.timeout(20):
        while rid not in served.engine.batcher.live:
            await served.get("/v1/loads")  # a round trip through the server's own loop
    return call, asyncio.Event()


async def test_an_answer_has_the_keys_of_a_captured_one(served: Served) -> None:
    answer = await served.generate([5, 6, 7, 8], sampling={"max_new_tokens": 3, "ignore_eos": True})
    assert keys(answer) == keys(sample("generate_skip_tokenizer")["body"])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 3, 0)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert meta["input_token_logprobs"] == []
    assert [token for _, token, text in meta["output_token_logprobs"] if text is None] == answer["output_ids"]
    assert meta["output_token_logprobs_length"] == 3


async def test_a_least_duration_of_steps_changes_no_token(serving: Serving) -> None:
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    answers = []
    for min_step_ms in (0.0, 5.0):
        async with serving(min_step_ms=min_step_ms) as served:
            calls = (served.generate([5, 6, 7, first], sampling=sampling) for first in range(8, 12))
            answers.append([answer["output_ids"] for answer in await asyncio.gather(*calls)])
    assert answers[0] == answers[1]


async def test_drafts_change_no_token_and_are_reported_as_sglang_does(serving: Serving) -> None:
    """A greedy answer of a random model soon repeats itself."""
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0.0}
    answers, metas = [], []
    for draft_tokens in (0, 4):
        async with serving(draft_tokens=draft_tokens) as served:
            calls = (served.generate([5, 6, 7, first], sampling=sampling) for first in range(8, 11))
            answers.append([answer["output_ids"] for answer in await asyncio.gather(*calls)])
            metas.append((await served.generate([5, 6, 7, 7], sampling=sampling))["meta_info"])
            [load] = (await served.get("/v1/loads"))[1]["loads"]
            assert ("speculative" in load) == (draft_tokens > 0)
    assert answers[0] == answers[1]
    assert not {key for key in metas[0] if key.startswith("spec_")}
    steps = metas[1]["spec_verify_ct"]
    assert steps < 250
    assert metas[1]["spec_accept_length"] == 300 / steps
    assert metas[1]["spec_num_correct_drafts"] == 300 - steps <= metas[1]["spec_num_proposed_drafts"]


async def test_a_repeated_prompt_is_cached_except_for_its_last_token(served: Served) -> None:
    await served.generate([5, 6, 7, 8])
    again = await served.generate([5, 6, 7, 8])
    other = await served.generate([5, 6, 7, 8], extra_key="k1")
    salted = await served.generate([5, 6, 7, 8], cache_salt="k1")
    assert again["meta_info"]["cached_tokens"] == 3
    assert again["meta_info"]["cached_tokens_details"] == {"device": 3, "host": 0}
    for answer in (other, salted):
        assert answer["meta_info"]["cached_tokens"] == 0
        assert answer["meta_info"]["cached_tokens_details"] is None


async def test_prefill_only_has_the_keys_of_a_captured_one(served: Served) -> None:
    answer = await served.generate([5, 6, 7, 8], sampling={"max_new_tokens": 0})
    captured = keys(sample("generate_max_new_tokens_0")["body"])
    captured["answer"].discard("text")
    assert keys(answer) == captured
    assert answer["output_ids"] == []
    assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


async def test_prompt_logprobs_begin_with_null_and_are_those_of_a_plain_forward(
    served: Served, reference_a: Reference
) -> None:
    answer = await served.generate([5, 6, 7, 8], sampling={"max_new_tokens": 2}, logprob_start_len=0)
    triples = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in triples] == [5, 6, 7, 8]
    assert triples[0] == [None, 5, None]
    assert [logprob for logprob, _, _ in triples[1:]] == pytest.approx(reference_a.logprobs([5, 6, 7, 8]), abs=1e-4)


async def test_many_at_once_give_the_logprobs_of_a_plain_forward(served: Served, reference_a: Reference) -> None:
    prompts = [[i % VOCAB] * (1 + 3 * i) for i in range(20)]  # more than there are slots
    calls = [
        served.generate(ids, sampling={"max_new_tokens": 5 + i, "temperature": 0.8, "ignore_eos": True})
        for i, ids in enumerate(prompts)
    ]
    for ids, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
        expected = reference_a.logprobs(ids + answer["output_ids"], temperature=0.8)[len(ids) - 1 :]
        assert [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
            expected, abs=1e-4
        )


async def test_siblings_that_arrive_together_share_one_prefill(served: Served) -> None:
    calls = [served.generate([9] * 50, sampling={"max_new_tokens": 4}, rid=f"s{i}") for i in range(8)]
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in await asyncio.gather(*calls))
    assert cached == [0] + [49] * 7


async def test_end_of_sequence_and_stop_tokens_end_an_answer_and_stay_in_it(served: Served) -> None:
    every = list(range(VOCAB))
    stopped = await served.generate([5, 6], sampling={"max_new_tokens": 9, "stop_token_ids": every})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stopped["output_ids"][0]}
    assert len(stopped["output_ids"]) == 1
    ignored = await served.generate([5, 6], sampling={"max_new_tokens": 9, "stop_token_ids": every, "ignore_eos": True})
    assert len(ignored["output_ids"]) == 9
    ended = await served.generate([5, 6], sampling={"max_new_tokens": 1500, "sampling_seed": 1})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert ended["output_ids"].index(EOS) == len(ended["output_ids"]) - 1


async def test_min_new_tokens_holds_back_every_stop(served: Served) -> None:
    stops = list(range(0, VOCAB, 2))
    answer = await served.generate(
        [5, 6], sampling={"max_new_tokens": 200, "min_new_tokens": 20, "stop_token_ids": stops}
    )
    output = answer["output_ids"]
    assert len(output) > 20
    assert not set(output[:20]) & set(stops)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": output[-1]}


async def test_greedy_is_the_argmax_whatever_the_seed(served: Served, reference_a: Reference) -> None:
    answer = await served.generate([3, 4], sampling={"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True})
    assert answer["output_ids"] == reference_a.greedy([3, 4], 8)


async def test_equal_seeds_give_equal_tokens_and_no_seed_gives_new_ones(served: Served) -> None:
    async def tokens(**sampling: Any) -> list[int]:
        answer = await served.generate([3, 4], sampling={"max_new_tokens": 30, "ignore_eos": True, **sampling})
        return list(answer["output_ids"])

    first, again = await tokens(sampling_seed=7), await tokens(sampling_seed=7)
    assert first == again
    assert first != await tokens(sampling_seed=8)
    assert await tokens() != await tokens()


async def test_a_request_aborted_and_resumed_elsewhere_gets_the_same_tokens(serving: Serving) -> None:
    sampling = {**LONG, "max_new_tokens": 400, "temperature": 1.0, "top_p": 0.9, "sampling_seed": 2**62 + 5}
    async with serving() as one, serving() as two:
        whole = (await one.generate([5, 6, 7], sampling=sampling))["output_ids"]
        # Other requests run beside it, so that neither batch is the one that made `whole`.
        beside = [asyncio.create_task(one.generate([i, i], sampling=LONG, rid=f"b{i}")) for i in range(5)]
        moved = asyncio.create_task(one.generate([5, 6, 7], sampling=sampling, rid="moved"))
        async with asyncio.timeout(20):
            while len(getattr(one.engine.batcher.live.get("moved"), "output_ids", [])) < 40:
                await one.get("/v1/loads")
        await one.post("/abort_request", {"rid": "moved"})
        begun = await moved
        assert begun["meta_info"]["finish_reason"]["type"] == "abort"
        so_far = begun["output_ids"]
        rest = {**sampling, "max_new_tokens": 400 - len(so_far)}
        resumed = await two.generate([5, 6, 7, *so_far], sampling=rest)
        assert 40 <= len(so_far) < 400
        assert so_far + resumed["output_ids"] == whole
        await one.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*beside)


# --- streams


async def chunks(served: Served, **body: Any) -> list[Any]:
    fields = {"input_ids": [5, 6, 7, 8], "return_logprob": True, **body}
    return [event async for event in served.events(fields)]


async def test_a_cumulative_stream_repeats_everything_and_ends_with_done(served: Served) -> None:
    *events, last, done = await chunks(served, sampling_params={"max_new_tokens": 300, "ignore_eos": True})
    assert done == "[DONE]"
    assert len(events) >= 1
    for event in [*events, last]:
        count = event["meta_info"]["completion_tokens"]
        assert len(event["output_ids"]) == len(event["meta_info"]["output_token_logprobs"]) == count
        assert event["output_ids"] == last["output_ids"][:count]
    assert len(last["output_ids"]) == 300
    assert last["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 300}]
    for event in events:
        assert event["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in event["meta_info"]


async def test_an_incremental_stream_has_only_new_tokens_and_total_counts(serving: Serving) -> None:
    async with serving(incremental_streaming_output=True) as served:
        assert (await served.get("/server_info"))[1]["incremental_streaming_output"] is True
        *events, last, _ = await chunks(served, sampling_params={"max_new_tokens": 300, "ignore_eos": True})
        total = 0
        for event in [*events, last]:
            meta = event["meta_info"]
            total += len(event["output_ids"])
            assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
            assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == total
        assert (total, len(events) >= 1) == (300, True)
        assert last["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 300}]


async def test_chunks_have_the_keys_of_captured_ones(serving: Serving) -> None:
    captured = [json.loads(text[6:]) for _, text in sample("stream_incremental_skip_tokenizer")["events"][:-1]]
    async with serving(incremental_streaming_output=True) as served:
        first, *_, last, _ = await chunks(served, sampling_params={"max_new_tokens": 300, "ignore_eos": True})
    assert keys(first) == keys(captured[1])  # the first captured one has a time stamp more, once
    assert keys(last) == keys(captured[-1])


async def test_the_first_token_of_an_idle_server_is_not_held_back(served: Served) -> None:
    first, *_ = await chunks(served, sampling_params={"max_new_tokens": 300, "ignore_eos": True})
    assert first["meta_info"]["completion_tokens"] == 1


async def test_a_client_that_leaves_frees_its_slot(served: Served) -> None:
    body = {"input_ids": [5], "sampling_params": LONG, "stream": True, "rid": "left"}
    async with served.http.post("/generate", json=body) as answer:
        await answer.content.readline()
        answer.close()
    assert await served.engine.batcher.emptied(timeout_s=20)
    with pytest.raises(asyncio.TimeoutError):
        await served.http.post("/generate", json={**body, "stream": False}, timeout=aiohttp.ClientTimeout(total=0.1))
    assert await served.engine.batcher.emptied(timeout_s=20)


# --- aborts and rids


async def test_an_aborted_running_request_answers_200_with_its_partial_tokens(served: Served) -> None:
    call, _ = await running(served, "ab-2", return_logprob=False)
    async with asyncio.timeout(20):
        while not served.engine.batcher.rows:
            await served.get("/v1/loads")
    assert await served.post("/abort_request", {"rid": "ab-2"}) == (200, "")
    answer = await call
    captured = sample("abort_one")
    assert answer["meta_info"]["finish_reason"] == captured["body_meta"]["finish_reason"]
    assert set(captured["body_meta"]) - set(answer["meta_info"]) <= {"decode_throughput"}
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < 1500


async def test_a_request_aborted_in_the_queue_has_a_text_and_no_prompt_counts(serving: Serving) -> None:
    async with serving(slots=1) as served:
        first, _ = await running(served, "first")
        second, _ = await running(served, "second")
        await served.post("/abort_request", {"rid": "second"})
        answer = await second
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(meta)
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
        await served.post("/abort_request", {"rid": "first"})
        await first


async def test_aborting_an_unknown_rid_has_no_effect(served: Served) -> None:
    assert await served.post("/abort_request", {"rid": "nope"}) == (200, "")
    assert await served.post("/abort_request", {"abort_all": True}) == (200, "")
    assert await served.post("/abort_request", {}) == (200, "")


async def test_a_live_rid_is_refused_and_a_finished_one_may_be_used_again(served: Served) -> None:
    call, _ = await running(served, "same")
    body = {"input_ids": [5], "rid": "same"}
    assert await served.post("/generate", body) == (400, sample("error_same_rid_concurrent")[1]["body"])
    await served.post("/abort_request", {"rid": "same"})
    await call
    await served.generate([5], sampling={"max_new_tokens": 1}, rid="same")


async def test_a_full_queue_answers_503_or_one_chunk(serving: Serving) -> None:
    async with serving(slots=1, max_queued_requests=1) as served:
        calls = [(await running(served, f"q{i}"))[0] for i in range(2)]
        body = {"input_ids": [5, 6, 7, 8], "rid": "q3"}
        refused = json.loads(sample("error_queue_full")[4]["body_head"])
        assert await served.post("/generate", body) == (503, refused)
        chunk, done = await chunks(served, rid="q3")
        captured = json.loads(sample("error_queue_full_stream")[3]["body_head"].split("\n")[0][6:])
        assert done == "[DONE]"
        assert keys(chunk) == keys(captured)
        assert chunk["meta_info"]["finish_reason"] == captured["meta_info"]["finish_reason"]
        await served.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*calls)


# --- refusals


def doubled(text: str) -> str:
    """Each number of tokens twice as large, as this model's context is twice that of the captured server's."""
    return re.sub(r"\d+", lambda found: str(2 * int(found[0])), text)


@pytest.mark.parametrize("name", ["error_empty_ids", "error_no_input", "error_negative_max_new"])
async def test_a_bad_value_is_refused_with_the_captured_body(served: Served, name: str) -> None:
    captured = sample(name)
    assert await served.post("/generate", captured["request"]["body"]) == (400, captured["body"])


async def test_a_request_that_is_too_long_is_refused_with_the_captured_words(served: Served) -> None:
    too_long = {"input_ids": [5] * 10000, "sampling_params": {"max_new_tokens": 3}}
    expected = doubled(sample("error_too_long")["body"]["error"]["message"])
    assert await served.post("/generate", too_long) == (400, {"error": {"message": expected}})
    total = {"input_ids": [5] * 4000, "sampling_params": {"max_new_tokens": 6000}}
    expected = doubled(sample("error_total_too_long")["body"]["error"]["message"])
    assert await served.post("/generate", total) == (400, {"error": {"message": expected}})


async def test_a_request_that_can_never_fit_the_kv_is_refused(serving: Serving) -> None:
    async with serving(kv_tokens=100) as served:
        status, body = await served.post("/generate", {"input_ids": [5] * 50, "sampling_params": LONG})
        assert status == 400
        assert "the engine holds 100" in body["error"]["message"]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": -1}, "temperature must be non-negative, got -1.0."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens must be in [0, max_new_tokens(4)], got 5."),
        ({"n": 2}, "n must be 1 on the embedded engine, got 2: send 2 calls."),
        ({"stop": "x"}, "stop is not supported by the embedded engine; leave it out."),
        ({"repetition_penalty": 1.1}, "repetition_penalty is not supported by the embedded engine; leave it out."),
    ],
)
async def test_sampling_out_of_range_or_beyond_this_engine_is_refused(
    served: Served, sampling: dict[str, Any], words: str
) -> None:
    answer = await served.post("/generate", {"input_ids": [5], "sampling_params": sampling})
    assert answer == (400, {"error": {"message": words}})


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"input_ids": [[5], [6]]}, "several prompts"),
        ({"input_ids": [5, VOCAB]}, f"must be in [0, {VOCAB})"),
        ({"input_ids": [-1]}, f"must be in [0, {VOCAB})"),
        ({"text": "hello"}, "skip_tokenizer_init"),
        ({"input_ids": [5], "rid": ["a"]}, "rid is a list"),
        ({"input_ids": [5], "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
    ],
)
async def test_an_unsupported_field_is_refused(served: Served, fields: dict[str, Any], word: str) -> None:
    status, body = await served.post("/generate", fields)
    assert status == 400
    assert word in body["error"]["message"]


async def test_a_refusal_inside_a_stream_is_an_event_of_a_200(served: Served) -> None:
    body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": -1}}
    captured = [text[6:] for _, text in sample("stream_error")["events"]]
    events = [event async for event in served.events(body)]
    assert events == [json.loads(captured[0]), captured[1]]


@pytest.mark.parametrize(
    "sampling", [{"top_k": 2**63}, {"stop_token_ids": [VOCAB]}, {"stop_token_ids": [-1]}, {"stop_token_ids": [2**70]}]
)
async def test_what_lies_beyond_the_vocabulary_has_no_effect(served: Served, sampling: dict[str, Any]) -> None:
    same = {"max_new_tokens": 3, "min_new_tokens": 3, "sampling_seed": 7}
    answers = [await served.generate([5, 6], sampling=same | more) for more in ({}, sampling)]
    one, other = (answer["meta_info"]["output_token_logprobs"] for answer in answers)
    assert one == other


@pytest.mark.parametrize(
    "raw",
    [b"{", b'{"input_ids": "x"}', b'{"input_ids": [1.5]}', b"[]", b"", b'{"rid": "\xff"}', b'{"x":' + b"[" * 100_000],
)
async def test_a_malformed_body_is_a_400_with_the_validation_shape(served: Served, raw: bytes) -> None:
    async with served.http.post("/generate", data=raw, headers={"Content-Type": "application/json"}) as answer:
        body = await answer.json()
    captured = json.loads(sample("error_bad_json")["body"])
    assert answer.status == 400
    assert set(body) == set(captured)
    assert {**body, "message": ""} == {**captured, "message": ""}


async def test_an_unknown_sampling_key_is_plain_text_and_an_unknown_top_level_key_is_ignored(served: Served) -> None:
    captured = sample("error_unknown_sp")
    assert await served.post("/generate", captured["request"]["body"]) == (500, captured["body"])
    await served.generate([5], sampling={"max_new_tokens": 1}, foo=1)


async def test_a_port_in_use_is_named_in_the_error(serving: Serving) -> None:
    async with serving() as served:
        port = served.http._base_url.port if served.http._base_url is not None else 0
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serving(port=port):
                raise AssertionError("two servers on one port")


def test_options_default_to_loopback_any_port_and_one_thread(model_a: Path) -> None:
    options = ServeOptions(model_path=model_a)
    assert (options.host, options.port, options.threads) == ("127.0.0.1", 0, 1)
