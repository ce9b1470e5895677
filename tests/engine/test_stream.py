"""The stream parser: each token once and in order, in every form of the stream, wherever it is split and however it
ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.engine.api import GenerateResult
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.sglang.stream import StreamParser, refusal
from dora.errors import ProtocolError

CAPTURES = Path(__file__).parent / "captures"
DONE = b"data: [DONE]\n\n"


@dataclass
class Received:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs


def read(*pieces: bytes, into: Received | None = None) -> tuple[Received, GenerateResult]:
    received = Received() if into is None else into
    parser = StreamParser("http://server", received.take)
    for piece in pieces:
        parser.feed(piece)
    return received, parser.close()


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(tokens: list[int], *, total: int, finish: dict[str, Any] | None = None, **meta: Any) -> bytes:
    triples = [[-token / 8, token, None] for token in tokens]
    meta = {"output_token_logprobs": triples, "completion_tokens": total, "finish_reason": finish, **meta}
    return event({"output_ids": tokens, "meta_info": meta})


def span(end: int, *, version: str = "run/3") -> dict[str, Any]:
    return {"version": version, "start": 0, "end": end}


def last(tokens: list[int], *, total: int, kind: str = "length") -> bytes:
    return chunk(tokens, total=total, finish={"type": kind}, weight_versions=[span(total)])


def captured_stream(name: str) -> bytes:
    if name.endswith(".txt"):
        return (CAPTURES / name).read_bytes()
    lines = [line for _, line in json.loads((CAPTURES / name).read_text())["events"]]
    return "".join(f"{line}\n\n" for line in lines).encode()


@pytest.mark.parametrize(
    ("name", "token_ids", "version"),
    [
        ("stream_logprob.json", [9, 370, 446], "default"),
        ("stream_cumulative_0.5.23.txt", [173, 365, 197], "v0"),
        ("stream_incremental_skip_tokenizer.json", [200, 179, 260, 183], "v0"),
    ],
)
def test_a_captured_stream_gives_each_token_once_at_every_split(name: str, token_ids: list[int], version: str) -> None:
    data = captured_stream(name)
    whole, result = read(data)
    assert whole.token_ids == token_ids
    assert all(-7 < logprob < -5 for logprob in whole.logprobs)
    assert (result.finish_reason, result.num_tokens) == ("length", len(token_ids))
    assert result.spans == ((version, 0, len(token_ids)),)
    for at in range(len(data) + 1):
        assert read(data[:at], data[at:]) == (whole, result)
    assert read(*(data[at : at + 1] for at in range(len(data)))) == (whole, result)


def test_the_last_chunk_of_a_captured_abort_keeps_all_tokens() -> None:
    body = json.loads((CAPTURES / "abort_one_stream.json").read_text())["last"][1]
    received, result = read(event(body), DONE)
    assert received.token_ids == body["output_ids"]
    assert (result.finish_reason, result.num_tokens, result.spans) == ("abort", 107, (("default", 0, 107),))
    assert result.cached_tokens == 3


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], bytes, list[int]]:
    """Tokens, the bytes of a stream of them (each chunk cumulative or incremental), and where to split the bytes."""
    tokens = draw(st.lists(st.integers(0, 500), min_size=1, max_size=12))
    ends = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=6)) | {len(tokens)})
    data, start = b"", 0
    for end in ends:
        shown = tokens[:end] if draw(st.booleans()) else tokens[start:end]
        data += last(shown, total=end) if end == len(tokens) else chunk(shown, total=end)
        data += draw(st.sampled_from([b"", b": keep-alive\n\n", b"\r\n"]))
        start = end
    data += DONE
    return tokens, data, sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))


@given(streams())
def test_any_mixture_of_forms_split_anywhere_gives_each_token_once(case: tuple[list[int], bytes, list[int]]) -> None:
    tokens, data, splits = case
    borders = [0, *splits, len(data)]
    received, result = read(*(data[a:b] for a, b in pairwise(borders)))
    assert received == Received(tokens, [-token / 8 for token in tokens])
    assert result.num_tokens == len(tokens)


@given(streams(), st.integers(0, 10_000))
def test_a_stream_cut_anywhere_keeps_a_prefix_of_the_tokens(case: tuple[list[int], bytes, list[int]], cut: int) -> None:
    tokens, data, _ = case
    received = Received()
    end = data.index(b"\n", data.index(b'"finish_reason": {')) + 1
    if cut % len(data) >= end:  # only [DONE] was lost: the answer is whole, to resume it would sample beyond its end
        read(data[: cut % len(data)], into=received)
        assert received.token_ids == tokens
    else:
        with pytest.raises(ServerGone, match=r"^http://server: the stream broke off after \d+ tokens$"):
            read(data[: cut % len(data)], into=received)
        assert received.token_ids == tokens[: len(received.token_ids)]


def test_an_abort_chunk_that_repeats_only_the_last_output_id_adds_nothing() -> None:
    """After a retract, incremental mode: output_ids holds the last token, log-probs all of them."""
    trap = event(
        {
            "text": "",
            "output_ids": [7],
            "meta_info": {
                "output_token_logprobs": [[-0.5, 5, None], [-0.75, 6, None], [-0.875, 7, None]],
                "completion_tokens": 3,
                "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
                "weight_versions": [span(3)],
            },
        }
    )
    received, result = read(chunk([5], total=1), chunk([6, 7], total=3), trap, DONE)
    assert received.token_ids == [5, 6, 7]
    assert result.finish_reason == "abort"


def test_an_abort_in_the_queue_before_the_first_token_is_an_empty_answer() -> None:
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"finish_reason": finish, "completion_tokens": 0, "weight_versions": [span(0)]}
    received, result = read(event({"text": "", "output_ids": [], "meta_info": meta}), DONE)
    assert (received.token_ids, result.finish_reason, result.spans) == ([], "abort", (("run/3", 0, 0),))


def test_an_answer_under_two_versions_has_both_spans() -> None:
    spans = [span(1), {"version": "run/4", "start": 1, "end": 2}]
    _, result = read(chunk([1, 2], total=2, finish={"type": "stop", "matched": 2}, weight_versions=spans), DONE)
    assert result.spans == (("run/3", 0, 1), ("run/4", 1, 2))
    assert result.finish_reason == "stop"


def test_an_answer_without_spans_has_one_span_of_the_label_on_its_last_chunk() -> None:
    """Labels on earlier chunks are those of the server's HTTP process at that moment."""
    early = chunk([1], total=1, weight_version="run/2")
    _, result = read(early, chunk([1, 2], total=2, finish={"type": "length"}, weight_version="run/3"), DONE)
    assert result.spans == (("run/3", 0, 2),)


