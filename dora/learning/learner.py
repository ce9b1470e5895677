"""The trainer's own steps within this process, on one rank, with all versions in memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dora.core.ids import VersionId
from dora.trainer.checkpoint import Saver, Storage
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

Weights = dict[str, Tensor]


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

    def publish(self, version: VersionId, *, chain: str) -> None:
        """Keep the weights as they are now."""
        self._kept[version] = {name: tensor.clone() for name, tensor in gather(self._policy).items()}

    def __getitem__(self, version: int) -> Weights:
        return self._kept[version]

    def forget_before(self, version: int) -> None:
        """Forget all older versions."""
        for old in [one for one in self._kept if one < version]:
            del self._kept[old]

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
    """In place of the connection to the controller: keeps the metrics of the last step."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def send(self, report: Any) -> None:
        if isinstance(report, StepDone):
            self.metrics = report.metrics


class _Rank(Trainer):
    """The one rank, which saves no checkpoints."""

    def save_checkpoint(self) -> None:
        pass


class Learner:
    """A policy that learns; within `OneRank`."""

    def __init__(self, settings: TrainerSettings, *, model: Path) -> None:
        self._reports = _Reports()
        policy = Policy(model, mesh=make_mesh("cpu"), dtype=torch.float32)
        self.versions = VersionsInMemory(policy)
        order = Configure(
            run_id="", model_path=str(model),
            settings=msgspec.structs.replace(settings, probe_tokens=0),  # the probe reads from a store of versions
            memory_root="", durable_root="", checkpoints="", resume_from=(), may_start_over=False, chain="", epoch=0,
            fence="",
        )  # fmt: skip
        self._trainer = _Rank(
            order,
            end=cast(TrainerEnd, self._reports),
            policy=policy,
            layout=check_training(policy, dtype="float32").layout,
            publisher=cast(Publisher, self.versions),
            saver=_saver(),
        )
        self._trainer.start()

    def train(self, batch: MicroBatch) -> None:
        """Train a micro-batch, and close the update or the step that ends with it."""
        self._trainer.train(batch)

    @property
    def metrics(self) -> dict[str, float]:
        """The trainer's metrics of the last step."""
        return self._reports.metrics


def _saver() -> Saver:
    """Return what would save checkpoints, if any were ordered."""
    storage = Storage(
        parent=Path(),
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
