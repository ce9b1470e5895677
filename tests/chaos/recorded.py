"""An independent reader of run folders, with `struct`, `zlib` and `msgspec`.

It follows the description of the format and imports nothing from dora, so that both readers cannot share a mistake.
Invariant: reading changes no file, and an active run can be read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

FRAME = struct.Struct("<III")  # payload bytes, CRC-32 of these four bytes, CRC-32 of the payload
CHUNK = struct.Struct("<BqIIII")  # kind, trajectory or group, epoch, attempt, start or siblings, tokens
PROMPT, SAMPLED, MASKED, FORKED, CHOICES = 0, 1, 2, 3, 4
BYTES_PER_TOKEN = {PROMPT: 4, SAMPLED: 8, MASKED: 9, FORKED: 9}
DIGEST_BYTES = 16  # after a prompt's tokens
FORK = struct.Struct("<II")  # after those of a forked chunk: parent row, number of its tokens

Record = dict[str, Any]


class Damaged(Exception):
    """Damage that no crash causes; the message names file and byte."""


@dataclass(frozen=True)
class Frames:
    """The intact frames of a file."""

    records: list[bytes]
    num_bytes: int  # of intact frames
    torn_bytes: int  # after them


def frame_at(data: bytes, offset: int) -> bytes | None:
    """Return the payload of an intact frame at this offset."""
    if offset + FRAME.size > len(data):
        return None
    length, length_crc, payload_crc = FRAME.unpack_from(data, offset)
    payload = data[offset + FRAME.size : offset + FRAME.size + length]
    if zlib.crc32(data[offset : offset + 4]) != length_crc or len(payload) != length:
        return None
    return payload if zlib.crc32(payload) == payload_crc else None


def read_frames(path: Path) -> Frames:
    """Read every record; Damaged if an intact frame follows a damaged one."""
    data = path.read_bytes()
    records: list[bytes] = []
    offset = 0
    while offset < len(data) and (payload := frame_at(data, offset)) is not None:
        records += split_payload(payload, f"{path.name}: the frame at byte {offset}")
        offset += FRAME.size + len(payload)
    for behind in range(offset + 1, len(data) - FRAME.size):
        if frame_at(data, behind):
            raise Damaged(f"{path.name}: the frame at byte {offset} is damaged, the one at {behind} is whole")
    return Frames(records, offset, len(data) - offset)


def split_payload(payload: bytes, where: str) -> Iterator[bytes]:
    start = 0
    while start < len(payload):
        end = start + 4 + int.from_bytes(payload[start : start + 4], "little")
        if start + 4 > len(payload) or end > len(payload):
            raise Damaged(f"{where} does not hold whole records")
        yield payload[start + 4 : end]
        start = end


def unpack(record: bytes) -> Record:
    """Decode a journal record as plain data, with its kind under `type`."""
    return dict(msgspec.msgpack.decode(record))


class Follower:
    """A reader of a growing journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[Record]:
        """Return the records of the frames completed since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        found: list[Record] = []
        offset = 0
        while (payload := frame_at(data, offset)) is not None:
            found += map(unpack, split_payload(payload, self.path.name))
            offset += FRAME.size + len(payload)
        self._offset += offset
        return found


@dataclass(frozen=True)
class Chunk:
    """One record of the token store."""

    kind: int
    number: int  # group of a prompt, trajectory of tokens
    epoch: int
    attempt: int
    start: int  # of a prompt: siblings of the group
    count: int
    fork: tuple[int, int] | None = None


def read_chunks(path: Path) -> list[Chunk]:
    """Read every record of a token store; Damaged if a length does not match its head."""
    found = []
    for record in read_frames(path).records:
        chunk = Chunk(*CHUNK.unpack_from(record))
        extra = {PROMPT: DIGEST_BYTES, FORKED: FORK.size, CHOICES: 4}.get(chunk.kind, 0)
        width = BYTES_PER_TOKEN.get(chunk.kind, -1)
        if chunk.kind == CHOICES:  # a mark and the experts of each token
            width = 1 + int.from_bytes(record[CHUNK.size : CHUNK.size + 4], "little")
        if len(record) != CHUNK.size + width * chunk.count + extra:
            raise Damaged(f"{path.name}: a record of kind {chunk.kind} has {len(record)} bytes")
        fork = FORK.unpack(record[-FORK.size :]) if chunk.kind == FORKED else None
        found.append(replace(chunk, fork=fork))
    return found
