"""Resumable checkpoints: one safetensors file per rank and a manifest, no pickle.

A checkpoint is written by a thread of each rank, beside training: weights and moments change only in an update, and the
next one waits until this rank's file is written (`Saver`).

Invariant: a checkpoint is written under a temporary name, with the manifest last, synced, and then renamed. Where hosts
have folders of their own, each renames its own, so a crash may leave a checkpoint on some hosts only. It is reported
once all have it, and loaded only if all ranks have the same manifest. Loaded tensors are compared with a hash of the
live weights and moments at the time of saving, so that a checkpoint that loads is the state that was saved. There is no
generator state, because the trainer draws no random numbers.

Where the weights are replicated, the ranks of the first copy write, and all copies load the same files. Any number of
ranks can load a checkpoint, if its folder has the files of all ranks that wrote it: each reads its own
rows (trainer/resharding.py) and verifies the checksums of some of the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dora import files
from dora.core.ids import StepId
from dora.errors import ConfigError
from dora.foreign import ForeignFileError
from dora.trainer.agreement import gather_bytes, gather_flags, together
from dora.trainer.buckets import TYPES, buckets_of
from dora.trainer.full_disk import wait_for_space
from dora.trainer.meeting import Meeting
from dora.trainer.resharding import Arrangement, Divided, OwnBlock, own_blocks_of, read_blocks
from dora.trainer.side_stream import SideStream
from dora.transport.messages import CheckpointWritten
from dora.weights.checkpoints import (
    CheckpointManifest,
    folder_of,
    rank_file,
    read_manifest,
    set_aside,
    write_manifest,
)
from dora.weights.file_plan import TensorSpec, plan_files
from dora.weights.store import checksum_of, clear_errors

#: For one checkpoint, in case the file system hangs: 400 GB at 200 MB/s.
SAVE_TIMEOUT_S: Final = 2_000.0


class Damaged(ConfigError):
    """A checkpoint is incomplete, or differs from what was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where a rank has its checkpoints."""

    parent: Path  # folder of checkpoint folders, on this host or shared with others
    here: tuple[int, ...]  # ranks that share these folders; the first one begins and completes them
    arrangement: Arrangement  # of the ranks that have one copy of the state together
    device: torch.device  # of collectives
    meeting: Meeting  # of all ranks, for their threads that save
    fence: Callable[[], None]
    divided: Divided | None = None

    @property
    def num_files(self) -> int:
        return self.arrangement.num_files

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == self.here[0]

    @property
    def own_file(self) -> int:
        """The file with this rank's part of the state; the first copy of the state is the one that is written."""
        return dist.get_rank() % self.num_files

    @property
    def writes(self) -> bool:
        return dist.get_rank() < self.num_files

    def wrote(self, manifest: CheckpointManifest) -> bool:
        """Return whether ranks in this arrangement wrote a checkpoint, so that each loads its own file."""
        return arrangement_of(manifest) == self.arrangement

    @property
    def files(self) -> tuple[int, ...]:
        """The files that the ranks of these folders need."""
        return tuple(sorted({rank % self.num_files for rank in self.here}))

    @property
    def written(self) -> tuple[int, ...]:
        """The files that the ranks of these folders write."""
        return tuple(rank for rank in self.here if rank < self.num_files)


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """A checkpoint in the folder of some ranks; the ranks of other folders have it too."""

    folder: Path
    files: Mapping[str, str]  # name -> checksum
    num_bytes: int

    @classmethod
    def of(cls, folder: Path, manifest: CheckpointManifest | None, ranks: Sequence[int]) -> Self:
        if manifest is None:  # these ranks write nothing
            return cls(folder, {}, 0)
        num_bytes = len(manifest.encode()) + sum(manifest.num_bytes[rank] for rank in ranks)
        return cls(folder, manifest.files(ranks), num_bytes)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where training continues."""

    step: StepId
    chain: str
    skipped: tuple[str, ...]  # damaged checkpoints, each with the reason


def save(storage: Storage, *, step: StepId, chain: str, tensors: Mapping[str, Tensor]) -> SavedFiles:
    """Write this rank's `tensors` for the boundary before `step`; by one thread of each rank.

    Return when all ranks have synced, and all folders are in place.
    """
    target = folder_of(storage.parent, step=step, chain=chain)
    written, meeting = target.with_name(f".{target.name}"), storage.meeting
    found = read_manifest(target, ranks=storage.written)
    has_it = not storage.writes or (found is not None and _is_of(found, tensors, storage))
    if set(meeting.gather("has it" if has_it else "", what="a look for a checkpoint")) == {"has it"}:
        return SavedFiles.of(target, found, storage.written)  # requested twice, or a replayed step
    what, begins = f"cannot write the checkpoint {target}", storage.is_first and storage.writes
    if begins:
        wait_for_space(partial(_begin, written, what))
    meeting.gather(what="the folder of a checkpoint")
    about = wait_for_space(partial(_write_own, written, storage, tensors, what)) if storage.writes else ""
    # Ranks of further copies have nothing to write, and wait from the first byte to the last.
    gathered = meeting.gather(about, what="the files of a checkpoint", timeout_s=SAVE_TIMEOUT_S)
    abouts = [one.split() for one in gathered]
    states, sizes, of_files = ([*column] for column in zip(*abouts[: storage.num_files], strict=True))
    arrangement = storage.arrangement
    manifest = CheckpointManifest(
        step, storage.num_files, chain, states, [*map(int, sizes)], of_files,
        expert_ranks=arrangement.expert_ranks, tensor_ranks=arrangement.tensor_ranks,
    )  # fmt: skip
    if begins:
        wait_for_space(partial(_complete, written, manifest, what))
        with clear_errors(what):
            storage.fence()
            files.remove(target)  # damaged
            files.rename(written, target)
            files.sync_folder(storage.parent)
    meeting.gather(what="the end of a checkpoint")
    return SavedFiles.of(target, manifest, storage.written)


def arrangement_of(manifest: CheckpointManifest) -> Arrangement:
    """Return the arrangement of the ranks that wrote a checkpoint."""
    return Arrangement(manifest.world_size, manifest.expert_ranks, manifest.tensor_ranks)


def _is_of(manifest: CheckpointManifest, tensors: Mapping[str, Tensor], storage: Storage) -> bool:
    is_own = storage.wrote(manifest)
    return is_own and manifest.state_checksums[storage.own_file] == state_hash(tensors)


def _write_own(written: Path, storage: Storage, tensors: Mapping[str, Tensor], what: str) -> str:
    """Write this rank's file; return its state, size and checksum."""
    path = rank_file(written, storage.own_file)
    state = _write(path, tensors, what)
    with clear_errors(what):
        return f"{state} {path.stat().st_size} {checksum_of(path)}"


