"""Append-only files of records, in frames: the file format of the journal and of the token store.

A frame is (payload length, CRC-32 of the length, CRC-32 of the payload), little-endian, then the payload; a payload is
one or more records, each preceded by its length. A frame is written only when the one before it is on the disk.
Invariant: a crash or a power failure damages only the last frame, which is reported when the file is read, and cut off
when it is opened for writing. A damaged frame before an intact one has another cause: a JournalError with file and
offset.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self
from zlib import crc32

import numpy as np

from dora import files, foreign
from dora.errors import DoraError

_LENGTH: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<III")
#: Maximum size of a record. The largest is a whole answer or prompt: one of a million tokens takes 9 MB.
MAX_RECORD_BYTES: Final = 64 << 20
_MAX_FRAME_BYTES: Final = _HEAD.size + (1 << 32)
#: Number of bytes that are read at once.
_PIECE: Final = 1 << 20
#: Maximum number of bytes after damage whose checksums are computed. After a crash, four bytes match the checksum of
#: those before them about once in 4e9 places; heads that were put there on purpose could take hours.
_MAX_SEARCHED_BYTES: Final = 1 << 28
#: Number of pending bytes at which a commit is requested.
LARGE: Final = 1 << 20


class JournalError(DoraError):
    """A journal or token file is damaged or cannot be written; the message names file and offset."""


class JournalFull(JournalError):
    """There was no space for a frame. The file is unchanged, so the frame may be stored again."""


class FrameReader:
    """The records of a file. Records that are appended after it was opened are left out."""

    def __init__(self, path: Path, *, since: int = 0, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        """`since`: the offset of the first frame that is read."""
        self.path = path
        self._since = since
        self._max_record_bytes = max_record_bytes
        self._size = foreign.size_of(path)
        self.num_bytes = 0  #: of intact frames and those before `since`, as found by the last iteration
        self.torn_bytes = 0  #: of the damaged end after them

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset of its frame, record) for every record, in order."""
        self.num_bytes, self.torn_bytes = self._since, 0
        with foreign.open_regular(self.path) as file:
            if os.fstat(file.fileno()).st_size < self._size:
                raise JournalError(f"{self.path}: was truncated while it was read")
            while (offset := self.num_bytes) < self._size:
                length = self._intact(file, offset)
                if length is None:
                    self._require_end(file, offset)
                    self.torn_bytes = self._size - offset
                    return
                yield from self._records(file, offset, length)
                self.num_bytes += _HEAD.size + length

    def _intact(self, file: BinaryIO, offset: int) -> int | None:
        """Return the length of the payload of the frame at `offset`; None if the frame is damaged."""
        start = offset + _HEAD.size
        if start > self._size:
            return None
        file.seek(offset)
        head = file.read(_HEAD.size)
        length, length_crc, payload_crc = _HEAD.unpack(head)
        if crc32(head[: _LENGTH.size]) != length_crc or start + length > self._size:
            return None
        found, left = 0, length
        while left and (piece := file.read(min(left, _PIECE))):
            found, left = crc32(piece, found), left - len(piece)
        return length if not left and found == payload_crc else None

    def _require_end(self, file: BinaryIO, damaged: int) -> None:
        """Raise JournalError unless the damage is a torn last frame: no intact frame follows, and the damage is not
        longer than a frame. Only offsets at which a frame would fit into the file are checked."""
        if self._size - damaged > _MAX_FRAME_BYTES:
            raise self._damaged(damaged)
        left = _MAX_SEARCHED_BYTES
        for piece in range(damaged + 1, self._size - _HEAD.size + 1, _PIECE):
            file.seek(piece)
            data = file.read(_PIECE + _LENGTH.size - 1)
            for start in range(min(_LENGTH.size, len(data) - _LENGTH.size + 1)):
                lengths = np.frombuffer(data[start : start + (len(data) - start) // _LENGTH.size * _LENGTH.size], "<u4")
                places = piece + start + _LENGTH.size * np.arange(len(lengths))
                fits = (lengths >= _LENGTH.size) & (places + _HEAD.size + lengths <= self._size)
                for offset, length in zip(places[fits].tolist(), lengths[fits].tolist(), strict=True):
                    file.seek(offset)
                    head = file.read(_HEAD.size)
                    if crc32(head[: _LENGTH.size]) != int.from_bytes(head[_LENGTH.size : 2 * _LENGTH.size], "little"):
                        continue
                    left -= length
                    if left < 0 or self._intact(file, offset):
                        raise self._damaged(damaged)

    def _damaged(self, offset: int) -> JournalError:
        return JournalError(f"{self.path}: the record at byte {offset} is damaged (checksum)")

    def _records(self, file: BinaryIO, offset: int, length: int) -> Iterator[tuple[int, bytes]]:
        place = offset + _HEAD.size
        end = place + length
        file.seek(place)
        while place < end:
            size = int.from_bytes(file.read(_LENGTH.size), "little")
            place += _LENGTH.size
            if place + size > end:
                raise JournalError(f"{self.path}: the frame at byte {offset} does not consist of whole records")
            if size > self._max_record_bytes:
                raise JournalError(f"{self.path}: the frame at byte {offset} has a record of {size:,} bytes")
            place += size
            yield offset, file.read(size)


class FrameWriter:
    """Collector of records, which are stored as one frame. Opening a file cuts off a torn end, and syncs what a killed
    process has left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0  #: bytes that were cut off the end on opening
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
        self._position = self._file.seek(0, os.SEEK_END)  # of the frame that `take` will return
        if is_new:
            files.append(self._file, path, b"")
            files.sync_folder(path.parent)

    def write(self, record: bytes) -> None:
        """Append a record in memory."""
        self._put(record)
        if len(self._pending) > LARGE:
            self.on_large()

    def _put(self, record: bytes) -> None:
        self._pending += _LENGTH.pack(len(record))
        self._pending += record
        self.num_records += 1

    def take(self) -> bytes:
        """Return the records written since the last call, as a frame for `store`; empty if there are none."""
        if not self._pending:
            return b""
        payload, self._pending = bytes(self._pending), bytearray()
        length = _LENGTH.pack(len(payload))
        self._position += _HEAD.size + len(payload)
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
