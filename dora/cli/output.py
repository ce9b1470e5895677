"""What commands print.

Invariant: each line passes `one_line`, as most contain text from files or other processes. Only files of DORA's own are
handed out unchanged.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

from dora import files
from dora.errors import ConfigError, one_line
from dora.log import LossyFile


def say(*lines: str) -> None:
    """Print results."""
    _write(sys.stdout, lines)


def say_preparing() -> None:
    """At a terminal, say that preparing takes some seconds; there is no other output until the run folder exists."""
    if sys.stdout.isatty():
        say("preparing: modules, configuration, model and prompts")


def hand_out(text: str) -> None:
    """Print a file that DORA made itself, unchanged."""
    sys.stdout.write(text)


def tell(*lines: str) -> None:
    """Print messages, to standard error."""
    _write(sys.stderr, (f"dora: {line}" for line in lines))


def show_progress(text: str) -> None:
    """Replace the text in the last line of a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{one_line(text)}\x1b[K")


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Name the option and the file if they are why nothing can be written."""
    try:
        yield
    except OSError as err:
        raise ConfigError(f"{option} {path}: cannot be written: {err.strerror}") from err


def require_no_folder(path: Path, *, option: str = "") -> None:
    """ConfigError if a file is to be written in place of a folder."""
    if os.path.isdir(path):
        raise ConfigError(f"{option}{path}: is a folder; give a file")


def write_file(path: Path, write: Callable[[IO[bytes]], int]) -> int:
    """Write a file so that a failure leaves no incomplete file. Files placed in the folder by others do not matter.

    What is there and is no regular file is written into: /dev/null must stay a device.
    """
    require_no_folder(path)
    written = path.with_name(f".{path.name[:200]}-{secrets.token_hex(8)}")
    try:
        if _is_special(path):
            with path.open("wb") as file:
                return write(file)
        with written.open("xb") as file:
            count = write(file)
        files.sync(written)
        written.replace(path)
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written: {err.strerror}") from err
    finally:
        with suppress(OSError):
            written.unlink(missing_ok=True)
    return count


def _is_special(path: Path) -> bool:
    """Return whether the path names a device or a pipe, and was made by this user or by root."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) and path.lstat().st_uid in (0, os.geteuid())
    except FileNotFoundError:
        return False


def tolerate_lost_output() -> None:
    """From here on, drop what is printed into a file while its disk is full, or into a pipe whose reader has ended, as
    `tee` does at Ctrl-C: it must not end the run it is about."""
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)


def _tolerant(stream: TextIO) -> TextIO:
    try:
        mode = os.fstat(stream.fileno()).st_mode if isinstance(stream, io.TextIOWrapper) else 0
    except io.UnsupportedOperation:  # a stream without a descriptor
        mode = 0
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        return stream
    stream.flush()
    file = LossyFile(stream.fileno(), "a", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True)


def _write(stream: TextIO, lines: Iterable[str]) -> None:
    stream.write("".join(f"{one_line(line)}\n" for line in lines))
