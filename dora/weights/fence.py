"""Which controller's ranks may make versions and checkpoints visible: a file that holds its epoch.

A rank that was stopped while its controller died, or that runs on another host, may go on much later. Invariant: every
rename into place asks here first, and a controller writes its epoch before it starts or admits a rank.
"""

from __future__ import annotations

from pathlib import Path

from dora import files
from dora.errors import DoraError


class StaleEpoch(DoraError):
    """Another controller has taken the run over; what this process made is not wanted any more."""


def raise_fence(path: Path, *, epoch: int) -> None:
    """From now on only processes of this epoch pass."""
    files.replace(path, f"{epoch}\n".encode())


def pass_fence(path: Path, *, epoch: int) -> None:
    """StaleEpoch unless the file holds `epoch`."""
    try:
        held = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as err:
        raise StaleEpoch(f"{path}: cannot be read ({err}); is the run folder still there?") from err
    if held != str(epoch):
        raise StaleEpoch(f"{path}: controller epoch {held} has taken the run over; this process belongs to {epoch}")
