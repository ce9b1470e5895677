"""Snapshots of a whole simulated job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest

from dora.core import events as ev
from dora.core.ids import InstanceId
from dora.observe.activities import trainer_waits_for
from dora.observe.episodes import EnvironmentRow, EpisodeStats
from dora.observe.facts import ShellFacts
from dora.observe.scores import Score
from dora.observe.snapshot import Snapshot, snapshot
from dora.observe.steps import StepFacts
from dora.observe.tokens import TokenAccount
from dora.trainer.metrics import METRICS
from tests.core.world import Faults, World, settings


@dataclass
class Watched(World):
    """A job with a snapshot after every event, and the shell's facts as an observer would fill them."""

    facts: ShellFacts = field(
        default_factory=lambda: ShellFacts(run_id="job-1", strategy="dora", phase="running", urls={InstanceId(0): "u0"})
    )
    snapshots: list[Snapshot] = field(default_factory=list)
    waits: set[tuple[bool, str]] = field(default_factory=set)  #: whether the trainer works, and what it waits for
    trained_at: float = 0.0

    def deliver(self, event: ev.Event) -> None:
        super().deliver(event)
        if isinstance(event, ev.StepTrained):
            self.facts.note_step(step_facts(event.step, duration_s=self.now - self.trained_at))
            self.trained_at = self.now
        feed = self.state.feed
        works = feed.open_step is not None and feed.idle_since is None
        self.waits.add((works, trainer_waits_for(self.state)))
        self.snapshots.append(snapshot(self.state, self.facts))


def step_facts(step: int, *, duration_s: float = 2.0, idle_s: float = 0.5) -> StepFacts:
    return StepFacts(
        step=step,
        reward_mean=0.25 + step / 100,
        reward_all_mean=0.25 + step / 100,
        num_groups=4,
        num_tokens=100,
        staleness_mean=0.5,
        duration_s=duration_s,
        idle_s=idle_s,
        waited_for="3 answers of 2 groups",
    )


def score(version: int, mean: float, *, name: str = "heldout") -> Score:
    return Score(name=name, version=version, mean=mean, pass_at_n=mean, num_samples=64)


@pytest.fixture(scope="session")
def job() -> Watched:
    """A job of 8 steps, K = 2, with evaluation, losses, failing pushes and groups that are filtered."""
    world = Watched(
        settings(eval_prompt_tokens=(3,) * 8, eval_every=4),
        seed=5,
        faults=Faults(push_fails=0.1, instance_dies=0.05, zero_variance=0.2),
    )
    world.facts.account = TokenAccount(sampled=1000)
    world.facts.rate.note(0, at=0.0)
    world.facts.rate.note(1000, at=10.0)
    world.facts.scores += [score(0, 0.25), score(4, 0.5), score(4, 0.75, name='second "set"')]
    for lag_s in (0.001, 0.002, 0.25):
        world.facts.lag.note(lag_s)
    world.facts.trainer_metrics = {**dict.fromkeys(METRICS, 0.5), "lag=0/entropy": 2.0, "grad_norm": math.nan}
    for seconds in (0.01, 0.02, 5_000.0):
        world.facts.durations.histograms["grading"].note(seconds)
    world.run()
    return world


@pytest.fixture(scope="session")
def middle(job: Watched) -> Snapshot:
    """The snapshot with the most live versions while steps are behind and ahead."""
    return max(job.snapshots, key=lambda s: (sum(v.is_live for v in s.versions), s.steps_trained > 2))


@pytest.fixture(scope="session")
def calling(middle: Snapshot) -> Snapshot:
    """The same with an environment."""
    stats = EpisodeStats(
        **{"count": 16, "turns_mean": 2.25, "turns_max": 4, "calls_mean": 1.5, "calls_max": 3},
        **{"sampled_tokens_mean": 40.0, "observation_tokens_mean": 6.0},
        **{"call_s_mean": 0.25, "call_s_p90": 0.5, "call_share": 0.125},
        turn_rewards=(0.25, 0.5),
        truncated={"turns": 2},
        metrics={"moves": 2.5},
    )
    steps = (*middle.steps[:-1], replace(middle.steps[-1], episodes=stats))
    return replace(middle, steps=steps, environment=EnvironmentRow(calling=7, failed={"timeout": 2, "host": 1}))
