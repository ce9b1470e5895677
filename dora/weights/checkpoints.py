"""Checkpoints of the trainer as folders: names, manifests and completeness.

Ranks of one host, or all ranks if they share storage, write into one folder. Invariant: a folder `step-<s>-<chain>` was
complete when it got this name, with the files of these ranks and the manifest, which is the same in the folders of all
hosts, on the disk. It may have been damaged since, so `read_manifest` checks the sizes, and the ranks check the bytes
when they load it. The trainer writes checkpoints; the controller decides which are deleted.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from dora import files, foreign
from dora.weights.store import StoreError, StoreFull, checksum_of, clear_errors

MANIFEST = "manifest.json"
#: 90 bytes for each rank.
_MAX_MANIFEST_BYTES: Final = 1 << 20
#: Beginnings of the names that a checkpoint has while it is written, kept, set aside or deleted.
_PREFIXES: Final = ("step-", ".step-", ".trash-", ".damaged-", ".aside-")
_FOLDER: Final = re.compile(r"step-[0-9]{6,9}(-[0-9A-Za-z]{1,8})?")
_FILE: Final = re.compile(r"rank-[0-9]{1,6}\.safetensors|manifest\.json")


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The contents of a checkpoint; written last."""

    step: int  # the next step to train
    world_size: int
    chain: str  # lineage before that step
    state_checksums: list[str]  # of each rank's tensors
    num_bytes: list[int]  # of each rank's file
    file_checksums: list[str]  # of each rank's file, as in the manifest of a version (dora/weights/store.py)
    expert_ranks: int = 1  # number of consecutive ranks that divided the experts
    tensor_ranks: int = 1  # number of those that divided the matrices

    def encode(self) -> bytes:
        """Return the contents of its file. The last two are there if they are not 1, as in older ones."""
        contents = asdict(self)
        for name in ("expert_ranks", "tensor_ranks"):
            if contents[name] == 1:
                del contents[name]
        return json.dumps(contents, indent=1).encode()

    def files(self, ranks: Iterable[int]) -> dict[str, str]:
        """Return the name and the checksum of the manifest and of the files of `ranks`: what a copy consists of."""
        manifest = {MANIFEST: xxhash.xxh3_128_hexdigest(self.encode())}
        return manifest | {file_name(rank): self.file_checksums[rank] for rank in ranks}


def folder_of(parent: Path, *, step: int, chain: str) -> Path:
    """Return the path of a checkpoint; different histories have different names."""
    return parent / (f"step-{step:06d}-{chain[:8]}" if chain else f"step-{step:06d}")


def file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def rank_file(folder: Path, rank: int) -> Path:
    return folder / file_name(rank)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write and sync the manifest. The checkpoint counts only once its folder is renamed into place."""
    path = folder / MANIFEST
    files.write_new(path, manifest.encode())
    files.sync(path)
    files.sync_folder(folder)


def read_manifest(folder: Path, *, ranks: Collection[int] | None = None) -> CheckpointManifest | None:
    """Return the manifest if the files of `ranks` (None: of all ranks) have the right sizes; None if the checkpoint is
    torn, half deleted or absent."""
    try:
        data = foreign.read(folder / MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
        rows = (manifest.num_bytes, manifest.state_checksums, manifest.file_checksums)
        if any(len(row) != manifest.world_size for row in rows):
            return None
        if min(manifest.expert_ranks, manifest.tensor_ranks) < 1:
            return None
        if manifest.world_size % (manifest.expert_ranks * manifest.tensor_ranks):
            return None
        is_complete = all(
            foreign.size_of(rank_file(folder, rank)) == manifest.num_bytes[rank]
            for rank in (range(manifest.world_size) if ranks is None else ranks)
        )
    except (OSError, IndexError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, foreign.ForeignFileError):
        return None
    return manifest if is_complete else None


def checkpoints_in(parent: Path) -> list[Path]:
    """Return all folders with a checkpoint's name, ascending by step."""
    return sorted(path for path in parent.glob("step-*") if path.is_dir())


def is_file_of(folder: str, name: str) -> bool:
    """Return whether these names, which may come from elsewhere, are of a checkpoint and of a file in it."""
    return bool(_FOLDER.fullmatch(folder) and _FILE.fullmatch(name))


def missing(folder: Path, checksums: Mapping[str, str]) -> dict[str, str]:
    """Return those of the files of a checkpoint (name -> checksum) that its folder does not have."""
    if not all(is_file_of(folder.name, name) for name in checksums):
        raise StoreError(f"{folder.name!r}: these are not names of a checkpoint and its files")

    def has(name: str) -> bool:
        try:
            return checksum_of(folder / name) == checksums[name]
        except (OSError, foreign.ForeignFileError):
            return False

    return {name: checksum for name, checksum in checksums.items() if not has(name)}


def stage(parent: Path, name: str, *, num_bytes: int) -> Path:
    """Create an empty folder for files of a checkpoint; StoreFull if there is no space for them."""
    what = f"cannot stage {name} in {parent}"
    with clear_errors(what):
        if (free := shutil.disk_usage(parent).free) < num_bytes:
            raise StoreFull(f"{what}: it has {num_bytes:,} bytes, for which there are {free:,}; free some")
        return Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))


def expose(staged: Path, target: Path, *, fence: Callable[[], None]) -> None:
    """Sync staged files and make them visible in `target`, beside the files of other ranks; the manifest last."""
    with clear_errors(f"cannot make {target} visible"):
        names = sorted((path.name for path in staged.iterdir()), key=lambda name: (name == MANIFEST, name))
        for name in names:
            files.wrote(staged / name)
            files.sync(staged / name)
        files.sync_folder(staged)
        fence()
        if not target.is_dir():
            files.rename(staged, target)
        for name in names if staged.is_dir() else ():
            files.rename(staged / name, target / name)
        files.sync_folder(target)
        files.sync_folder(target.parent)


def drop(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half-deleted one is never found."""
    trash = folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}")
    try:
        files.rename(folder, trash)
    except FileNotFoundError:
        return
    files.sync_folder(folder.parent)  # else a power failure could restore the name but not all files
    files.remove(trash)


def set_aside(folder: Path, *, why: str) -> Path:
    """Rename a checkpoint so that it is not found any more; return its new path."""
    aside = folder.with_name(f".{why}-{folder.name}-{secrets.token_hex(4)}")
    files.rename(folder, aside)
    files.sync_folder(folder.parent)
    return aside


def keep_only(parent: Path, names: Collection[str]) -> None:
    """Delete all other checkpoints of a folder, whole or not, at the start of a run, before any rank writes."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name in names or not path.name.startswith(_PREFIXES):
            continue
        if path.name.startswith("step-"):
            drop(path)
        else:
            files.remove(path)


def sweep(parent: Path) -> None:
    """Delete the remains of interrupted writes and deletions, at the start of a run, before any rank writes."""
    files.sync_folder(parent)  # else a power failure could restore the name of a half-deleted folder
    for path in parent.iterdir():
        if path.is_dir() and path.name.startswith((".step-", ".trash-")):
            files.remove(path)
