"""What an observer reads from the metrics of an earlier controller of its run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora.controller.recorder import _line
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.state import State
from dora.journal.replay import replay
from dora.observe.drift import DriftWatch
from dora.observe.facts import RECENT_STEPS, ShellFacts
from dora.observe.observed import Folded
from dora.observe.steps import _lengths
from dora.observe.tokens import UNGRADED
from tests.core.world import Faults, World, settings
from tests.observe.builders import observed, resumed
from tests.status.conftest import step_facts

STALE = {"all/tokens": 100.0, "lag=2/tokens": 100.0, "lag=2/mismatch_k3": 0.5}


def test_a_resumed_run_has_the_alarms_of_the_steps_before_and_ignores_torn_rows(tmp_path: Path) -> None:
    rows = [
        {"kind": "step", "step": 0, "trainer": {}},
        {"kind": "evaluation", "version": 1},
        {"kind": "step", "step": 1, "trainer": STALE},
        {"kind": "step", "step": 2, "trainer": "torn"},
        {"kind": "step", "trainer": STALE},
        {"kind": "step", "step": 3, "trainer": {"lag=0/mismatch_k3": None}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "step", "st')
    drift = DriftWatch(precision="float32", updates=1)
    resumed(path, drift=drift)
    assert [(alarm.name, alarm.step) for alarm in drift.alarms.values()] == [("stale_tokens", 1)]
    assert drift.note(4, STALE) == [], "it has been said"


def test_a_metric_that_is_not_finite_is_null_in_a_row_whose_alarms_are_recalled(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(_line({"kind": "step", "step": 0, "trainer": {"grad_norm": math.nan, "updates_skipped": 1.0}}))
    assert msgspec.json.decode(path.read_bytes())["trainer"] == {"grad_norm": None, "updates_skipped": 1.0}
    drift = DriftWatch(precision="float32", updates=1)
    resumed(path, drift=drift)
    assert list(drift.alarms) == ["update_skipped"]


def test_a_resumed_run_has_the_metrics_of_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "step", "step": step, "trainer": {"loss": step, "grad_norm": None}} for step in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert resumed(path).snapshot().trainer_metrics == {"loss": 1.0}


@pytest.mark.parametrize(
    ("lengths", "mean", "p90", "longest"),
    [
        ([7], 7, 7, 7),
        ([*range(10, 0, -1)], 5.5, 9, 10),
        ([*range(1, 12)], 6, 10, 11),
        ([1, 1, 1, 100], 25.75, 100, 100),
    ],
)
def test_nine_of_ten_answers_are_at_most_as_long_as_the_90th_percentile(
    lengths: list[int], mean: float, p90: int, longest: int
) -> None:
    assert [*_lengths(lengths).values()] == [mean, p90, longest]
    assert _lengths([]) == {}


def test_a_new_run_has_no_alarms(tmp_path: Path) -> None:
    drift = DriftWatch(precision="float32", updates=1)
    resumed(tmp_path / "metrics.jsonl", drift=drift)
    assert drift.alarms == {}


class Watched(World):
    """A job that is observed from its first event."""

    def begin(self) -> None:
        self.observed = observed(self.state)
        self.rows: list[dict[str, Any]] = []
        self.sink = self.observed.apply

    def deliver(self, event: ev.Event) -> None:
        if (row := self.observed.before(event, cpu_s=0.0)) is not None:
            self.rows.append(row)
        super().deliver(event)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_a_replay_knows_what_the_run_knew(share: float) -> None:
    """All of a run, or a part of it: the same facts, as far as events tell them."""
    faults = Faults(push_fails=0.1, instance_dies=0.05, zero_variance=0.3, grading_fails=0.1)
    whole = Watched(settings(group_size=4), seed=3, faults=faults)
    whole.begin()
    whole.run()
    known = whole.journal[: int(share * len(whole.journal))]
    folded = Folded.new(4, is_replay=True)
    assert replay(whole.state.settings, known, projection=folded).difference is None
    state = State(whole.state.settings)
    live = observed(state)
    for event, _ in known:
        live.before(event, cpu_s=0.0)
        live.apply(event, handle(state, event))
    resumed_run = observed(state, folded=folded)
    for field in ("steps", "rewards", "later_s", "later_idle_s", "num_trained_tokens"):
        assert getattr(resumed_run.facts, field) == getattr(live.facts, field), field
    assert (folded.steps, folded.slots) == (live.folded.steps, live.folded.slots)
    assert folded.durations.histograms == live.folded.durations.histograms
    assert len(whole.rows) == whole.state.settings.steps


def test_a_replay_keeps_no_times_of_evaluations_that_have_ended() -> None:
    whole = World(settings(group_size=4, eval_prompt_tokens=(3,) * 4, eval_every=1), seed=3)
    whole.run()
    known = whole.journal[: 2 * len(whole.journal) // 3]
    folded = Folded.new(4, is_replay=True)
    state = replay(whole.state.settings, known, projection=folded).state
    assert sum(isinstance(order, cmd.ReportEvaluation) for _, orders in known for order in orders) > 1
    assert {id for id in folded.episodes.times if id < 0} <= {*state.evaluation.trajectories}


def test_a_run_that_only_evaluates_runs_from_its_first_answer_on() -> None:
    world = Watched(settings(steps=0, max_staleness=0, eval_prompt_tokens=(3,) * 4), seed=3)
    world.begin()
    phases: list[tuple[bool, str]] = []
    apply = world.observed.apply

    def take(event: ev.Event, orders: list[cmd.Command]) -> None:
        apply(event, orders)
        has_begun = any(
            isinstance(order, cmd.Generate) for _, earlier in world.journal for order in [*earlier, *orders]
        )
        phases.append((has_begun, world.observed.snapshot().phase))

    world.sink = take
    world.run()
    assert {*phases} == {(False, "starting"), (True, "running")}


def test_a_step_that_is_trained_again_has_no_second_row() -> None:
    world = Watched(settings(group_size=4), seed=3)
    world.begin()
    world.run()
    trained = [event for event, _ in world.journal if isinstance(event, ev.StepTrained)]
    assert [row["step"] for row in world.rows] == [event.step for event in trained]
    assert world.observed.before(trained[0], cpu_s=0.0) is None


def test_the_tokens_of_answers_without_a_reward_are_not_trained() -> None:
    world = Watched(settings(group_size=4), seed=3, faults=Faults(grading_fails=0.1))
    world.begin()
    account = world.observed.folded.tokens

    def take(event: ev.Event, orders: list[cmd.Command]) -> None:
        if isinstance(event, ev.GenerationFinished):
            account.append(event.trajectory, event.num_tokens)
        world.observed.apply(event, orders)

    world.sink = take
    world.run()
    assert account.account.dropped[UNGRADED] > 0
    assert sum(row["num_tokens"] for row in world.rows) == account.account.trained


def test_rewards_are_kept_of_all_steps_and_facts_of_the_latest() -> None:
    before = [step_facts(step) for step in range(3 * RECENT_STEPS)]
    facts = ShellFacts(run_id="r", strategy="dora")
    for step in before:
        facts.note_step(step)
    assert facts.rewards == [step.reward_all_mean for step in before]
    assert [*facts.steps] == before[-RECENT_STEPS:]