def test_an_answer_without_a_version_has_no_span() -> None:
    _, result = read(chunk([1], total=1, finish={"type": "length"}), DONE)
    assert result.spans == ()


def test_spans_count_more_than_the_label_of_the_end() -> None:
    spans = [span(1), {"version": "run/4", "start": 1, "end": 2}]
    end = chunk([1, 2], total=2, finish={"type": "length"}, weight_versions=spans, weight_version="run/4")
    _, result = read(end, DONE)
    assert result.spans == (("run/3", 0, 1), ("run/4", 1, 2))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(chunk([1, 2], total=5), id="more tokens than shown"),
        pytest.param(chunk([1], total=1) + chunk([1, 2, 3], total=2), id="fewer tokens than shown"),
        pytest.param(chunk([1, 2], total=2) + chunk([1], total=1), id="tokens taken back"),
        pytest.param(event({"output_ids": [1], "meta_info": {"completion_tokens": 1}}), id="no log-probs"),
        pytest.param(event({"meta_info": {"output_token_logprobs": [[None, 5, None]]}}), id="a log-prob of null"),
        pytest.param(last([1, 2], total=2) + chunk([3], total=3), id="tokens after the last chunk"),
        pytest.param(chunk([1], total=1, finish={"type": "length"}, weight_versions=[span(2)]), id="spans too long"),
        pytest.param(chunk([1], total=1, finish={"type": "gave up"}), id="unknown finish reason"),
        pytest.param(event({"status": "ok"}), id="neither tokens nor error"),
        pytest.param(chunk([2**31], total=1), id="an id beyond 32 bits"),
        pytest.param(chunk([-5], total=1), id="an id below 0"),
        pytest.param(
            event({"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1e39, 5, None]]}}),
            id="a log-prob beyond float32",
        ),
        pytest.param(
            event({"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[1e39, 5, None]]}}),
            id="a log-prob that would become infinite",
        ),
        pytest.param(last([], total=0), id="the end of an answer without a token"),
        pytest.param(b"data: {half\n\n", id="broken JSON"),
        pytest.param(b"data: \xff\n\n", id="not text"),
    ],
)
def test_what_is_not_the_protocol_is_a_protocol_error_that_names_the_server(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^http://server: "):
        read(data, DONE)


def test_an_event_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    parser = StreamParser("http://server", Received().take, max_event_bytes=1_000)
    for piece in (b"data: ", *[b"x" * 100] * 9):
        parser.feed(piece)
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        parser.feed(b"x" * 100)


def test_tokens_before_an_error_in_the_same_bytes_are_delivered() -> None:
    received = Received()
    with pytest.raises(RequestRefused):
        read(chunk([4, 5], total=2) + event({"error": "out of memory"}) + DONE, into=received)
    assert received.token_ids == [4, 5]


def test_tokens_in_a_refusing_abort_chunk_are_delivered() -> None:
    received = Received()
    finish = {"type": "abort", "message": "Out of KV room", "status_code": 500}
    with pytest.raises(RequestRefused, match="Out of KV room") as refused:
        read(chunk([4], total=1) + chunk([4, 5], total=2, finish=finish) + DONE, into=received)
    assert received.token_ids == [4, 5]
    assert (refused.value.status, refused.value.retryable) == (500, True)


def test_a_captured_validation_error_inside_a_200_stream_is_a_refusal() -> None:
    with pytest.raises(
        RequestRefused, match=r"^http://server: max_new_tokens must be at least 0, got -1. \(400\)"
    ) as e:
        read(captured_stream("stream_error.json"))
    assert (e.value.status, e.value.retryable) == (400, False)


def test_a_captured_full_queue_inside_a_200_stream_may_be_retried() -> None:
    bodies = json.loads((CAPTURES / "error_queue_full_stream.json").read_text())
    with pytest.raises(RequestRefused, match="The request queue is full") as refused:
        read(bodies[3]["body_head"].encode())
    assert (refused.value.status, refused.value.retryable) == (503, True)


@pytest.mark.parametrize(
    ("error", "status", "retryable"),
    [
        ({"error": {"message": "m", "code": 503}}, 503, True),
        ({"error": {"message": "m", "code": 503, "retryable": False}}, 503, False),
        ({"error": {"message": "m", "code": "bad"}}, 400, False),
        ({"error": "m"}, 400, False),
        ({"object": "error", "message": "m", "code": 503}, 503, True),
    ],
)
def test_every_shape_of_error_in_a_stream_is_read(error: dict[str, Any], status: int, retryable: bool) -> None:
    with pytest.raises(RequestRefused, match=rf"^http://server: m \({status}\)$") as refused:
        read(event(error), DONE)
    assert (refused.value.status, refused.value.retryable) == (status, retryable)


PROBE = json.loads((CAPTURES / "probe_0.5.23.json").read_text())


@pytest.mark.parametrize(
    ("status", "body", "says", "retryable"),
    [
        (400, PROBE["unknown sampling param"][1], "unknown field `foo`", False),
        (400, json.dumps({"error": {"message": "Duplicate request ID detected: same"}}), "Duplicate request ID", False),
        (400, json.loads((CAPTURES / "error_bad_json.json").read_text())["body"], "JSON decode error", False),
        (503, json.loads((CAPTURES / "error_queue_full.json").read_text())[4]["body_head"], "queue is full", True),
        (500, "Internal Server Error", "Internal Server Error", True),
        (404, json.dumps({"detail": "Not Found"}), "Not Found", False),
        (502, "", "no reason given", True),
    ],
)
def test_every_captured_shape_of_a_refused_call_is_read(status: int, body: str, says: str, retryable: bool) -> None:
    error = refusal(status, body.encode(), source="http://server")
    assert says in str(error)
    assert str(error).startswith("http://server: ")
    assert (error.status, error.retryable) == (status, retryable)
