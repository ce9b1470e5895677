"""Checkpoints of the trainer as folders: their names, their manifests, and which of them are whole.

Invariant: a folder `step-<s>-<chain>` was complete when it got that name: every rank's file and the manifest were on
the disk before. It may have been damaged since, so `read` looks at the sizes, and the ranks at the bytes when they
load it. The trainer writes checkpoints; the controller decides which of them are deleted.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from dora import files

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a checkpoint consists of; written last."""

    step: int  # the next step to be trained from it
    world_size: int
    chain: str  # lineage before that step
    state_checksums: list[str]  # of each rank's tensors
    num_bytes: list[int]  # of each rank's file


def folder_of(parent: Path, *, step: int, chain: str) -> Path:
    """Where a checkpoint lies: two histories never share a name."""
    return parent / (f"step-{step:06d}-{chain[:8]}" if chain else f"step-{step:06d}")


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Bytes are written and synced; the folder's name makes it count."""
    path = folder / MANIFEST
    files.write_new(path, json.dumps(asdict(manifest), indent=1).encode())
    files.sync(path)
    files.sync_folder(folder)


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """The manifest of a folder whose files are there in their sizes; None if it is torn, pruned by half or none."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
        sizes = [rank_file(folder, rank).stat().st_size for rank in range(len(manifest.num_bytes))]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_whole = sizes == manifest.num_bytes and len(sizes) == len(manifest.state_checksums) == manifest.world_size
    return manifest if is_whole else None


def checkpoints_in(parent: Path) -> list[Path]:
    """Every folder that looks like a checkpoint, ascending by step."""
    return sorted(path for path in parent.glob("step-*") if path.is_dir())


def drop(folder: Path) -> None:
    """Delete a checkpoint; out of sight first, so that a half-deleted one is never found."""
    trash = folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}")
    try:
        files.rename(folder, trash)
    except FileNotFoundError:
        return
    files.sync_folder(folder.parent)  # else a power failure could bring the name back, but not all of its files
    files.remove(trash)


def set_aside(folder: Path, *, why: str) -> Path:
    """Take a checkpoint out of sight without deleting it; returns where it lies now."""
    aside = folder.with_name(f".{why}-{folder.name}-{secrets.token_hex(4)}")
    files.rename(folder, aside)
    files.sync_folder(folder.parent)
    return aside


def sweep(parent: Path) -> None:
    """Delete what interrupted writes and deletions left behind. Only at the start of a run, before any rank writes."""
    files.sync_folder(parent)  # else a power failure could bring back the name of what is half deleted here
    for path in parent.iterdir():
        if path.is_dir() and path.name.startswith((".step-", ".trash-")):
            files.remove(path)
