"""A checkpoint of another number or layout of ranks: which of its rows this rank has.

Ranks have the rows (dimension 0) of every tensor in chunks, in their own order, and so have the files of a checkpoint:
one file after the other has the whole tensor. Only where the experts are divided among ranks is the order of stacked
experts another one (`order_of_experts`). All this also holds for moments in 8 bits, whose blocks never span two rows of
a matrix. Numbers (update counts) are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from dora.errors import ConfigError


class OwnRows(NamedTuple):
    """The rows of a whole tensor that this rank has."""

    start: int
    stop: int
    total: int  # of the whole tensor


def order_of_experts(num_files: int, *, groups: int) -> list[int]:
    """Return the files in the order of their rows of stacked experts, if `groups` consecutive ranks divide these."""
    return [shard * groups + group for group in range(groups) for shard in range(num_files // groups)]


def parameter_of(name: str) -> str:
    """Return the parameter of a tensor of a checkpoint, which is its weight or a moment of it (KIND/PARAMETER)."""
    return name.rpartition("/")[2]


def own_rows_of(
    tensors: Mapping[str, Tensor],
    *,
    num_files: int,
    device: torch.device,
    groups: int = 1,
    experts: Collection[str] = (),
) -> dict[str, OwnRows]:
    """Return this rank's rows of each tensor that has any; a collective.

    `num_files`: number of ranks that have one copy of the state together. `device`: of collectives. `groups`: number of
    consecutive ranks that divide the parameters `experts`.
    """
    mine = torch.tensor([len(tensor) if tensor.dim() else 0 for tensor in tensors.values()], device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    counts = torch.stack(gathered[:num_files]).tolist()
    rank, of_experts, found = dist.get_rank() % num_files, order_of_experts(num_files, groups=groups), {}
    for column, name in enumerate(tensors):
        order = of_experts if parameter_of(name) in experts else range(num_files)
        start = sum(counts[other][column] for other in order[: order.index(rank)])
        total = sum(count[column] for count in counts)
        found[name] = OwnRows(start, start + counts[rank][column], total)
    return found


def read_rows(
    paths: Sequence[Path],
    *,
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, OwnRows],
    groups: int = 1,
    experts: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return this rank's part of a checkpoint, whose files are in the order of the ranks that wrote them.

    `groups`: number of these ranks that divided the parameters `experts`. ConfigError if the files belong to another
    model; OSError or SafetensorError if they cannot be read.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        for path, file in zip(paths, files, strict=True):
            if other := sorted(tensors.keys() ^ set(file.keys())):
                raise ConfigError(f"{path.parent} belongs to another model: {other[0]} does not match")
        of_experts = [files[number] for number in order_of_experts(len(files), groups=groups)]
        return {
            name: _read(
                paths[0].parent, of_experts if parameter_of(name) in experts else files, name, tensor, rows[name]
            )
            for name, tensor in tensors.items()
        }


def _read(folder: Path, files: Sequence[Any], name: str, like: Tensor, rows: OwnRows) -> Tensor:
    shapes = [file.get_slice(name).get_shape() for file in files]
    if any(len(shape) != like.dim() for shape in shapes):
        raise ConfigError(f"{folder} belongs to another model: {name} has shape {tuple(shapes[0])}")
    if not like.dim():
        whole: Tensor = files[0].get_tensor(name)
        return whole
    parts, end = [], 0
    for file, (count, *shape) in zip(files, shapes, strict=True):
        stored = file.get_slice(name)
        first, last = max(rows.start - end, 0), min(rows.stop - end, count)
        if shape != list(like.shape[1:]):
            raise ConfigError(f"{folder} belongs to another model: {name} has rows of shape {tuple(shape)}")
        if first < last:
            parts.append(stored[first:last])
        end += count
    if end != rows.total:
        raise ConfigError(f"{folder} belongs to another model: {name} has {end} rows, expected {rows.total}")
    return torch.cat(parts) if parts else torch.empty_like(like, device="cpu")
