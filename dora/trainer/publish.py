"""Publication of a version: gathered weights -> a complete Hugging Face folder in the version store.

Invariant: a version number is published once. If the store has it already (steps replayed after a resume), its bytes
stay and the new ones are only compared. A full disk is waited for: it costs time, not the run.

Publisher thread: consumes one gathered version at a time; produces VersionPublished; waits for its job; ended by
`close`. The next step is trained meanwhile; `publish` waits for the version before, so at most one is under way.
Called by: step.py (rank 0).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dora.trainer.model import Policy
from dora.trainer.room import save_tensors, until_there_is_room
from dora.transport.messages import VersionPublished
from dora.weights.store import MANIFEST, VersionStore, checksum_of, clear_errors

PUBLISH_TIMEOUT_S = 900.0  # for one version to be written: longer than FULL_TIMEOUT_S; a hanging file system


class Publisher:
    """Writes versions in the background and reports each when it is complete."""

    def __init__(
        self,
        store: VersionStore,
        *,
        model_path: Path,
        dtype: str,
        report: Callable[[VersionPublished], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` is called in the thread: the main thread may be waiting for work that will never come."""
        self._store = store
        self._model_path = model_path
        self._dtype = dtype
        self._report = report
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: Future[None] | None = None

    def publish(self, version: int, weights: dict[str, Tensor]) -> None:
        """Start writing; raises what the version before has failed with."""
        self.wait()
        self._under_way = self._pool.submit(self._write, version, weights)
        self._under_way.add_done_callback(self._on_done)

    def wait(self) -> None:
        """Until the version under way is published."""
        if self._under_way is not None:
            self._under_way.result(PUBLISH_TIMEOUT_S)

    def close(self) -> None:
        """Finish what is under way."""
        self.wait()
        self._pool.shutdown()

    def _on_done(self, job: Future[None]) -> None:
        if (err := job.exception()) is not None:
            self._on_failure(err)

    def _write(self, version: int, weights: dict[str, Tensor]) -> None:
        """In the first root that has room; where none has, room may come."""
        attempts = [partial(self._write_in, root, version, weights) for root in self._store.roots]
        self._report(until_there_is_room(*attempts))

    def _write_in(self, root: Path, version: int, weights: dict[str, Tensor]) -> VersionPublished:
        replayed = version in {*self._store.live(), *self._store.durable()}
        staged = self._store.stage(version, root=root)
        with clear_errors(f"cannot write version {version} to {root}", remove=staged):
            save_tensors(weights, staged / "model.safetensors")
            copy_model_files(self._model_path, staged, dtype=self._dtype)
        checksums = _checksums(staged) if replayed else {}
        manifest = self._store.seal(version, staged)
        return VersionPublished(
            version=version,
            num_bytes=manifest.num_bytes,
            files=dict(manifest.files),
            replayed=replayed,
            matches=not replayed or checksums == dict(manifest.files),
        )


def gather(policy: Policy, *, dtype: str, keep: bool) -> dict[str, Tensor]:
    """The whole model on the host in `dtype`; a collective, one tensor at a time; empty where `keep` is off."""
    kept = {}
    for name, tensor in policy.full_tensors():
        if keep:
            converted = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            kept[name] = converted.to("cpu", copy=True).contiguous()
    return kept


def copy_model_files(source: Path, target: Path, *, dtype: str) -> None:
    """Config, tokenizer and the like; the config names the type of the weights beside it."""
    for path in sorted(source.iterdir()):
        is_weights = ".safetensors" in path.name or path.name == MANIFEST
        if path.is_file() and not is_weights and path.suffix in {".json", ".txt", ".model", ".jinja"}:
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)  # its name before transformers 5
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: checksum_of(path) for path in sorted(folder.iterdir())}
