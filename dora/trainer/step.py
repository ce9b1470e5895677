"""A streamed training step: receive -> pack -> forward/backward -> close -> publish.

The gradient of sums is accumulated over the step's micro-batches as they come; the one normalisation, by D, the
trained tokens of all ranks, happens at the close (losses.md §7). One optimizer update per step, so π_o = sg(π).
Invariant: step s is trained on version s and publishes s + 1, exactly once; micro-batches arrive in the order of
their numbers, on every rank equally many; between two closes the weights do not change, so a checkpoint may be
written at any moment and stands for the boundary before the current step.
Called by: main.py.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dora.errors import ProtocolError
from dora.trainer import checkpoint
from dora.trainer.loss import decoupled_ppo
from dora.trainer.metrics import StepSums
from dora.trainer.model import Policy, logprobs
from dora.trainer.packing import Row, Targets, check, pack
from dora.trainer.publish import Publisher, gather
from dora.transport.messages import (
    CheckpointSaved,
    Configure,
    MicroBatch,
    MicroBatchTrained,
    Ready,
    StepTrained,
)
from dora.transport.trainer_end import TrainerEnd


class Trainer:
    """One rank of the trainer between Configure and Stop."""

    def __init__(self, order: Configure, *, end: TrainerEnd, policy: Policy, publisher: Publisher | None) -> None:
        """`publisher`: rank 0 only."""
        self._settings = order.settings
        self._checkpoints = Path(order.checkpoints)
        self._end = end
        self._policy = policy
        self._publisher = publisher
        self._rank = dist.get_rank()
        self._shards = policy.shards()
        self._optimizer = make_optimizer(self._shards, order)
        self._step = 0
        if order.resume_from is not None:
            self._step = checkpoint.load(Path(order.resume_from), tensors=self._state())
        self._begin_step()

    def start(self) -> None:
        """Publish the version to be trained (a no-op if the store has it), then report READY."""
        self._publish(self._step)
        self._end.send(Ready(rank=self._rank, next_step=self._step))

    # ---- one micro-batch --------------------------------------------------------------------------------------------

    def train(self, batch: MicroBatch) -> None:
        """Forward and backward; the last micro-batch of a step also closes it."""
        if (batch.step, batch.index) != (self._step, self._next_index):
            raise ProtocolError(
                f"micro-batch {batch.step}/{batch.index} arrived, expected {self._step}/{self._next_index}"
            )
        check(batch, max_staleness=self._settings.max_staleness, vocab_size=self._policy.vocab_size)
        started = time.perf_counter()
        row, targets = pack(batch, advantage=self._settings.advantage, device=self._policy.device)
        self._policy.prepare(closes_step=batch.last)
        self._accumulate(row, targets)
        self._sums.add_sequences(
            lag=torch.from_numpy(batch.step - batch.versions).long(),
            reward=torch.from_numpy(batch.rewards.copy()),
            truncated=torch.from_numpy(batch.truncated.copy()),
        )
        self._sums.step_tokens += len(batch.tokens)
        self._next_index += 1
        busy_s = time.perf_counter() - started
        self._sums.busy_s += busy_s
        done = MicroBatchTrained(
            rank=self._rank, step=batch.step, index=batch.index, num_tokens=len(batch.tokens), busy_s=busy_s
        )
        self._end.send(done)
        if batch.last:
            self._close_step()

    def _accumulate(self, row: Row, targets: Targets) -> None:
        current_P, entropy_P = logprobs(self._policy.model, row, temperature=self._settings.temperature)
        loss_P = decoupled_ppo(
            current_P,
            proximal=current_P.detach(),
            behavior=targets.behavior_P,
            advantage=targets.advantage_P,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
            tis_cap=self._settings.tis_cap,
        )
        (loss_P.sum() / self._settings.micro_batch_tokens).backward()
        self._sums.add_tokens(
            current=current_P.detach(),
            behavior=targets.behavior_P,
            advantage=targets.advantage_P,
            entropy=entropy_P,
            loss=loss_P.detach(),
            lag=targets.lag_P,
            tis_cap=self._settings.tis_cap,
        )

    # ---- the close --------------------------------------------------------------------------------------------------

    def _close_step(self) -> None:
        started = time.perf_counter()
        self._policy.reshard()
        sums = self._sums.reduce()
        learning_rate = self._warmed_up_rate()
        grad_norm = self._normalize_gradients(sums.denominator)
        skipped = sums.denominator == 0 or not math.isfinite(grad_norm)
        if not skipped:
            self._update(learning_rate)
        self._policy.clear_gradients()
        weights = self._gather()
        trained, self._step = self._step, self._step + 1
        self._begin_step()
        if self._publisher is not None:
            metrics = sums.metrics(
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                update_skipped=float(skipped),
                close_s=time.perf_counter() - started,
            )
            self._end.send(StepTrained(rank=self._rank, step=trained, metrics=metrics))
            self._publisher.publish(self._step, weights)
        if self._step % self._settings.checkpoint_every == 0 or self._step == self._settings.steps:
            self.save_checkpoint()

    def _normalize_gradients(self, denominator: float) -> float:
        """Turn averages over ranks of Σ l / s₀ into Σ l / D and clip; returns the norm before clipping."""
        gradients = self._policy.gradients()
        scale = self._settings.micro_batch_tokens * dist.get_world_size() / max(denominator, 1.0)
        squares = torch.zeros((), dtype=torch.float64, device=self._policy.device)
        for gradient in gradients.values():
            squares += gradient.mul_(scale).double().square().sum()
        dist.all_reduce(squares)
        norm = math.sqrt(float(squares))
        if norm > self._settings.max_grad_norm and math.isfinite(norm):
            for gradient in gradients.values():
                gradient.mul_(self._settings.max_grad_norm / norm)
        return norm

    def _update(self, learning_rate: float) -> None:
        gradients = self._policy.gradients()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            for name, parameter in zip(self._shards, group["params"], strict=True):
                parameter.grad = gradients[name]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _warmed_up_rate(self) -> float:
        """Linear warm-up; its first step has 1 / warmup_steps of the peak."""
        return self._settings.learning_rate * min(1.0, (self._step + 1) / max(self._settings.warmup_steps, 1))

    def _begin_step(self) -> None:
        self._next_index = 0
        self._sums = StepSums(max_staleness=self._settings.max_staleness, device=self._policy.device)

    # ---- weights and state ------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Write the state before the current step."""
        folder = checkpoint.save(self._checkpoints, step=self._step, tensors=self._state(), device=self._policy.device)
        if self._rank == 0:
            self._end.send(CheckpointSaved(step=self._step, folder=str(folder)))

    def _publish(self, version: int) -> None:
        weights = self._gather()
        if self._publisher is not None:
            self._publisher.publish(version, weights)

    def _gather(self) -> dict[str, Tensor]:
        return gather(self._policy, dtype=self._settings.publish_dtype, keep=self._publisher is not None)

    def _state(self) -> dict[str, Tensor]:
        """All that a checkpoint holds: weights, moments and the update count, by name; live tensors."""
        state = dict(self._shards)
        for name, parameter in zip(self._shards, self._optimizer.param_groups[0]["params"], strict=True):
            state |= {f"{key}/{name}": value for key, value in self._optimizer.state[parameter].items()}
        return state


def make_optimizer(shards: dict[str, Tensor], order: Configure) -> torch.optim.AdamW:
    """AdamW over this rank's rows as plain tensors: elementwise, so sharding does not change it.

    Its moments exist from the start, so that a checkpoint has one format whenever it is written.
    """
    settings = order.settings
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(shard) for shard in shards.values()],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
