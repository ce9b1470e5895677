"""Writing where the disk may be full: what finds no room waits for some, which costs time, not the run.

Called by: publish.py, checkpoint.py.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dora.weights.store import StoreFull

#: How long a full disk is waited for: less than a collective, in which the other ranks wait meanwhile. After that a
#: resume goes on from the last checkpoint.
FULL_TIMEOUT_S = 540.0
_PAUSE_S = 2.0
_T = TypeVar("_T")
_NO_SPACE = f"os error {errno.ENOSPC}"


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file; OSError with the system's own number if it cannot be written."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as err:  # the library hides the number of the system's error in its text
        raise OSError(errno.ENOSPC if _NO_SPACE in str(err) else errno.EIO, str(err)) from err


def until_there_is_room(*attempts: Callable[[], _T]) -> _T:
    """The result of the first attempt that finds room; all of them again every two seconds while none does."""
    deadline = time.monotonic() + FULL_TIMEOUT_S
    while True:
        for attempt in attempts:
            try:
                return attempt()
            except StoreFull as err:
                full = err
                print(f"dora trainer: {err}", file=sys.stderr)  # noqa: T201
        if time.monotonic() > deadline:
            raise full
        time.sleep(_PAUSE_S)
