"""The lag harness: rollout and training of one job in one process, with staleness that is given by count.

Step s trains groups that were sampled under version max(s - K, 0), as in a run whose trajectories all take K steps.
Nothing else differs from a run: prompts, rewards and settings are those of a configuration, tokens come from the
batcher and decoder of the embedded engine, and each step is the trainer's own, on one rank. There is no HTTP, no ZeroMQ
and no clock, so a run is a function of its settings and its seed, on one machine and one version of torch.

Invariant: two runs with the same seed and the same K train on the same prompts, with the same noise for every sampled
token; runs with another K or another objective differ in the weights alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dora.app.inputs import open_inputs
from dora.app.settings import trainer_settings
from dora.config.schema import Config
from dora.core.ids import StepId, VersionId
from dora.embedded.batcher import Batcher
from dora.embedded.decoder import CausalDecoder
from dora.embedded.generation import Generation, SamplingParams
from dora.tasks.prompts import Prompt
from dora.tasks.rewards import GradeRequest, build_scorer, total
from dora.tasks.sources import derive_seed
from dora.trainer.forward_check import check_training
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.publish import Publisher
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, MicroBatch, StepDone
from dora.transport.trainer_end import TrainerEnd
from tests.trainer.publishing import Unpublished, gather, make_saver

Weights = dict[str, Tensor]

#: Requests that decode together; more of them cost less per token, but answers of very different lengths leave early.
SLOTS = 128
#: Groups are sampled until enough of them have a variance, at most this many times `groups_per_step`.
MAX_TOP_UP = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """A trajectory."""

    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    reward: float
    truncated: bool


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one prompt, sampled under one version."""

    version: int
    answers: list[Answer]

    @property
    def rewards(self) -> list[float]:
        return [answer.reward for answer in self.answers]


