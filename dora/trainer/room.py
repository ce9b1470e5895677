"""Writing to a disk that may be full: a write that does not fit waits for space."""

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

#: How long to wait for space. The other ranks wait in a collective meanwhile, so it is less than that one's time limit.
FULL_TIMEOUT_S = 540.0
_PAUSE_S = 2.0
_T = TypeVar("_T")
_NO_SPACE = f"os error {errno.ENOSPC}"


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file; raises OSError with the system's error number."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as err:  # the library reports the system's error only as text
        raise OSError(errno.ENOSPC if _NO_SPACE in str(err) else errno.EIO, str(err)) from err


def until_there_is_room(*attempts: Callable[[], _T]) -> _T:
    """The result of the first attempt that finds space; while none does, try all of them every two seconds."""
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
