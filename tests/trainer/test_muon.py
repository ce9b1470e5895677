"""Muon on the rows of 1, 2 and 4 ranks, against torch's own on whole matrices."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dora.trainer.muon import ShardedMuon, split_rows

#: A tall matrix, wide ones, fewer rows than ranks, and experts: no two ranks have as many rows of each.
SHAPES = {"tall": (37, 8), "wide": (8, 37), "few": (3, 16), "square": (16, 16), "other": (9, 16), "experts": (5, 8, 12)}
DECAY, RATE, STEPS = 0.1, 1e-2, 4


def make(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows_of(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    return {name: tensor.split(split_rows(len(tensor), ranks))[rank].clone() for name, tensor in tensors.items()}


def train(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The whole parameters after some steps, from the rows of all ranks."""
    rank, ranks = group.rank(), group.size()
    shards = rows_of(make(0), rank, ranks)
    rows = {name: shape[0] for name, shape in SHAPES.items()}
    muon = ShardedMuon(shards, rows=rows, weight_decay=DECAY, group=group)
    for step in range(STEPS):
        muon.update(rows_of(make(step + 1), rank, ranks), learning_rate=RATE)
    whole = {}
    for name, shard in shards.items():
        most = torch.zeros(-(-SHAPES[name][0] // ranks), *SHAPES[name][1:])
        most[: len(shard)] = shard
        parts = [torch.empty_like(most) for _ in range(ranks)]
        dist.all_gather(parts, most, group=group)
        whole[name] = torch.cat(parts)[: SHAPES[name][0]]
    return whole


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    found = {}
    for ranks in (1, 2, 4):
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            found[ranks] = train(group)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def with_torchs_own() -> dict[str, Tensor]:
    """The same with `torch.optim.Muon` on whole matrices, one for each expert."""
    parameters = {
        name: [torch.nn.Parameter(m.clone()) for m in (whole if whole.dim() > 2 else [whole])]
        for name, whole in make(0).items()
    }
    muon = torch.optim.Muon(
        [p for each in parameters.values() for p in each],
        lr=RATE, weight_decay=DECAY, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for step in range(STEPS):
        for name, gradient in make(step + 1).items():
            for parameter, part in zip(parameters[name], gradient if gradient.dim() > 2 else [gradient], strict=True):
                parameter.grad = part
        muon.step()
    return {name: torch.cat([p.detach() for p in each]).view(SHAPES[name]) for name, each in parameters.items()}


@pytest.mark.deep
def test_any_number_of_ranks_makes_the_steps_of_torchs_own(tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(str(tmp_path),), nprocs=4)
    found = torch.load(tmp_path / "found")
    torch.testing.assert_close(found[1], with_torchs_own(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found[2], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[4], found[1], rtol=0, atol=0)


def test_rows_are_split_as_fsdp2_splits_them() -> None:
    for rows in (1, 3, 5, 16, 37):
        for ranks in (1, 2, 3, 4):
            chunks = torch.zeros(rows).chunk(ranks)
            assert split_rows(rows, ranks) == [len(c) for c in chunks] + [0] * (ranks - len(chunks))
