"""The fence: a file that names the only ranks that may make versions and checkpoints visible.

It has the epoch of their controller and their incarnation: the number of this start of the ranks. Ranks that were
suspended while their controller died, or were replaced, or that run on another host, may continue much later.
Invariant: every rename into place checks the fence first, and a controller raises it before it starts or admits ranks.
"""

from __future__ import annotations

from pathlib import Path

from dora import files, foreign
from dora.errors import DoraError


class StaleEpoch(DoraError):
    """Other ranks have taken over, so the results of this process are not needed any more."""


def raise_fence(path: Path, *, epoch: int, incarnation: int = 0) -> None:
    """Let only these ranks pass from now on."""
    files.replace(path, f"{epoch}.{incarnation}\n".encode())


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
