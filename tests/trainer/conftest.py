"""A tiny policy, micro-batches, and whole trainer jobs: real torchrun ranks against a real ControllerEnd."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dora.transport.controller_end import ControllerEnd
from dora.transport.messages import (
    NO_EXPERTS,
    CheckpointWritten,
    Configure,
    MicroBatch,
    SaveCheckpoint,
    StepDone,
    Stop,
    TrainerFailed,
    TrainerSettings,
    VersionWritten,
    empty_micro_batch,
)
from dora.weights.fence import raise_fence

VOCAB = 23
GROUP_SIZE = 4
START_S = 90.0


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_model_folder(folder: Path) -> Path:
    """A random two-layer Qwen3 with tied embeddings, grouped-query attention and an odd number of rows to shard."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


TIS_CAP, CLIP_LOW, CLIP_HIGH = 1.5, 0.2, 0.28
SETTINGS = TrainerSettings(
    device="cpu", dtype="float32", publish_dtype="float32", fp32_head=False,
    activation_checkpointing="none", optimizer_state="device", optimizer="adamw", compile=False, schedule="constant",
    min_learning_rate=0.0, threads=1, micro_batch_tokens=64, longest_request=128,
    steps=100, learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, beta1=0.9, beta2=0.95, max_grad_norm=0.05,
    updates=1, copies="device", probe_tokens=0, probe_every=1,
    objective=f'{{"preset": "dapo", "weight_high": {TIS_CAP}}}', max_new_tokens=100, temperature=0.7, max_staleness=2,
    checkpoint_every=100, shard_ranks=0,
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One trajectory of a made-up group."""

    group: int
    sibling: int
    version: int
    tokens: list[int]
    prompt_length: int
    logprobs: list[float]  # of the response
    rewards: list[float]  # of the whole group


def make_groups(count: int, *, version: int, seed: int) -> list[Answer]:
    """Random groups whose behavior log-probs are around log(1/VOCAB), some ratios beyond the TIS cap."""
    rng = np.random.default_rng(seed)
    answers = []
    for group in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()
        rewards = rng.choice([0.0, 0.5, 1.0], GROUP_SIZE).tolist()
        for sibling in range(GROUP_SIZE):
            response = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
            logprobs = (-np.log(VOCAB) + rng.normal(0, 0.5, len(response))).tolist()
            answers.append(
                Answer(100 * seed + group, sibling, version, prompt + response, len(prompt), logprobs, rewards)
            )
    return answers


def make_batch(answers: Sequence[Answer], *, step: int, index: int, last: bool) -> MicroBatch:
    """Masked positions have NaN log-probs, because nothing may read them."""
    if not answers:
        return empty_micro_batch(step=step, index=index, last=last, group_size=GROUP_SIZE)
    mask = [np.arange(len(a.tokens)) >= a.prompt_length for a in answers]
    logprobs = [np.concatenate([np.full(a.prompt_length, np.nan), a.logprobs]) for a in answers]
    return MicroBatch(
        step=step,
        index=index,
        last=last,
        tokens=np.concatenate([a.tokens for a in answers]).astype(np.int32),
        loss_mask=np.concatenate(mask).astype(np.uint8),
        behavior_logprobs=np.concatenate(logprobs).astype(np.float32),
        lengths=np.array([len(a.tokens) for a in answers], np.int32),
        trajectories=np.array([a.group * GROUP_SIZE + a.sibling for a in answers], np.int64),
        groups=np.array([a.group for a in answers], np.int64),
        versions=np.array([a.version for a in answers], np.int32),
        rewards=np.array([a.rewards[a.sibling] for a in answers], np.float32),
        group_rewards=np.array([a.rewards for a in answers], np.float32),
        truncated=np.zeros(len(answers), np.uint8),
        sources=np.zeros(len(answers), np.uint8),
    )


def with_experts(batch: MicroBatch, *, layers: int = 4, num_experts: int = 4, top_k: int = 2) -> MicroBatch:
    """The micro-batch with experts to replay, made up from the tokens before, so that siblings agree on their prompt.
    Every fifth token is unknown, with ids that nothing may read, and every seventh one has been read again."""
    experts, routed = [], []
    for start, end in zip(np.cumsum(batch.lengths) - batch.lengths, np.cumsum(batch.lengths), strict=True):
        for place in range(start, end):
            rng = np.random.default_rng(batch.tokens[start : place + 1])
            experts.append([rng.permutation(num_experts)[:top_k] for _ in range(layers)])
            position = place - start
            routed.append(0 if place + 1 == end or position % 5 == 4 else 2 if position % 7 == 6 else 1)
    known = np.array(routed, np.uint8)
    ids = np.array(experts, np.uint8).reshape(-1, layers, top_k) if len(known) else NO_EXPERTS
    ids[known == 0] = 255
    return msgspec.structs.replace(batch, experts=ids, routed=known)


def chain_of(version: int) -> str:
    """Lineage of a version."""
    return f"{version:032x}"


def in_history(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with its place in the lineage."""
    chain = chain_of(batch.step + 1) if batch.last else ""
    return msgspec.structs.replace(batch, parent=chain_of(batch.step), chain=chain)


@dataclass
class Job:
    """A running trainer: `torchrun`, the controller's end, and all reports of the ranks."""

    end: ControllerEnd
    process: asyncio.subprocess.Process
    world_size: int
    reports: list[object] = field(default_factory=list)

    async def step(self, step: int, waves: Sequence[Sequence[Sequence[Answer]]]) -> StepDone:
        """Send waves[index][rank] and wait until the step is trained and its version published."""
        for index, wave in enumerate(waves):
            for rank, answers in enumerate(wave):
                batch = make_batch(answers, step=step, index=index, last=index == len(waves) - 1)
                await self.end.send(rank, in_history(batch))
        trained = await self.until(StepDone)
        while (await self.until(VersionWritten)).version != step + 1:
            pass  # that with which the ranks began, which they write in the background
        return trained

    async def until(self, kind: type, *, count: int = 1):
        """The `count`-th report of `kind` from now on; TrainerFailed only if that is `kind`."""
        async with asyncio.timeout(START_S):
            while True:
                _, message = await self.end.receive()
                self.reports.append(message)
                assert kind is TrainerFailed or not isinstance(message, TrainerFailed), message
                count -= isinstance(message, kind)
                if isinstance(message, kind) and count == 0:
                    return message

    async def broadcast(self, message) -> None:
        for rank in range(self.world_size):
            await self.end.send(rank, message)

    async def save_checkpoint(self) -> CheckpointWritten:
        await self.broadcast(SaveCheckpoint())
        return await self.until(CheckpointWritten)

    async def stop(self) -> int:
        """End the ranks; returns torchrun's exit code."""
        await self.broadcast(Stop(reason="the test is over"))
        return await self.exit_code()

    async def exit_code(self) -> int:
        """torchrun's exit code. Takes reports meanwhile, because ranks wait until their last message is read."""
        reading = asyncio.create_task(self._read(), name="reading")
        try:
            async with asyncio.timeout(START_S):
                return await self.process.wait()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            self.reports.append((await self.end.receive())[1])


@asynccontextmanager
async def start_job(
    folder: Path, model_path: Path, *, world_size: int = 2, resume_from: str | None = None, entry: str = "", **changes
) -> AsyncIterator[Job]:
    """Ranks that are connected and configured; the caller waits for READY. `entry`: a script in place of -m."""
    await asyncio.to_thread(raise_fence, folder / "epoch", epoch=0)
    token = secrets.token_hex(8)
    end = ControllerEnd(address="tcp://127.0.0.1:0", token=token, world_size=world_size, now=time.monotonic)
    address = await end.start()
    environment = {
        **os.environ, "DORA_CONTROLLER": address, "DORA_TOKEN": token, "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
        *([entry] if entry else ["-m", "dora.trainer.main"]), env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        await end.wait_ready(START_S)
        job = Job(end, process, world_size)
        await job.broadcast(
            Configure(
                run_id="test",
                model_path=str(model_path),
                settings=msgspec.structs.replace(SETTINGS, **changes),
                memory_root=str(folder / "memory"),
                durable_root=str(folder / "durable"),
                checkpoints=str(folder / "checkpoints"),
                resume_from=(resume_from,) if resume_from is not None else (),
                may_start_over=False,
                chain=chain_of(0),
                epoch=0,
                fence=str(folder / "epoch"),
            )
        )
        yield job
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            await process.wait()
        await end.close()


def mini_batches(answers: Sequence[Answer], updates: int) -> list[list[Answer]]:
    """The answers of each update: as many groups, in order."""
    groups = list(dict.fromkeys(a.group for a in answers))
    size = max(1, len(groups) // updates)
    return [[a for a in answers if groups.index(a.group) // size == update] for update in range(updates)]


class PlainTrainer:
    """A synchronous trainer written for these tests: whole batch, one sequence at a time, its own AdamW."""

    def __init__(self, model_path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="eager")
        self.parameters = dict(self.model.named_parameters())
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.num_updates = 0

    def step(self, answers: list[Answer], *, step: int, updates: int = 1) -> float:
        """All updates of a step; returns the mean gradient norm before clipping."""
        with torch.no_grad():
            old = {(a.group, a.sibling): self._logprobs(a) for a in answers}
        norms = [self._update(part, old, step=step) for part in mini_batches(answers, updates)]
        return sum(norms) / updates

    def _logprobs(self, a: Answer) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([a.tokens])).logits[0] / SETTINGS.temperature
        return logits.log_softmax(-1)[range(a.prompt_length - 1, len(a.tokens) - 1), a.tokens[a.prompt_length :]]

    def _update(self, answers: list[Answer], old: dict[tuple[int, int], torch.Tensor], *, step: int) -> float:
        tokens = sum(len(a.logprobs) for a in answers)
        if tokens == 0:
            return 0.0
        self.model.zero_grad()
        for a in answers:
            proximal = old[a.group, a.sibling]
            ratio = torch.exp(self._logprobs(a) - proximal)
            rewards = torch.tensor(a.rewards, dtype=torch.float64)
            advantage = (
                (rewards[a.sibling] - rewards.mean()) / (rewards.std() + 1e-6)
            ).float()  # as the trainer has it
            behavior = torch.tensor(a.logprobs, dtype=torch.float32).double()
            weight = torch.clamp(torch.exp(proximal - behavior), max=TIS_CAP)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
            (-(weight * surrogate).sum() / tokens).backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters.values()))
        self._adamw(step, scale=min(1.0, SETTINGS.max_grad_norm / max(norm, 1e-30)))
        return norm

    @torch.no_grad()
    def _adamw(self, step: int, *, scale: float) -> None:
        self.num_updates += 1
        rate = SETTINGS.learning_rate * min(1.0, (step + 1) / SETTINGS.warmup_steps)
        for name, p in self.parameters.items():
            gradient = p.grad * scale
            self.first[name] = SETTINGS.beta1 * self.first[name] + (1 - SETTINGS.beta1) * gradient
            self.second[name] = SETTINGS.beta2 * self.second[name] + (1 - SETTINGS.beta2) * gradient**2
            first = self.first[name] / (1 - SETTINGS.beta1**self.num_updates)
            second = self.second[name] / (1 - SETTINGS.beta2**self.num_updates)
            if p.dim() > 1 and "embed" not in name:
                p.mul_(1 - rate * SETTINGS.weight_decay)
            p.sub_(rate * first / (second.sqrt() + 1e-8))


def assert_equal_weights(left, right, *, atol):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name].double(), right[name].double(), atol=atol, rtol=0, msg=lambda m, name=name: name + m
        )
