"""Wire types <-> ZeroMQ frames: one msgpack header frame, then, if the message has arrays, a frame with all small ones
and one frame for each large one.

In the header an array is (dtype, shape), which also says where its little-endian bytes are: those below
OWN_FRAME_BYTES lie in the second frame in the order in which the header names them, each from a multiple of ALIGN; the
others are the frames after it, in the same order. A frame costs as much as copying some 20 KB, so small arrays share
one; large ones are never copied. On receipt an array is a read-only view of its frame's own memory. Whatever does not
follow the protocol becomes `ProtocolError`.
Called by: controller_end, trainer_end, the store of rollouts in dora.controller.
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
OWN_FRAME_BYTES = 65_536  # pyzmq copies what is smaller
ALIGN = 8


def encode(message: Message) -> list[Buffer]:
    """Frames of `message`; those of large arrays share memory with them."""
    small: list[Buffer] = []
    large: list[Buffer] = []

    def refer(array: Any) -> tuple[str, tuple[int, ...]]:
        if not isinstance(array, np.ndarray):
            raise NotImplementedError(f"{type(array).__name__} cannot travel")
        little = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        if little.nbytes < OWN_FRAME_BYTES:
            small.extend((little.data, bytes(-little.nbytes % ALIGN)))
        else:
            large.append(little.reshape(-1).view(np.uint8).data)
        return little.dtype.str, little.shape

    header = msgspec.msgpack.encode(message, enc_hook=refer)
    return [header, b"".join(small), *large] if small or large else [header]


def decode(frames: Sequence[Buffer], kind: Any) -> Any:
    """The message in `frames`; `kind` is the union of wire types it must belong to."""
    if not frames:
        raise ProtocolError("a message without frames")
    small = memoryview(frames[1] if len(frames) > 1 else b"").toreadonly()
    large = [memoryview(frame).toreadonly() for frame in reversed(frames[2:])]
    taken = 0  # bytes of `small`

    def resolve(annotation: Any, reference: Any) -> np.ndarray[Any, Any]:
        nonlocal taken
        dtype, shape = reference  # what is no such pair, and a shape that is none, raises ValueError or TypeError
        wanted, name = _dtype(annotation)
        if dtype != name:
            raise ValueError(f"dtype {dtype} where {name} is the protocol")
        num_bytes = math.prod(shape) * wanted.itemsize
        if num_bytes >= OWN_FRAME_BYTES and large and large[-1].nbytes == num_bytes:
            return np.ndarray(shape, wanted, large.pop())
        if num_bytes >= OWN_FRAME_BYTES or num_bytes > small.nbytes - taken:
            raise ValueError(f"there are no bytes for shape {shape} of {dtype}")
        array: np.ndarray[Any, Any] = np.ndarray(shape, wanted, small, taken)
        taken += num_bytes + -num_bytes % ALIGN
        return array

    try:
        message = msgspec.msgpack.decode(frames[0], type=kind, dec_hook=resolve)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ProtocolError(f"a message that is not the protocol: {err}") from err
    if taken != small.nbytes or large:
        raise ProtocolError("more bytes of arrays than the header names")
    return message


@cache
def _dtype(annotation: Any) -> tuple[np.dtype[Any], str]:
    """Of a field `NDArray[scalar]`, and what it is called on the wire."""
    scalar: type[np.generic] = get_args(get_args(annotation)[1])[0]
    little = np.dtype(scalar).newbyteorder("<")
    return little, little.str
