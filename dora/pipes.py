"""The pipes of a child process that runs code of the user.

A frame is 4 bytes of length (big endian), then its payload. Invariant: only frames reach the pipes.
"""

from __future__ import annotations

import os
import struct
import sys
import traceback
from contextlib import suppress
from typing import BinaryIO

HEADER = struct.Struct(">I")

#: Begins each line of stderr about a failure that the process survived, so that such a line is not taken for the reason
#: why the process ended.
SURVIVED = "| "
#: Maximum size of a traceback, in characters; the end is kept.
_LONGEST_TRACEBACK = 16_000


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move stdin and stdout to new descriptors, and return them. Code of the user, imported after this, may print and
    read freely: fd 0 then reads /dev/null, and fd 1 is stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def read_frame(pipe: BinaryIO) -> bytes | None:
    """Return the next frame, or None if the other side is gone."""
    header = _read(pipe, HEADER.size)
    return _read(pipe, HEADER.unpack(header)[0]) if header is not None else None


def _read(pipe: BinaryIO, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = pipe.read(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def write_frame(pipe: BinaryIO, body: bytes) -> None:
    rest = memoryview(HEADER.pack(len(body)) + body)
    while rest:
        rest = rest[pipe.write(rest) :]


def print_failure(what: str, err: BaseException) -> None:
    """Write the traceback of an exception of the user's code, which the process survives, to stderr."""
    lines = [what, *"".join(traceback.format_exception(err))[-_LONGEST_TRACEBACK:].splitlines()]
    with suppress(Exception):  # code of the user may have closed or replaced it
        sys.stderr.write("".join(f"{SURVIVED}{line}\n" for line in lines))
        sys.stderr.flush()
