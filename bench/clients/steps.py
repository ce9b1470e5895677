"""Training steps that bench/training.py and bench/on_gpu compare: the trainer's own, and plain loops over padded rows.

All take the same answers, from the same weights, to the same gradient: the log-probs of the engine are so low that
every importance weight is cut at `weight_high` = 1, which leaves Σ A log π / D.
Legend: n answers, b rows, L padded length, P trained tokens, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dora.app.settings import trainer_settings
from dora.config.schema import Config
from dora.core.ids import GroupId, TrajectoryId
from dora.core.waves import Answer, Pending
from dora.objectives.advantages import group_advantages
from dora.trainer.checkpointing import Mode
from dora.trainer.forward_check import check_training
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.publish import Publisher
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, MicroBatch, TrainerSettings
from dora.transport.trainer_end import TrainerEnd
from dora.weights.store import VersionStore
from tests.trainer.publishing import Unpublished, make_saver

GROUP_SIZE = 8
PROMPT_TOKENS = 32
TAIL = 1.0  # deviation of log(length)
BEHAVIOR = -18.0  # log μ; below every log π of a random model
SEED = 0
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Answers:
    """The trajectories of a step in the order in which they arrived."""

    tokens: list[NDArray[np.int64]]  # prompt and answer
    group_rewards: NDArray[np.float32]  # [n, G]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    @property
    def trained(self) -> int:
        return sum(self.lengths) - PROMPT_TOKENS * len(self)

    @property
    def rewards(self) -> NDArray[np.float32]:
        return self.group_rewards[np.arange(len(self)), np.arange(len(self)) % GROUP_SIZE]

    @property
    def advantages(self) -> NDArray[np.float64]:
        return group_advantages(self.rewards, self.group_rewards, kind="grpo")


def draw_answers(count: int, *, num_tokens: int, vocab_size: int) -> Answers:
    """`count` random answers with `num_tokens` in all, prompts included; lengths are the quantiles of a log-normal."""
    rng = np.random.default_rng(SEED)
    quantiles = [math.exp(TAIL * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    scale = (num_tokens - (PROMPT_TOKENS + 1) * count) / sum(quantiles)
    lengths = PROMPT_TOKENS + 1 + (scale * np.array(quantiles)).astype(int)
    lengths[-1] += num_tokens - lengths.sum()
    rng.shuffle(lengths)
    rewards = rng.random((-(-count // GROUP_SIZE), GROUP_SIZE), np.float32)
    return Answers(
        [rng.integers(0, vocab_size, length) for length in lengths], rewards.repeat(GROUP_SIZE, axis=0)[:count]
    )


# --- the trainer


class Reports:
    """In place of a connection to the controller: keeps what the trainer reports, and when."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, object]] = []

    def send(self, message: object) -> None:
        self.sent.append((time.perf_counter(), message))

    def when(self, kind: type) -> float | None:
        """When the last message of a kind was sent."""
        return next((moment for moment, message in reversed(self.sent) if isinstance(message, kind)), None)


class WatchedTrainer(Trainer):
    """Notes the norm of the last gradient, and how long its step took to close."""

    grad_norm = math.nan
    publish_from = math.nan  # when the publication of the next version began
    publish_s = math.nan  # how long the trainer stood for that
    update_s = math.nan  # of the close: without the publication

    def _normalize_gradients(self, denominator: float) -> float:
        self.grad_norm = super()._normalize_gradients(denominator)
        return self.grad_norm

    def _publish(self) -> None:
        self.publish_from = time.perf_counter()
        super()._publish()
        self.publish_s = time.perf_counter() - self.publish_from

    def _close_step(self, chain: str) -> None:
        self.update_s = timed(partial(super()._close_step, chain)) - self.publish_s


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(act: Callable[[], object]) -> float:
    """Seconds, those on a GPU included."""
    synchronize()
    begun = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - begun


