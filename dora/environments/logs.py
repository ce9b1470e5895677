"""What hosts print: a log for each place of a host, in the run folder.

Invariant: a log takes at most about 2 x MAX_BYTES on the disk, whatever a host writes. It is text without control
characters, which could control a terminal. It is a regular file: nothing is written to a link or a pipe in its place.
The last KEPT_BYTES of what is written before the folder is known are kept. If the disk is full or the file cannot be
written, only the log is lost.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

#: Size at which a log is renamed to NAME.1, replacing the one before it.
MAX_BYTES: Final = 2 << 20
#: Number of the latest bytes that are kept until the folder is known.
KEPT_BYTES: Final = 64 << 10

_CONTROL: Final = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")


class HostLog:
    """The output of the hosts in one place, one after the other."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._size = 0
        self._kept = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def open(self, path: Path) -> None:
        """From now on, write to this file, which may exist."""
        self._path = path
        self._reopen()
        self._write(self._kept)
        self._kept = b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(self, data: bytes) -> None:
        """Add output, which may end within a character."""
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", self._decoder.decode(data))
        clean = text.encode("utf-8", "replace")
        if self._path is None:
            self._kept = (self._kept + clean)[-KEPT_BYTES:]
        else:
            self._write(clean)

    def _write(self, data: bytes) -> None:
        if self._file is None or self._path is None:
            return
        try:
            self._size += os.write(self._file, data)
            if self._size >= MAX_BYTES:
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
                self._reopen()
        except OSError as err:
            self._give_up(str(err))

    def _reopen(self) -> None:
        assert self._path is not None
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._file = os.open(self._path, flags, 0o666)
            found = os.fstat(self._file)
        except OSError as err:  # among others: a link, or a pipe that nobody reads
            return self._give_up(str(err))
        self._size = found.st_size
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            self._give_up("it is not a regular file with a single link")

    def _give_up(self, reason: str) -> None:
        log.warning("host_log_ended", path=str(self._path), reason=reason)
        self.close()