def _begin(written: Path, what: str) -> None:
    with clear_errors(what):
        files.remove(written)
        written.parent.mkdir(exist_ok=True)  # without parents: a deleted run folder stays deleted
        files.make_folder(written)


def _write(path: Path, tensors: Mapping[str, Tensor], what: str) -> str:
    """Write and sync a file of tensors, some rows at a time; return `state_hash` of what was written."""
    specs = [TensorSpec(name, TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    plan = plan_files(specs, max_bytes=sum(spec.num_bytes for spec in specs))
    [file] = plan.files
    digest = xxhash.xxh3_128()
    with clear_errors(what), open(path, "wb", opener=_for_this_user) as opened:
        opened.write(file.header)
        opened.flush()
        os.posix_fallocate(opened.fileno(), 0, file.num_bytes)
        for name in sorted(tensors):
            digest.update(name.encode())
            opened.seek(plan.places[name].offset)
            for data in buckets_of(tensors[name]):
                digest.update(data)
                opened.write(data)
    with clear_errors(what):
        files.wrote(path)
        files.sync(path)
    return digest.hexdigest()


def _for_this_user(path: str, flags: int) -> int:
    """Open a file that only this user can read, whatever the group of the run."""
    return os.open(path, flags, 0o600)


def _complete(written: Path, manifest: CheckpointManifest, what: str) -> None:
    with clear_errors(what):
        write_manifest(written, manifest)


def load(storage: Storage, paths: Sequence[Path], *, tensors: Mapping[str, Tensor], may_start_over: bool) -> Loaded:
    """Copy this rank's state from the first checkpoint that is undamaged on every rank; a collective.

    A folder that is damaged is set aside, and so are all folders of a checkpoint whose manifests differ. If no
    checkpoint is left and `may_start_over`, `tensors` stay as they are, for step 0.
    """
    skipped: list[str] = []
    own = own_blocks_of(tensors, storage.arrangement, device=storage.device, divided=storage.divided)
    for path in paths:
        reason = ""
        problem: ConfigError | None = None
        manifest = together(partial(_read_manifest, path, storage), device=storage.device)
        try:
            _require_same(path, manifest, device=storage.device)
            stored = _read(path, manifest, storage, tensors=tensors, own=own)
        except Damaged as err:
            reason = str(err)
        except ConfigError as err:  # or so it seems: other ranks verify some of the files
            problem = err
        undamaged = gather_flags(not reason, device=storage.device)
        if all(undamaged):
            if problem is not None:
                raise problem
            assert manifest is not None
            for name, tensor in tensors.items():
                tensor.copy_(stored[name])
            if storage.wrote(manifest) and state_hash(tensors) != manifest.state_checksums[storage.own_file]:
                raise ConfigError(f"{path}: the loaded state differs from the saved one, but the file is undamaged")
            return Loaded(StepId(manifest.step), manifest.chain, tuple(skipped))
        if reason:
            skipped.append(reason)  # without a reason here, the checkpoint is damaged on another rank, which says why
        if storage.is_first and not all(undamaged[rank] for rank in storage.here) and path.exists():
            storage.fence()
            set_aside(path, why="damaged")
        dist.barrier()
    if not may_start_over:
        raise ConfigError(f"no checkpoint can be loaded: {'; '.join(skipped) or 'they are damaged on another rank'}")
    return Loaded(StepId(0), "", tuple(skipped))


def _read_manifest(path: Path, storage: Storage) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint; None if this folder is incomplete, or has the name of another checkpoint.

    ConfigError if the files of other ranks are needed, which are on other hosts.
    """
    found = read_manifest(path, ranks=())
    if found is None:
        return None
    is_own = storage.wrote(found)
    manifest = read_manifest(path, ranks=storage.files if is_own else None)
    if manifest is None and not is_own and len(storage.here) < dist.get_world_size():
        files_of = f"{path} was written by {found.world_size} ranks, whose files are not all on this host"
        for key in ("expert", "tensor"):
            if (ranks := getattr(found, f"{key}_ranks")) != getattr(storage.arrangement, f"{key}_ranks"):
                raise ConfigError(f"{files_of}; set trainer.parallel.{key} to {ranks}")
        raise ConfigError(f"{files_of}; set trainer.ranks to that number")
    if manifest is None or path != folder_of(path.parent, step=manifest.step, chain=manifest.chain):
        return None
    return manifest


def _require_same(path: Path, manifest: CheckpointManifest | None, *, device: torch.device) -> None:
    """Raise Damaged unless all manifests of a checkpoint that were found are the same; a collective."""
    nothing = bytes(xxhash.xxh3_128().digest_size)
    digests = gather_bytes(nothing if manifest is None else xxhash.xxh3_128_digest(manifest.encode()), device=device)
    if len({*digests} - {nothing}) > 1:
        raise Damaged(f"{path} is not the same checkpoint on all hosts")


def _read(
    path: Path,
    manifest: CheckpointManifest | None,
    storage: Storage,
    *,
    tensors: Mapping[str, Tensor],
    own: Mapping[str, OwnBlock],
) -> dict[str, Tensor]:
    """Return this rank's part of a checkpoint, verified against its checksum."""
    rank = storage.own_file
    if manifest is None:
        raise Damaged(f"{path} is incomplete")
    if not storage.wrote(manifest):
        return _read_others(path, manifest, tensors=tensors, own=own, divided=storage.divided)
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


def _read_others(
    path: Path,
    manifest: CheckpointManifest,
    *,
    tensors: Mapping[str, Tensor],
    own: Mapping[str, OwnBlock],
    divided: Divided | None,
) -> dict[str, Tensor]:
    """Return this rank's part of a checkpoint of ranks in another arrangement; it verifies its share of the files."""
    paths = [rank_file(path, rank) for rank in range(manifest.world_size)]
    try:
        for written_by in range(dist.get_rank(), manifest.world_size, dist.get_world_size()):
            if checksum_of(paths[written_by]) != manifest.file_checksums[written_by]:
                raise Damaged(f"{paths[written_by]} does not match its checksum")
        return read_blocks(paths, arrangement_of(manifest), tensors=tensors, own=own, divided=divided)
    except (OSError, SafetensorError, ForeignFileError) as err:
        raise Damaged(f"{path} is damaged ({err})") from err


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the XXH3 hash (128 bits) of names and bytes."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        for data in buckets_of(tensors[name]):
            digest.update(data)
    return digest.hexdigest()


class Saver:
    """Writes checkpoints in the background, one at a time."""

    def __init__(
        self,
        storage: Storage,
        *,
        report: Callable[[CheckpointWritten], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`report` is called in the writing thread, on the first rank of each folder; and so is `on_failure`, on every
        rank, because the main thread may be waiting for a message."""
        self.storage = storage
        self._report = report
        self._on_failure = on_failure
        self._stream = SideStream(storage.device)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._under_way: Future[None] | None = None

    def save(self, *, step: StepId, chain: str, tensors: Mapping[str, Tensor]) -> None:
        """Start writing; raise the error of the previous checkpoint if that failed. Tensors must not change before
        `wait` has returned."""
        self.wait()
        self._under_way = self._pool.submit(self._save, step, chain, tensors, self._stream.mark())
        self._under_way.add_done_callback(self._on_done)

    def wait(self) -> None:
        """Wait until the checkpoint under way is complete."""
        if self._under_way is not None:
            self._under_way.result(SAVE_TIMEOUT_S)

    def close(self) -> None:
        """Wait for the checkpoint under way and end the thread."""
        self.wait()
        self._pool.shutdown()

    def _save(self, step: StepId, chain: str, tensors: Mapping[str, Tensor], mark: torch.cuda.Event | None) -> None:
        with self._stream.after(mark):
            saved = save(self.storage, step=step, chain=chain, tensors=tensors)
        if self.storage.is_first and self.storage.writes:
            names, folder = dict(saved.files), str(saved.folder)
            self._report(CheckpointWritten(step, folder, num_bytes=saved.num_bytes, files=names, chain=chain))

    def _on_done(self, job: Future[None]) -> None:
        if (err := job.exception()) is not None:
            self._on_failure(err)
