"""Drift alarms: recorded runs raise those that they should, healthy runs raise none, and each is reported once.

`recorded_metrics.json` has the trainer's metrics of real runs of the built-in job, step by step, with four digits:
`default`, `seed_1` and `sync`; `k8` and `k16`, with as many instances as they need; `learning_rate_x100`;
`staleness_of_16`, which trains answers of version 0 in 16 steps, with their full weights; and `temperature_1.1`, of the
trainer alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dora.cli.summary import summary
from dora.journal.run_folder import RunFolder
from dora.observe.drift import CALM_STEPS, CAUSES, Alarm, DriftWatch
from dora.observe.snapshot import Snapshot
from dora.status.frame import frame
from dora.status.metrics import render

RECORDED: dict[str, list[dict[str, float]]] = json.loads(
    (Path(__file__).parent / "recorded_metrics.json").read_text(encoding="utf-8")
)
QUIET = {
    "all/tokens": 1000.0,
    "all/ess": 0.99,
    "all/entropy": 0.5,
    "all/clip_high_frac": 0.01,
    "grad_norm": 0.3,
    "updates_skipped": 0.0,
    "lag=0/mismatch_k3": 1e-13,
    "lag=0/tokens": 600.0,
    "lag=2/mismatch_k3": 0.01,
    "lag=2/tokens": 400.0,
}


def watch(*, updates: int = 1) -> DriftWatch:
    return DriftWatch(precision="float32", updates=updates)


def changes(steps: list[dict[str, float]], *, updates: int = 1) -> list[tuple[int, str, bool]]:
    """(step, name, whether it was raised) of every change."""
    drift = watch(updates=updates)
    return [(i, a.name, a.cleared is None) for i, metrics in enumerate(steps) for a in drift.note(i, metrics)]


@pytest.mark.parametrize("run", ["default", "seed_1", "sync", "k8", "k16"])
def test_a_healthy_run_raises_no_alarm(run: str) -> None:
    assert changes(RECORDED[run]) == []


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("learning_rate_x100", "large_updates"),
        ("staleness_of_16", "stale_tokens"),
        ("temperature_1.1", "engine_mismatch"),
    ],
)
def test_a_planted_drift_is_named_first_and_within_ten_steps(run: str, name: str) -> None:
    step, first, is_raised = changes(RECORDED[run])[0]
    assert (first, is_raised) == (name, True)
    assert step < 10


def test_an_alarm_names_quantity_value_threshold_step_staleness_and_cause() -> None:
    drift = watch()
    drift.note(3, QUIET)
    (alarm,) = drift.note(4, QUIET | {"lag=2/mismatch_k3": 0.75})
    assert alarm == Alarm(
        name="stale_tokens",
        quantity="lag=2/mismatch_k3",
        value=0.75,
        threshold=0.3,
        step=4,
        staleness=2,
        cause=CAUSES["stale_tokens"],
    )
    assert alarm.text == (
        "stale_tokens at step 5: lag=2/mismatch_k3 is 0.75, limit 0.3; the policy has moved too far since these tokens "
        "were sampled: lower rollout.max_staleness or trainer.learning_rate"
    )


def test_an_alarm_is_raised_once_and_cleared_once_and_may_be_raised_again() -> None:
    high, between, low = ({**QUIET, "lag=2/mismatch_k3": value} for value in (0.4, 0.2, 0.01))
    steps = [high, high, between, *[low] * (CALM_STEPS - 1), between, high, *[low] * CALM_STEPS, low, high]
    cleared = len(steps) - 3
    assert changes(steps) == [
        (0, "stale_tokens", True),
        (cleared, "stale_tokens", False),
        (len(steps) - 1, "stale_tokens", True),
    ]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"all/ess": 0.49}, "low_ess"),
        ({"grad_norm": 3.1}, "gradient_explosion"),
        ({"all/entropy": 0.0049}, "entropy_collapse"),
        ({"all/clip_high_frac": 0.51}, "much_clipping"),
        ({"updates_skipped": 1.0}, "update_skipped"),
        ({"lag=0/mismatch_k3": 2e-6}, "engine_mismatch"),
        ({"engine_mismatch_k3": 2e-6}, "engine_mismatch"),
        ({"lag=1/mismatch_k3": 0.31, "lag=1/tokens": 100.0}, "large_updates"),
    ],
)
def test_each_quantity_has_its_alarm_which_a_return_to_normal_clears(change: dict[str, float], name: str) -> None:
    calm = QUIET | {key: 0.0 for key in change if key not in QUIET and "tokens" not in key}
    assert changes([*[calm] * 6, calm | change, *[calm | {"lag=1/tokens": 100.0}] * CALM_STEPS]) == [
        (6, name, True),
        (6 + CALM_STEPS, name, False),
    ]


def test_a_staleness_with_few_tokens_is_not_judged() -> None:
    few, enough = ({"lag=5/mismatch_k3": 0.5, "lag=5/tokens": tokens} for tokens in (49.0, 50.0))
    assert changes([QUIET | few]) == []
    assert changes([QUIET | enough]) == [(0, "stale_tokens", True)]


def test_a_step_without_the_quantity_neither_clears_nor_raises() -> None:
    stale = {"lag=3/mismatch_k3": 0.5, "lag=3/tokens": 400.0}
    without = {key: value for key, value in QUIET.items() if not key.startswith("lag=2")}
    assert changes([without | stale, *[without] * 10]) == [(0, "stale_tokens", True)]


def test_with_several_updates_staleness_0_says_nothing_about_the_engine() -> None:
    assert changes([QUIET | {"lag=0/mismatch_k3": 0.1}], updates=2) == []


def test_half_precision_may_differ_more() -> None:
    drift = DriftWatch(precision="bfloat16", updates=1)
    assert drift.note(0, QUIET | {"lag=0/mismatch_k3": 5e-3}) == []
    assert [alarm.name for alarm in drift.note(1, QUIET | {"lag=0/mismatch_k3": 2e-2})] == ["engine_mismatch"]


def test_an_alarm_is_shown_everywhere(middle: Snapshot, tmp_path: Path) -> None:
    drift = watch()
    drift.note(4, QUIET | {"all/ess": 0.1})
    drift.note(5, QUIET | {"lag=2/mismatch_k3": 1.0})
    for step in range(6, 6 + CALM_STEPS):
        drift.note(step, QUIET | {"all/ess": 0.1})
    ess, stale = drift.alarms.values()
    now = replace(middle, alarms=(ess, stale))
    metrics = render(now)
    assert 'dora_drift_alarm{alarm="low_ess"} 1\n' in metrics
    assert 'dora_drift_alarm{alarm="stale_tokens"} 0\n' in metrics
    assert metrics.count("dora_drift_alarm{") == len(CAUSES)
    shown = "\n".join(line.text for line in frame(now, 400))
    assert f"drift: {ess.text}" in shown
    assert "stale_tokens" not in shown, "it is cleared"
    end = summary(now, folder=RunFolder(tmp_path), violations=0)
    assert f"  drift: {ess.text}" in end
    assert stale.text.startswith("stale_tokens at step 6, cleared at step 9: ")
    assert f"  drift: {stale.text}" in end


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_a_skipped_update_and_hides_no_later_explosion(norm: float) -> None:
    skipped = QUIET | {"grad_norm": norm, "updates_skipped": 1.0}
    for before in (0, 5):
        steps = [*[QUIET] * before, skipped, *[QUIET] * 5, QUIET | {"grad_norm": 30.0}]
        raised = [(step, name) for step, name, is_raised in changes(steps) if is_raised]
        assert raised == [(before, "update_skipped"), (before + 6, "gradient_explosion")]


def test_steps_without_a_gradient_are_no_baseline_of_an_explosion() -> None:
    assert changes([QUIET | {"grad_norm": 0.0}] * 6 + [QUIET] * 6) == []


def test_clipped_tokens_say_nothing_where_the_loss_clips_many() -> None:
    watch = DriftWatch(precision="float32", updates=2, clips_many=True)
    clipped = {"all/tokens": 100.0, "all/clip_high_frac": 0.64}
    assert watch.note(0, clipped) == []
    assert [alarm.name for alarm in watch.note(1, clipped | {"all/tis_capped_frac": 0.64})] == ["much_clipping"]