def reset_peak() -> int:
    """Count the peak of the resident memory from now on; returns that memory, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The largest resident memory since `reset_peak`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def settings(*, device: str, dtype: str, micro_batch_tokens: int, mode: Mode = "none") -> TrainerSettings:
    """The defaults of a run, with the optimizer of the plain loops; `mode`: what layers keep for the backward pass."""
    return msgspec.structs.replace(
        trainer_settings(Config(), max_staleness=0),
        device=device,
        dtype=dtype,
        publish_dtype=dtype,
        threads=torch.get_num_threads(),
        micro_batch_tokens=micro_batch_tokens,
        activation_checkpointing=mode,
        compile=False,
        optimizer="adamw",
        optimizer_state="device",
        steps=1_000_000,
        checkpoint_every=1_000_000,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        min_learning_rate=0.0,
        warmup_steps=0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
        max_grad_norm=MAX_GRAD_NORM,
        objective='{"preset": "dapo", "weight_high": 1.0}',
        probe_tokens=0,
        temperature=1.0,
    )


def configure(model_path: Path, settings: TrainerSettings, *, store: Path) -> Configure:
    """The controller's order, with everything else under `store`."""
    return Configure(
        run_id="bench",
        model_path=str(model_path),
        settings=settings,
        memory_root=str(store / "memory"),
        durable_root=str(store / "durable"),
        checkpoints=str(store / "checkpoints"),
        resume_from=(),
        may_start_over=False,
        chain="",
        epoch=0,
        fence=str(store / "epoch"),
    )


def make_trainer(
    order: Configure,
    *,
    layout: Layout | None = None,
    reports: Reports | None = None,
    publishes: bool = False,
    policy_kind: type[Policy] = Policy,
    trainer_kind: type[WatchedTrainer] = WatchedTrainer,
) -> WatchedTrainer:
    """A trainer as dora/trainer/main.py makes it, without a controller; with a layout, the model is not checked."""
    settings = order.settings
    policy = policy_kind(
        Path(order.model_path),
        mesh=make_mesh(settings.device, shard_ranks=settings.shard_ranks),
        dtype=getattr(torch, settings.dtype),
        activation_checkpointing=cast(Mode, settings.activation_checkpointing),
        compiled=settings.compile,
        lora=settings.lora,
    )
    layout = layout or check_training(policy, dtype=settings.dtype).layout
    reports = reports or Reports()
    publisher = make_publisher(order, policy, reports) if publishes else cast(Publisher, Unpublished())
    end, saver = cast(TrainerEnd, reports), make_saver(order)
    return trainer_kind(order, end=end, policy=policy, layout=layout, publisher=publisher, saver=saver)


def make_publisher(order: Configure, policy: Policy, reports: Reports) -> Publisher:
    """The publisher of a single rank."""
    return Publisher(
        VersionStore(memory_root=Path(order.memory_root), durable_root=Path(order.durable_root)),
        policy=policy,
        model_path=Path(order.model_path),
        dtype=order.settings.publish_dtype,
        words=HashStore(),
        writers=1,
        report=reports.send,
        on_failure=lambda err: print(f"publication failed: {err!r}", file=sys.stderr),
    )


