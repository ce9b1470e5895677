"""Learning in simulated time: a workload gives the hardware and the job, a configuration the task and the objective."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import torch

from dora.app.inputs import Inputs, open_inputs, weights_digest
from dora.app.settings import rollout_section, trainer_settings
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError, RunFailed
from dora.learning.learner import Learner, OneRank
from dora.learning.progress import Progress
from dora.learning.sampler import AnswerRequest, Sampler
from dora.learning.world import AnswerJob, LearningWorld, RealAnswers
from dora.sim.workload import Workload, checked
from dora.tasks.prompts import Prompt
from dora.tasks.sources import derive_seed

#: Prompts that are kept: a block is sampled under several versions.
KEPT_PROMPTS: Final = 4096
#: Versions between two that are saved with the trainer.
SAVE_EVERY: Final = 5


class Point(msgspec.Struct, frozen=True):
    """A version, when it was published, and what it scores."""

    version: int
    at_s: float  #: virtual seconds
    #: Of the held-out answers, one set after the other (nan: none could be given); empty if it was not evaluated.
    rewards: list[float]

    @property
    def heldout(self) -> float | None:
        """The mean reward of the answers that have one; None if the version was not evaluated."""
        given = [reward for reward in self.rewards if not math.isnan(reward)]
        return (math.fsum(given) / len(given) if given else math.nan) if self.rewards else None


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
        return sum(versions * count for versions, count in enumerate(self.staleness)) / sum(self.staleness)


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
    if config.task.revisit_share < 1:
        raise ConfigError(f"{path}: task.revisit_share: simulations pass over no rows; leave it at 1")
    if not config.eval.sets:
        raise ConfigError(f"{path}: eval.sets: a curve needs a held-out set")
    rewards = [config.task.rewards, *(one.rewards for one in config.eval.sets)]
    if any(reward.kind == "judge" for terms in rewards for reward in terms):
        raise ConfigError(f"{path}: rewards of kind judge: simulations ask no judge; use another kind")
    if workload.has_calls:
        named = "lengths.calls" if workload.lengths.calls else "tools.calls"
        raise ConfigError(f"{named}: a policy that learns makes no calls; remove them from the workload")
    if not 0 < workload.lengths.scale < math.inf:
        raise ConfigError("lengths.scale: a token must take as long as a finite number, above 0, of the workload")
    cap = max(1, round(config.rollout.max_new_tokens * workload.lengths.scale))
    fitted = workload.with_changes(job={"eval_samples": 0}, lengths={"regime": "A", "cap": cap})
    return config, checked(fitted, origin=f"the workload, with the token budget of {path}")


def learn(
    workload: Workload,
    config: Config,
    *,
    seed: int,
    show: Callable[[str], None],
    folder: Path | None = None,
    every: int = 1,
    behind: int = 0,
) -> LearningCurve:
    """Simulate a workload whose answers and versions are real.

    `config`: as `configured` returns it. `show` receives a line about the progress. `folder`: where the simulation is
    saved, and from where it goes on. `every`: one group in `every` is sampled and trained, and the others borrow their
    lengths and rewards. `behind` breaks C3 on purpose, where neither core nor trainer can see it: answers are sampled
    under weights that are `behind` versions older than their tag.
    """
    inputs = open_inputs(config)
    points: list[Point] = []
    steps: list[dict[str, float]] = []
    scored = held_out(inputs)
    digests = digest_of(workload, config, seed=seed), weights_digest(inputs)
    about = "/".join((*digests, str(every), str(behind), torch.__version__))
    with OneRank(), closing(Progress(folder, about=about)) as saved:
        settings = trainer_settings(config, max_staleness=workload.settings().max_lag)
        learner = Learner(settings, model=inputs.model, folder=folder)
        sampler = Sampler(config, model=inputs.model, tokenizer=inputs.tokenizer)
        job = job_of(config, inputs, every=every, behind=behind)
        answers = RealAnswers(job, sampler, learner.versions, saved, workload=workload)

        def published(version: int, at_s: float) -> None:
            if version:
                steps.append(saved.recall(lambda: _without_times(learner.metrics(version - 1)), dict[str, float]))
            every_n = config.eval.every
            is_scored = version in (0, config.run.steps) or (every_n > 0 and version % every_n == 0)
            found = [
                answer
                for requests, temperature in (scored if is_scored else ())
                for answer in answers.answer(requests, version, temperature=temperature)
            ]
            points.append(Point(version, at_s, [answer.reward for answer in found]))
            if version % SAVE_EVERY == 0:
                learner.save()
            shown = f", held-out reward {points[-1].heldout:.3f}" if found else ""
            show(f"version {version} of {config.run.steps} after {at_s:,.0f} simulated seconds{shown}")

        world = LearningWorld(workload, answers, learner, seed=seed, on_version=published)
        with closing(sampler):
            try:
                world.run()
            except RunFailed as err:
                raise RunFailed(
                    *str(err).split("\n"), *([f"grading: {sampler.failure}"] * bool(sampler.failure))
                ) from err
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


def digest_of(workload: Workload, config: Config, *, seed: int) -> str:
    """Return a digest of what a simulation depends on, apart from the files that the configuration names."""
    told = msgspec.json.encode(workload) + config.model_dump_json().encode() + str(seed).encode()
    return hashlib.blake2b(told, digest_size=8).hexdigest()


def _without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


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


def held_out(inputs: Inputs) -> list[tuple[list[AnswerRequest], float]]:
    """Return requests for each held-out set, all samples of a prompt side by side, and its temperature."""
    return [
        (
            [
                AnswerRequest(prompt, derive_seed("eval", prompt.position, *([n] * (n > 0))), held_out=index)
                for prompt in one.prompts
                for n in range(one.samples)
            ],
            one.temperature,
        )
        for index, one in enumerate(inputs.evaluations.sets)
    ]
