"""A folder loaded into a policy, and a version written as the trainer publishes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from dora.core.ids import VersionId
from dora.trainer.checkpoint import Saver, Storage
from dora.trainer.meeting import Meeting
from dora.trainer.meshes import block_of, make_mesh
from dora.trainer.model import Policy
from dora.trainer.parts import Parts
from dora.trainer.publish import Publisher, copy_model_files, make_files, write_piece
from dora.trainer.resharding import Arrangement
from dora.transport.messages import CheckpointWritten, Configure, VersionWritten
from dora.weights.fence import pass_fence
from dora.weights.file_plan import MAX_FILE_BYTES, plan_files
from dora.weights.store import VersionStore

_NUMBERS = itertools.count()


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_policy(folder: Path, *, shard_ranks: int = 0, expert_ranks: int = 1, tensor_ranks: int = 1) -> Policy:
    mesh = make_mesh("cpu", shard_ranks=shard_ranks, expert_ranks=expert_ranks, tensor_ranks=tensor_ranks)
    return Policy(folder, mesh=mesh, dtype=torch.float32)


def write_version(
    policy: Policy,
    source: Path,
    target: Path,
    *,
    dtype: str,
    writers: int | None = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write what the trainer would publish into a folder, together with the other ranks."""
    writers = writers or policy.sharding.size()
    parts = Parts(policy, dtype=dtype, writers=writers)
    plan = plan_files(parts.specs, max_bytes=max_bytes)
    if dist.get_rank() == 0:
        target.mkdir(exist_ok=True)
        make_files(target, plan)
        copy_model_files(source, target, dtype=dtype)
    dist.barrier()
    for piece in (*parts.gather(), *parts.pieces()) if not policy.copy_number else ():
        write_piece(target, plan, piece)
    dist.barrier()


def whole(tensor: Tensor) -> Tensor:
    """Return a parameter or its gradient, whole; a collective. `full_tensor` remembers process groups that have ended,
    and says that it is slow."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    ranks = tensor.device_mesh.size()
    copies = math.prod(n for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if p.is_replicate())
    parts = [block_of(tensor, rank) for rank in range(ranks // copies)]
    local = tensor.detach().to_local()
    mine = local.new_zeros(max(len(part.rows) for part in parts), *local.shape[1:])
    mine[: len(local)] = local
    found = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(found, mine)
    joined = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part, values in zip(parts, found, strict=False):
        joined[part.slices[: joined.dim()]] = values[: len(part.rows)]
    return joined


def gather(policy: Policy, *, dtype: str = "float32") -> dict[str, Tensor]:
    """Return all tensors of a version, on rank 0; a collective."""
    parts = Parts(policy, dtype=dtype, writers=1)
    shapes = {spec.name: spec.shape for spec in parts.specs}
    found: dict[str, Tensor] = {}
    for piece in (*parts.gather(), *parts.pieces()):
        whole = found.setdefault(piece.name, torch.empty(shapes[piece.name], dtype=piece.rows.dtype))
        (whole[piece.row : piece.row + len(piece.rows)] if whole.dim() else whole).copy_(piece.rows)
    return found


class Unpublished:
    """In place of a publisher: nothing is published."""

    def publish(self, version: VersionId, *, chain: str, proof: None = None) -> None:
        """Do nothing."""

    def until_written(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class KeptVersions(Unpublished):
    """In place of a publisher: keeps the weights of each version in memory, on rank 0."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.weights: list[dict[str, Tensor]] = []

    def publish(self, version: VersionId, *, chain: str, proof: None = None) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in gather(self._policy).items()})


def published(policy: Policy, source: Path, target: Path, *, dtype: str = "float32") -> dict[str, Tensor]:
    """Write what the trainer would publish into a folder; return its tensors."""
    write_version(policy, source, target, dtype=dtype)
    return tensors_in(target)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def words_of_ranks() -> Store:
    """A store for words of one kind, in the order in which all ranks ask for one."""
    return PrefixStore(f"words-{next(_NUMBERS)}", _get_default_store().clone())


def make_saver(
    order: Configure,
    *,
    report: Callable[[CheckpointWritten], None] = lambda _: None,
    on_failure: Callable[[BaseException], None] = lambda _: None,
) -> Saver:
    """What saves the checkpoints of a rank; made in the same order by all ranks."""
    size, fence = dist.get_world_size(), partial(pass_fence, Path(order.fence), epoch=order.epoch)
    storage = Storage(
        parent=Path(order.checkpoints),
        here=tuple(range(size)),
        arrangement=Arrangement(order.settings.shard_ranks or size),
        device=torch.device(order.settings.device),
        meeting=Meeting(words_of_ranks(), rank=dist.get_rank(), size=size, fence=fence),
        fence=fence,
    )
    return Saver(storage, report=report, on_failure=on_failure)


def make_publisher(
    policy: Policy,
    source: Path,
    store: VersionStore,
    *,
    dtype: str = "float32",
    report: Callable[[VersionWritten], None] = lambda _: None,
    on_failure: Callable[[BaseException], None] = lambda _: None,
    serves_adapters: bool = False,
) -> Publisher:
    """The publisher of a single rank."""
    return Publisher(
        store, policy=policy, model_path=source, dtype=dtype, words=words_of_ranks(), writers=1, report=report,
        on_failure=on_failure, serves_adapters=serves_adapters,
    )  # fmt: skip
