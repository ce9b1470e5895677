"""Every message survives encoding unchanged, and nothing else is accepted as one."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from dora.core.ids import StepId, TrajectoryId, VersionId
from dora.errors import ProtocolError
from dora.transport.codec import decode, encode
from dora.transport.messages import (
    ControllerData,
    ControllerFrame,
    LoraSettings,
    MicroBatch,
    StepDone,
    ToController,
    ToTrainer,
    TrainerData,
    TrainerFrame,
    TrainerSettings,
    empty_micro_batch,
)

WIRE_TYPES = [*get_args(ToTrainer), *get_args(ToController), *get_args(TrainerFrame), *get_args(ControllerFrame)]


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values for a field of a message."""
    origin = get_origin(annotation)
    if origin is np.ndarray:
        return stnp.arrays(get_args(get_args(annotation)[1])[0], stnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
    if annotation in WIRE_TYPES or annotation in (TrainerSettings, LoraSettings):
        return st.builds(annotation, **{name: values(hint) for name, hint in get_type_hints(annotation).items()})
    if annotation in (int, StepId, TrajectoryId, VersionId):
        return st.integers(-(2**63), 2**63 - 1)
    if origin in (Union, UnionType):
        return st.one_of([values(one) for one in get_args(annotation)])
    if annotation == tuple[int, ...]:
        return st.lists(values(int)).map(tuple)
    return st.from_type(annotation)


for kind in WIRE_TYPES:
    st.register_type_strategy(kind, values(kind))


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    else:
        np.testing.assert_equal(left, right)  # NaN equals NaN


def sent(message: Any) -> Any:
    """`message`, encoded and decoded, with each frame in separate memory."""
    union = ToTrainer | ToController | TrainerFrame | ControllerFrame
    return decode([bytes(frame) for frame in encode(message)], union)


@pytest.mark.parametrize("kind", WIRE_TYPES, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_message_survives_encoding(kind, data):
    message = data.draw(values(kind))
    assert_same(sent(message), message)


def test_arrays_are_views_of_their_frames_and_read_only():
    batch = empty_micro_batch(step=0, index=0, last=True, group_size=2)
    batch = msgspec.structs.replace(batch, tokens=np.arange(1000, dtype=np.int32))
    frames = encode(batch)
    received = decode(frames, ToTrainer)
    assert np.shares_memory(received.tokens, np.frombuffer(frames[1], np.uint8))
    assert not received.tokens.flags.writeable


def test_a_large_array_is_never_copied():
    batch = empty_micro_batch(step=0, index=0, last=True, group_size=2)
    batch = msgspec.structs.replace(
        batch, tokens=np.arange(20_000, dtype=np.int32), behavior_logprobs=np.ones((100, 200), np.float32)
    )
    frames = encode(batch)
    received = decode(frames, ToTrainer)
    for name in ("tokens", "behavior_logprobs"):
        assert np.shares_memory(getattr(received, name), getattr(batch, name))
        assert not getattr(received, name).flags.writeable
    assert_same(decode([bytes(frame) for frame in frames], ToTrainer), batch)
    for wrong in (
        frames[:-1],
        [*frames, frames[-1]],
        [frames[0], *frames[2:]],
        [*frames[:2], frames[3], frames[2][4:]],
    ):
        with pytest.raises(ProtocolError):
            decode(wrong, ToTrainer)


def test_a_big_endian_array_arrives_with_the_same_numbers():
    batch = empty_micro_batch(step=0, index=0, last=True, group_size=2)
    batch = msgspec.structs.replace(batch, tokens=np.arange(5, dtype=">i4"))
    np.testing.assert_array_equal(sent(batch).tokens, np.arange(5))


def header(**changes: Any) -> bytes:
    fields = {"type": "StepDone", "rank": 0, "step": 1, "metrics": {}, **changes}
    return msgspec.msgpack.encode(fields)


def batch_frames(reference: Any) -> list[bytes]:
    """A micro-batch with two tokens (the first eight bytes of the arrays), which `reference` describes."""
    batch = empty_micro_batch(step=0, index=0, last=True, group_size=2)
    header, arrays = encode(msgspec.structs.replace(batch, tokens=np.arange(2, dtype=np.int32)))
    fields = msgspec.msgpack.decode(header)
    assert fields["tokens"] == ["<i4", [2]]
    return [msgspec.msgpack.encode({**fields, "tokens": reference}), bytes(arrays)]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [header()[:-3]],
        [header(type="StepForgotten")],
        [header(surprise=1)],
        [header(step="one")],
        [header(metrics={1: 2.0})],
        [header(), b"nobody asked"],
        [msgspec.msgpack.encode({"type": "Stop", "reason": "x"})],  # for the other receiver
        batch_frames(["<i8", [1]]),
        batch_frames(["<u4", [2]]),
        batch_frames(["<i4", [3]]),
        batch_frames(["<i4", [0]]),
        batch_frames(["<i4", [-1, -2]]),
        batch_frames(["<i4", [2**62, 2**62]]),
        batch_frames(["<i4", [2]])[:-1],
        [*batch_frames(["<i4", [2]]), b""],
        [*batch_frames(["<i4", [2]])[:-1], batch_frames(["<i4", [2]])[1] + bytes(8)],
        batch_frames("tokens"),
    ],
)
def test_bytes_that_violate_the_protocol_are_refused(frames):
    with pytest.raises(ProtocolError):
        decode(frames, ToController | ControllerFrame | MicroBatch)


def test_a_frame_of_one_direction_is_refused_in_the_other():
    frames = encode(ControllerData(epoch=0, incarnation=0, id=1, message=StepDone(rank=0, step=0, metrics={})))
    with pytest.raises(ProtocolError):
        decode(frames, TrainerFrame)
    assert TrainerData.__struct_config__.tag != ControllerData.__struct_config__.tag
