"""Messages between DORA's own processes, and requests to the embedded engine."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from dora.embedded.requests import GenerateCall, RefusedCall, RequestLimits
from dora.embedded.requests import parse as parse_request
from dora.engine.sglang.orders import Failed, Listening, Scored, SenderReady, Sent
from dora.engine.sglang.senders import read_reply
from dora.errors import ProtocolError
from dora.transport.codec import Buffer, decode, encode
from dora.transport.messages import (
    Ack,
    CheckpointWritten,
    ControllerData,
    ControllerFrame,
    Hello,
    MicroBatch,
    StepDone,
    Stop,
    TrainerData,
    TrainerFrame,
    VersionWritten,
    Welcome,
    empty_micro_batch,
)
from tests.fuzz.parsers import LONG, Parser, drive, require_robust, require_samples

SAMPLES: Final = Path(__file__).parent.parent / "embedded" / "samples"
_LENGTH: Final = struct.Struct("<I")


def packed(frames: Sequence[Buffer]) -> bytes:
    """ZeroMQ frames as one string of bytes, so that a mutation may also move their borders."""
    return b"".join(_LENGTH.pack(memoryview(frame).nbytes) + frame for frame in frames)


def unpacked(data: bytes) -> list[bytes]:
    frames: list[bytes] = []
    at = 0
    while len(data) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        frames.append(data[at : at + length])
        at += length
    return frames


def micro_batch(num_tokens: int) -> MicroBatch:
    empty = empty_micro_batch(step=3, index=1, last=True, group_size=2)
    return msgspec.structs.replace(
        empty,
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, np.uint8),
        behavior_logprobs=np.full(num_tokens, -0.5, np.float32),
        lengths=np.array([num_tokens], np.int32),
        trajectories=np.array([7], np.int64),
        group_rewards=np.array([[1.0, np.nan]], np.float32),
    )


def to_trainer() -> list[bytes]:
    messages = (Stop(reason="done"), micro_batch(9), micro_batch(20_000))
    frames = [
        encode(TrainerData(epoch=1, incarnation=0, id=number, message=message))
        for number, message in enumerate(messages)
    ]
    return [
        packed(one)
        for one in (
            *frames,
            encode(Welcome(epoch=1, incarnation=0, last_id=0)),
            encode(Ack(epoch=1, incarnation=0, last_id=2)),
        )
    ]


def to_controller() -> list[bytes]:
    messages = (
        StepDone(rank=0, step=3, metrics={"loss": 0.5, "grad_norm": float("nan")}),
        VersionWritten(version=4, num_bytes=9, files={"a": "b"}, chain="c"),
        CheckpointWritten(step=4, folder="/runs/a/checkpoints/step-000004", num_bytes=5, files={"a": "b"}),
    )
    frames = [
        encode(ControllerData(epoch=1, incarnation=0, id=number, message=message))
        for number, message in enumerate(messages)
    ]
    hello = Hello(protocol=2, rank=0, world_size=1, host="h", pid=9, last_id=0)
    return [packed(one) for one in (*frames, encode(hello))]


def parse_frames(data: bytes, *, kind: Any) -> None:
    message = decode(unpacked(data), kind)
    again = encode(message)
    assert packed(encode(decode(again, kind))) == packed(again)
    if isinstance(message, TrainerData) and isinstance(message.message, MicroBatch):
        assert message.message.tokens.dtype == np.int32
        assert not message.message.tokens.flags.writeable


def parse_sender(data: bytes) -> None:
    reply = read_reply(data)
    assert read_reply(msgspec.json.encode(reply)) == reply


def requests() -> list[bytes]:
    names = ("generate_logprob", "generate_skip_tokenizer", "stream_logprob", "generate_max_new_tokens_0")
    asked = [json.loads((SAMPLES / f"{name}.json").read_bytes())["request"] for name in names]
    captured = [request.get("body", request) for request in asked]
    full = {
        "rid": "a",
        "input_ids": [1, 2, 3],
        "extra_key": "run/3",
        "sampling_params": {
            **{"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "sampling_seed": -3},
            **{"stop_token_ids": [9], "ignore_eos": False, "stop": None, "logit_bias": {}, "custom_params": {}},
        },
        "logprob_start_len": 0,
        "return_logprob": True,
        "stream": True,
    }
    return [json.dumps(body).encode() for body in (*captured, full, {"text": "how many?", "cache_salt": "s"})]


SENDER: Final = [
    msgspec.json.encode(reply) + b"\n"
    for reply in (SenderReady(), Listening(port=9, buckets=[]), Sent(), Scored([1, 2], [-0.5]), Failed("no room"))
]
LIMITS: Final = RequestLimits(
    context_tokens=2_000,
    kv_tokens=1_900,
    vocab_size=1_000,
    eos_token_ids=frozenset({2}),
    draw_seed=lambda: 0,
    encode=lambda text: [ord(character) % 1_000 for character in text],
)


def parse_body(data: bytes, _scratch: Path) -> None:
    """A refusal is a value here: its text is SGLang's and may have several lines."""
    asked = parse_request(data, LIMITS)
    if isinstance(asked, RefusedCall):
        raise ProtocolError(str(asked.error))
    assert isinstance(asked, GenerateCall)
    generation = asked.generation
    assert all(type(token) is int and 0 <= token < LIMITS.vocab_size for token in generation.prompt_ids)
    assert 0 < len(generation.prompt_ids) < LIMITS.context_tokens
    assert 0 <= generation.sampling.max_new_tokens < LIMITS.context_tokens
    assert generation.sampling.temperature >= 0
    assert -(2**63) <= generation.sampling.seed < 2**63
    assert generation.logprob_start is None or 0 <= generation.logprob_start < len(generation.prompt_ids)


PARSERS: Final = [
    Parser("trainer frame", to_trainer, lambda data, _: parse_frames(data, kind=TrainerFrame)),
    Parser("controller frame", to_controller, lambda data, _: parse_frames(data, kind=ControllerFrame)),
    Parser("sender", lambda: SENDER, lambda data, _: parse_sender(data)),
    Parser("request", requests, parse_body),
]


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_any_message_is_accepted_or_refused_in_one_line(parser: Parser, tmp_path: Path) -> None:
    require_samples(parser, tmp_path)
    require_robust(parser, tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_many_more_messages_are_accepted_or_refused(parser: Parser, tmp_path: Path) -> None:
    drive(parser, tmp_path)
