"""Intervals of mean scores: right shares, coverage, and what is paired."""

from __future__ import annotations

import numpy as np
import pytest

from dora.observe.estimates import Interval, difference, interval, wilson


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilsons_interval_has_the_published_values(right: int, total: int, low: float, high: float) -> None:
    found = wilson(right, total)  # the last row: Newcombe 1998, table I
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_single_right_or_wrong_answers_get_wilsons_interval_and_all_others_are_resampled() -> None:
    assert interval([[1.0], [0.0]]) == wilson(1, 2)
    assert interval([[1.0], [0.0], []]) == wilson(1, 2), "a prompt without a graded answer does not count"
    for rewards in ([[1.0, 1.0], [0.0]], [[0.5], [0.0]]):
        found = interval(rewards)
        assert found is not None
        assert found.method == "bootstrap over prompts"
    assert interval([]) is interval([[]]) is None


def test_the_same_answers_give_the_same_interval() -> None:
    rewards = [[0.1 * i, 1.0] for i in range(10)]
    assert interval(rewards) == interval(rewards)


def test_answers_to_one_prompt_are_not_independent() -> None:
    """Eight equal answers to each of 20 prompts say no more than one to each."""
    right = [float(i % 2) for i in range(20)]
    many, one = interval([[r] * 8 for r in right]), interval([[r + 1e-9] for r in right])
    assert many is not None
    assert one is not None
    assert many.high - many.low == pytest.approx(one.high - one.low, abs=1e-6)
    assert many.high - many.low > 0.3


def test_about_95_of_100_intervals_contain_the_true_mean() -> None:
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(100):
        chances = draw.random(60)  # of mean 0.5
        found = interval([list((draw.random(4) < chance).astype(float)) for chance in chances])
        assert found is not None
        inside += found.low <= 0.5 <= found.high
    assert 88 <= inside <= 100


def test_a_difference_compares_each_prompt_with_itself() -> None:
    """Prompts of very different difficulty, of which each gains the same: paired, there is no doubt about the gain."""
    before = [[float(i)] for i in range(50)]
    found = difference(before, [[float(i) + 0.5] for i in range(50)])
    assert found is not None
    mean, between = found
    assert mean == pytest.approx(0.5)
    assert between == Interval(0.5, 0.5, "bootstrap over prompts")


def test_prompts_that_were_not_graded_twice_are_left_out_of_a_difference() -> None:
    found = difference([[1.0], [], [0.0, 1.0]], [[0.0], [1.0], [1.0]])
    assert found is not None
    assert found[0] == pytest.approx((-1.0 + 0.5) / 2)
    assert difference([[]], [[1.0]]) is None
