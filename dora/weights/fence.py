"""The fence: a file that names the only ranks that may make versions and checkpoints visible.

It has the epoch of their controller and their incarnation: the number of this start of the ranks. Ranks that were
suspended while their controller died, or were replaced, or that run on another host, may continue much later.
Invariant: every rename into place checks the fence first, and a controller raises it before it starts or admits ranks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from dora import files, foreign
from dora.errors import DoraError, RunFailed
from dora.journal.commits import FULL_TIMEOUT_S

log = structlog.get_logger(__name__)

#: Pause after an attempt that found the disk full.
_PAUSE_S: Final = 1.0


class StaleEpoch(DoraError):
    """Other ranks have taken over, so the results of this process are not needed any more."""


def raise_fence(path: Path, *, epoch: int, incarnation: int = 0) -> None:
    """Let only these ranks pass from now on."""
    files.replace(path, f"{epoch}.{incarnation}\n".encode())


async def raise_fence_patiently(path: Path, *, epoch: int, incarnation: int = 0) -> None:
    """Raise the fence. A full disk is waited for as long as the journal waits for it; RunFailed if it stays full, or if
    the fence cannot be written for another reason."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        try:
            return await asyncio.to_thread(raise_fence, path, epoch=epoch, incarnation=incarnation)
        except OSError as err:
            if not files.is_full(err) or clock() - began > FULL_TIMEOUT_S:
                raise RunFailed(f"{path}: cannot be written ({err.strerror})") from err
            log.warning("fence_waits_for_space", path=str(path), reason=err.strerror)
        await asyncio.sleep(_PAUSE_S)


def pass_fence(path: Path, *, epoch: int, incarnation: int = 0) -> None:
    """StaleEpoch unless the fence names these ranks."""
    try:
        held = foreign.read(path, max_bytes=100).decode("ascii").strip()
    except (OSError, ValueError, foreign.ForeignFileError) as err:
        raise StaleEpoch(f"{path}: cannot be read ({err}); is the run folder still there?") from err
    if held != f"{epoch}.{incarnation}":
        raise StaleEpoch(
            f"{path}: the ranks of controller epoch and incarnation {held} have taken over the run; this process "
            f"belongs to {epoch}.{incarnation}"
        )
