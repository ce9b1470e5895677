"""Resumable checkpoints: one safetensors file per rank and a manifest, no pickle.

Invariant: a checkpoint is written under a temporary name, with the manifest last, synced, and then renamed. Loaded
tensors are compared with a hash of the live weights and moments at the time of saving, so that a checkpoint that loads
is the state that was saved. There is no generator state, because the trainer draws no random numbers. A checkpoint can
only be loaded by as many ranks as wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dora import files
from dora.core.ids import StepId
from dora.errors import ConfigError
from dora.trainer.full_disk import save_tensors, wait_for_space
from dora.weights.checkpoints import (
    CheckpointManifest,
    folder_of,
    rank_file,
    read_manifest,
    set_aside,
    write_manifest,
)
from dora.weights.store import clear_errors


class Damaged(ConfigError):
    """A checkpoint is incomplete, or differs from what was saved."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where training continues."""

    step: StepId
    chain: str
    skipped: tuple[str, ...]  # damaged checkpoints, each with the reason


def save(
    parent: Path,
    *,
    step: StepId,
    chain: str,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    fence: Callable[[], None],
) -> Path:
    """Write this rank's `tensors` for the boundary before `step`. A collective: return when all ranks have synced."""
    target = folder_of(parent, step=step, chain=chain)
    written = target.with_name(f".{target.name}")
    rank = dist.get_rank()
    checksums = _gather_hashes(state_hash(tensors), device=device)
    found = read_manifest(target)
    if _agree(found is not None and found.state_checksums == checksums, device=device):
        return target  # requested twice, or a replayed step
    what = f"cannot write the checkpoint {target}"
    if rank == 0:
        wait_for_space(partial(_begin, written, what))
    dist.barrier()
    mine = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    wait_for_space(partial(_write, rank_file(written, rank), mine, what))
    dist.barrier()
    if rank == 0:
        wait_for_space(partial(_complete, written, step, chain, checksums, what))
        with clear_errors(what):
            fence()
            files.remove(target)  # damaged
            files.rename(written, target)
            files.sync_folder(parent)
    dist.barrier()
    return target


def _begin(written: Path, what: str) -> None:
    with clear_errors(what):
        files.remove(written)
        written.parent.mkdir(exist_ok=True)  # without parents: a deleted run folder stays deleted
        files.make_folder(written)


def _write(path: Path, tensors: Mapping[str, Tensor], what: str) -> None:
    with clear_errors(what):
        save_tensors(tensors, path)
        files.wrote(path)
        files.sync(path)


def _complete(written: Path, step: StepId, chain: str, checksums: list[str], what: str) -> None:
    with clear_errors(what):
        sizes = [rank_file(written, rank).stat().st_size for rank in range(len(checksums))]
        write_manifest(written, CheckpointManifest(step, len(checksums), chain, checksums, sizes))


def load(
    paths: Sequence[Path],
    *,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    may_start_over: bool,
    fence: Callable[[], None],
) -> Loaded:
    """Copy this rank's state from the first checkpoint that is undamaged on every rank; a collective.

    Damaged ones are set aside. If none is left and `may_start_over`, `tensors` stay as they are, for step 0.
    """
    skipped: list[str] = []
    for path in paths:
        reason = ""
        try:
            manifest, stored = _read(path, tensors=tensors)
        except Damaged as err:
            reason = str(err)
        if _agree(not reason, device=device):
            for name, tensor in tensors.items():
                tensor.copy_(stored[name])
            if state_hash(tensors) != manifest.state_checksums[dist.get_rank()]:
                raise ConfigError(f"{path}: the loaded state differs from the saved one, but the file is undamaged")
            return Loaded(StepId(manifest.step), manifest.chain, tuple(skipped))
        if reason:
            skipped.append(reason)  # without a reason here, the checkpoint is damaged on another rank, which says why
        if dist.get_rank() == 0 and path.exists():
            fence()
            set_aside(path, why="damaged")
        dist.barrier()
    if not may_start_over:
        raise ConfigError(f"no checkpoint can be loaded: {'; '.join(skipped) or 'they are damaged on another rank'}")
    return Loaded(StepId(0), "", tuple(skipped))


def _read(path: Path, *, tensors: Mapping[str, Tensor]) -> tuple[CheckpointManifest, dict[str, Tensor]]:
    """Return this rank's part of a checkpoint, verified against its checksum."""
    rank = dist.get_rank()
    manifest = read_manifest(path)
    if manifest is None:
        raise Damaged(f"{path} is incomplete")
    if manifest.world_size != dist.get_world_size():
        raise ConfigError(f"{path} was written by {manifest.world_size} ranks; set trainer.ranks to that number")
    try:
        stored = load_file(rank_file(path, rank))
    except (OSError, SafetensorError) as err:
        raise Damaged(f"{rank_file(path, rank)} is damaged ({err})") from err
    if state_hash(stored) != manifest.state_checksums[rank]:
        raise Damaged(f"{rank_file(path, rank)} does not match its checksum")
    if stored.keys() != tensors.keys():
        raise ConfigError(
            f"{path} belongs to another model: {sorted(stored.keys() ^ tensors.keys())[0]} does not match"
        )
    for name, tensor in tensors.items():
        if stored[name].shape != tensor.shape:
            raise ConfigError(f"{path} belongs to another model: {name} has shape {tuple(stored[name].shape)}")
    return manifest, stored


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the XXH3 hash (128 bits) of names and bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _agree(holds: bool, *, device: torch.device) -> bool:
    """Return whether `holds` is true on every rank; a collective."""
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _gather_hashes(own: str, *, device: torch.device) -> list[str]:
    """Return the hashes of all ranks; gathered as tensors, because gathering objects would pickle them."""
    mine = torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [bytes(hash_.tolist()).hex() for hash_ in gathered]
