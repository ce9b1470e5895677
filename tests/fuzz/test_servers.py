"""Answers of servers: streams of events, HTTP, control calls, refusals, the status of a run, replies of graders."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from dora.core.ids import InstanceId
from dora.engine.post import Post
from dora.engine.sglang.answers import (
    AdapterAnswer,
    AdapterInfo,
    ChecksumsAnswer,
    LoadsAnswer,
    ModelInfo,
    ModelsAnswer,
    PromptAnswer,
    ServerInfo,
    UpdateAnswer,
    read,
    read_server_info,
    without_secrets,
)
from dora.engine.sglang.stream import StreamParser, refusal
from dora.environments.replies import FailedCall
from dora.environments.replies import outcome_of as why_failed
from dora.environments.replies import read_reply as read_host
from dora.errors import DoraError
from dora.observe.facts import ShellFacts
from dora.observe.scores import Score
from dora.observe.snapshot import decode as decode_status
from dora.observe.snapshot import encode as encode_status
from dora.observe.snapshot import snapshot
from dora.status.client import reply_text
from dora.tasks.pool import Graded, GradingFailed, outcome_of, read_reply
from tests.core.world import run
from tests.fuzz.parsers import LONG, Parser, drive, require_robust, require_samples

CAPTURES: Final = Path(__file__).parent.parent / "engine" / "captures"


def bodies(*names: str) -> list[bytes]:
    """The bodies of captured answers."""
    found = [json.loads((CAPTURES / f"{name}.json").read_bytes())["body"] for name in names]
    return [body.encode() if isinstance(body, str) else json.dumps(body).encode() for body in found]


def streams() -> list[bytes]:
    names = ("stream_logprob", "stream_incremental_skip_tokenizer")
    captured = [json.loads((CAPTURES / f"{name}.json").read_bytes())["events"] for name in names]
    joined = ["".join(f"{line}\n\n" for _, line in events if line).encode() for events in captured]
    return [*joined, (CAPTURES / "stream_cumulative_0.5.23.txt").read_bytes()]


def answers() -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    first, *others = streams()
    chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (10, first[:10], len(first) - 10, first[10:])
    (refused,) = bodies("error_too_long")
    return [
        head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks,
        *(head + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in others),
        b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"\r\n" + first,
        b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(refused) + refused,
    ]


def read_stream(data: bytes, cuts: Sequence[int] = ()) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs and end of the stream `data`, received in pieces."""
    tokens: list[int] = []
    logprobs: list[float] = []

    def take(new_tokens: Sequence[int], new_logprobs: Sequence[float]) -> None:
        assert len(new_tokens) == len(new_logprobs) > 0
        tokens.extend(new_tokens)
        logprobs.extend(new_logprobs)

    parser = StreamParser("http://server", take)
    try:
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            parser.feed(data[start:end])
        result = parser.close()
        assert result.num_tokens == len(tokens)
        assert not result.spans or result.spans[-1][2] == len(tokens)
    except DoraError as err:
        return tokens, logprobs, f"{type(err).__name__}: {err}"
    return tokens, logprobs, ""


def parse_stream(data: bytes, _scratch: Path) -> None:
    whole = read_stream(data)
    third = len(data) // 3
    assert repr(read_stream(data, (third, 2 * third))) == repr(whole), "the bytes' splits change what is read"
    parser = StreamParser("http://server", lambda tokens, logprobs: None)
    parser.feed(data)
    parser.close()


_LOOP: Final = asyncio.new_event_loop()


async def _post(data: bytes, cuts: Sequence[int]) -> tuple[bytes, int, bytes, str]:
    body = bytearray()
    post = Post("http://server", b"", on_events=body.extend)
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        post.data_received(data[start:end])
    post.connection_lost(None)
    assert post.ended.done()
    error = post.ended.exception()
    assert error is None or isinstance(error, DoraError), error
    return bytes(body), post.status, bytes(post.error), "" if error is None else f"{type(error).__name__}: {error}"


async def _parse_answer(data: bytes) -> None:
    body, status, refused, error = await _post(data, ())
    third = len(data) // 3
    cut = await _post(data, (third, 2 * third))
    assert cut[0] == body or body.startswith(cut[0]) or error, "the bytes' splits change what is read"
    post = Post("http://server", b"", on_events=StreamParser("http://server", lambda tokens, logprobs: None).feed)
    post.data_received(data)
    post.connection_lost(None)
    await post.ended
    assert str(refusal(status, refused, source="http://server"))


def parse_answer(data: bytes, _scratch: Path) -> None:
    _LOOP.run_until_complete(_parse_answer(data))


