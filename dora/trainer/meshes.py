"""Which ranks share which weights, and which rows of a parameter a rank has.

Ranks are numbered copy by copy. Within a copy, consecutive ranks divide the experts, and ranks at the same place of
such groups share those that they have. With two copies of four ranks each, and experts in two groups:

    rank                0 1 2 3 4 5 6 7
    copy                0 0 0 0 1 1 1 1
    group of experts    0 1 0 1 0 1 0 1
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dora.errors import ConfigError

REPLICATE, SHARD, EXPERT = "replicate", "shard", "expert"  # dimensions of a mesh


class Mesh(NamedTuple):
    """How all ranks are arranged, by what they share."""

    weights: DeviceMesh  # [copies, ranks of a copy], without the first dimension if there is one copy
    experts: DeviceMesh | None = None  # [copies, ranks that share some experts, groups of experts], likewise

    @property
    def sharding(self) -> DeviceMesh:
        """The ranks that have one copy of the weights together, this one among them."""
        return self.weights[SHARD]

    @property
    def copy_number(self) -> int:
        """The number of this rank's copy."""
        return self.weights.get_local_rank(REPLICATE) if self.weights.ndim > 1 else 0

    @property
    def expert_shards(self) -> DeviceMesh:
        """The dimensions of `experts` over which FSDP2 shards the experts of one group."""
        assert self.experts is not None
        return self.experts[REPLICATE, SHARD] if self.experts.ndim > 2 else self.experts[SHARD]


def make_mesh(device: str, *, shard_ranks: int = 0, expert_ranks: int = 1) -> Mesh:
    """Return the mesh of all ranks. The weights are sharded over `shard_ranks` consecutive ranks (0: all), and others
    have copies of them (HSDP). `expert_ranks` consecutive ranks of these divide the experts (EP)."""
    size = dist.get_world_size()
    if size % (shard_ranks := shard_ranks or size):
        raise ConfigError(f"trainer.parallel.replicate: {size} ranks are no whole copies of {shard_ranks} ranks")
    if shard_ranks % expert_ranks:
        raise ConfigError(
            f"trainer.parallel.expert: the {shard_ranks} ranks of a copy of the weights cannot be divided into groups "
            f"of {expert_ranks}"
        )
    copies = {REPLICATE: size // shard_ranks} if size > shard_ranks else {}
    weights = _arranged(device, {**copies, SHARD: shard_ranks})
    if expert_ranks == 1:
        return Mesh(weights)
    return Mesh(weights, _arranged(device, {**copies, SHARD: shard_ranks // expert_ranks, EXPERT: expert_ranks}))


def _arranged(device: str, shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


def rows_of(tensor: DTensor, rank: int) -> range:
    """Return the rows of a parameter that a rank has. `rank`: its number in its copy of the weights.

    The last dimension of the mesh cuts the rows first: groups of experts before their shards.
    """
    rows = range(tensor.shape[0])
    for size, placement in reversed([*zip(tensor.device_mesh.shape, tensor.placements, strict=True)]):
        if not placement.is_replicate():
            rank, place = divmod(rank, size)
            chunk = -(-len(rows) // size)
            rows = rows[chunk * place : chunk * (place + 1)]
    return rows
