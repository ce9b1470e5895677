"""Which ranks share which weights, and which rows of a parameter a rank has.

Ranks are numbered copy by copy. Within a copy, consecutive ranks divide the experts, and ranks at the same place of
such groups share those that they have. With two copies of four ranks each, and experts in two groups:

    rank                0 1 2 3 4 5 6 7
    copy                0 0 0 0 1 1 1 1
    group of experts    0 1 0 1 0 1 0 1
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dora.errors import ConfigError

REPLICATE, SHARD, GROUP = "replicate", "shard", "group"  # dimensions of a mesh


class Block(NamedTuple):
    """A part of a tensor: some of its first two dimensions."""

    rows: range
    columns: range

    @property
    def slices(self) -> tuple[slice, slice]:
        """Its index in a tensor of at least two dimensions."""
        return slice(self.rows.start, self.rows.stop), slice(self.columns.start, self.columns.stop)


class Mesh(NamedTuple):
    """How all ranks are arranged, by what they share."""

    weights: DeviceMesh  # [copies, ranks of a copy], without the first dimension if there is one copy
    #: [copies, ranks that share a part of divided weights, ranks that divide them], likewise; None: none are divided
    divided: DeviceMesh | None = None
    divides: Literal["nothing", "experts", "matrices"] = "nothing"

    @property
    def sharding(self) -> DeviceMesh:
        """The ranks that have one copy of the weights together, this one among them."""
        return self.weights[SHARD]

    @property
    def copy_number(self) -> int:
        """The number of this rank's copy."""
        return self.weights.get_local_rank(REPLICATE) if self.weights.ndim > 1 else 0

    @property
    def shards(self) -> DeviceMesh:
        """The dimensions of `divided` over which FSDP2 shards the part of a rank."""
        assert self.divided is not None
        return self.divided[REPLICATE, SHARD] if self.divided.ndim > 2 else self.divided[SHARD]


def make_mesh(device: str, *, shard_ranks: int = 0, expert_ranks: int = 1, tensor_ranks: int = 1) -> Mesh:
    """Return the mesh of all ranks. The weights are sharded over `shard_ranks` consecutive ranks (0: all), and others
    have copies of them (HSDP). `expert_ranks` consecutive ranks of these divide the experts (EP), or `tensor_ranks` the
    matrices (TP)."""
    size = dist.get_world_size()
    if size % (shard_ranks := shard_ranks or size):
        raise ConfigError(f"trainer.parallel.replicate: {size} ranks are no whole copies of {shard_ranks} ranks")
    groups = max(expert_ranks, tensor_ranks)
    if shard_ranks % groups:
        key = "tensor" if tensor_ranks > 1 else "expert"
        raise ConfigError(
            f"trainer.parallel.{key}: the {shard_ranks} ranks of a copy of the weights cannot be divided into groups "
            f"of {groups}"
        )
    copies = {REPLICATE: size // shard_ranks} if size > shard_ranks else {}
    weights = _arranged(device, {**copies, SHARD: shard_ranks})
    if groups == 1:
        return Mesh(weights)
    divided = _arranged(device, {**copies, SHARD: shard_ranks // groups, GROUP: groups})
    return Mesh(weights, divided, "matrices" if tensor_ranks > 1 else "experts")


def _arranged(device: str, shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


def block_of(tensor: DTensor, rank: int) -> Block:
    """Return the part of a parameter that a rank has. `rank`: its number in its copy of the weights.

    The last dimension of the mesh divides the parameter first: a group of ranks before FSDP2.
    """
    part = Block(range(tensor.shape[0]), range(tensor.shape[1] if tensor.dim() > 1 else 1))
    for size, placement in reversed([*zip(tensor.device_mesh.shape, tensor.placements, strict=True)]):
        if not placement.is_replicate():
            rank, place = divmod(rank, size)
            rows, columns = part
            if placement.is_shard(1):
                part = Block(rows, chunk_of(columns, place, size))
            else:
                part = Block(chunk_of(rows, place, size), columns)
    return part


def chunk_of(indices: range, place: int, size: int) -> range:
    """Return one of `size` chunks of indices, as torch cuts them: only the last ones may be smaller, or empty."""
    chunk = -(-len(indices) // size)
    return indices[chunk * place : chunk * (place + 1)]
