"""Writes of a trainer whose disk is full: those of tensors wait for space, log lines are dropped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from dora.errors import one_line
from dora.weights.store import StoreFull

#: Longest wait for space. The other ranks wait in a collective, so this must be below the timeout of collectives.
FULL_TIMEOUT_S = 540.0
_PAUSE_S = 2.0
_T = TypeVar("_T")


def print_error(line: str) -> None:
    """Print a line to standard error, a file of the run."""
    with suppress(OSError):
        print(one_line(f"dora trainer: {line}"), file=sys.stderr, flush=True)  # noqa: T201


def wait_for_space(*attempts: Callable[[], _T]) -> _T:
    """Return the result of the first attempt that finds space; retry all of them every two seconds until one does."""
    deadline = time.monotonic() + FULL_TIMEOUT_S
    while True:
        for attempt in attempts:
            try:
                return attempt()
            except StoreFull as err:
                full = err
                print_error(str(err))
        if time.monotonic() > deadline:
            raise full
        time.sleep(_PAUSE_S)
