"""A checkpoint of another number or layout of ranks: which part of its tensors this rank has.

Ranks have the rows (dimension 0) of every tensor in chunks, in their own order, and so have the files of a checkpoint:
one file after the other has the whole tensor. That also holds for moments in 8 bits, whose blocks never span two rows
of a matrix. Numbers (update counts) are the same on all ranks. Parameters that groups of ranks divide are divided
before their rows are: by rows too (stacked experts), so that the files are in another order, or by columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.meshes import Block


class Divided(NamedTuple):
    """The dimension of each parameter that groups of ranks may divide, by name."""

    experts: Mapping[str, int]
    matrices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The ranks that have one copy of the state together, each with a file of a checkpoint."""

    num_files: int
    expert_ranks: int = 1  # consecutive ranks that divide the experts
    tensor_ranks: int = 1  # consecutive ranks that divide the matrices; one of the two is 1

    def files(self, name: str, divided: Divided | None) -> list[list[int]]:
        """Return the files in the order of their rows, for each part of the columns of a tensor: a weight, or a moment
        of it (KIND/PARAMETER). `divided`: None if nothing ever is."""
        groups = self.expert_ranks * self.tensor_ranks
        if divided is None or groups == 1:
            return [[*range(self.num_files)]]
        dimensions = divided.matrices if self.tensor_ranks > 1 else divided.experts
        dimension = dimensions.get(name.rpartition("/")[2])
        if dimension is None:
            return [[*range(self.num_files)]]
        of_groups = [[*range(group, self.num_files, groups)] for group in range(groups)]
        return of_groups if dimension == 1 else [[file for files in of_groups for file in files]]


class OwnBlock(NamedTuple):
    """The part of a whole tensor that this rank has."""

    block: Block
    rows: int  # of the whole tensor
    columns: int


def own_blocks_of(
    tensors: Mapping[str, Tensor], arrangement: Arrangement, *, device: torch.device, divided: Divided | None = None
) -> dict[str, OwnBlock]:
    """Return this rank's part of each tensor; a collective. `device`: of collectives."""
    mine = torch.tensor([len(tensor) if tensor.dim() else 0 for tensor in tensors.values()], device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    counts = torch.stack(gathered[: arrangement.num_files]).tolist()
    rank, found = dist.get_rank() % arrangement.num_files, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        columns = arrangement.files(name, divided)
        place, files = next((place, files) for place, files in enumerate(columns) if rank in files)
        start = sum(counts[file][number] for file in files[: files.index(rank)])
        width = tensor.shape[1] if tensor.dim() > 1 else 1
        block = Block(range(start, start + counts[rank][number]), range(width * place, width * (place + 1)))
        found[name] = OwnBlock(block, sum(counts[file][number] for file in files), width * len(columns))
    return found


def read_blocks(
    paths: Sequence[Path],
    arrangement: Arrangement,
    *,
    tensors: Mapping[str, Tensor],
    own: Mapping[str, OwnBlock],
    divided: Divided | None = None,
) -> dict[str, Tensor]:
    """Return this rank's part of a checkpoint, whose files are in the order of the ranks that wrote them.

    `arrangement`: of those ranks. ConfigError if the files belong to another model; OSError or SafetensorError if they
    cannot be read.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        for path, file in zip(paths, opened, strict=True):
            if other := sorted(tensors.keys() ^ set(file.keys())):
                raise ConfigError(f"{path.parent} belongs to another model: {other[0]} does not match")
        found = {}
        for name, tensor in tensors.items():
            columns = [[opened[number] for number in files] for files in arrangement.files(name, divided)]
            found[name] = _read(paths[0].parent, columns, name, tensor, own[name])
        return found


def _read(folder: Path, columns: Sequence[Sequence[Any]], name: str, like: Tensor, own: OwnBlock) -> Tensor:
    """Return a part of a tensor; `columns`: the files in the order of their rows, for each part of the columns."""
    another = f"{folder} belongs to another model: {name} has"
    shapes = [file.get_slice(name).get_shape() for files in columns for file in files]
    if any(len(shape) != like.dim() for shape in shapes):
        raise ConfigError(f"{another} shape {tuple(shapes[0])}")
    if not like.dim():
        whole: Tensor = columns[0][0].get_tensor(name)
        return whole
    width = own.columns // len(columns)
    of_row = [width, *like.shape[2:]] if like.dim() > 1 else []
    result = torch.empty_like(like, device="cpu")
    for number, files in enumerate(columns):
        end, left = 0, number * width
        across = _shared(own.block.columns, range(left, left + width))
        for file in files:
            stored = file.get_slice(name)
            count, *shape = stored.get_shape()
            if shape != of_row:
                raise ConfigError(f"{another} rows of shape {tuple(shape)}")
            rows = _shared(own.block.rows, range(end, end + count))
            if rows and across:
                values = stored[rows.start - end : rows.stop - end]
                here = result[rows.start - own.block.rows.start :][: len(rows)]
                if like.dim() > 1:
                    values = values[:, across.start - left : across.stop - left]
                    here = here[:, across.start - own.block.columns.start :][:, : len(across)]
                here.copy_(values)
            end += count
        if end != own.rows:
            raise ConfigError(f"{another} {end} rows, expected {own.rows}")
    return result


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
