"""What an observer reads from the metrics of an earlier controller of its run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from dora.controller.observer import _lengths, _line, earlier_steps, earlier_trained_tokens, recall_alarms
from dora.status.drift import DriftWatch
from dora.status.facts import RECENT_STEPS, ShellFacts
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
    recall_alarms(drift, path)
    assert [(alarm.name, alarm.step) for alarm in drift.alarms.values()] == [("stale_tokens", 1)]
    assert drift.note(4, STALE) == [], "it has been said"


def test_a_metric_that_is_not_finite_is_null_in_a_row_whose_alarms_are_recalled(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(_line({"kind": "step", "step": 0, "trainer": {"grad_norm": math.nan, "updates_skipped": 1.0}}))
    assert msgspec.json.decode(path.read_bytes())["trainer"] == {"grad_norm": None, "updates_skipped": 1.0}
    drift = DriftWatch(precision="float32", updates=1)
    recall_alarms(drift, path)
    assert list(drift.alarms) == ["update_skipped"]


def test_a_resumed_run_counts_the_tokens_that_were_trained_before(tmp_path: Path) -> None:
    rows = [
        {"kind": "step", "num_tokens": 30},
        {"kind": "step", "num_tokens": "torn"},
        {"kind": "step", "num_tokens": 12},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(_line, rows)))
    assert earlier_trained_tokens(path) == 42
    assert earlier_trained_tokens(tmp_path / "none") == 0


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
    recall_alarms(drift, tmp_path / "metrics.jsonl")
    assert drift.alarms == {}


def test_a_resumed_run_knows_the_reward_of_its_first_step_however_many_there_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = [step_facts(step) for step in range(3 * RECENT_STEPS)]
    path.write_bytes(b"".join(_line({"kind": "step", **asdict(step)}) for step in before))
    facts = ShellFacts(run_id="r", strategy="dora")
    for step in earlier_steps(path):
        facts.note_step(step)
    assert facts.rewards == [step.reward_all_mean for step in before]
    assert [*facts.steps] == before[-RECENT_STEPS:]
