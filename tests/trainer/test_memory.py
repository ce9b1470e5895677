"""A rank that runs out of memory ends the trainer, and says what to change."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import VOCAB, Answer, in_history, make_batch, start_job

from dora.trainer import memory
from dora.trainer.memory import DeviceMemory, DeviceMemoryError, device_memory, memory_errors
from dora.transport.messages import MicroBatchDone, RankReady, TrainerFailed

STARVED = str(Path(__file__).parent / "starved_rank.py")
CPU = torch.device("cpu")
END_S = 20.0  # 7 s on a loaded machine
SAYS = (
    "out of memory on cpu (N GB free) in a micro-batch of 30000 tokens, of which the longest sequence has 500; "
    "lower trainer.micro_batch_tokens, which is 40000, set trainer.activation_checkpointing to full, "
    "or start more trainer.ranks"
)


def answers(count: int, length: int) -> list[Answer]:
    rewards = [0.0, 1.0, 0.0, 1.0]
    return [Answer(n // 4, n % 4, 0, [n % VOCAB] * length, 1, [-3.0] * (length - 1), rewards) for n in range(count)]


@pytest.mark.deep
async def test_a_rank_without_memory_ends_all_ranks_with_one_clear_line(tmp_path, model_path):
    async with start_job(tmp_path, model_path, entry=STARVED, micro_batch_tokens=40_000) as job:
        await job.until(RankReady, count=2)
        ranks = [p for p in psutil.Process(job.process.pid).children(recursive=True) if STARVED in p.cmdline()]
        assert len(ranks) == 2
        for rank, part in enumerate((answers(4, 9), answers(60, 500))):
            await job.end.send(rank, in_history(make_batch(part, step=0, index=0, last=True)))
        failed = await job.until(TrainerFailed)
        failed_at = time.monotonic()
        assert (failed.rank, re.sub(r"[\d.]+ of [\d.]+ GB", "N GB", failed.reason)) == (1, SAYS)
        assert await job.exit_code() == 1
        psutil.wait_procs(ranks, timeout=10)
        assert not any(rank.is_running() for rank in ranks)
        assert time.monotonic() - failed_at < END_S
    assert not any(isinstance(report, MicroBatchDone) and report.rank == 1 for report in job.reports)


def test_only_errors_of_memory_are_explained():
    says = r"^out of memory on cpu \(\d+\.\d of \d+\.\d GB free\) now; do less, or start more trainer.ranks$"
    with pytest.raises(DeviceMemoryError, match=says), memory_errors(CPU, during="now", change="do less"):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="must match"), memory_errors(CPU, during="now", change="do less"):
        torch.ones(2) + torch.ones(3)


def test_memory_of_the_host():
    found = device_memory(CPU)
    assert 0 < found.free <= found.total <= psutil.virtual_memory().total


def test_files_that_a_container_has_read_take_no_memory(tmp_path, monkeypatch):
    host = psutil.virtual_memory()
    limit = min(2**30, host.available)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{limit - 2**20}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert device_memory(CPU) == DeviceMemory(2**20, limit)
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {2**20}\nshmem 7\ninactive_file {2**21}\n")
    assert device_memory(CPU) == DeviceMemory(2**22, limit)
