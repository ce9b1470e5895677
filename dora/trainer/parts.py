"""The parts of a version that each rank writes: its own rows of the weights, under the names of the model folder.

Most tensors of the model are tensors of the folder, and a rank writes the rows that it has. A stack of experts is cut
into the tensors of its experts, and a rank converts those that it has. Conversions that join rows or columns of several
tensors need them whole: they are gathered, one at a time, to the rank that will write them. So are all tensors if some
ranks cannot write, because the folder is on another host.

Where an adapter is trained, its part is added to the rows of a weight, in float64, as they are converted. Where servers
hold adapters, a version is the adapter alone if its weights can be made of the model.

Invariant: every element of every tensor of the folder is written by exactly one rank, of the first copy of the weights.
These get the published type, except those that a 16-bit or FP8 folder keeps in float32. Tensors that are not trained
are published as they were read, but for FP8, which gets the published type; rank 0 writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora.trainer import buckets
from dora.trainer.adapters import Factors, write_adapter
from dora.trainer.buckets import TYPES, rows_in
from dora.trainer.loading import Conversion, as_published, own_block, stacks_rows, tensors_of
from dora.trainer.meshes import Block
from dora.trainer.model import Policy
from dora.weights.file_plan import TensorSpec
from dora.weights.merging import MAX_RANK, RECIPE, MergeRecipe, Origin, checksums_of_model
from dora.weights.store import ADAPTER


class Piece(NamedTuple):
    """Rows of a tensor of the folder, in its published type."""

    name: str
    row: int  # the first one
    rows: Tensor


@dataclass(frozen=True, slots=True)
class _Shard:
    """The rows of a tensor of the model that this rank has, and writes."""

    conversion: Conversion
    row: int  # the first one
    rows: Tensor  # shares memory with the model; without the adapter


class Parts:
    """What this rank writes of every version; made before the first pass."""

    def __init__(self, policy: Policy, *, dtype: str, writers: int, serves_adapters: bool = False) -> None:
        """`writers`: number of ranks, from rank 0 on, that write into the store; all of them have the first copy."""
        self._policy = policy
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rank, self._world_size = policy.sharding.get_local_rank(), policy.sharding.size()
        self._writers = writers
        self._tensors: dict[str, Tensor] = {}  # of the model; kept, as a module has others while it is gathered
        self._wide = policy.plan.wide
        untrained = set(policy.plan.untrained)
        self._trained = trained = [one for one in policy.plan.conversions if not one.sources.keys() <= untrained]
        tensors = tensors_of(policy.model)
        self._adapter = None if policy.adapters is None else policy.adapters.factors()
        self._factors: dict[str, Factors] = {}  # by name of the weight; see `gather`
        for target in (target for conversion in trained for target in conversion.targets):
            self._tensors[target] = tensors[target].detach()
        #: All tensors of the model's folder.
        self._all_specs = [spec for conversion in trained for spec in self._specs(conversion)]
        self._all_specs += [self._untrained_spec(name) for name in policy.plan.untrained]
        self._is_adapter_alone = serves_adapters and self._has_recipe()
        self._model: dict[str, str] = {}  # checksums of the model's files, once they are needed
        written = [] if self._is_adapter_alone else trained
        self._gathered = [
            one for one in written if writers < self._world_size or not _is_local(one) or self._has_columns(one)
        ]
        shards = [self._shard(one) for one in written if one not in self._gathered]
        begin = len(shards) * self._rank // self._world_size  # ranks that write into one file wait for each other
        self._shards = [*shards[begin:], *shards[:begin]]
        #: The tensors that ranks write, the same on all of them.
        self.specs = [] if self._is_adapter_alone else self._all_specs

    def pieces(self) -> Iterator[Piece]:
        """Yield what this rank writes of its own, converted when it is asked for: all but what the last `gather`
        returned, and with the adapter as it was then."""
        for shard in self._shards:
            step = rows_in(buckets.BUCKET_BYTES, shard.rows)
            for start in range(0, len(shard.rows), step):
                row, rows = shard.row + start, shard.rows[start : start + step]
                yield from self._published(
                    shard.conversion, row, self._with_adapter(shard.conversion.targets[0], rows, row)
                )
        if self._rank == 0 and not self._is_adapter_alone:
            for name, tensor in self._policy.untrained.items():
                yield Piece(name, 0, tensor.to(self._dtype) if name in self._policy.dequantised else tensor)

    def gather(self) -> list[Piece]:
        """Return what this rank writes of conversions that need other ranks, in host memory; a collective."""
        kept: list[Piece] = []
        if self._policy.copy_number:
            return kept
        if self._adapter is not None:
            self._factors = self._adapter.whole(self._policy.sharding.get_group(), dtype=self._dtype)
        for number, conversion in enumerate(self._gathered):
            owner = number % self._writers
            is_of_rows = conversion.converter is None and not self._has_columns(conversion)
            found = self._rows(conversion, owner) if is_of_rows else self._whole(conversion, owner)
            kept += [piece._replace(rows=piece.rows.to("cpu", copy=True)) for piece in found]
        return kept

    def write_adapter(self, folder: Path, *, model: Path) -> None:
        """Write the adapter as it was at the last `gather`, if one is trained, into the folder of a version; with a
        recipe, if its weights can be made of copies of the folder `model`."""
        if self._policy.adapters is not None:
            write_adapter(folder / ADAPTER, self._factors, self._policy.adapters.settings)
            if self._has_recipe():
                if self._is_adapter_alone and not self._model:
                    self._model = checksums_of_model(model)
                (folder / RECIPE).write_bytes(self._recipe().encode())

    def _adapted(self) -> list[Conversion]:
        """Return the conversions of the weights that have an adapter."""
        names = set() if self._adapter is None else self._adapter.names
        return [one for one in self._trained if names & {*one.targets}]

    def _has_recipe(self) -> bool:
        """Return whether the weights of a version can be made of the model, without the trainer."""
        if self._policy.adapters is None or self._policy.dequantised:
            return False
        is_copied = all(one.converter is None or stacks_rows(one.converter) for one in self._trained)
        is_added = all(one.converter is None for one in self._adapted())
        return is_copied and is_added and self._policy.adapters.settings.rank <= MAX_RANK

    def _recipe(self) -> MergeRecipe:
        """Return how tensors of the folder become those of a version."""
        adapted = self._adapted()
        held = {name: self._tensors[one.targets[0]].dtype for one in self._trained for name in one.sources}
        targets = {name: one.targets[0] for one in adapted for name in one.sources}
        return MergeRecipe(
            scale=next(iter(self._factors.values())).scale,
            tensors=tuple(
                Origin(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    held=TYPES[held[spec.name]] if spec.name in held else spec.dtype,
                    module=targets.get(spec.name, "").removesuffix(".weight"),
                    is_transposed=spec.name in targets and self._factors[targets[spec.name]].is_transposed,
                )
                for spec in self._all_specs
            ),
            model=self._model,
        )

    def _rows(self, conversion: Conversion, owner: int) -> Iterator[Piece]:
        """Yield, on the owner, the rows of all ranks, some of each rank at a time."""
        [name], [target] = conversion.sources, conversion.targets
        everyones = [part.rows for part in self._blocks_of(target)]
        local, most = self._local(target), max(map(len, everyones))
        step = rows_in(buckets.BUCKET_BYTES // self._world_size, local)
        first = own_block(self._tensors[target], self._rank).rows.start
        for start in range(0, most, step):
            count = min(step, most - start)
            mine = self._with_adapter(target, local[start : start + count], first + start)
            found = self._gather_to(owner, self._cast(name, mine), count)
            for rows, values in zip(everyones, found, strict=False):
                if own := rows[start : start + count]:
                    yield Piece(name, own.start, values[: len(own)])

    def _whole(self, conversion: Conversion, owner: int) -> Iterator[Piece]:
        """Yield, on the owner, the tensors of a conversion."""
        tensors = {}
        for target in conversion.targets:
            tensor = self._tensors[target]
            if isinstance(tensor, DTensor):
                parts = self._blocks_of(target)
                found = self._gather_to(owner, self._local(target), max(len(part.rows) for part in parts))
                tensor = torch.empty(tensor.shape if found else 0, dtype=tensor.dtype, device=tensor.device)
                for part, values in zip(parts, found, strict=False):
                    tensor[part.slices[: tensor.dim()]] = values[: len(part.rows)]
            tensors[target] = tensor
        if self._rank == owner:
            adapted = {target: self._with_adapter(target, tensor, 0) for target, tensor in tensors.items()}
            for name, tensor in as_published(self._policy.model, conversion, adapted).items():
                yield Piece(name, 0, self._cast(name, tensor))

    def _gather_to(self, owner: int, local: Tensor, count: int) -> list[Tensor]:
        """Return, on the owner, `count` rows of every rank, padded; elsewhere nothing."""
        mine = local.new_zeros(count, *local.shape[1:])
        mine[: len(local)] = local
        into = [torch.empty_like(mine) for _ in range(self._world_size)] if self._rank == owner else None
        dist.gather(mine, into, group=self._policy.sharding.get_group(), group_dst=owner)
        return into or []

    def _published(self, conversion: Conversion, row: int, rows: Tensor) -> Iterator[Piece]:
        if conversion.converter is None:
            [name] = conversion.sources
            yield Piece(name, row, self._cast(name, rows))
            return
        for name, tensor in as_published(self._policy.model, conversion, {conversion.targets[0]: rows}).items():
            before, number, after = re.fullmatch(r"(.*\.)(\d+)(\..*)", name).groups()  # type: ignore[union-attr]
            of_expert = f"{before}{row + int(number)}{after}"
            yield Piece(of_expert, 0, self._cast(of_expert, tensor))

    def _with_adapter(self, target: str, rows: Tensor, row: int) -> Tensor:
        """Return rows of a tensor, from `row` on, with what the adapter adds; then in the published type."""
        if (factors := self._factors.get(target)) is None:
            return rows
        return factors.added_to(rows, start=row, dtype=torch.float32 if target in self._wide else self._dtype)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(self._type(name, tensor.dtype))

    def _type(self, name: str, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return dtype
        return torch.float32 if name in self._policy.plan.float32 else self._dtype

    def _shard(self, conversion: Conversion) -> _Shard:
        tensor = self._tensors[conversion.targets[0]]
        return _Shard(conversion, own_block(tensor, self._rank).rows.start, self._local(conversion.targets[0]))

    def _blocks_of(self, target: str) -> list[Block]:
        """Return the part of a tensor that each rank has."""
        return [own_block(self._tensors[target], rank) for rank in range(self._world_size)]

    def _has_columns(self, conversion: Conversion) -> bool:
        """Return whether ranks have some columns of a tensor, so that their rows are not contiguous in a file."""
        tensors = [self._tensors[target] for target in conversion.targets]
        return any(tensor.dim() > 1 and len(own_block(tensor, 0).columns) < tensor.shape[1] for tensor in tensors)

    def _local(self, target: str) -> Tensor:
        tensor = self._tensors[target]
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _specs(self, conversion: Conversion) -> Iterator[TensorSpec]:
        outlines = {
            target: torch.empty(self._tensors[target].shape, dtype=self._tensors[target].dtype, device="meta")
            for target in conversion.targets
        }
        for name, outline in as_published(self._policy.model, conversion, outlines).items():
            yield TensorSpec(name, TYPES[self._type(name, outline.dtype)], tuple(outline.shape))

    def _untrained_spec(self, name: str) -> TensorSpec:
        spec = self._policy.untrained_specs[name]
        is_cast = name in self._policy.dequantised
        return TensorSpec(name, TYPES[self._dtype], spec.shape) if is_cast else spec


def _is_local(conversion: Conversion) -> bool:
    """Return whether rows of the model can be published without the other rows."""
    return conversion.converter is None or stacks_rows(conversion.converter)
