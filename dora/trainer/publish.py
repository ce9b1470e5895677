"""Publication of versions: the ranks together write each as a complete Hugging Face folder into the version store.

Weights change only at an optimizer update. So a thread of each rank writes that rank's parts of a version while the
next passes run, and only the next update waits for it (`until_written`). Rank 0 stages the folder, with room for every
file, so that a full disk is found before anything is written. Each rank writes its parts at their planned offsets and,
once all have, computes the checksums of some files. Then rank 0 seals the folder. The threads tell each other by words
(trainer/meeting.py), because only the main thread may run collectives.

Invariant: a version number is published once. If the store already has it (a step replayed after a resume), the new
bytes are only compared with the stored ones. A folder is sealed after all ranks have written and closed its files. On a
full disk, publication waits for space.

Where an adapter is trained, the weights of a version include it, and it is beside them in a folder of its own. Where
servers hold adapters, a version has no weights beside it, if they can be made of the model.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dora.adapter_files import PROOF, Proof
from dora.core.ids import VersionId
from dora.trainer.buckets import bytes_of
from dora.trainer.full_disk import wait_for_space
from dora.trainer.meeting import PEER_TIMEOUT_S, Meeting
from dora.trainer.model import Policy
from dora.trainer.parts import Parts, Piece
from dora.trainer.side_stream import SideStream
from dora.transport.messages import VersionWritten
from dora.weights.file_plan import INDEX, FilePlan, plan_files
from dora.weights.store import ADAPTER, MANIFEST, VersionStore, checksum_of, checksum_of_files, clear_errors

#: For one version, in case the file system hangs.
PUBLISH_TIMEOUT_S: Final = PEER_TIMEOUT_S + 100.0


class Publisher:
    """Writes this rank's part of each version in the background; on rank 0, reports each one when it is complete."""

    def __init__(
        self,
        store: VersionStore,
        *,
        policy: Policy,
        model_path: Path,
        dtype: str,
        words: Store,
        writers: int,
        report: Callable[[VersionWritten], None],
        on_failure: Callable[[BaseException], None],
        serves_adapters: bool = False,
    ) -> None:
        """`words`: of the threads of this incarnation of the ranks, and of nothing else. `writers`: number of ranks,
        from rank 0 on, that share the folders of `store`. `on_failure` is called in the writing thread, because the
        main thread may be waiting for a message.
        """
        self._store = store
        self._model_path = model_path
        self._dtype = dtype
        self._rank = dist.get_rank()
        self._meeting = Meeting(words, rank=self._rank, size=writers, fence=store.fence)
        self._writers = writers
        self._report = report
        self._on_failure = on_failure
        self._parts = Parts(policy, dtype=dtype, writers=writers, serves_adapters=serves_adapters)
        self._plan = plan_files(self._parts.specs)
        self._stream = SideStream(policy.device)
        self._count = 0  # of versions; the same on all ranks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._written: Future[Path] | None = None
        self._sealed: Future[None] | None = None

    def publish(self, version: VersionId, *, chain: str, proof: Proof | None = None) -> None:
        """Start writing the weights as they are now; raise the error of the previous version if that failed. A
        collective. `chain`: lineage of the weights. `proof`: of its adapter, if servers are to prove that they have it.
        """
        self.wait()
        gathered = self._parts.gather()
        self._count += 1
        if self._rank >= self._writers:
            return
        self._written = self._pool.submit(self._write, version, gathered, proof, self._stream.mark())
        self._sealed = self._pool.submit(self._seal, version, chain, self._written)
        self._sealed.add_done_callback(self._on_done)

    def until_written(self) -> None:
        """Wait until the weights may change: until this rank's part of the version under way is written."""
        if self._written is not None:
            self._written.result(PUBLISH_TIMEOUT_S)

    def wait(self) -> None:
        """Wait until the version under way is published; on ranks other than 0, until their work on it is done."""
        if self._sealed is not None:
            self._sealed.result(PUBLISH_TIMEOUT_S)

    def close(self) -> None:
        """Wait for the version under way and end the thread."""
        self.wait()
        self._pool.shutdown()

    def _on_done(self, job: Future[None]) -> None:
        if (err := job.exception()) is not None:
            self._on_failure(err)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _write(
        self, version: VersionId, gathered: Sequence[Piece], proof: Proof | None, mark: torch.cuda.Event | None
    ) -> Path:
        """Write this rank's parts; return the staged folder."""
        if self._rank == 0:
            folder = wait_for_space(*(partial(self._stage, version, proof, root) for root in self._store.roots))
            self._meeting.say(self._word("folder"), str(folder))
        else:
            folder = Path(self._meeting.hear(self._word("folder"), rank=0))
        with self._stream.after(mark):
            for piece in itertools.chain(gathered, self._parts.pieces()):
                wait_for_space(partial(write_piece, folder, self._plan, piece))
        return folder

    def _stage(self, version: VersionId, proof: Proof | None, root: Path) -> Path:
        """Make a folder in a root, with all but the weights, and with room for them."""
        staged = self._store.stage(version, root=root)
        with clear_errors(f"cannot write version {version} to {root}", remove=staged):
            make_files(staged, self._plan)
            copy_model_files(self._model_path, staged, dtype=self._dtype)
            self._parts.write_adapter(staged, model=self._model_path)
            if proof is not None:
                (staged / ADAPTER / PROOF).write_bytes(msgspec.json.encode(proof))
        return staged

    def _seal(self, version: VersionId, chain: str, written: Future[Path]) -> None:
        """Compute this rank's share of the checksums; on rank 0, seal the version and report it."""
        folder = written.result()
        self._meeting.say(self._word("written"))
        for rank in range(self._writers):
            self._meeting.hear(self._word("written"), rank=rank)
        mine = self._plan.files[self._rank :: self._writers]
        with clear_errors(f"cannot read version {version} in {folder}"):
            checksums = {file.name: checksum_of(folder / file.name) for file in mine}
        self._meeting.say(self._word("checksums"), json.dumps(checksums))
        if self._rank == 0:
            self._report(self._complete(version, folder, chain))

    def _complete(self, version: VersionId, folder: Path, chain: str) -> VersionWritten:
        checksums: dict[str, str] = {}
        for rank in range(self._writers):
            checksums |= json.loads(self._meeting.hear(self._word("checksums"), rank=rank))
        for rank, what in itertools.product(range(self._writers), ("folder", "written", "checksums")):
            self._meeting.forget(self._word(what), rank=rank)  # all have heard them
        replayed = version in {*self._store.live(), *self._store.durable()}
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        made = {name: checksums.get(name) or checksum_of(folder / name) for name in names}
        manifest = self._store.seal(version, folder, chain=chain, checksums=checksums)
        return VersionWritten(
            version=version,
            num_bytes=manifest.num_bytes,
            files=dict(manifest.files),
            chain=chain,
            differs=checksum_of_files(made) if replayed and made != manifest.files else "",
        )

    def _word(self, what: str) -> str:
        return f"{what} of publication {self._count}"


