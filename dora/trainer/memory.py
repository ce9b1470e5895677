"""The memory of a rank's device: how much there is, and the error when it is used up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from dora.errors import DoraError
from dora.transport.messages import MicroBatch, TrainerSettings

_GB: Final = 2**30
#: What torch's CPU allocator raises, as a RuntimeError.
_CPU_ALLOCATOR: Final = "DefaultCPUAllocator"
#: Files of a container (cgroup v2): the memory limit of all its processes together, the memory that they use and the
#: cache of files that they have read, and what that is made of.
_CGROUP: Final = Path("/sys/fs/cgroup")


class DeviceMemoryError(DoraError):
    """A rank ran out of memory."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device, or of this host's memory."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.free / _GB:.1f} of {self.total / _GB:.1f} GB free"


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a GPU; for a CPU, that of the host or, if it is less, of the container."""
    if device.type == "cuda":
        return DeviceMemory(*torch.cuda.mem_get_info(device))
    host = psutil.virtual_memory()
    limit, used = (_read_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None or limit > host.total:
        return DeviceMemory(host.available, host.total)
    return DeviceMemory(min(host.available, limit - used + _cache_bytes()), limit)


def rank_memory(device: torch.device, *, ranks_here: int) -> int:
    """Return the bytes that one rank may use: its GPU, or its share of the memory that is free on this host."""
    found = device_memory(device)
    return found.total if device.type == "cuda" else found.free // ranks_here


def _cache_bytes() -> int:
    """Return the container's cache of files, which the kernel gives up where memory is needed."""
    try:
        rows = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(rows["active_file"]) + int(rows["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is none (`max`: no limit)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def memory_errors(device: torch.device, *, during: str, change: str) -> Iterator[None]:
    """Raise DeviceMemoryError if memory runs out in this context; it names device, `during`, and what to `change`."""
    try:
        yield
    except (RuntimeError, MemoryError) as err:
        if not isinstance(err, torch.OutOfMemoryError | MemoryError) and _CPU_ALLOCATOR not in str(err):
            raise
        raise DeviceMemoryError(
            f"out of memory on {device} ({device_memory(device)}) {during}; {change}, or start more trainer.ranks"
        ) from err


def train_in_memory(batch: MicroBatch, settings: TrainerSettings, device: torch.device) -> AbstractContextManager[None]:
    """Return `memory_errors` for a micro-batch."""
    longest = int(batch.lengths.max(initial=0))
    if longest < settings.micro_batch_tokens * settings.context_ranks:
        change = f"lower trainer.micro_batch_tokens, which is {settings.micro_batch_tokens}"
    else:
        change = "lower rollout.max_new_tokens"
    if settings.activation_checkpointing != "full":
        change += ", set trainer.activation_checkpointing to full"
    during = f"in a micro-batch of {len(batch.tokens)} tokens, of which the longest sequence has {longest}"
    return memory_errors(device, during=during, change=change)
