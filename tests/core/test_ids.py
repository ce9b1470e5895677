"""Numbering: the worked table of ids.py, both ends of the bound, and ids that never meet."""

from __future__ import annotations

import pytest

from dora.core.feasibility import Formation
from dora.core.ids import (
    GroupId,
    TrajectoryId,
    deadline,
    evaluation_id,
    evaluation_index,
    group_of,
    trajectory_id,
)


@pytest.mark.parametrize(("version", "trained_at", "due"), [(0, [0, 1], 1), (1, [1, 2], 2), (2, [2], 2)])
def test_the_worked_table_of_three_steps_and_k_1(version: int, trained_at: list[int], due: int) -> None:
    formation = Formation(step_size=4, max_staleness=1, steps=3)
    assert [s for s in range(3) if formation.staleness_allowed(version, step=s)] == trained_at
    assert deadline(version, max_staleness=1, steps=3) == formation.deadline(version) == due == trained_at[-1]


@pytest.mark.parametrize("k", range(5))
def test_a_version_may_be_trained_from_its_own_step_to_k_later_both_included(k: int) -> None:
    formation = Formation(step_size=4, max_staleness=k, steps=100)
    allowed = [s for s in range(100) if formation.staleness_allowed(7, step=s)]
    assert (allowed[0], allowed[-1], len(allowed)) == (7, 7 + k, k + 1)
    assert deadline(7, max_staleness=k, steps=100) == 7 + k


def test_no_deadline_lies_beyond_the_last_step() -> None:
    assert [deadline(v, max_staleness=4, steps=6) for v in range(6)] == [4, 5, 5, 5, 5, 5]


def test_trajectory_ids_count_siblings_within_groups() -> None:
    ids = [trajectory_id(GroupId(g), i, group_size=3) for g in range(3) for i in range(3)]
    assert ids == list(range(9))
    assert [group_of(t, group_size=3) for t in ids[3:7]] == [1, 1, 1, 2]


def test_evaluation_ids_are_negative_distinct_and_reversible() -> None:
    ids = [evaluation_id(v, i, num_samples=5) for v in range(4) for i in range(5)]
    assert len(set(ids)) == 20
    assert max(ids) == -1
    assert [evaluation_index(t, num_samples=5) for t in ids] == [(v, i) for v in range(4) for i in range(5)]
    assert evaluation_index(TrajectoryId(-1), num_samples=5) == (0, 0)
