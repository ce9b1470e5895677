"""Resumable checkpoints: one safetensors file per rank and a manifest, no pickle.

Invariant: a checkpoint is written under a temporary name, with the manifest last, synced, and then renamed. Where hosts
have folders of their own, each renames its own, so a crash may leave a checkpoint on some hosts only. It is reported
once all have it, and loaded only if all ranks have the same manifest. Loaded tensors are compared with a hash of the
live weights and moments at the time of saving, so that a checkpoint that loads is the state that was saved. There is no
generator state, because the trainer draws no random numbers. A checkpoint can only be loaded by as many ranks as wrote
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

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
from dora.weights.store import checksum_of, clear_errors


class Damaged(ConfigError):
    """A checkpoint is incomplete, or differs from what was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where a rank has its checkpoints."""

    parent: Path  # folder of checkpoint folders, on this host or shared with others
    ranks: tuple[int, ...]  # whose files are in these folders; the first one begins and completes them
    device: torch.device  # of collectives
    fence: Callable[[], None]

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """A checkpoint in the folder of some ranks; the ranks of other folders have it too."""

    folder: Path
    files: Mapping[str, str]  # name -> checksum
    num_bytes: int

    @classmethod
    def of(cls, folder: Path, manifest: CheckpointManifest, ranks: Sequence[int]) -> Self:
        num_bytes = len(manifest.encode()) + sum(manifest.num_bytes[rank] for rank in ranks)
        return cls(folder, manifest.files(ranks), num_bytes)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where training continues."""

    step: StepId
    chain: str
    skipped: tuple[str, ...]  # damaged checkpoints, each with the reason


def save(storage: Storage, *, step: StepId, chain: str, tensors: Mapping[str, Tensor]) -> SavedFiles:
    """Write this rank's `tensors` for the boundary before `step`. A collective: return when all ranks have synced, and
    all folders are in place."""
    target = folder_of(storage.parent, step=step, chain=chain)
    written = target.with_name(f".{target.name}")
    checksums = [digest.hex() for digest in _gather(bytes.fromhex(state_hash(tensors)), device=storage.device)]
    found = read_manifest(target, ranks=storage.ranks)
    has_it = found is not None and found.state_checksums == checksums
    if all(_gather_flags(has_it, device=storage.device)):
        assert found is not None
        return SavedFiles.of(target, found, storage.ranks)  # requested twice, or a replayed step
    what = f"cannot write the checkpoint {target}"
    if storage.is_first:
        wait_for_space(partial(_begin, written, what))
    dist.barrier()
    mine = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    path = rank_file(written, dist.get_rank())
    wait_for_space(partial(_write, path, mine, what))
    with clear_errors(what):
        about = bytes.fromhex(checksum_of(path)) + path.stat().st_size.to_bytes(8)
    abouts = _gather(about, device=storage.device)
    sizes, of_files = [int.from_bytes(one[-8:]) for one in abouts], [one[:-8].hex() for one in abouts]
    manifest = CheckpointManifest(step, len(checksums), chain, checksums, sizes, of_files)
    if storage.is_first:
        wait_for_space(partial(_complete, written, manifest, what))
        with clear_errors(what):
            storage.fence()
            files.remove(target)  # damaged
            files.rename(written, target)
            files.sync_folder(storage.parent)
    dist.barrier()
    return SavedFiles.of(target, manifest, storage.ranks)


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


def _complete(written: Path, manifest: CheckpointManifest, what: str) -> None:
    with clear_errors(what):
        write_manifest(written, manifest)


def load(storage: Storage, paths: Sequence[Path], *, tensors: Mapping[str, Tensor], may_start_over: bool) -> Loaded:
    """Copy this rank's state from the first checkpoint that is undamaged on every rank; a collective.

    A folder that is damaged is set aside, and so are all folders of a checkpoint whose manifests differ. If no
    checkpoint is left and `may_start_over`, `tensors` stay as they are, for step 0.
    """
    skipped: list[str] = []
    for path in paths:
        reason = ""
        manifest = _read_manifest(path, storage)
        try:
            _require_same(path, manifest, device=storage.device)
            stored = _read(path, manifest, tensors=tensors)
        except Damaged as err:
            reason = str(err)
        undamaged = _gather_flags(not reason, device=storage.device)
        if all(undamaged):
            assert manifest is not None
            for name, tensor in tensors.items():
                tensor.copy_(stored[name])
            if state_hash(tensors) != manifest.state_checksums[dist.get_rank()]:
                raise ConfigError(f"{path}: the loaded state differs from the saved one, but the file is undamaged")
            return Loaded(StepId(manifest.step), manifest.chain, tuple(skipped))
        if reason:
            skipped.append(reason)  # without a reason here, the checkpoint is damaged on another rank, which says why
        if storage.is_first and not all(undamaged[rank] for rank in storage.ranks) and path.exists():
            storage.fence()
            set_aside(path, why="damaged")
        dist.barrier()
    if not may_start_over:
        raise ConfigError(f"no checkpoint can be loaded: {'; '.join(skipped) or 'they are damaged on another rank'}")
    return Loaded(StepId(0), "", tuple(skipped))


def _read_manifest(path: Path, storage: Storage) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint; None if this folder is incomplete, or has the name of another checkpoint."""
    manifest = read_manifest(path, ranks=storage.ranks)
    if manifest is None or path != folder_of(path.parent, step=manifest.step, chain=manifest.chain):
        return None
    return manifest


def _require_same(path: Path, manifest: CheckpointManifest | None, *, device: torch.device) -> None:
    """Raise Damaged unless all manifests of a checkpoint that were found are the same; a collective."""
    nothing = bytes(xxhash.xxh3_128().digest_size)
    digests = _gather(nothing if manifest is None else xxhash.xxh3_128_digest(manifest.encode()), device=device)
    if len({*digests} - {nothing}) > 1:
        raise Damaged(f"{path} is not the same checkpoint on all hosts")


def _read(path: Path, manifest: CheckpointManifest | None, *, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of a checkpoint, verified against its checksum."""
    rank = dist.get_rank()
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
    return stored


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the XXH3 hash (128 bits) of names and bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _gather_flags(flag: bool, *, device: torch.device) -> list[bool]:
    """Return the flags of all ranks; a collective."""
    return [one != b"\0" for one in _gather(bytes([flag]), device=device)]


def _gather(own: bytes, *, device: torch.device) -> list[bytes]:
    """Return the bytes of all ranks, equally many of each. They are gathered as tensors, because gathering objects
    would pickle them."""
    mine = torch.tensor(list(own), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [bytes(one.tolist()) for one in gathered]
