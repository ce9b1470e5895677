"""A streamed training step: receive -> pack -> forward/backward -> update -> close -> publish.

Micro-batches are trained as they arrive. Their gradients of unnormalized sums are accumulated, and divided once, when
their update closes, by the objective's divisor over all ranks. So the result does not depend on how an update is cut
into micro-batches, or on which rank gets which. A step has M updates. In the first one, the proximal policy π_o is the
current policy without gradient, sg(π); in the others, π_o is a copy of the weights before the step.

The probe, which loads other weights for a pass, runs after the last update of a step and before its version is
published. So the weights of a version stay in the shards until the first update of the next step, which waits until
they are written.

Invariant: step s is trained under version s and publishes s + 1, exactly once; every rank gets the same number of
micro-batches, in order; a checkpoint may be written at any time and contains the state before the current step.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dora.core.ids import StepId, TrajectoryId, VersionId
from dora.errors import ProtocolError
from dora.objectives.objective import Objective, compares_sequences
from dora.objectives.settings import ObjectiveConfig
from dora.trainer import checkpoint
from dora.trainer.balance import balance_of
from dora.trainer.batch import advantages_of, check, experts_of, firsts_of, pack, without_truncated
from dora.trainer.copies import OtherPolicies
from dora.trainer.forward_check import CHECK_EVERY, check_again
from dora.trainer.full_disk import print_error
from dora.trainer.logprobs import logprobs
from dora.trainer.metrics import StepSums
from dora.trainer.model import Policy
from dora.trainer.optimizer import ShardOptimizer
from dora.trainer.packing import Layout, prompts_of, split_passes, unshared_tokens
from dora.trainer.probe import make_probe
from dora.trainer.proof import prove
from dora.trainer.publish import Publisher
from dora.trainer.replay import check_replay, replayed
from dora.trainer.schedule import learning_rate
from dora.trainer.spans import RankClock
from dora.transport.messages import (
    Configure,
    MicroBatch,
    MicroBatchDone,
    RankReady,
    StepDone,
    TrainerLogprobs,
)
from dora.transport.trainer_end import TrainerEnd
from dora.weights.checkpoints import checkpoints_in, drop, keep_only
from dora.weights.store import clear_errors

#: Longest answer whose log-probs are sent: a message to the controller has at most 1 MiB.
MAX_LOGPROBS = 2**17


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update."""

    divisor: float  # D
    grad_norm: float  # of the normalized gradient, before clipping
    skipped: bool  # D = 0, or the gradient is not finite
    learning_rate: float


