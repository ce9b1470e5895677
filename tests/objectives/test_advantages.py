"""Advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dora.errors import ConfigError
from dora.objectives.advantages import group_advantages


def advantages(rewards, kind):
    group = np.array(rewards, np.float32)
    graded = ~np.isnan(group)
    return group_advantages(group[graded], np.tile(group, (graded.sum(), 1)), kind=kind)


@pytest.mark.parametrize(
    ("rewards", "kind", "expected"),
    [
        ([1, 0, 0, 0], "grpo", [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], "dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ([1, 0, 0, 0], "rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 0, 0], "maxrl", [3, -1, -1, -1]),
        ([0, 0, 0, 0], "maxrl", [0, 0, 0, 0]),
        ([0.2, 0.9, 0.4], "grpo", [-0.8321, 1.1094, -0.2774]),
        ([0.2, 0.9, 0.4], "rloo", [-0.45, 0.6, -0.15]),
    ],
)
def test_golden_advantages(rewards, kind, expected):
    np.testing.assert_allclose(advantages(rewards, kind), expected, atol=1e-4)  # four digits, printed for ε = 0


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_an_ungraded_sibling_is_left_out(kind):
    np.testing.assert_allclose(advantages([1, np.nan, 0, 0], kind), advantages([1, 0, 0], kind))


def test_a_group_without_variance_has_no_advantage():
    np.testing.assert_array_equal(advantages([0.1, 0.1, 0.1], "grpo"), np.zeros(3))


def test_a_group_with_one_graded_sibling_is_refused():
    with pytest.raises(ValueError, match="fewer than two graded siblings"):
        advantages([1, np.nan, np.nan], "grpo")


def test_every_trajectory_may_have_its_own_advantage():
    rewards = np.array([1, 0, 1, 0], np.float32)
    groups = np.array([[1, 0, 0, 0]] * 2 + [[1, 0, np.nan, 0]] * 2, np.float32)
    kinds = ["rloo", "rloo", "dr_grpo", "maxrl"]
    got = group_advantages(rewards, groups, kind=kinds)
    np.testing.assert_allclose(got, [1, -1 / 3, 2 / 3, -1])
    for kind in set(kinds):
        chosen = np.array(kinds) == kind
        np.testing.assert_array_equal(got[chosen], group_advantages(rewards[chosen], groups[chosen], kind=kind))


def test_a_negative_reward_is_refused_where_advantages_are_divided_by_the_mean():
    with pytest.raises(ConfigError, match=r"maxrl needs rewards of at least 0, got -0\.5; use grpo or rloo"):
        advantages([1, -0.5, np.nan], "maxrl")


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="unknown advantage 'gae'"):
        advantages([1, 0], "gae")
