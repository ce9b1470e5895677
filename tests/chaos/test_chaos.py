"""Twenty faults in real processes, drawn from a seed: nothing is lost, and nothing happens twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import Driver

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

SEED = 7
FAULTS = 20
STEPS = 20


@pytest.mark.parametrize(
    "jobs", [("ranks", "on-policy"), ("adapters", "merged"), ("experts",), ("agents",), ("mcp",)], ids="-".join
)
def test_twenty_faults_cost_no_group_and_train_none_twice(tmp_path: Path, jobs: tuple[str, ...]) -> None:
    report = Driver(tmp_path, SEED, jobs=jobs).drive(FAULTS, steps=STEPS)
    assert report.violations == []
    assert report.num_faults >= FAULTS
    assert report.false_alarms == 0
    assert sum(verdict.trained for verdict in report.verdicts) == 4 * STEPS * len(report.verdicts)
    assert sum(verdict.lost + verdict.twice for verdict in report.verdicts) == 0