class Trainer:
    """One rank of the trainer between Configure and Stop."""

    def __init__(
        self,
        order: Configure,
        *,
        end: TrainerEnd,
        policy: Policy,
        layout: Layout,
        publisher: Publisher,
        saver: checkpoint.Saver,
        clock: RankClock | None = None,
    ) -> None:
        """`clock`: the clock of this process; None: a clock that begins now."""
        self._settings = order.settings
        self._objective = Objective(
            ObjectiveConfig.model_validate_json(order.settings.objective), longest=order.settings.max_new_tokens
        )
        self._compares_sequences = compares_sequences(self._objective.settings)
        self._end = end
        self._policy = policy
        self._layout = layout
        self._publisher = publisher
        self._rank = dist.get_rank()
        self._clock = clock or RankClock(self._rank)
        self._shards = policy.trained()
        self._optimizer = ShardOptimizer(
            self._shards, order.settings, model=policy.model, group=policy.sharding.get_group()
        )
        self._copies = OtherPolicies(order, policy=policy, objective=self._objective)
        replays = self._objective.settings.router_replay == "r3"
        #: What the engine chose for each token; None: nothing of that is replayed.
        self._routing = check_replay(policy, layout, dtype=order.settings.dtype) if replays else None
        self._balance = balance_of(
            policy.model,
            replays=replays,
            compiled=policy.compiled,
            max_staleness=order.settings.max_staleness,
            device=policy.device,
        )
        self._probe = make_probe(order, policy=policy, layout=layout, routing=self._routing)
        self._step = StepId(0)
        self._chain = order.chain
        self._saver = saver
        self._storage = saver.storage
        self._skipped: tuple[str, ...] = ()
        if order.owns_checkpoints and self._storage.is_first:
            with clear_errors(f"cannot clear {order.checkpoints}"):
                keep_only(self._storage.parent, [Path(path).name for path in order.resume_from])
        if order.resume_from:
            self._load(order)
        self._begin_step()

    @property
    def next_step(self) -> StepId:
        """The step that is trained next, or now."""
        return self._step

    def start(self, *, note: str = "") -> None:
        """Publish the version of the current step (no effect if the store has it), then report READY."""
        self._publish()
        self._end.send(self._clock.take())
        self._end.send(RankReady(rank=self._rank, next_step=self._step, skipped=self._skipped, note=note))

    # ---- one micro-batch --------------------------------------------------------------------------------------------

    def train(self, batch: MicroBatch) -> None:
        """Run forward and backward on a micro-batch, and the update or step that closes with it."""
        if (batch.step, batch.index, batch.update) != (self._step, self._next_index, len(self._updates)):
            raise ProtocolError(
                f"micro-batch {batch.step}/{batch.index} of update {batch.update} arrived, "
                f"expected {self._step}/{self._next_index} of update {len(self._updates)}"
            )
        if batch.parent != self._chain:
            raise ProtocolError(
                f"micro-batch {batch.step}/{batch.index} belongs to another history: it follows {batch.parent}, "
                f"but the weights are those of {self._chain}"
            )
        check(
            batch,
            max_staleness=self._settings.max_staleness,
            vocab_size=self._policy.vocab_size,
            routing=self._routing,
        )
        started = time.perf_counter()
        self._clock.switch("packing")
        settings = self._objective.settings
        if settings.truncated == "mask":
            batch = without_truncated(batch)
        advantages_nU = advantages_of(
            batch, self._settings.advantages or (settings.advantage,), to_go=settings.turn_rewards == "reward_to_go"
        )
        experts = experts_of(batch, self._routing)
        for number, members in enumerate(passes := self._passes(batch, experts), start=1):
            closes_update = (batch.closes or batch.last) and number == len(passes)
            self._policy.prepare(closes_update=closes_update)
            self._accumulate(batch, members, advantages_nU, experts, closes_update=closes_update)
        firsts = firsts_of(batch)
        self._sums.add_trajectories(
            lag=torch.from_numpy((batch.step - batch.versions)[firsts]).long(),
            reward=torch.from_numpy(batch.rewards[firsts]),
            truncated=torch.from_numpy(batch.truncated[firsts]),
        )
        self._sums.step_tokens += len(batch.tokens)
        self._next_index += 1
        if batch.closes and not batch.last:
            with self._clock.during("copying"):
                self._keep_state()
            self._close_update()
        busy_s = time.perf_counter() - started
        self._sums.busy_s += busy_s
        done = MicroBatchDone(
            rank=self._rank, step=batch.step, index=batch.index, num_tokens=len(batch.tokens), busy_s=busy_s
        )
        self._end.send(self._clock.take())
        self._end.send(done)
        if batch.last:
            self._close_step(batch.chain)
        self._clock.switch("waiting")

    def _passes(self, batch: MicroBatch, experts: NDArray[np.int16] | None) -> list[list[int]]:
        """Return the sequences of each forward pass. If passes are collectives, all ranks get the same number."""
        trained = np.flatnonzero(batch.loss_mask)
        prompts = prompts_of(batch.tokens, lengths=batch.lengths, trained=trained, experts=experts)
        if self._balance is not None:
            unshared = unshared_tokens(batch.lengths.tolist(), prompts, layout=self._layout)
            self._balance.add_batch(batch, unshared=unshared)
        passes = split_passes(
            batch.lengths.tolist(),
            prompts=prompts,
            owners=self._owners(batch).tolist(),
            layout=self._layout,
            budget=self._settings.micro_batch_tokens * self._layout.slices,
        ) or [[]]
        if self._policy.meets_in_passes:
            most = torch.tensor(len(passes), device=self._policy.device)
            with self._clock.during("slowest_rank"):
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
            passes += [[]] * (int(most) - len(passes))
        return passes

    def _owners(self, batch: MicroBatch) -> NDArray[np.int64]:
        """Return a number per sequence; the objective treats sequences with the same number as one. It is the number of
        the trajectory, or different for every sequence if the objective acts on tokens."""
        return batch.trajectories if self._compares_sequences else np.arange(len(batch.lengths))

    def _accumulate(
        self,
        batch: MicroBatch,
        members: list[int],
        advantages_nU: NDArray[np.float64],
        experts: NDArray[np.int16] | None,
        *,
        closes_update: bool,
    ) -> None:
        self._clock.switch("packing")
        row, targets = pack(
            batch,
            members,
            owners_n=self._owners(batch),
            advantages_nU=advantages_nU,
            experts=experts,
            layout=self._layout,
            device=self._policy.device,
        )
        self._clock.switch("forward_backward")
        if self._policy.gathered and self._policy.is_sharded:
            self._await_ranks()
            self._policy.gather()
        settings, copies = self._settings, self._copies
        observed = self._balance.observing(row) if self._balance is not None else nullcontext()
        with replayed(self._policy.model, row):
            reference_P = copies.reference(row)
            proximal_P = copies.proximal(row, version=VersionId(self._step), update=batch.update)
            with observed:
                current_P, entropy_P = logprobs(
                    self._policy.model,
                    row,
                    temperature=settings.temperature,
                    fp32_head=settings.fp32_head,
                    entropy_gradient=self._objective.needs_entropy_gradient,
                )
            tokens = targets.tokens(
                current_P,
                entropy_P=entropy_P,
                proximal_P=proximal_P,
                reference_P=reference_P,
                progress=batch.update / settings.updates,
            )
            terms = self._objective(tokens)
            loss = terms.loss_P.sum() / settings.micro_batch_tokens
            if closes_update and self._policy.gathered:
                self._await_ranks()
            loss.backward()
        self._sums.add_tokens(tokens, terms)
        if members:
            self._sums.positions += row.tokens_BT.numel()
            self._sums.padding += row.num_padding
        if self._probe is not None and batch.update == 0:
            self._probe.add(batch, members, current_P, targets.behavior_P, experts=experts)
        if self._settings.sends_logprobs and 0 in members and self._rank % self._layout.ranks == 0:
            self._send_logprobs(batch, members, current_P)

    def _await_ranks(self) -> None:
        """Wait for the slowest rank here, so that the wait is measured apart from the collectives that follow."""
        if self._policy.device.type == "cuda":
            torch.cuda.synchronize()  # what this rank has queued
        with self._clock.during("slowest_rank"):
            self._policy.await_ranks()

    def _send_logprobs(self, batch: MicroBatch, members: list[int], current_P: Tensor) -> None:
        """Send the log-probs of the micro-batch's first answer, unless it is too long or has several rows."""
        trained_n = np.add.reduceat(batch.loss_mask, np.cumsum(batch.lengths) - batch.lengths, dtype=np.int64)
        count, start = int(trained_n[0]), int(sum(trained_n[n] for n in members[: members.index(0)]))
        trajectory = TrajectoryId(int(batch.trajectories[0]))
        if 0 < count <= MAX_LOGPROBS and np.count_nonzero(batch.trajectories == trajectory) == 1:
            logprobs_p = current_P[start : start + count].detach().float().cpu().numpy()
            self._end.send(TrainerLogprobs(rank=self._rank, trajectory=trajectory, logprobs=logprobs_p))

    # ---- the close --------------------------------------------------------------------------------------------------

    def _close_update(self) -> None:
        """Make the optimizer update of the micro-batches since the last one."""
        self._policy.reshard()
        self._clock.switch("slowest_rank")
        sums = self._sums.reduce_update()
        self._clock.switch("optimizer")
        divisor, rate = self._objective.divisor(sums), self._learning_rate() * self._objective.rate_factor(sums)
        grad_norm = self._normalize_gradients(divisor)
        self._await_writers()
        update = Update(divisor, grad_norm, divisor == 0 or not math.isfinite(grad_norm), rate)
        if not update.skipped:
            self._optimizer.update(self._policy.gradients(), learning_rate=update.learning_rate)
        self._policy.clear_gradients()
        self._updates.append(update)

    def _close_step(self, chain: str) -> None:
        started = time.perf_counter()
        self._close_update()
        if (self._step + 1) % CHECK_EVERY == 0:
            self._clock.switch("forward_backward")
            self._check_again(f"the weights after step {self._step + 1}, which are neither published nor saved")
        sums, updates = self._sums.reduce(), self._updates
        extra = self._probe.close() if self._probe is not None else {}
        extra |= self._balance.close() if self._balance is not None else {}
        trained, self._step, self._chain = self._step, StepId(self._step + 1), chain
        write_wait_s = self._write_wait_s
        self._clock.switch("copying")
        self._begin_step()
        self._end.send(self._clock.take())
        if self._rank == 0:
            metrics = sums.metrics(
                denominator=sum(update.divisor for update in updates),
                grad_norm=mean(update.grad_norm for update in updates),
                learning_rate=mean(update.learning_rate for update in updates),
                updates_skipped=float(sum(update.skipped for update in updates)),
                close_s=time.perf_counter() - started,
                write_wait_s=write_wait_s,
            )
            metrics |= extra
            self._end.send(StepDone(rank=self._rank, step=trained, metrics=metrics, chain=chain))
        self._publish()
        if self._step % self._settings.checkpoint_every == 0 or self._step == self._settings.steps:
            self.save_checkpoint()

    def _normalize_gradients(self, denominator: float) -> float:
        """Rescale gradients from Σ l / s₀ to Σ l / D and clip; return the norm before clipping."""
        gradients = self._policy.gradients()
        scale = self._settings.micro_batch_tokens / (denominator or 1.0)
        squares = torch.zeros((), dtype=torch.float64, device=self._policy.device)
        for gradient in gradients.values():
            squares += gradient.mul_(scale).double().square().sum()
        dist.all_reduce(squares, group=self._policy.sharding.get_group())
        norm = math.sqrt(float(squares))
        if norm > self._settings.max_grad_norm and math.isfinite(norm):
            for gradient in gradients.values():
                gradient.mul_(self._settings.max_grad_norm / norm)
        return norm

    def _learning_rate(self) -> float:
        return learning_rate(
            self._step,
            schedule=self._settings.schedule,
            peak=self._settings.learning_rate,
            min_share=self._settings.min_learning_rate,
            warmup_steps=self._settings.warmup_steps,
            steps=self._settings.steps,
        )

    def _begin_step(self) -> None:
        self._copies.begin_step(VersionId(self._step))
        self._next_index = 0
        self._write_wait_s = 0.0
        self._updates: list[Update] = []
        self._before: dict[str, Tensor] | None = None  # the state before the step; None until its first update
        self._sums = StepSums(
            max_staleness=self._settings.max_staleness,
            device=self._policy.device,
            ranks_per_batch=self._layout.ranks,
        )

    # ---- weights and state ------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Begin to write the state before the current step, beside training."""
        tensors = self._state() if self._before is None else self._before
        with self._clock.during("saving"):
            self._saver.save(step=self._step, chain=self._chain, tensors=tensors)

    def close(self) -> None:
        """Wait until all that is being written is written; then nothing more can be."""
        self._saver.close()
        self._publisher.close()

    def drop_checkpoint(self, name: str) -> None:
        """Delete a checkpoint of the folder that the ranks own; if that fails, print an error and go on."""
        try:
            for path in checkpoints_in(self._storage.parent):
                if path.name == name:
                    drop(path)
        except OSError as err:
            print_error(f"the checkpoint {name} could not be deleted: {err}")

    def _keep_state(self) -> None:
        """Copy the state that the first update of a step will change, so that a checkpoint can be written later."""
        if self._before is None:
            self._before = {name: tensor.to("cpu", copy=True) for name, tensor in self._state().items()}

    def _load(self, order: Configure) -> None:
        loaded = checkpoint.load(
            self._storage,
            [Path(path) for path in order.resume_from],
            tensors=self._state(),
            may_start_over=order.may_start_over,
        )
        self._step, self._skipped = loaded.step, loaded.skipped
        self._chain = loaded.chain or order.chain
        self._check_again(f"the weights of the checkpoint of step {self._step}")

    def _check_again(self, weights: str) -> None:
        """Raise RunFailed unless the rows of this run are exact under the current weights; a collective."""
        settings = self._settings
        longest = settings.longest_request
        check_again(self._policy, self._layout, dtype=settings.dtype, longest=longest, weights=weights)

    def _publish(self) -> None:
        """Begin to publish the weights, as the version of the current step; a collective."""
        with self._clock.during("publishing"):
            self._publisher.wait()
        with self._clock.during("copying"):
            settings = self._settings
            proof = prove(self._policy, self._layout, settings) if settings.serves_adapters else None
            self._publisher.publish(VersionId(self._step), chain=self._chain, proof=proof)

    def _await_writers(self) -> None:
        """Wait until what is about to change, weights and moments, is written."""
        started = time.perf_counter()
        with self._clock.during("publishing"):
            self._publisher.until_written()
        with self._clock.during("saving"):
            self._saver.wait()
        self._write_wait_s += time.perf_counter() - started

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: weights, moments and the update count, by name; not copies."""
        return dict(self._shards) | self._optimizer.state()
