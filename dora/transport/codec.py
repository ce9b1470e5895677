"""Messages <-> ZeroMQ frames: a msgpack header and, if the message has arrays, one frame with all small ones and one
frame for each large one.

In the header an array is (dtype, shape). The little-endian bytes of arrays below OWN_FRAME_BYTES are in the second
frame, in the order of the header, each aligned to ALIGN; the other arrays are the frames after it, in the same order. A
frame costs as much as copying some 20 KB, so small arrays share one; large ones are never copied. A received array is a
read-only view of its frame's memory. Anything that violates the protocol raises ProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np

from dora.errors import ProtocolError
from dora.transport.messages import Message

Buffer = bytes | memoryview
OWN_FRAME_BYTES = 65_536  # pyzmq copies smaller frames
ALIGN = 8
MAX_REASON = 200  # characters of an error text, parts of which the sender can choose
_MAX_DIMENSIONS = 32


def encode(message: Message) -> list[Buffer]:
    """Return the frames of `message`; large arrays are not copied."""
    small: list[Buffer] = []
    large: list[Buffer] = []

    def refer(array: Any) -> tuple[str, tuple[int, ...]]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} cannot be encoded")
        little = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        if little.nbytes < OWN_FRAME_BYTES:
            small.extend((little.data, bytes(-little.nbytes % ALIGN)))
        else:
            large.append(little.reshape(-1).view(np.uint8).data)
        return little.dtype.str, little.shape

    header = msgspec.msgpack.encode(message, enc_hook=refer)
    return [header, b"".join(small), *large] if small or large else [header]


def require_size(message: Message, frames: Sequence[Buffer], *, max_bytes: int, receiver: str) -> None:
    """ProtocolError if a frame exceeds the receiver's limit: it would close the connection without a reason."""
    longest = max(memoryview(frame).nbytes for frame in frames)
    if longest > max_bytes:
        raise ProtocolError(
            f"{type(message).__name__} has a frame of {longest:,} bytes; {receiver} accepts at most {max_bytes:,}"
        )


def decode(frames: Sequence[Buffer], kind: Any) -> Any:
    """Return the message in `frames`, which must belong to `kind`, a union of message types."""
    if not frames:
        raise ProtocolError("a message without frames")
    small = memoryview(frames[1] if len(frames) > 1 else b"").toreadonly()
    large = [memoryview(frame).toreadonly() for frame in reversed(frames[2:])]
    taken = 0  # bytes of `small`

    def resolve(annotation: Any, reference: Any) -> np.ndarray[Any, Any]:
        nonlocal taken
        dtype, shape = reference  # anything but such a pair raises ValueError or TypeError
        wanted, name = _dtype(annotation)
        if dtype != name:
            raise ValueError(f"dtype {dtype}, expected {name}")
        if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise ValueError("an impossible shape")
        num_bytes = math.prod(shape) * wanted.itemsize
        if num_bytes >= OWN_FRAME_BYTES and large and large[-1].nbytes == num_bytes:
            return np.ndarray(shape, wanted, large.pop())
        if num_bytes >= OWN_FRAME_BYTES or num_bytes > small.nbytes - taken:
            raise ValueError(f"no bytes for shape {shape} of {dtype}")
        array: np.ndarray[Any, Any] = np.ndarray(shape, wanted, small, taken)
        taken += num_bytes + -num_bytes % ALIGN
        return array

    try:
        message = msgspec.msgpack.decode(frames[0], type=kind, dec_hook=resolve)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"a message that violates the protocol: {str(err)[:MAX_REASON]}") from err
    if taken != small.nbytes or large:
        raise ProtocolError("more array bytes than the header describes")
    return message


@cache
def _dtype(annotation: Any) -> tuple[np.dtype[Any], str]:
    """Return the dtype of a field `NDArray[scalar]`, and its name in a header."""
    scalar: type[np.generic] = get_args(get_args(annotation)[1])[0]
    little = np.dtype(scalar).newbyteorder("<")
    return little, little.str
