"""What commands print.

Invariant: each line passes `one_line`, as most contain text from files or other processes. Only files of DORA's own are
handed out unchanged.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

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


def tolerate_full_disk() -> None:
    """From here on, drop what is printed into a file while its disk is full: it must not end the run it is about."""
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)


def _tolerant(stream: TextIO) -> TextIO:
    try:
        is_file = isinstance(stream, io.TextIOWrapper) and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except io.UnsupportedOperation:  # a stream without a descriptor
        is_file = False
    if not is_file:
        return stream
    stream.flush()
    file = LossyFile(stream.fileno(), "a", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True)


def _write(stream: TextIO, lines: Iterable[str]) -> None:
    stream.write("".join(f"{one_line(line)}\n" for line in lines))
