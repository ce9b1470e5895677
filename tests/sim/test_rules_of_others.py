"""The rules of other systems, as presets of ours."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core.orchestration import NAMED, RULES, orchestration_of
from tests.sim.worlds import simulate, workload


def test_every_name_is_a_preset_of_switches() -> None:
    for name in RULES:
        assert orchestration_of(name).calls == "release"
        assert not orchestration_of(name, without=["streaming"]).streaming
    assert orchestration_of("dora", refill=True).refill
    assert {name: orchestration_of(name) for name in NAMED} == NAMED


@pytest.mark.parametrize(
    ("strategy", "rules", "broken"),
    [
        ("dora", "psrl", ()),
        ("partial_bounded", "psrl", ("C1",)),
        ("partial", "areal", ("C1", "C3")),
    ],
)
def test_a_step_is_trained_as_a_whole_and_keeps_what_its_strategy_keeps(
    strategy: str, rules: str, broken: tuple[str, ...]
) -> None:
    one = workload(strategy, job={"rules": rules})
    result, _, journal = simulate(one)
    assert result.rules == rules
    assert one.rules.broken_by_design == broken
    assert result.violations == 0
    assert result.migrations == 0, "requests stay where they are"
    num_committed, first = 0, {}  # groups of the step that are committed when the trainer gets the first of them
    for _, orders in journal:
        for order in orders:
            num_committed += isinstance(order, cmd.CommitGroup)
            if isinstance(order, cmd.TrainMicroBatch):
                first.setdefault(order.step, num_committed - 24 * order.step)
    assert min(first.values()) >= 20, "all but a few, whose places F keeps for groups that are due earlier"
