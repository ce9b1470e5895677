"""Append-only files of records, in frames: the file format of the journal and of the token store.

A frame is (payload length, CRC-32 of the length, CRC-32 of the payload), little-endian, then the payload; a payload is
one or more records, each preceded by its length. A frame is written only when the one before it is on the disk.
Invariant: a crash or a power failure damages only the last frame, which is reported when the file is read, and cut off
when it is opened for writing. A damaged frame before an intact one has another cause: a JournalError with file and
offset.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from zlib import crc32

import numpy as np

from dora import files
from dora.errors import DoraError

_LENGTH: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<III")
#: Number of pending bytes at which a commit is requested.
LARGE: Final = 1 << 20


class JournalError(DoraError):
    """A journal or token file is damaged or cannot be written; the message names file and offset."""


class JournalFull(JournalError):
    """There was no space for a frame. The file is unchanged, so the frame may be stored again."""


class FrameReader:
    """The records of a file. Records that are appended after it was opened are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        self.num_bytes = 0  #: of intact frames, as found by the last iteration
        self.torn_bytes = 0  #: of the damaged end after them

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset of its frame, record) for every record, in order."""
        self.num_bytes = self.torn_bytes = 0
        if not self._size:
            return
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if len(data) < self._size:
                raise JournalError(f"{self.path}: was truncated while it was read")
            while (offset := self.num_bytes) < self._size:
                payload = self._payload(data, offset)
                if payload is None:
                    self._require_end(data, offset)
                    self.torn_bytes = self._size - offset
                    return
                yield from self._records(payload, offset=offset)
                self.num_bytes += _HEAD.size + len(payload)

    def _payload(self, data: mmap.mmap, offset: int) -> bytes | None:
        """Return the payload of the frame at `offset`; None if the frame is damaged."""
        start = offset + _HEAD.size
        if start > self._size:
            return None
        length, length_crc, payload_crc = _HEAD.unpack_from(data, offset)
        if crc32(data[offset : offset + _LENGTH.size]) != length_crc or start + length > self._size:
            return None
        payload = data[start : start + length]
        return payload if crc32(payload) == payload_crc else None

    def _require_end(self, data: mmap.mmap, damaged: int) -> None:
        """Raise JournalError if an intact frame follows. Only offsets whose length fits the file are checked."""
        for start in range(damaged + 1, damaged + 1 + _LENGTH.size):
            count = (self._size - _HEAD.size - start) // _LENGTH.size + 1
            if count < 1:
                continue
            places = start + _LENGTH.size * np.arange(count)
            lengths = np.frombuffer(data[start : start + _LENGTH.size * count], "<u4")
            fits = (lengths >= _LENGTH.size) & (places + _HEAD.size + lengths <= self._size)
            for offset in places[fits].tolist():
                if self._payload(data, offset):
                    raise JournalError(f"{self.path}: the record at byte {damaged} is damaged (checksum)")

    def _records(self, payload: bytes, *, offset: int) -> Iterator[tuple[int, bytes]]:
        start = 0
        while start < len(payload):
            end = start + _LENGTH.size
            end += int.from_bytes(payload[start:end], "little")
            if start + _LENGTH.size > len(payload) or end > len(payload):
                raise JournalError(f"{self.path}: the frame at byte {offset} does not consist of whole records")
            yield offset, payload[start + _LENGTH.size : end]
            start = end


class FrameWriter:
    """Collector of records, which are stored as one frame. Opening a file cuts off a torn end, and syncs what a killed
    process has left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0  #: cut off the end on opening
        self.num_records = 0  #: written since the file was opened
        self.on_large: Callable[[], None] = lambda: None  #: called when LARGE bytes are pending
        self._pending = bytearray()
        is_new = not path.exists()
        if not is_new:
            reader = FrameReader(path)
            for _ in reader:
                pass
            self.torn_bytes = reader.torn_bytes
            if reader.torn_bytes:
                files.truncate(path, reader.num_bytes)
            files.sync(path)  # later records rely on those that were just read
        self._file = path.open("ab", buffering=0)
        if is_new:
            files.append(self._file, path, b"")
            files.sync_folder(path.parent)

    def write(self, record: bytes) -> None:
        """Append a record in memory."""
        self._pending += _LENGTH.pack(len(record))
        self._pending += record
        self.num_records += 1
        if len(self._pending) > LARGE:
            self.on_large()

    def take(self) -> bytes:
        """Return the records written since the last call, as a frame for `store`; empty if there are none."""
        if not self._pending:
            return b""
        payload, self._pending = bytes(self._pending), bytearray()
        length = _LENGTH.pack(len(payload))
        return _HEAD.pack(len(payload), crc32(length), crc32(payload)) + payload

    def store(self, frame: bytes) -> None:
        """Append a frame, and wait until it is on the disk.

        After a failure other than JournalFull nothing more can be stored, because it is unknown how much of the frame
        is on the disk; the next writer cuts it off.
        """
        if not frame:
            return
        try:
            self._append(frame)
            files.sync(self.path, self._file.fileno())
            if not os.fstat(self._file.fileno()).st_nlink:
                raise OSError(errno.ENOENT, "it was deleted")
        except (OSError, ValueError) as err:
            self._file.close()
            reason = err.strerror if isinstance(err, OSError) else "an earlier write failed"
            raise JournalError(f"{self.path}: cannot be written: {reason}") from err

    def _append(self, frame: bytes) -> None:
        try:
            files.append(self._file, self.path, frame)
        except OSError as err:
            if files.is_full(err):
                raise JournalFull(f"{self.path}: cannot be written: {err.strerror}") from err
            raise

    def abandon(self) -> None:
        """Close without storing pending records, because earlier ones are not on the disk."""
        self._pending.clear()
        self._file.close()

    def close(self) -> None:
        """Store pending records and close. No effect after a failure."""
        if not self._file.closed:
            self.store(self.take())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
