"""The trainer's own steps within this process, on one rank, with all versions in memory.

A learner with a folder can be saved: the versions in memory, then a checkpoint of the trainer. Invariant: the newest
checkpoint has all versions that were in memory with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, cast

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dora import files, foreign
from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.trainer.checkpoint import Saver, Storage
from dora.trainer.copies import frozen_adapters
from dora.trainer.forward_check import check_training
from dora.trainer.meeting import Meeting
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.parts import Parts
from dora.trainer.publish import Publisher
from dora.trainer.resharding import Arrangement
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, MicroBatch, StepDone, TrainerSettings
from dora.transport.trainer_end import TrainerEnd
from dora.weights.checkpoints import checkpoints_in, keep_only

Weights = dict[str, Tensor]
#: Why something is missing: it comes before a saved step, so the answers that led to it were on the disk.
_LOST: Final = "although later ones were: answers that were saved are lost; delete the simulation's folder"
#: Folder with the versions of a saved learner.
VERSIONS: Final = "versions"
#: File among them with metrics of the trainer.
METRICS: Final = "metrics"


class OneRank:
    """The process group of one rank, which FSDP needs, while the context is open."""

    def __enter__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        dist.destroy_process_group()


class VersionsInMemory:
    """In place of the publisher: the weights of versions, until they are forgotten."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: dict[int, Weights] = {}

    def publish(self, version: VersionId, *, chain: str, proof: None = None) -> None:
        """Keep the weights as they are now."""
        self._kept[version] = {name: tensor.clone() for name, tensor in gather(self._policy).items()}

    def __getitem__(self, version: int) -> Weights:
        if version not in self._kept:
            raise ConfigError(f"version {version}: its weights were not saved, {_LOST}")
        return self._kept[version]

    def forget_before(self, version: int) -> None:
        """Forget all older versions."""
        for old in [one for one in self._kept if one < version]:
            del self._kept[old]

    def save(self, folder: Path) -> None:
        """Write the versions that are not in the folder."""
        for version, weights in self._kept.items():
            path = folder / f"{version}.safetensors"
            if not path.exists():
                files.replace(path, safetensors.torch.save(weights))

    def load(self, folder: Path, *, newest: int) -> None:
        """Read the versions of a folder up to `newest`."""
        for path in folder.glob("*.safetensors"):
            if int(path.stem) <= newest:
                with foreign.open_regular(path) as file:
                    self._kept[int(path.stem)] = safetensors.torch.load(file.read())

    def clean(self, folder: Path) -> None:
        """Delete the versions of a folder that are forgotten."""
        for path in folder.glob("*.safetensors"):
            if int(path.stem) not in self._kept:
                files.remove(path)

    def until_written(self) -> None:
        """Nothing is written."""

    def wait(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is written."""


def gather(policy: Policy) -> Weights:
    """Return all tensors of the policy in float32."""
    parts = Parts(policy, dtype="float32", writers=1)
    shapes = {spec.name: spec.shape for spec in parts.specs}
    found: Weights = {}
    for piece in (*parts.gather(), *parts.pieces()):
        whole = found.setdefault(piece.name, torch.empty(shapes[piece.name], dtype=piece.rows.dtype))
        (whole[piece.row : piece.row + len(piece.rows)] if whole.dim() else whole).copy_(piece.rows)
    return found


class _Reports:
    """In place of the connection to the controller: keeps the metrics of steps."""

    def __init__(self) -> None:
        self._metrics: dict[int, dict[str, float]] = {}

    def send(self, report: Any) -> None:
        if isinstance(report, StepDone):
            self._metrics[report.step] = report.metrics

    def take(self, step: int) -> dict[str, float] | None:
        """Return the metrics of a step, and forget those before it."""
        for old in [one for one in self._metrics if one < step]:
            del self._metrics[old]
        return self._metrics.get(step)

    def save(self, folder: Path) -> None:
        """Write what was not taken yet: the steps that were trained before their versions are published."""
        files.replace(folder / METRICS, msgspec.msgpack.encode(self._metrics))

    def load(self, folder: Path) -> None:
        """Read what was written; nothing, if nothing was."""
        if (folder / METRICS).exists():
            with foreign.open_regular(folder / METRICS) as file:
                self._metrics = msgspec.msgpack.decode(file.read(), type=dict[int, dict[str, float]])


class _LearningRank(Trainer):
    """The one rank, which saves a checkpoint only when the learner is saved."""

    def save_checkpoint(self) -> None:
        pass

    def save_now(self) -> None:
        """Save a checkpoint and wait for it."""
        super().save_checkpoint()
        self._saver.wait()


class Learner:
    """A policy that learns; within `OneRank`."""

    def __init__(self, settings: TrainerSettings, *, model: Path, folder: Path | None = None) -> None:
        """`folder`: where it is saved, and where it goes on from if it was."""
        self._reports = _Reports()
        self._folder = folder
        policy = Policy(
            model,
            mesh=make_mesh("cpu"),
            dtype=torch.float32,
            lora=settings.lora,
            frozen_adapters=frozen_adapters(settings),
        )
        self.versions = VersionsInMemory(policy)
        saved = checkpoints_in(folder)[-1:] if folder is not None else []
        order = Configure(
            run_id="", model_path=str(model),
            settings=msgspec.structs.replace(settings, probe_tokens=0),  # the probe reads from a store of versions
            memory_root="", durable_root="", checkpoints="", resume_from=tuple(map(str, saved)), may_start_over=False,
            chain="", epoch=0, fence="",
        )  # fmt: skip
        self._trainer = _LearningRank(
            order,
            end=cast(TrainerEnd, self._reports),
            policy=policy,
            layout=check_training(policy, dtype="float32").layout,
            publisher=cast(Publisher, self.versions),
            saver=_saver(folder or Path()),
        )
        self._trained = self._trainer.next_step  # steps that the checkpoint has
        if folder is not None:
            with _readable(folder / VERSIONS):
                files.make_folder(folder / VERSIONS, exist_ok=True)
                self.versions.load(folder / VERSIONS, newest=self._trained)
                self._reports.load(folder / VERSIONS)
        self._trainer.start()

    def train(self, batch: MicroBatch) -> None:
        """Train a micro-batch, and close the update or the step that ends with it; no effect if that was saved."""
        if batch.step >= self._trained:
            self._trainer.train(batch)

    def save(self) -> None:
        """Save the versions in memory and the state before the current step; no effect without a folder."""
        if self._folder is None or self._trainer.next_step <= self._trained:
            return
        self.versions.save(self._folder / VERSIONS)
        self._reports.save(self._folder / VERSIONS)
        self._trainer.save_now()
        keep_only(self._folder, [path.name for path in checkpoints_in(self._folder)[-1:]])
        self.versions.clean(self._folder / VERSIONS)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the trainer's metrics of a step, and forget those before it. Later steps may be trained by now."""
        found = self._reports.take(step)
        if found is None:
            raise ConfigError(f"step {step}: its metrics were not saved, {_LOST}")
        return found


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise ConfigError for versions that cannot be read."""
    try:
        yield
    except (OSError, ValueError, SafetensorError, msgspec.MsgspecError) as err:
        raise ConfigError(
            f"{folder}: its versions cannot be read ({err}); delete the folder of the simulation"
        ) from err


def _saver(folder: Path) -> Saver:
    """Return what saves checkpoints."""
    storage = Storage(
        parent=folder,
        here=(0,),
        arrangement=Arrangement(1),
        device=torch.device("cpu"),
        meeting=Meeting(HashStore(), rank=0, size=1, fence=_pass),
        fence=_pass,
    )
    return Saver(storage, report=_ignore, on_failure=_ignore)


def _pass() -> None:
    pass


def _ignore(_: object) -> None:
    pass
