"""The lag harness: rollout and training of one job in one process, with staleness that is given by count.

Step s trains groups that were sampled under version max(s - K, 0), as in a run whose trajectories all take K steps.
Nothing else differs from a run: prompts, rewards and settings are those of a configuration, tokens come from the
batcher and decoder of the embedded engine, and each step is the trainer's own, on one rank. There is no HTTP, no ZeroMQ
and no clock, so a run is a function of its settings and its seed, on one machine and one version of torch.

Invariant: two runs with the same seed and the same K train on the same prompts, with the same noise for every sampled
token; runs with another K or another objective differ in the weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from dora.app.inputs import open_inputs
from dora.app.learn import held_out
from dora.app.settings import trainer_settings
from dora.config.schema import Config
from dora.core.ids import StepId
from dora.learning.learner import Learner as OneRankLearner
from dora.learning.learner import Weights
from dora.learning.sampler import AnswerRequest, RealAnswer, Sampler
from dora.tasks.prompts import Prompt
from dora.tasks.sources import derive_seed
from dora.transport.messages import MicroBatch

#: Groups are sampled until enough of them have a variance, at most this many times `groups_per_step`.
MAX_TOP_UP = 8


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one prompt, sampled under one version."""

    version: int
    answers: list[RealAnswer]

    @property
    def rewards(self) -> list[float]:
        return [answer.reward for answer in self.answers]


class Rollout:
    """Samples answers to the prompts of a task under any weights."""

    def __init__(self, config: Config) -> None:
        self.inputs = open_inputs(config)
        self._config = config
        self._sampler = Sampler(config, model=self.inputs.model, tokenizer=self.inputs.tokenizer)

    def close(self) -> None:
        """End the decoder thread."""
        self._sampler.close()

    def load(self, weights: Weights) -> None:
        """Sample under these weights from now on."""
        self._sampler.load(weights)

    def groups(self, positions: Sequence[int], *, version: int) -> list[Group]:
        """Sample the groups of the prompts at these positions of the stream."""
        size, seed = self._config.rollout.group_size, self._config.run.seed
        prompts = [self.prompt(position) for position in positions]
        requests = [
            AnswerRequest(prompt, derive_seed(seed, "sample", position, sibling))
            for position, prompt in zip(positions, prompts, strict=True)
            for sibling in range(size)
        ]
        answers = self._sampler.answer(requests, temperature=self._config.rollout.temperature)
        return [Group(version, answers[start : start + size]) for start in range(0, len(answers), size)]

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position of the stream, which is endless."""
        return cast(Prompt, self.inputs.stream.at(position))

    def heldout(self) -> float:
        """Return the mean reward of all held-out prompts."""
        rewards = [
            answer.reward
            for requests, temperature in held_out(self.inputs)
            for answer in self._sampler.answer(requests, temperature=temperature)
        ]
        return math.fsum(rewards) / len(rewards)


class Learner(OneRankLearner):
    """The trainer, fed with whole steps."""

    def __init__(self, config: Config, *, model: Path, max_staleness: int) -> None:
        super().__init__(trainer_settings(config, max_staleness=max_staleness), model=model)
        self._updates = config.trainer.updates
        self._max_staleness = max_staleness

    def step(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train one step, in M updates of equally many groups; return its metrics."""
        share = len(groups) // self._updates
        for update in range(self._updates):
            chosen = groups[update * share : (update + 1) * share]
            self.train(micro_batch(chosen, step=step, update=update, last=update == self._updates - 1))
        self.versions.forget_before(step + 1 - self._max_staleness)
        return self.metrics(step)


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


def run(config: Config, *, staleness: int, eval_every: int) -> Curve:
    """Run a job of `config` with this staleness; call it within `OneRank`. Versions 0, `eval_every`, ... and the last
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


def answers_while_training(config: Config, *, versions: Sequence[int], groups: int) -> list[Group]:
    """Train a job without staleness, and return what each of these versions answers to the next prompts."""
    rollout = Rollout(config)
    learner = Learner(config, model=rollout.inputs.model, max_staleness=0)
    position, answered = 0, []
    try:
        for version in range(config.run.steps + 1):
            rollout.load(learner.versions[version])
            if version in versions:
                answered += rollout.groups(range(position, position + groups), version=version)
            if version < config.run.steps:
                found, position = sample(rollout, config, position=position, version=version)
                learner.step(version, found)
    finally:
        rollout.close()
    return answered


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
