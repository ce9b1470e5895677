"""Wire types <-> ZeroMQ frames: one msgpack header frame, then one raw little-endian frame per array.

An array is written into the header as (frame number, dtype, shape); on receipt it is a read-only view of the frame's
own memory, so tensors are never copied. Whatever does not follow the protocol becomes `ProtocolError`.
Called by: controller_end, trainer_end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from dora.errors import ProtocolError
from dora.transport.messages import Message

Buffer = bytes | memoryview


def encode(message: Message) -> list[Buffer]:
    """Frames of `message`; array frames share memory with its arrays."""
    buffers: list[Buffer] = []

    def refer(array: Any) -> tuple[int, str, tuple[int, ...]]:
        if not isinstance(array, np.ndarray):
            raise NotImplementedError(f"{type(array).__name__} cannot travel")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)
        buffers.append(little.reshape(-1).view(np.uint8).data)
        return len(buffers), little.dtype.str, little.shape

    header = msgspec.msgpack.encode(message, enc_hook=refer)
    return [header, *buffers]


def decode(frames: Sequence[Buffer], kind: Any) -> Any:
    """The message in `frames`; `kind` is the union of wire types it must belong to."""
    if not frames:
        raise ProtocolError("a message without frames")
    used: set[int] = set()

    def resolve(annotation: Any, reference: Any) -> np.ndarray[Any, Any]:
        number, dtype, shape = msgspec.convert(reference, tuple[int, str, tuple[int, ...]])
        wanted = np.dtype(get_args(get_args(annotation)[1])[0]).newbyteorder("<")
        if dtype != wanted.str:
            raise ValueError(f"dtype {dtype} where {wanted.str} is the protocol")
        if not 1 <= number < len(frames):
            raise ValueError(f"array frame {number} is missing")
        buffer = memoryview(frames[number])
        if math.prod(shape) * wanted.itemsize != buffer.nbytes:
            raise ValueError(f"{buffer.nbytes} bytes do not make shape {shape} of {dtype}")
        used.add(number)
        return np.frombuffer(buffer, dtype=wanted).reshape(shape)

    try:
        message = msgspec.msgpack.decode(frames[0], type=kind, dec_hook=resolve)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ProtocolError(f"a message that is not the protocol: {err}") from err
    if len(used) != len(frames) - 1:
        raise ProtocolError(f"{len(frames) - 1} array frames, of which the header names {len(used)}")
    return message
