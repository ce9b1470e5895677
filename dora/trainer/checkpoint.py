"""Resumable checkpoints: one safetensors file per rank and a manifest, no pickle.

Invariant: a folder `step-<s>` is complete: it is written under a temporary name, synced and renamed, its manifest
last; anything else is ignored. After loading, a hash of weights and moments is compared with the one taken from the
live tensors when saving, so a checkpoint that loads is the state that was saved. Nothing in the trainer draws random
numbers, hence no generator state. A checkpoint belongs to its world size.
Called by: step.py; `latest` by the CLI.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.room import save_tensors, until_there_is_room
from dora.weights.store import clear_errors

KEEP = 2  # complete checkpoints kept, newest first
MANIFEST = "manifest.json"


def save(folder: Path, *, step: int, tensors: Mapping[str, Tensor], device: torch.device) -> Path:
    """Write this rank's `tensors` for the boundary before `step`; a collective, returns when all ranks are durable."""
    target, written = folder / f"step-{step:06d}", folder / f".step-{step:06d}"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manifest = {
        "step": step,
        "world_size": world_size,
        "state_checksums": _gather_hashes(state_hash(tensors), device=device),
    }
    if _complete(target) and json.loads((target / MANIFEST).read_text()) == manifest:
        return target  # asked for twice, or a replayed step
    what = f"cannot write the checkpoint {target}"
    if rank == 0:
        until_there_is_room(partial(_begin, written, what))
    dist.barrier()
    mine = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    until_there_is_room(partial(_write, written / f"rank-{rank}.safetensors", mine, what))
    dist.barrier()
    if rank == 0:
        until_there_is_room(partial(_complete_with, manifest, written, what))
        shutil.rmtree(target, ignore_errors=True)  # incomplete, or of a history that was given up
        written.rename(target)
        _fsync(folder)
        for old in _all(folder)[:-KEEP]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def _begin(written: Path, what: str) -> None:
    with clear_errors(what):
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)


def _write(path: Path, tensors: Mapping[str, Tensor], what: str) -> None:
    with clear_errors(what):
        save_tensors(tensors, path)
        _fsync(path)


def _complete_with(manifest: Mapping[str, Any], written: Path, what: str) -> None:
    with clear_errors(what):
        (written / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _fsync(written / MANIFEST)
        _fsync(written)


def load(path: Path, *, tensors: Mapping[str, Tensor]) -> int:
    """Copy this rank's state into `tensors`, verify it and return the step to go on with."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not _complete(path):
        raise ConfigError(f"{path} is no complete checkpoint; name a folder step-<s> that holds {MANIFEST}")
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest["world_size"] != world_size:
        raise ConfigError(f"{path} was written by {manifest['world_size']} ranks; set trainer.ranks to that number")
    try:
        stored = load_file(path / f"rank-{rank}.safetensors")
    except (OSError, SafetensorError) as err:
        raise ConfigError(
            f"{path}/rank-{rank}.safetensors is damaged ({err}); resume from an older checkpoint"
        ) from err
    if stored.keys() != tensors.keys():
        raise ConfigError(
            f"{path} belongs to another model: {sorted(stored.keys() ^ tensors.keys())[0]} does not match"
        )
    for name, tensor in tensors.items():
        if stored[name].shape != tensor.shape:
            raise ConfigError(f"{path} belongs to another model: {name} has shape {tuple(stored[name].shape)}")
        tensor.copy_(stored[name])
    if state_hash(tensors) != manifest["state_checksums"][rank]:
        raise ConfigError(f"{path}: what rank {rank} loaded is not what was saved; resume from an older checkpoint")
    return int(manifest["step"])


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`."""
    return max(_all(folder), default=None)


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """XXH3 (128 bits) over names and bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if _complete(path))


def _complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _gather_hashes(own: str, *, device: torch.device) -> list[str]:
    """The hashes of all ranks, as tensors: gathering objects would pickle them."""
    mine = torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [bytes(hash_.tolist()).hex() for hash_ in gathered]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
