"""A trainer with all three policies and the probe, on two ranks, and resumed in the middle of a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import SETTINGS, chain_of, in_history, make_batch, make_groups, mini_batches
from torch import Tensor

from dora.objectives.objective import Objective, Terms
from dora.objectives.tokens import Tokens
from dora.trainer import model as policy_module
from dora.trainer.batch import pack
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.metrics import PROBED
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.publish import Publisher
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, MicroBatch, StepDone
from dora.weights.checkpoints import folder_of
from dora.weights.fence import raise_fence
from dora.weights.store import VersionStore
from tests.trainer.publishing import make_saver, words_of_ranks

RANKS, UPDATES = 2, 2
#: Two steps of four groups; in the second one, those of version 0 come first.
STEPS = [
    make_groups(4, version=0, seed=21),
    [*make_groups(2, version=0, seed=22), *make_groups(2, version=1, seed=23)],
]
CHANGES = {
    "updates": UPDATES, "micro_batch_tokens": 1000, "objective": '{"kl_coefficient": 0.1}', "probe_tokens": 64,
    "probe_every": 2,
}  # fmt: skip


class Watched(Objective):
    """Keeps the inputs of every pass."""

    def __call__(self, tokens: Tokens) -> Terms:
        self.seen.append(tokens)
        return super().__call__(tokens)

    seen: list[Tokens]


class Rank:
    """A trainer of this rank, and what it reported."""

    def __init__(self, folder: Path, model_path: Path, *, resume_from: tuple[str, ...] = (), **changes: Any) -> None:
        self.sent: list[Any] = []
        self.rank = dist.get_rank()
        order = Configure(
            run_id="three",
            model_path=str(model_path),
            settings=msgspec.structs.replace(SETTINGS, **(CHANGES | changes)),
            memory_root=str(folder / "memory"),
            durable_root=str(folder / "durable"),
            checkpoints=str(folder / "checkpoints"),
            resume_from=resume_from,
            may_start_over=False,
            chain=chain_of(0),
            epoch=0,
            fence=str(folder / "epoch"),
        )
        policy = Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)
        self.publisher = self._publisher(order, policy)
        saver = make_saver(order, report=self.send)
        self.trainer = Trainer(
            order,
            end=self,
            policy=policy,
            layout=Layout(),
            publisher=self.publisher,
            saver=saver,  # type: ignore[arg-type]
        )
        self.trainer._objective.__class__ = Watched
        self.seen = self.trainer._objective.seen = []  # type: ignore[attr-defined]
        self.trainer.start()

    def send(self, message: object) -> None:
        self.sent.append(message)

    def _publisher(self, order: Configure, policy: Policy) -> Publisher:
        store = VersionStore(memory_root=Path(order.memory_root), durable_root=Path(order.durable_root))
        return Publisher(
            store, policy=policy, model_path=Path(order.model_path), dtype="float32", words=words_of_ranks(),
            writers=RANKS, report=self.send, on_failure=partial(print),
        )  # fmt: skip

    def train(self, step: int, *, end: int | None = None) -> list[MicroBatch]:
        """Train the waves of a step, two in each update, or those before `end`; return what this rank trained."""
        waves = [
            (update, part[half::2])
            for update, part in enumerate(mini_batches(STEPS[step], UPDATES))
            for half in range(2)
        ]
        trained = []
        for index, (update, wave) in enumerate(waves[:end]):
            batch = make_batch(wave[self.rank :: RANKS], step=step, index=index, last=index == len(waves) - 1)
            batch = in_history(msgspec.structs.replace(batch, update=update, closes=index % 2 == 1))
            self.trainer.train(batch)
            trained.append(batch)
        self.wait()
        return trained

    def wait(self) -> None:
        self.publisher.wait()
        dist.barrier()

    @property
    def metrics(self) -> list[dict[str, float]]:
        timings = {"busy_s", "close_s", "write_wait_s"}
        found = [message.metrics for message in self.sent if isinstance(message, StepDone)]
        return [{name: value for name, value in each.items() if name not in timings} for each in found]

    @property
    def shards(self) -> dict[str, Tensor]:
        return {name: shard.clone() for name, shard in self.trainer._state().items()}


def compute(policy: Policy, batch: MicroBatch) -> Tensor:
    members = range(len(batch.lengths))
    row, _ = pack(batch, members, advantages_nU=np.zeros((len(members), 1)), layout=Layout(), device=policy.device)
    with torch.no_grad():
        return logprobs(policy.model, row, temperature=SETTINGS.temperature)[0]


def check_what_the_objective_gets(folder: Path, model_path: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Log-probs of the weights before the step from the first update on, of version 0 in all; to the bit."""
    rank = Rank(folder, model_path)
    rank.wait()  # until version 0 is published
    start = Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)
    for step in range(len(STEPS)):
        rank.seen.clear()
        before = Policy(folder / "memory" / f"v{step:06d}", mesh=make_mesh("cpu"), dtype=torch.float32)
        batches = rank.train(step)
        assert len(rank.seen) == len(batches) == 2 * UPDATES
        for batch, tokens in zip(batches, rank.seen, strict=True):
            assert tokens.reference_P is not None
            assert torch.equal(tokens.reference_P, compute(start, batch))
            if batch.update == 0:
                assert tokens.proximal_P is None
                assert torch.equal(tokens.current_P, compute(before, batch))
            else:
                assert tokens.proximal_P is not None
                assert torch.equal(tokens.proximal_P, compute(before, batch))
                assert len(tokens.current_P) == 0 or not torch.equal(tokens.proximal_P, tokens.current_P)
    return rank.metrics, rank.shards


