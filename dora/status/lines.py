"""Reading a file of lines that grows, so that no line is read twice to find out what is new.

Invariant: only complete lines count. A file that was cut (a resume does that) or replaced is read again.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dora import foreign
from dora.foreign import ForeignFileError

#: Number of bytes at the end of the part that was read. If they have changed, the file counts as another one.
_CHECKED_BYTES = 256


class Lines:
    """An index of the lines of a file: where each line is, and its kind."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        kind_of: Callable[[bytes], str | None],
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_bytes`: of a line. `kind_of`: returns the kind of a line, or None if the line is not shown; called once
        for each line. `on_reset`: called before the file is read again and `kind_of` is called for all lines again.
        """
        self.path = path
        self._max_bytes = max_bytes
        self._kind_of = kind_of
        self._on_reset = on_reset
        self._forget()

    def _forget(self) -> None:
        self.count = 0  #: lines of the file
        self._size = 0  # bytes of these lines
        self._tail = b""  # their last bytes
        self._numbers: dict[str, array[int]] = {}  # kind -> numbers of its lines
        self._starts: dict[str, array[int]] = {}  # kind -> where its lines begin
        self._lengths: dict[str, array[int]] = {}  # kind -> number of bytes of each line

    def refresh(self) -> None:
        """Read what was added; a file that is missing has no lines. ForeignFileError if a line is too long."""
        try:
            file = foreign.open_regular(self.path)
        except OSError:
            self._reset()
            return
        with file:
            file.seek(self._size - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._reset()
                file.seek(0)
            while line := file.readline(self._max_bytes + 1):
                if len(line) > self._max_bytes:
                    raise ForeignFileError(
                        f"{self.path}, line {self.count + 1}: has more than {self._max_bytes:,} bytes"
                    )
                if line.endswith(b"\n"):
                    self._add(line)

    def _reset(self) -> None:
        if self.count:
            self._forget()
            self._on_reset()

    def _add(self, line: bytes) -> None:
        kind = self._kind_of(line)
        if kind is not None:
            self._numbers.setdefault(kind, array("q")).append(self.count)
            self._starts.setdefault(kind, array("q")).append(self._size)
            self._lengths.setdefault(kind, array("q")).append(len(line))
        self.count += 1
        self._size += len(line)
        self._tail = (self._tail + line[-_CHECKED_BYTES:])[-_CHECKED_BYTES:]

    def numbers(self, kind: str, *, since: int) -> Sequence[int]:
        """Return the numbers of the lines of a kind, from line `since` on."""
        found = self._numbers.get(kind, array("q"))
        return found[bisect_left(found, since) :]

    def size(self, kind: str, numbers: Sequence[int]) -> int:
        """Return the number of bytes of lines of a kind."""
        known, lengths = self._numbers.get(kind, ()), self._lengths.get(kind, ())
        return sum(lengths[bisect_left(known, number)] for number in numbers)

    def read(self, kind: str, numbers: Sequence[int]) -> list[bytes]:
        """Return lines of a kind by their numbers, without the line end; lines that are gone meanwhile are left out."""
        known, starts = self._numbers.get(kind, ()), self._starts.get(kind, ())
        lines = []
        with suppress(OSError), foreign.open_regular(self.path) as file:
            for number in numbers:
                file.seek(starts[bisect_left(known, number)])
                lines.append(file.readline(self._max_bytes).rstrip(b"\n"))
        return lines


def tail(path: Path, size: int) -> list[bytes]:
    """Return the complete lines in the last `size` bytes of a file; none if it is missing."""
    with suppress(OSError), foreign.open_regular(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        lines = file.read(size).splitlines(keepends=True)
        return [line for line in lines[start > 0 :] if line.endswith(b"\n")]
    return []
