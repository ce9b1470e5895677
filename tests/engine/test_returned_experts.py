"""The choice of experts in answers: read exactly once whole, and every other form of it is one line."""

from __future__ import annotations

import base64
import json
import re
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scripted_server import ScriptedServer, captured

from dora.engine.api import AskedRouting, GenerateRequest
from dora.engine.sglang import routing
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.engine.sglang.routing import routing_doubt
from dora.engine.sglang.stream import MAX_EVENT_BYTES, StreamParser
from dora.errors import ConfigError, ProtocolError
from dora.routing import RoutingShape

#: Five layers, of which the first and the fourth have no experts.
SHAPE = RoutingShape(num_layers=5, layers=(1, 2, 4), num_experts=300, top_k=2)
PROMPT, ANSWER, START = 6, 4, 2
ROWS = PROMPT + ANSWER - 1 - START
REQUEST = GenerateRequest(
    id="r-1",
    tokens=[5] * PROMPT,
    max_new_tokens=ANSWER,
    temperature=1.0,
    stop_tokens=[2],
    seed=11,
    label="run/3",
    routing=AskedRouting(SHAPE, START),
)


def choices(rows: int = ROWS, shape: RoutingShape = SHAPE, *, seed: int = 0) -> NDArray[np.int32]:
    """What a server records: distinct experts in layers that have some, zeros in others."""
    rng, found = np.random.default_rng(seed), np.zeros((rows, shape.num_layers, shape.top_k), np.int32)
    for layer in shape.layers:
        found[:, layer] = [rng.choice(shape.num_experts, shape.top_k, replace=False) for _ in range(rows)]
    return found


def in_base64(found: NDArray[np.int32]) -> str:
    return base64.b64encode(found.astype("<i4").tobytes()).decode()


def answer(experts: Any, *, tokens: int = ANSWER, finish: str = "length", steps: bool = False) -> bytes:
    triples = [[-0.5, 7, None]] * tokens
    meta: dict[str, Any] = {"finish_reason": {"type": finish}, "completion_tokens": tokens}
    meta |= {"output_token_logprobs": triples, "weight_versions": [{"version": "v", "start": 0, "end": tokens}]}
    if experts is not None:
        meta["routed_experts"] = experts
    first = {"output_token_logprobs": triples[:1], "completion_tokens": 1, "finish_reason": None}
    events = [{"meta_info": first}] * steps + [{"meta_info": meta}]
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=8, vocab_size=512) as client:
        yield client


def ignore(token_ids: Any, logprobs: Any) -> None: ...


async def test_the_choices_of_layers_with_experts_come_from_the_first_token_of_interest_on(
    server: ScriptedServer, client: EngineClient
) -> None:
    server.streams(answer(in_base64(choices()), steps=True))
    result = await client.generate(server.url, REQUEST, ignore)
    assert result.chosen is not None
    assert (result.chosen.start, result.chosen.experts.dtype) == (START, np.uint16)
    assert result.chosen.experts.tolist() == choices()[:, [1, 2, 4]].tolist()
    body = server.calls[0][1]
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, START)


async def test_without_a_question_nothing_is_asked_or_read(server: ScriptedServer, client: EngineClient) -> None:
    server.streams(answer("not base64"))
    assert (await client.generate(server.url, replace(REQUEST, routing=None), ignore)).chosen is None
    assert not {name for name in server.calls[0][1] if "routed" in name}


@pytest.mark.parametrize("start", [-1, PROMPT])
async def test_a_question_about_tokens_that_are_not_there_is_never_sent(
    server: ScriptedServer, client: EngineClient, start: int
) -> None:
    with pytest.raises(ConfigError, match=rf"experts from token {start} of 6 on"):
        await client.generate(server.url, replace(REQUEST, routing=AskedRouting(SHAPE, start)), ignore)
    assert not server.calls


def repeated() -> NDArray[np.int32]:
    found = choices()
    found[5, 2] = 7
    return found


def beyond(expert: int) -> NDArray[np.int32]:
    found = choices()
    found[3, 4, 1] = expert
    return found