def micro_batches(answers: Answers, *, step: int, budget: int, updates: int = 1) -> list[MicroBatch]:
    """The waves that the controller would send to one rank."""
    waves: list[tuple[int, list[int]]] = []
    for update, part in enumerate(np.array_split(np.arange(len(answers)), updates)):
        pending = Pending()
        for i in part:
            pending.add(Answer(TrajectoryId(int(i)), answers.lengths[i], GroupId(int(i) // GROUP_SIZE)))
        while pending.answers:
            (rank,) = pending.cut(num_ranks=1, budget=budget)
            waves.append((update, sorted(int(a.trajectory) for a in rank)))
    found = []
    for i, (update, wave) in enumerate(waves):
        last = i + 1 == len(waves)
        batch = make_batch(answers, wave, step=step, index=i, last=last)
        found.append(msgspec.structs.replace(batch, update=update, closes=last or waves[i + 1][0] > update))
    return found


def make_batch(answers: Answers, chosen: Sequence[int], *, step: int, index: int, last: bool) -> MicroBatch:
    rows = np.array(chosen)
    lengths = np.array([len(answers.tokens[i]) for i in chosen])
    mask = [np.arange(length) >= PROMPT_TOKENS for length in lengths]
    return MicroBatch(
        step=step,  # type: ignore[arg-type]
        index=index,
        last=last,
        tokens=np.concatenate([answers.tokens[i] for i in chosen]).astype(np.int32),
        loss_mask=np.concatenate(mask).astype(np.uint8),
        behavior_logprobs=np.full(lengths.sum(), BEHAVIOR, np.float32),
        lengths=lengths.astype(np.int32),
        trajectories=rows.astype(np.int64),
        groups=(rows // GROUP_SIZE).astype(np.int64),
        versions=np.full(len(rows), step, np.int32),
        rewards=answers.rewards[rows],
        group_rewards=answers.group_rewards[rows],
        truncated=np.zeros(len(rows), np.uint8),
        sources=np.zeros(len(rows), np.uint8),
    )


# --- plain transformers


def in_order(answers: Answers, *, rows: int) -> list[list[int]]:
    """Batches of `rows` answers in the order in which they arrived."""
    order = list(range(len(answers)))
    return [order[i : i + rows] for i in range(0, len(order), rows)]


def by_length(answers: Answers, *, budget: int) -> list[list[int]]:
    """Batches of answers of similar length, each of at most `budget` tokens with its padding, or of one answer."""
    batches: list[list[int]] = []
    lengths = answers.lengths
    for i in sorted(range(len(answers)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def accumulate(model: Any, answers: Answers, chosen: Sequence[int]) -> None:
    """Forward and backward of one batch, padded on the right: causal attention needs no mask for that."""
    device = model.device
    ids_bL = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(answers.tokens[i]) for i in chosen], batch_first=True)
    lengths = torch.tensor([len(answers.tokens[i]) for i in chosen])
    position = torch.arange(ids_bL.shape[1])
    trained_bL = ((position >= PROMPT_TOKENS) & (position < lengths[:, None])).to(device)
    advantage_b = torch.from_numpy(answers.advantages[list(chosen)]).float()
    advantage_P = advantage_b.repeat_interleave(lengths - PROMPT_TOKENS).to(device)
    ids_bL = ids_bL.to(device)
    logits_PV = model(input_ids=ids_bL, use_cache=False).logits[:, :-1][trained_bL[:, 1:]]
    logprob_P = logits_PV.float().log_softmax(-1).gather(-1, ids_bL[trained_bL][:, None])[:, 0]
    plain_loss(logprob_P, advantage_P, denominator=answers.trained).backward()  # type: ignore[no-untyped-call]


def accumulate_packed(model: Any, answers: Answers, chosen: Sequence[int]) -> None:
    """Forward and backward of one batch in a row, which transformers takes apart by its positions."""
    device = model.device
    tokens_T = torch.from_numpy(np.concatenate([answers.tokens[i] for i in chosen])).to(device)
    lengths = [len(answers.tokens[i]) for i in chosen]
    position_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    target_P = torch.nonzero(position_T >= PROMPT_TOKENS)[:, 0]
    advantage_b = torch.from_numpy(answers.advantages[list(chosen)]).float()
    advantage_P = advantage_b.repeat_interleave(torch.tensor(lengths) - PROMPT_TOKENS).to(device)
    logits_PV = model(
        input_ids=tokens_T[None], position_ids=position_T[None], use_cache=False, logits_to_keep=target_P - 1
    ).logits[0]
    logprob_P = logits_PV.float().log_softmax(-1).gather(-1, tokens_T[target_P][:, None])[:, 0]
    plain_loss(logprob_P, advantage_P, denominator=answers.trained).backward()  # type: ignore[no-untyped-call]


def plain_loss(logprob_P: Tensor, advantage_P: Tensor, *, denominator: int) -> Tensor:
    """The clipped objective of one update per step, in which the ratio is 1."""
    ratio_P = (logprob_P - logprob_P.detach()).exp()
    return -torch.minimum(ratio_P * advantage_P, ratio_P.clamp(0.8, 1.28) * advantage_P).sum() / denominator


def make_adamw(model: Any) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def update(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Clip and update; returns the norm of the gradient before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