class Rollout:
    """The embedded engine with the rewards of a task: samples answers under any weights."""

    def __init__(self, config: Config) -> None:
        self.inputs = open_inputs(config)
        self._config = config
        rollout = config.rollout
        kv_tokens = SLOTS * (config.task.max_prompt_tokens + rollout.max_new_tokens)
        self._decoder = CausalDecoder(
            self.inputs.model, slots=SLOTS, kv_tokens=kv_tokens, device="cpu", dtype="float32", threads=1
        )
        self._batcher = Batcher(self._decoder, slots=SLOTS, kv_tokens=kv_tokens)
        self._runner = asyncio.Runner()
        self._score = build_scorer(config.task.rewards, field="task.rewards", http_timeout_s=1.0)

    def close(self) -> None:
        """End the decoder thread."""
        self._batcher.close()
        self._runner.close()

    def load(self, weights: Weights) -> None:
        """Sample under these weights from now on."""
        self._decoder.put(weights.items())
        self._decoder.flush()

    def groups(self, positions: Sequence[int], *, version: int) -> list[Group]:
        """Sample the groups of the prompts at these positions of the stream."""
        size, seed = self._config.rollout.group_size, self._config.run.seed
        prompts = [self.inputs.stream.at(position) for position in positions]
        requests = [
            (cast(Prompt, prompt), derive_seed(seed, "sample", position, sibling))
            for position, prompt in zip(positions, prompts, strict=True)
            for sibling in range(size)
        ]
        answers = self._answers(requests, temperature=self._config.rollout.temperature)
        return [Group(version, answers[start : start + size]) for start in range(0, len(answers), size)]

    def heldout(self) -> float:
        """Return the mean reward of the first held-out set."""
        held_out = next(iter(self.inputs.evaluations.sets))
        requests = [(prompt, derive_seed("eval", prompt.position)) for prompt in held_out.prompts]
        answers = self._answers(requests, temperature=held_out.temperature)
        return math.fsum(answer.reward for answer in answers) / len(answers)

    def _answers(self, requests: Sequence[tuple[Prompt, int]], *, temperature: float) -> list[Answer]:
        generations = [
            Generation(
                rid=str(number),
                prompt_ids=list(prompt.tokens),
                sampling=SamplingParams(
                    max_new_tokens=self._config.rollout.max_new_tokens,
                    temperature=temperature,
                    seed=seed % 2**63,
                    stop_ids=frozenset(self.inputs.tokenizer.eos_ids),
                ),
            )
            for number, (prompt, seed) in enumerate(requests)
        ]
        self._runner.run(self._generate(generations))
        return [self._answer(prompt, one) for (prompt, _), one in zip(requests, generations, strict=True)]

    async def _generate(self, generations: Sequence[Generation]) -> None:
        """Run the batcher until all are complete. They are submitted before it starts, so that their batches are
        always the same."""
        for generation in generations:
            self._batcher.submit(generation)
        running = asyncio.create_task(self._batcher.run(), name="batcher")
        await self._batcher.emptied(timeout_s=600.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def _answer(self, prompt: Prompt, done: Generation) -> Answer:
        response = self.inputs.tokenizer.decode(done.output_ids)
        request = GradeRequest(prompt=prompt.text, response=response, answer=prompt.answer, metadata=prompt.metadata)
        assert done.finish_reason is not None
        return Answer(
            prompt=prompt,
            tokens=done.output_ids,
            logprobs=done.output_logprobs,
            reward=total(self._score(request)),
            truncated=done.finish_reason["type"] == "length",
        )


class Versions(Unpublished):
    """In place of the publisher: keeps the newest versions in memory."""

    def __init__(self, policy: Policy, count: int) -> None:
        self._policy = policy
        self._kept: deque[tuple[int, Weights]] = deque(maxlen=count)

    def publish(self, version: VersionId, *, chain: str) -> None:
        self._kept.append((version, gather(self._policy)))

    def __getitem__(self, version: int) -> Weights:
        return next(weights for kept, weights in self._kept if kept == version)


class _Reports:
    """In place of the connection to the controller: keeps the metrics of the steps."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def send(self, message: Any) -> None:
        if isinstance(message, StepDone):
            self.metrics.append(message.metrics)


class _Ranks(Trainer):
    """The one rank; a run is too short for checkpoints."""

    def save_checkpoint(self) -> None:
        pass


class Learner:
    """The trainer, fed in this process."""

    def __init__(self, config: Config, *, model: Path, max_staleness: int) -> None:
        self._config = config
        self._reports = _Reports()
        policy = Policy(model, mesh=make_mesh("cpu"), dtype=torch.float32)
        self.versions = Versions(policy, max_staleness + 1)
        settings = trainer_settings(config, max_staleness=max_staleness)
        order = Configure(
            run_id="", model_path=str(model),
            settings=msgspec.structs.replace(settings, probe_tokens=0),  # the probe reads from a store of versions
            memory_root="", durable_root="", checkpoints="", resume_from=(), may_start_over=False, chain="", epoch=0,
            fence="",
        )  # fmt: skip
        self._trainer = _Ranks(
            order,
            end=cast(TrainerEnd, self._reports),
            policy=policy,
            layout=check_training(policy, dtype="float32").layout,
            publisher=cast(Publisher, self.versions),
            saver=make_saver(order),
        )
        self._trainer.start()

    def step(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train one step, in M updates of equally many groups; return its metrics."""
        updates = self._config.trainer.updates
        share = len(groups) // updates
        for update in range(updates):
            chosen = groups[update * share : (update + 1) * share]
            self._trainer.train(micro_batch(chosen, step=step, update=update, last=update == updates - 1))
        return self._reports.metrics[-1]


def micro_batch(groups: Sequence[Group], *, step: int, update: int, last: bool) -> MicroBatch:
    """Return all answers of some groups as one message."""
    answers = [answer for group in groups for answer in group.answers]
    owners = [(number, group) for number, group in enumerate(groups) for _ in group.answers]
    prompts = [len(answer.prompt.tokens) for answer in answers]
    return MicroBatch(
        step=StepId(step),
        index=update,
        last=last,
        tokens=np.concatenate([[*answer.prompt.tokens, *answer.tokens] for answer in answers]).astype(np.int32),
        loss_mask=np.concatenate([[0] * n + [1] * len(a.tokens) for n, a in zip(prompts, answers, strict=True)]).astype(
            np.uint8
        ),
        behavior_logprobs=np.concatenate(
            [[0.0] * n + a.logprobs for n, a in zip(prompts, answers, strict=True)]
        ).astype(np.float32),
        lengths=np.array([n + len(a.tokens) for n, a in zip(prompts, answers, strict=True)], np.int32),
        trajectories=np.arange(len(answers)),
        groups=np.array([number for number, _ in owners], np.int64),
        versions=np.array([group.version for _, group in owners], np.int32),
        rewards=np.array([answer.reward for answer in answers], np.float32),
        group_rewards=np.array([group.rewards for _, group in owners], np.float32),
        truncated=np.array([answer.truncated for answer in answers], np.uint8),
        sources=np.zeros(len(answers), np.uint8),
        update=update,
        closes=True,
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run shows."""

    heldout: list[tuple[int, float]]  # (version, mean reward of the held-out set)
    steps: list[dict[str, float]]  # the trainer's metrics

    @property
    def area(self) -> float:
        """Area under the held-out curve by the trapezoid rule, divided by the number of steps: a mean reward."""
        points = zip(self.heldout, self.heldout[1:], strict=False)
        return sum((b - a) * (low + high) / 2 for (a, low), (b, high) in points) / self.heldout[-1][0]


class Process:
    """The process group of one rank, which FSDP needs."""

    def __enter__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        dist.destroy_process_group()


def run(config: Config, *, staleness: int, eval_every: int) -> Curve:
    """Run a job of `config` with this staleness; call it within `Process`. Versions 0, `eval_every`, ... and the last
    are evaluated.

    A policy that samples no group of different rewards any more has collapsed: its score stands for all later versions.
    """
    rollout = Rollout(config)
    learner = Learner(config, model=rollout.inputs.model, max_staleness=staleness)
    steps = config.run.steps
    heldout, metrics, position = [], [], 0
    try:
        for step in range(steps + 1):
            if step % eval_every == 0 or step == steps:
                rollout.load(learner.versions[step])
                heldout.append((step, rollout.heldout()))
            if step < steps:
                version = max(step - staleness, 0)
                rollout.load(learner.versions[version])
                groups, position = sample(rollout, config, position=position, version=version)
                if len(groups) < config.trainer.updates:
                    rollout.load(learner.versions[step])
                    heldout.append((steps, rollout.heldout()))
                    break
                metrics.append(learner.step(step, groups))
    finally:
        rollout.close()
    return Curve(heldout, metrics)


def sample(rollout: Rollout, config: Config, *, position: int, version: int) -> tuple[list[Group], int]:
    """Return the groups of a step and the next position of the stream. Groups of equal rewards are replaced by the
    next ones, as in a run, if the configuration says so."""
    wanted = config.rollout.groups_per_step
    kept: list[Group] = []
    end = position + (MAX_TOP_UP * wanted if config.rollout.filter_zero_variance else wanted)
    while len(kept) < wanted and position < end:
        count = min(wanted if not kept else 2 * (wanted - len(kept)), wanted, end - position)
        found = rollout.groups(range(position, position + count), version=version)
        position += count
        kept += [group for group in found if not config.rollout.filter_zero_variance or len(set(group.rewards)) > 1]
    return kept[:wanted], position
