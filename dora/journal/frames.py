"""Append-only files of framed records: the form that journal and token store share.

A frame is (payload length, CRC-32 of the length, CRC-32 of the payload), little-endian, then the payload. The length
has its own checksum so that a damaged length is not taken for a torn end. Invariant: a file grows only by whole frames
in order, so a crash leaves at most one incomplete frame, at the end; it is reported when read and cut off when the
file is opened for writing again. Any other damage is a JournalError with file and offset.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from zlib import crc32

from dora.errors import DoraError

_LENGTH: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<III")
#: Bytes held back at most; more is handed to the operating system without being asked for.
_MAX_PENDING: Final = 1 << 20


class JournalError(DoraError):
    """A journal or token file is damaged or cannot be written; the message names file and offset."""


class FrameReader:
    """The frames a file has now; every iteration reads these again, whatever is appended meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        self.num_bytes = 0  #: of whole frames, as seen by the last iteration
        self.torn_bytes = 0  #: of the incomplete frame behind them

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(offset, payload) of every whole frame, in order."""
        offset = self.num_bytes = self.torn_bytes = 0
        with self.path.open("rb") as file:
            while head := file.read(min(_HEAD.size, self._size - offset)):
                if len(head) < _HEAD.size:
                    self.torn_bytes = len(head)
                    return
                length, length_crc, payload_crc = _HEAD.unpack(head)
                if crc32(head[: _LENGTH.size]) != length_crc:
                    raise JournalError(f"{self.path}: the record at byte {offset} has a damaged length")
                payload = file.read(min(length, self._size - offset - _HEAD.size))
                if len(payload) < length:
                    self.torn_bytes = len(head) + len(payload)
                    return
                if crc32(payload) != payload_crc:
                    raise JournalError(f"{self.path}: the record at byte {offset} is damaged (checksum)")
                yield offset, payload
                offset += len(head) + length
                self.num_bytes = offset


class FrameWriter:
    """Appends frames. What `follows` holds reaches the disk before what this file holds, whoever asks."""

    def __init__(self, path: Path, *, follows: FrameWriter | None = None) -> None:
        self.path = path
        self.torn_bytes = 0  #: cut off the end on opening
        self._follows = follows
        self._pending = bytearray()
        if path.exists():
            reader = FrameReader(path)
            for _ in reader:
                pass
            self.torn_bytes = reader.torn_bytes
            os.truncate(path, reader.num_bytes)
        self._file = path.open("ab", buffering=0)

    def write(self, payload: bytes) -> None:
        """Append one frame, in memory until the next flush."""
        length = _LENGTH.pack(len(payload))
        self._pending += _HEAD.pack(len(payload), crc32(length), crc32(payload))
        self._pending += payload
        if len(self._pending) > _MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: it survives the end of this process."""
        if self._follows is not None:
            self._follows.flush()
        left = memoryview(self._pending)
        self._pending = bytearray()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as err:
            raise self._broken(err) from err

    def sync(self) -> None:
        """Flush, and wait until the disk has it: it survives a power failure."""
        if self._follows is not None:
            self._follows.sync()
        self.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as err:
            raise self._broken(err) from err

    def close(self) -> None:
        """Flush and close; a file that could not be written is closed already."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _broken(self, err: OSError) -> JournalError:
        self._file.close()  # at worst it ends in a torn frame; nothing may be appended behind that
        return JournalError(f"{self.path}: cannot be written: {err.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
