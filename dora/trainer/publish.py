"""Publication of versions: each is written as a complete Hugging Face folder into the version store.

Invariant: a version number is published once. If the store already has it (a step replayed after a resume), the
new bytes are only compared with the stored ones. On a full disk, publication waits for space.

A thread writes one version while the next step is trained; `publish` waits for the previous version, so that at most
one is being written.
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

from dora.core.ids import VersionId
from dora.trainer.full_disk import save_tensors, wait_for_space
from dora.trainer.loading import as_published
from dora.trainer.model import Policy
from dora.transport.messages import VersionWritten
from dora.weights.store import MANIFEST, VersionStore, checksum_of, checksum_of_files, clear_errors

PUBLISH_TIMEOUT_S = 900.0  # for one version, in case the file system hangs; longer than FULL_TIMEOUT_S


class Publisher:
    """Writes versions in the background and reports each one when it is complete."""

    def __init__(
        self,
        store: VersionStore,
        *,
        model_path: Path,
        dtype: str,
        report: Callable[[VersionWritten], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` is called in the writing thread, because the main thread may be waiting for a message."""
        self._store = store
        self._model_path = model_path
        self._dtype = dtype
        self._report = report
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: Future[None] | None = None

    def publish(self, version: VersionId, weights: dict[str, Tensor], *, chain: str) -> None:
        """Start writing; raise the error of the previous version if that failed. `chain`: lineage of the weights."""
        self.wait()
        self._under_way = self._pool.submit(self._write, version, weights, chain)
        self._under_way.add_done_callback(self._on_done)

    def wait(self) -> None:
        """Wait until the version under way is published."""
        if self._under_way is not None:
            self._under_way.result(PUBLISH_TIMEOUT_S)

    def close(self) -> None:
        """Wait for the version under way and end the thread."""
        self.wait()
        self._pool.shutdown()

    def _on_done(self, job: Future[None]) -> None:
        if (err := job.exception()) is not None:
            self._on_failure(err)

    def _write(self, version: VersionId, weights: dict[str, Tensor], chain: str) -> None:
        """Write to the first root with enough space; wait for space if none has."""
        attempts = [partial(self._write_in, root, version, weights, chain) for root in self._store.roots]
        self._report(wait_for_space(*attempts))

    def _write_in(self, root: Path, version: VersionId, weights: dict[str, Tensor], chain: str) -> VersionWritten:
        replayed = version in {*self._store.live(), *self._store.durable()}
        staged = self._store.stage(version, root=root)
        with clear_errors(f"cannot write version {version} to {root}", remove=staged):
            save_tensors(weights, staged / "model.safetensors")
            copy_model_files(self._model_path, staged, dtype=self._dtype)
        made = {path.name: checksum_of(path) for path in sorted(staged.iterdir())} if replayed else {}
        manifest = self._store.seal(version, staged, chain=chain)
        differs = checksum_of_files(made) if replayed and made != manifest.files else ""
        return VersionWritten(
            version=version,
            num_bytes=manifest.num_bytes,
            files=dict(manifest.files),
            chain=chain,
            differs=differs,
        )


def gather(policy: Policy, *, dtype: str, keep: bool) -> dict[str, Tensor]:
    """Return all tensors of the folder in host memory, with the names and layout of the folder; empty unless `keep`. A
    collective, one conversion (at most the experts of one layer) at a time.

    Trained tensors get `dtype`, except those that a 16-bit or FP8 folder keeps in float32. Other tensors are unchanged,
    except that those stored in FP8 get `dtype`.
    """
    kept, untrained = {}, set(policy.plan.untrained)
    for name, tensor in policy.untrained.items():  # rank 0 has them
        kept[name] = tensor.to(getattr(torch, dtype)) if name in policy.dequantised else tensor
    for conversion in policy.plan.conversions:
        if conversion.sources.keys() <= untrained:
            continue
        tensors = {target: policy.full_tensor(target) for target in conversion.targets}
        if not keep:
            continue
        for name, tensor in as_published(policy.model, conversion, tensors).items():
            to = torch.float32 if name in policy.plan.float32 else getattr(torch, dtype)
            converted = tensor.to(to) if tensor.is_floating_point() else tensor
            kept[name] = converted.to("cpu", copy=True).contiguous()
    return kept


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
