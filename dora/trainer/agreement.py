"""Small collectives, by which all ranks come to the same result: flags, bytes and errors of every rank.

They are gathered as tensors, because torch.distributed would pickle objects. `device`: where collectives run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from dora.errors import ConfigError

_T = TypeVar("_T")
_MESSAGE_BYTES: Final = 1000


def together(work: Callable[[], _T], *, device: torch.device) -> _T:
    """Return `work()`; if it raises ConfigError on any rank, raise the lowest rank's on every rank. A collective."""
    own: ConfigError | None = None
    try:
        result = work()
    except ConfigError as err:
        own = err
    problem = str(own or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    for message in (one.rstrip(b"\0").decode(errors="ignore") for one in gather_bytes(problem, device=device)):
        if message:
            raise ConfigError(message) from own
    return result


def gather_flags(flag: bool, *, device: torch.device) -> list[bool]:
    """Return the flags of all ranks; a collective."""
    return [one != b"\0" for one in gather_bytes(bytes([flag]), device=device)]


def gather_bytes(own: bytes, *, device: torch.device) -> list[bytes]:
    """Return the bytes of all ranks, equally many of each; a collective."""
    mine = torch.tensor(list(own), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [bytes(one.tolist()) for one in gathered]