def control(shape: Any) -> Callable[[bytes, Path], None]:
    def parse(data: bytes, _scratch: Path) -> None:
        value = read(data, shape, what="http://server/path")
        assert msgspec.convert(msgspec.to_builtins(value), shape) == value

    return parse


def parse_server_info(data: bytes, _scratch: Path) -> None:
    info = without_secrets(read(data, dict[str, Any], what="http://server/server_info"))
    for shape in (ServerInfo, AdapterInfo):
        assert isinstance(read_server_info(info, shape, url="http://server"), shape)


def parse_refusal(data: bytes, _scratch: Path) -> None:
    error = refusal(500, data, source="http://server")
    assert str(error).isprintable()
    assert str(error).endswith("(500)") or len(str(error)) >= 100


def statuses() -> list[bytes]:
    facts = ShellFacts(run_id="job-1", strategy="dora", phase="running", urls={InstanceId(0): "http://a:1"})
    facts.scores.append(Score(name="heldout", version=0, mean=0.25, pass_at_n=0.5, num_samples=64))
    return [encode_status(snapshot(run(seed=20, steps=2).state, facts))]


def parse_status(data: bytes, _scratch: Path) -> None:
    snapshot = decode_status(data)
    assert decode_status(encode_status(snapshot)) == snapshot


def parse_said(data: bytes, _scratch: Path) -> None:
    assert isinstance(reply_text(data, status=200, address="http://run/instances/add"), str)


def parse_reply(data: bytes, _scratch: Path) -> None:
    outcome = outcome_of(read_reply(data))
    assert isinstance(outcome, Graded | GradingFailed)
    assert isinstance(outcome, Graded) or outcome.reason.isprintable()


def parse_host(data: bytes, _scratch: Path) -> None:
    reply = read_host(data, expected=("reset", "observation", "end"))
    if isinstance(reply, FailedCall):
        assert why_failed(reply).reason.isprintable()
    else:
        assert all(isinstance(message["content"], str) for message in reply.messages)


CONTROL: Final = {
    "loads": (LoadsAnswer, lambda: bodies("GET_v1_loads", "GET_v1_loads_busy")),
    "model info": (ModelInfo, lambda: bodies("GET_model_info")),
    "update": (UpdateAnswer, lambda: bodies("update_bad_path")),
    "adapter": (AdapterAnswer, lambda: [b'{"success":true,"error_message":"","loaded_adapters":{"a":"/a"}}']),
    "models": (ModelsAnswer, lambda: [b'{"object":"list","data":[{"id":"a","root":"/a","parent":"model"}]}']),
    "checksum": (ChecksumsAnswer, lambda: [b'{"per_engine_checksum":"ab12","success":true}']),
    "prompt": (PromptAnswer, lambda: [b'{"meta_info":{"input_token_logprobs":[[null,5,null],[-1.25,6,"a"]]}}']),
}
HOST: Final = [
    b'{"id":1,"type":"reset","messages":[{"role":"user","content":"p"}],"tools":[{"type":"function"}]}',
    b'{"id":2,"type":"observation","messages":[{"role":"tool","tool_call_id":"c","content":"7"}],"reward":0.5}',
    b'{"id":3,"type":"end","reward":null,"messages":[]}',
    b'{"id":4,"type":"failed","cause":"raised","reason":"raised KeyError: 1","stuck":true}',
]
PARSERS: Final = [
    Parser("stream", streams, parse_stream),
    Parser("http", answers, parse_answer),
    *(Parser(name, samples, control(shape)) for name, (shape, samples) in CONTROL.items()),
    Parser("server info", lambda: bodies("GET_server_info"), parse_server_info),
    Parser("refusal", lambda: bodies("error_bad_json", "error_too_long", "error_unknown_sp"), parse_refusal),
    Parser("status", statuses, parse_status),
    Parser("said", lambda: [b'{"said":"instance 3 is drained"}'], parse_said),
    Parser(
        "grader",
        lambda: [
            msgspec.msgpack.encode(reply)
            for reply in ({"reward": 0.5}, {"error": "ValueError: no"}, {"reward": -1e300})
        ],
        parse_reply,
    ),
    Parser("host", lambda: HOST, parse_host),
]


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_any_bytes_from_a_server_give_a_value_or_one_line(parser: Parser, tmp_path: Path) -> None:
    require_samples(parser, tmp_path)
    require_robust(parser, tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_many_more_bytes_give_a_value_or_one_line(parser: Parser, tmp_path: Path) -> None:
    drive(parser, tmp_path)