def make_files(folder: Path, plan: FilePlan) -> None:
    """Make the files of a plan in a folder: their headers, and room for the tensors."""
    for file in plan.files:
        with (folder / file.name).open("wb") as opened:
            opened.write(file.header)
            opened.flush()
            os.posix_fallocate(opened.fileno(), 0, file.num_bytes)
    if len(plan.files) > 1:
        (folder / INDEX).write_bytes(plan.index())


def write_piece(folder: Path, plan: FilePlan, piece: Piece) -> None:
    """Write rows of a tensor to their place; StoreError if that fails."""
    place = plan.places[piece.name]
    data = bytes_of(piece.rows)
    path = folder / place.file
    with clear_errors(f"cannot write {path}"):
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            at = place.offset + piece.row * place.row_bytes
            while data:
                written = os.pwrite(file, data, at)
                data, at = data[written:], at + written
        finally:
            os.close(file)


def copy_model_files(source: Path, target: Path, *, dtype: str) -> None:
    """Copy config, tokenizer and similar files; the config gets the data type of the weights beside it."""
    for path in sorted(source.iterdir()):
        is_weights = ".safetensors" in path.name or path.name == MANIFEST
        if path.is_file() and not is_weights and path.suffix in {".json", ".txt", ".model", ".jinja"}:
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name before transformers 5
    config.pop("quantization_config", None)  # FP8 was dequantised
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
