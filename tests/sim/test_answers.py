"""The length regimes have the statistics that docs/SIMULATION.md gives."""

from __future__ import annotations

import numpy as np
import pytest

from dora.sim.answers import Answers

NUM_GROUPS = 16_384


def lengths_of(regime: str, *, group_size: int, seed: int = 1) -> np.ndarray:
    answers = Answers(regime, seed=seed, group_size=group_size)
    return np.array([answers.group(i).lengths for i in range(NUM_GROUPS)], dtype=float)


def log_deviations(lengths: np.ndarray) -> tuple[float, float]:
    """Deviation of the logarithm of lengths, within groups and between their means."""
    logs = np.log(lengths)
    return float(np.sqrt(logs.var(axis=1, ddof=1).mean())), float(logs.mean(axis=1).std())


def group_maximum(lengths: np.ndarray) -> float:
    return float(lengths.max(axis=1).mean() / lengths.mean())


def test_regime_a_is_an_early_base_model() -> None:
    lengths = lengths_of("A", group_size=8)
    ordered = np.sort(lengths.ravel())
    assert ordered.mean() == pytest.approx(587, rel=0.02)
    assert np.percentile(ordered, [50, 90, 99]) == pytest.approx([466, 1041, 2447], rel=0.03)
    assert ordered[-len(ordered) // 20 :].sum() / ordered.sum() == pytest.approx(0.18, abs=0.01)
    assert log_deviations(lengths) == pytest.approx((0.57, 0.36), abs=0.015)
    assert group_maximum(lengths) == pytest.approx(2.2, abs=0.06)


def test_regime_b_varies_between_prompts_and_is_capped() -> None:
    lengths = lengths_of("B", group_size=8)
    assert lengths.mean() == pytest.approx(9228, rel=0.02)
    assert np.median(lengths) == pytest.approx(9892, rel=0.03)
    assert (lengths == 16_000).mean() == pytest.approx(0.15, abs=0.01)
    assert np.log(lengths).mean() == pytest.approx(8.91, abs=0.03)
    assert log_deviations(lengths) == pytest.approx((0.18, 0.74), abs=0.015)
    assert group_maximum(lengths) == pytest.approx(1.16, abs=0.02)


def test_regime_c_is_a_mixture_of_normals() -> None:
    lengths = lengths_of("C", group_size=8)
    assert lengths.mean() == pytest.approx(9589, rel=0.02)
    assert lengths.std() == pytest.approx(5940, rel=0.02)
    assert np.percentile(lengths, [50, 90, 99]) == pytest.approx([8165, 18_463, 26_470], rel=0.025)
    assert group_maximum(lengths) == pytest.approx(1.5, abs=0.03)


def test_regime_d_has_the_published_tail() -> None:
    lengths = lengths_of("D", group_size=16)
    assert lengths.mean() == pytest.approx(2567, rel=0.02)
    assert np.percentile(lengths, [50, 99]) == pytest.approx([1152, 23_888], rel=0.03)
    assert (lengths == 30_000).mean() == pytest.approx(0.006, abs=0.001)
    assert group_maximum(lengths) == pytest.approx(3.8, abs=0.1)
    batches = lengths.reshape(-1, 8192)
    assert (batches.max(axis=1) / np.median(batches, axis=1)).mean() == pytest.approx(26, abs=1)
    assert (1 - batches.mean(axis=1) / batches.max(axis=1)).mean() == pytest.approx(0.91, abs=0.01)


@pytest.mark.parametrize("regime", ["A", "B", "C", "D"])
def test_an_answer_does_not_depend_on_earlier_requests(regime: str) -> None:
    forward, backward = (Answers(regime, seed=3, group_size=4) for _ in range(2))
    numbers = range(0, 2000, 7)
    assert [forward.group(i) for i in numbers] == [backward.group(i) for i in reversed(numbers)][::-1]
    assert forward.group(0) != Answers(regime, seed=4, group_size=4).group(0)


def test_hard_prompts_have_long_answers_that_pass_less_often() -> None:
    answers = Answers("D", seed=0, group_size=16)
    groups = sorted((answers.group(i) for i in range(NUM_GROUPS)), key=lambda g: sum(g.lengths))
    short, long = groups[: NUM_GROUPS // 4], groups[-NUM_GROUPS // 4 :]
    passed = [sum(sum(g.rewards) for g in part) / (16 * len(part)) for part in (short, long)]
    assert passed[0] > passed[1] + 0.2


def test_forgotten_groups_are_not_kept() -> None:
    answers = Answers("A", seed=0, group_size=2)
    first = answers.group(0)
    answers.group(5000)
    answers.forget_before(5000)
    assert list(answers._blocks) == [5000 // 512]
    assert answers.group(0) == first