def check_metrics(metrics: list[dict[str, float]]) -> None:
    """Of rank 0: where the reference is the policy, and what the probe found."""
    first, second = metrics
    assert 0 < first["all/kl_reference"] < second["all/kl_reference"]
    fresh = sum(len(answer.logprobs) for answer in mini_batches(STEPS[0], UPDATES)[0])
    assert fresh > 0
    assert first["probe_tokens"] == 0  # no token is stale
    assert first.keys() & PROBED.keys() == {"engine_mismatch_k3", "probe_tokens", "probe_skipped"}
    assert PROBED.keys() <= second.keys()
    assert second["probe_skipped"] == 0
    assert 0 < second["probe_tokens"] < RANKS * CHANGES["probe_tokens"]
    assert 0 < second["version_drift_k3"] < second["engine_mismatch_k3"]  # a step, against noise of 0.5 in μ


def check_resume(folder: Path, model_path: Path, metrics: list[dict[str, float]], end: dict[str, Tensor]) -> None:
    """Interrupted in the second update of the second step, and resumed from the checkpoint of that moment."""
    rank = Rank(folder, model_path)
    rank.train(0)
    rank.train(1, end=3)
    rank.trainer.save_checkpoint()
    rank.trainer.close()
    saved = folder_of(folder / "checkpoints", step=1, chain=chain_of(1))  # type: ignore[arg-type]
    resumed = Rank(folder, model_path, resume_from=(str(saved),))
    resumed.train(1)
    for name, tensor in resumed.shards.items():
        assert torch.equal(tensor, end[name]), name
    if resumed.rank == 0:
        assert resumed.metrics == metrics[1:]


def check_without_effect(folder: Path, model_path: Path, end: dict[str, Tensor]) -> None:
    """The probe changes nothing."""
    rank = Rank(folder, model_path, probe_tokens=0)
    for step in range(len(STEPS)):
        rank.train(step)
    for name, tensor in rank.shards.items():
        assert torch.equal(tensor, end[name]), name
    assert not any(each.keys() & PROBED.keys() for each in rank.metrics)


def _rank(rank: int, folder: Path, model_path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        for policy_module.GATHERED_BYTES in (2**31, 0):
            here = folder / str(policy_module.GATHERED_BYTES)
            metrics, end = check_what_the_objective_gets(here / "whole", model_path)
            if rank == 0:
                check_metrics(metrics)
            check_resume(here / "resumed", model_path, metrics, end)
            check_without_effect(here / "without", model_path, end)
    finally:
        dist.destroy_process_group()


@pytest.mark.deep
def test_three_policies_over_one_data_path_before_and_after_a_resume(tmp_path: Path, model_path: Path) -> None:
    for gathered in (2**31, 0):
        for name in ("whole", "resumed", "without"):
            folder = tmp_path / str(gathered) / name
            (folder / "checkpoints").mkdir(parents=True)
            raise_fence(folder / "epoch", epoch=0)
    mp.start_processes(_rank, (tmp_path, model_path), nprocs=RANKS, start_method="spawn")