WRONG = {
    "absent": (None, "an answer of 4 tokens came without the choice of experts; start the server with --enable-"),
    "a truth value": (False, "expected `str`, got `bool`"),
    "a row too few": (in_base64(choices(ROWS - 1)), f"{ROWS - 1} tokens of 5 layers and 2 experts, expected {ROWS}"),
    "a row too many": (in_base64(choices(ROWS + 1)), f"{ROWS + 1} tokens of 5 layers and 2 experts, expected {ROWS}"),
    "cut": (in_base64(choices())[:-4], f"expected {ROWS}"),
    "all rows of the prompt": (in_base64(choices(PROMPT + ANSWER - 1)), f"9 tokens .* expected {ROWS}"),
    "only layers with experts": (in_base64(choices()[:, [1, 2, 4]]), f"4.2 tokens of 5 layers .* expected {ROWS}"),
    "an expert twice": (in_base64(repeated()), "token 5 has an expert twice in layer 2"),
    "never recorded": (in_base64(np.zeros((ROWS, 5, 2), np.int32)), "token 0 has an expert twice in layer 1"),
    "an expert too high": (in_base64(beyond(300)), "expert 300 of 300"),
    "256 above an expert": (in_base64(beyond(2**16)), "expert 65536 of 300"),
    "a negative expert": (in_base64(beyond(-1)), "expert -1 of 300"),
    "not base64": ("!" * len(in_base64(choices())), "Invalid base64"),
    "not text": ("é" * (len(in_base64(choices())) // 2), "Invalid base64"),
    "padding": ("=" * len(in_base64(choices())), "Invalid base64"),
    "padded early": ("AA==" + in_base64(choices())[4:], "Invalid base64"),
    "a list": ([[1, 2]], "Expected `str`, got `array`"),
    "nothing": ("", "0 tokens of 5 layers"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_whatever_else_a_server_returns_is_one_line_that_names_it_and_what_to_do(
    server: ScriptedServer, client: EngineClient, case: str
) -> None:
    experts, says = WRONG[case]
    server.streams(answer(experts))
    with pytest.raises(ProtocolError, match=f"(?i){says}") as error:
        await client.generate(server.url, REQUEST, ignore)
    line = str(error.value)
    assert line.startswith(f"{server.url}: ")
    assert "\n" not in line
    assert line.endswith("or set objective.router_replay to off")


@pytest.mark.parametrize("experts", [None, "", in_base64(choices(PROMPT - 1))])
async def test_an_answer_without_tokens_needs_none(
    server: ScriptedServer, client: EngineClient, experts: str | None
) -> None:
    server.streams(answer(experts, tokens=0, finish="abort"))
    result = await client.generate(server.url, REQUEST, ignore)
    assert (result.was_stopped, result.chosen) == (True, None)


async def test_a_stop_while_the_request_waits_to_be_continued_has_none(
    server: ScriptedServer, client: EngineClient
) -> None:
    """SGLang returns them from a batch, and such a request is in none."""
    server.streams(answer(None, tokens=3, finish="abort"))
    result = await client.generate(server.url, REQUEST, ignore)
    assert (result.num_tokens, result.chosen) == (3, None)


async def test_a_stop_of_a_running_request_has_the_rows_of_its_tokens(
    server: ScriptedServer, client: EngineClient
) -> None:
    server.streams(answer(in_base64(choices(ROWS - 1)), tokens=ANSWER - 1, finish="abort"))
    chosen = (await client.generate(server.url, REQUEST, ignore)).chosen
    assert chosen is not None
    assert len(chosen.experts) == ROWS - 1


@given(st.lists(st.integers(0, 100_000), max_size=8), st.booleans())
def test_choices_are_read_wherever_the_bytes_are_split(cuts: list[int], escaped: bool) -> None:
    text = in_base64(choices())
    data = answer(text, steps=True)
    if escaped:
        data = data.replace(text.encode(), b"".join(b"\\u%04x" % ord(letter) for letter in text))
    ids = array("i")
    parser = StreamParser("http://server", lambda token_ids, logprobs: ids.extend(token_ids))
    begin = 0
    for cut in [*sorted(cut % len(data) for cut in cuts), len(data)]:
        parser.feed(data[begin:cut])
        begin = cut
    assert parser.close().num_tokens == len(ids) == ANSWER
    assert parser.routed is not None
    assert REQUEST.routing is not None
    chosen = routing.read_chosen(parser.routed, REQUEST.routing, rows=ROWS, source="http://server")
    assert chosen.experts.tolist() == choices()[:, [1, 2, 4]].tolist()


@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_an_expert_twice_is_found_wherever_it_is(top_k: int, rows: int, seed: int) -> None:
    shape = RoutingShape(num_layers=3, layers=(0, 2), num_experts=7, top_k=top_k)
    experts = np.random.default_rng(seed).integers(0, 7, (rows, 2, top_k)).astype(shape.dtype)
    found = [
        f"token {row} has an expert twice in layer {shape.layers[layer]}"
        for row in range(rows)
        for layer in range(2)
        if len(set(experts[row, layer].tolist())) < top_k
    ]
    fault = shape.fault(experts)
    assert fault in found if found else fault == ""


def test_an_event_may_be_as_large_as_the_longest_request_makes_it() -> None:
    wide = RoutingShape(num_layers=48, layers=(*range(48),), num_experts=128, top_k=8)
    longest = replace(REQUEST, tokens=[5], max_new_tokens=32_768, routing=AskedRouting(wide, 0))
    limit = routing.max_event_bytes(longest)
    assert limit - MAX_EVENT_BYTES == 32_768 * 48 * 8 * 4 * 4 // 3
    assert routing.max_event_bytes(replace(longest, routing=None)) == MAX_EVENT_BYTES
    rows = 2_000
    data = answer(in_base64(np.tile(choices(20, wide), (rows // 20, 1, 1))), tokens=1)
    parser = StreamParser("http://server", ignore, max_event_bytes=len(data))
    for begin in range(0, len(data), 2**16):
        parser.feed(data[begin : begin + 2**16])
    assert parser.routed is not None
    chosen = routing.read_chosen(parser.routed, AskedRouting(wide, 0), rows=rows, source="http://server")
    assert (chosen.experts[-20:] == choices(20, wide)).all()


# --- servers that are refused

RETURNS = {**captured("GET_server_info.json"), "version": "0.5.23", "enable_return_routed_experts": True}


def test_a_server_that_returns_them_is_not_doubted() -> None:
    assert routing_doubt(RETURNS, url="http://server") == ""
    assert routing_doubt({**RETURNS, "version": "0.6.0.dev3"}, url="http://server") == ""
    assert routing_doubt({**RETURNS, "version": "main"}, url="http://server") == ""


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("version", "0.5.22", "needs SGLang 0.5.23 or newer; this is 0.5.22"),
        ("enable_return_routed_experts", False, "start it with --enable-return-routed-experts"),
        ("enable_return_routed_experts", None, "start it with --enable-return-routed-experts"),
        ("enable_hierarchical_cache", True, "start it without --enable-hierarchical-cache"),
        ("enable_hisparse", True, "start it without --enable-hisparse"),
        ("enable_lmcache", True, "start it without --enable-lmcache"),
        ("enable_flexkv", True, "start it without --enable-flexkv"),
        (
            "disaggregation_decode_enable_offload_kvcache",
            True,
            "start it without --disaggregation-decode-enable-offload-kvcache",
        ),
        ("disaggregation_mode", "decode", "start it without --disaggregation-mode decode"),
        ("speculative_algorithm", "EAGLE3", "start it without --speculative-algorithm"),
        ("enable_two_batch_overlap", True, "start it without --enable-two-batch-overlap"),
        ("enable_prefill_cp", True, "start it without --enable-prefill-cp"),
        ("radix_cache_backend", "flexkv", "start it without --radix-cache-backend"),
        ("dcp_size", 2, "start it with --dcp-size 1, not 2"),
        ("pp_size", 2, "start it with --pp-size 1, not 2"),
        ("attn_cp_size", 4, "start it with --attn-cp-size 1, not 4"),
        ("moe_runner_backend", "flashinfer_trtllm", "start it with --moe-runner-backend triton"),
        ("moe_runner_backend", "flashinfer_mxfp4", "start it with --moe-runner-backend triton"),
        ("moe_runner_backend", "triton_kernel", "start it with --moe-runner-backend triton"),
    ],
)
def test_a_server_that_would_return_other_choices_is_doubted(argument: str, value: Any, says: str) -> None:
    assert says in routing_doubt({**RETURNS, argument: value}, url="http://server")


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer_trtllm_routed", "flashinfer_cutlass", "deep_gemm"])
def test_runners_that_take_the_choice_of_experts_are_not_doubted(backend: str) -> None:
    assert routing_doubt({**RETURNS, "moe_runner_backend": backend}, url="http://server") == ""


async def test_the_doubt_refuses_a_server_only_where_choices_are_replayed(
    server: ScriptedServer, client: EngineClient
) -> None:
    server.says("/server_info", captured("GET_server_info.json"))
    server.says("/v1/loads", captured("GET_v1_loads.json"))
    server.says("/model_info", captured("GET_model_info.json"))
    server.streams(answer(None, tokens=1))
    found = await probe(client, server.url, timeout_s=10)
    found.require_meant(server.url, slots=None, transfer="disk")
    refusal = f"{server.url}: the choice of experts needs SGLang 0.5.23 or newer; this is 0.5.20, or set objective."
    with pytest.raises(ConfigError, match=f"^{re.escape(refusal)}"):
        found.require_meant(server.url, slots=None, transfer="disk", routing=True)
