"""The fence: a file with the epoch of the controller whose ranks may make versions and checkpoints visible.

A rank that was suspended while its controller died, or that runs on another host, may continue much later. Invariant:
every rename into place checks the fence first, and a controller writes its epoch before it starts or admits a rank.
"""

from __future__ import annotations

from pathlib import Path

from dora import files, foreign
from dora.errors import DoraError


class StaleEpoch(DoraError):
    """Another controller has taken over the run, so the results of this process are not needed any more."""


def raise_fence(path: Path, *, epoch: int) -> None:
    """Let only processes of this epoch pass from now on."""
    files.replace(path, f"{epoch}\n".encode())


def pass_fence(path: Path, *, epoch: int) -> None:
    """StaleEpoch unless the fence is at `epoch`."""
    try:
        held = foreign.read(path, max_bytes=100).decode("ascii").strip()
    except (OSError, ValueError, foreign.ForeignFileError) as err:
        raise StaleEpoch(f"{path}: cannot be read ({err}); is the run folder still there?") from err
    if held != str(epoch):
        raise StaleEpoch(f"{path}: controller epoch {held} has taken over the run; this process belongs to {epoch}")
