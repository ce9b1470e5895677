"""Two ranks as on two hosts: processes that meet in a file, each with a folder of checkpoints of its own.

They are forked from a process that has imported everything, so that a test can start and kill many of them.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from dora import files
from dora.errors import DoraError
from dora.trainer import checkpoint
from dora.trainer.meeting import Meeting
from dora.trainer.resharding import Arrangement
from dora.weights.checkpoints import checkpoints_in
from dora.weights.fence import pass_fence, raise_fence

CPU = torch.device("cpu")
CHAIN = "0a1b2c3d4e5f"
WAIT_S = 60.0

_context = get_context("forkserver")
_context.set_forkserver_preload(["dora.trainer.checkpoint"])


@dataclass(frozen=True)
class Fault:
    """What happens to a host before its file operation number `at`, from 0."""

    rank: int
    at: int
    kind: str = "kill"  # or "full": once, its disk is full

    def __call__(self, operation: files.Operation) -> None:
        if next(self._numbers) != self.at:
            return
        if self.kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), signal.SIGKILL)

    _numbers = count()


def state(rank: int, step: int, *, run: int = 0) -> dict[str, torch.Tensor]:
    """What a rank would save before this step."""
    generator = torch.Generator().manual_seed(1000 * run + 10 * step + rank)
    return {"w": torch.randn(3, 2, generator=generator), "exp_avg/w": torch.randn(3, 2, generator=generator)}


def save(storage: checkpoint.Storage, step: int, *, chain: str = CHAIN, run: int = 0) -> checkpoint.SavedFiles:
    return checkpoint.save(storage, step=step, chain=chain, tensors=state(dist.get_rank(), step, run=run))


def load(storage: checkpoint.Storage, steps: Sequence[int], *, run: int = 0) -> tuple[int, tuple[str, ...]]:
    """The step from which both ranks continue, whose state is right, and what was skipped; step 0: none."""
    paths = [checkpoint.folder_of(storage.parent, step=step, chain=CHAIN) for step in steps]
    tensors = state(dist.get_rank(), 0)
    loaded = checkpoint.load(storage, paths, tensors=tensors, may_start_over=True)
    expected = state(dist.get_rank(), loaded.step, run=run if loaded.step else 0)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    return loaded.step, loaded.skipped


class Hosts:
    """Two hosts whose folders are in `root`, or one with two ranks if they share a folder."""

    def __init__(self, root: Path, *, is_shared: bool = False) -> None:
        self._root = root
        self._is_shared = is_shared
        self._meetings = count()
        self.folders = [root / "shared"] * 2 if is_shared else [root / "host-0", root / "host-1"]
        for folder in {*self.folders}:
            folder.mkdir(parents=True)
            raise_fence(folder / "epoch", epoch=0)

    def run(self, *jobs: Callable[[checkpoint.Storage], Any], fault: Fault | None = None) -> list[Any]:
        """Run the jobs on both, one after another; what the last one returned on each: a DoraError if one was raised,
        None if the host or its peer was killed."""
        meeting = self._root / f"meeting-{next(self._meetings)}"
        ends, processes = [], []
        for rank, folder in enumerate(self.folders):
            ours, theirs = _context.Pipe()
            ranks = (0, 1) if self._is_shared else (rank,)
            of_rank = fault if fault is not None and fault.rank == rank else None
            process = _context.Process(target=_run, args=(rank, ranks, folder, meeting, jobs, of_rank, theirs))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return [_result(end) for end in ends]
        finally:
            for process in processes:
                process.join(WAIT_S)
                process.kill()
                process.close()

    def visible(self) -> list[list[str]]:
        return [[path.name for path in checkpoints_in(folder)] for folder in self.folders]


def _result(end: Connection) -> Any:
    assert end.poll(WAIT_S), "a rank hangs"
    try:
        return end.recv()
    except EOFError:
        return None
    finally:
        end.close()


def _end_with(peer: int) -> None:
    """End this process when the peer was killed, as its main thread would in the next collective."""
    try:
        dist.recv(torch.zeros(1), src=peer)
    except RuntimeError:
        os._exit(1)


def _run(
    rank: int,
    ranks: tuple[int, ...],
    folder: Path,
    meeting: Path,
    jobs: Sequence[Callable[[checkpoint.Storage], Any]],
    fault: Fault | None,
    end: Connection,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    fence = partial(pass_fence, folder / "epoch", epoch=0)
    words = PrefixStore("words", FileStore(f"{meeting}-words", 2))
    gathering = Meeting(words, rank=rank, size=2, fence=fence)
    storage = checkpoint.Storage(
        parent=folder, here=ranks, arrangement=Arrangement(2), device=CPU, meeting=gathering, fence=fence
    )
    peer = threading.Thread(target=_end_with, args=(1 - rank,), daemon=True)
    peer.start()
    try:
        with files.observed(fault or (lambda operation: None)):
            end.send([job(storage) for job in jobs][-1])
    except DoraError as err:
        end.send(err)
        peer.join(1.0)  # it may raise an error too; if it waits for this rank instead, it ends with it
        return
    except RuntimeError as err:
        if "gloo" not in str(err):
            raise
        return
    with suppress(RuntimeError):  # the peer has ended
        dist.send(torch.zeros(1), dst=1 - rank)
        peer.join(WAIT_S)
