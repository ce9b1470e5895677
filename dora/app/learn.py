"""Learning in simulated time: a workload gives the hardware and the job, a configuration the task and the objective."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

import msgspec

from dora.app.inputs import Inputs, open_inputs
from dora.app.settings import rollout_section, trainer_settings
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.learning.learner import Learner, OneRank
from dora.learning.sampler import AnswerRequest, Sampler
from dora.learning.world import AnswerJob, LearningWorld, RealAnswers
from dora.sim.workload import Workload, checked
from dora.tasks.prompts import Prompt
from dora.tasks.sources import derive_seed

#: Prompts that are kept: a block is sampled under several versions.
KEPT_PROMPTS = 4096


class Point(msgspec.Struct, frozen=True):
    """A version, when it was published, and what it scores."""

    version: int
    at_s: float  #: virtual seconds
    rewards: list[float]  #: of the first held-out set, by prompt; empty if the version was not evaluated

    @property
    def heldout(self) -> float | None:
        """The mean reward; None if the version was not evaluated."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None


class LearningCurve(msgspec.Struct, frozen=True):
    """What one simulated job has learned."""

    strategy: str
    max_staleness: int
    seed: int
    points: list[Point]  #: of all versions, from 0
    steps: list[dict[str, float]]  #: the trainer's metrics, without times
    answer_tokens: list[float]  #: real tokens of a trained answer, mean of each step
    staleness: list[int]  #: numbers of trained groups that were 0, 1, ... versions old
    mixed: int  #: answers with tokens of several versions (C1)
    discarded: int  #: groups discarded because their step was full (C2)
    filtered: int  #: groups without different rewards
    digest: str  #: of all waves and of the times of versions; equal digests mean equal histories

    @property
    def step_s(self) -> float:
        """Virtual seconds from one version to the next, on average."""
        return (self.points[-1].at_s - self.points[0].at_s) / (len(self.points) - 1)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of all trained groups."""
        return sum(age * count for age, count in enumerate(self.staleness)) / sum(self.staleness)


def configured(path: Path, workload: Workload, overrides: Sequence[str] = (), *, seed: int) -> tuple[Config, Workload]:
    """Return the configuration with the job of a workload, and the workload with the token budget of the configuration.

    ConfigError if the two do not fit together.
    """
    job, train = workload.job, workload.train
    rollout = {f"rollout.{name}": value for name, value in rollout_section(job).items()}
    sizes = {
        "run.steps": job.steps,
        "run.seed": seed,
        "trainer.updates": train.updates,
        "engine.instances": max(workload.num_instances, job.max_staleness + 1),
    }
    chosen = [f"{name}={msgspec.json.encode(value).decode()}" for name, value in (rollout | sizes).items()]
    config = load(path, [*overrides, *chosen], environ=os.environ)
    if config.environment.name:
        raise ConfigError(f"{path}: environment.name: only single answers are simulated")
    if not config.eval.sets:
        raise ConfigError(f"{path}: eval.sets: a curve needs a held-out set")
    if workload.tools.max_turns > 1:
        raise ConfigError("tools.calls: a policy that learns makes no calls; remove them from the workload")
    cap = max(1, round(config.rollout.max_new_tokens * workload.lengths.scale))
    fitted = workload.with_changes(job={"eval_samples": 0}, lengths={"regime": "A", "cap": cap})
    return config, checked(fitted, origin=str(path))


def learn(
    workload: Workload,
    config: Config,
    *,
    seed: int,
    show: Callable[[str], None],
    every: int = 1,
    behind: int = 0,
) -> LearningCurve:
    """Simulate a workload whose answers and versions are real.

    `config`: as `configured` returns it. `every`: one in so many groups is sampled and trained, the others borrow
    lengths and rewards from these. `behind` breaks C3 on purpose, where neither core nor trainer can see it: answers
    are sampled under weights that are so many versions older than their tag. `show` receives a line about the progress.
    """
    inputs = open_inputs(config)
    points: list[Point] = []
    steps: list[dict[str, float]] = []
    scored = held_out(inputs)
    with OneRank():
        sampler = Sampler(config, model=inputs.model, tokenizer=inputs.tokenizer)
        settings = trainer_settings(config, max_staleness=workload.settings().max_lag)
        learner = Learner(settings, model=inputs.model)
        answers = RealAnswers(
            job_of(config, inputs, every=every, behind=behind), sampler, learner.versions, workload=workload
        )

        def published(version: int, at_s: float) -> None:
            if version:
                steps.append({name: value for name, value in learner.metrics.items() if not name.endswith("_s")})
            is_scored = version % config.eval.every == 0 or version == config.run.steps
            temperature = inputs.evaluations.sets[0].temperature
            found = answers.answer(scored if is_scored else (), version, temperature=temperature)
            points.append(Point(version, at_s, [answer.reward for answer in found]))
            shown = f", held-out reward {points[-1].heldout:.3f}" if found else ""
            show(f"version {version} of {config.run.steps} after {at_s:,.0f} simulated seconds{shown}")

        world = LearningWorld(workload, answers, learner, seed=seed, on_version=published)
        try:
            world.run()
        finally:
            sampler.close()
    measure = world.measure
    return LearningCurve(
        workload.job.strategy,
        workload.rules.max_staleness,
        seed,
        points,
        steps,
        [fmean(world.answer_tokens[step]) for step in range(workload.job.steps)],
        [sum(of_steps) for of_steps in zip_longest(*measure.staleness.values(), fillvalue=0)],
        world.state.counters.version_conflicts,
        measure.counts.discarded,
        measure.counts.dropped,
        world.digest,
    )


def job_of(config: Config, inputs: Inputs, *, every: int = 1, behind: int = 0) -> AnswerJob:
    """Return what is sampled, of one in `every` groups; `prompt_at` raises ConfigError for a prompt over the limit."""

    @lru_cache(KEPT_PROMPTS)
    def prompt_at(number: int) -> Prompt:
        prompt = inputs.stream.at(number)
        if prompt is None or prompt.skipped:
            why = "has no more rows" if prompt is None else f"cannot be used: {prompt.skipped}"
            raise ConfigError(f"task.sources: prompt {number} {why}")
        return prompt

    rollout = config.rollout
    return AnswerJob(prompt_at, rollout.temperature, config.run.seed, rollout.group_size, every, behind)


def held_out(inputs: Inputs) -> list[AnswerRequest]:
    """Return requests for the first held-out set."""
    return [
        AnswerRequest(prompt, derive_seed("eval", prompt.position)) for prompt in inputs.evaluations.sets[0].prompts
    ]
