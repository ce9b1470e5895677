"""What commands print.

Invariant: each line passes `one_line`, as most contain text from files or other processes. Only files of DORA's own are
handed out unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from dora.errors import one_line


def say(*lines: str) -> None:
    """Print results."""
    _write(sys.stdout, lines)


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


def _write(stream: TextIO, lines: Iterable[str]) -> None:
    stream.write("".join(f"{one_line(line)}\n" for line in lines))
