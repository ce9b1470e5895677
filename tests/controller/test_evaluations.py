"""Held-out evaluation: which sample is which, and what a version scored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dora.controller.evaluations import EvalSet, Evaluations, pass_at_k
from dora.core.ids import TrajectoryId
from tests.controller.fakes import prompt


@pytest.fixture
def evaluations() -> Evaluations:
    """Two prompts with one sample each, then one prompt with three."""
    return Evaluations([EvalSet("greedy", [prompt(0), prompt(1)], 1, 0.0), EvalSet("sampled", [prompt(2)], 3, 1.0)])


def test_ids_name_version_set_prompt_and_sample(evaluations: Evaluations) -> None:
    assert evaluations.ids(0) == [-1, -2, -3, -4, -5]
    assert evaluations.ids(1) == [-6, -7, -8, -9, -10]
    for version in (0, 1, 7):
        located = [evaluations.locate(t) for t in evaluations.ids(version)]
        assert [(one.name, place) for one, place in located] == [
            ("greedy", 0), ("greedy", 1), ("sampled", 0), ("sampled", 0), ("sampled", 0),
        ]  # fmt: skip
        assert [evaluations.set_index(t) for t in evaluations.ids(version)] == [0, 0, 1, 1, 1]


def test_a_sample_has_the_same_key_under_every_version_and_beside_other_sets_and_samples(
    evaluations: Evaluations,
) -> None:
    assert [evaluations.key(t) for t in evaluations.ids(0)] == [
        "greedy 0 0", "greedy 1 0", "sampled 2 0", "sampled 2 1", "sampled 2 2",
    ]  # fmt: skip
    assert [evaluations.key(t) for t in evaluations.ids(7)] == [evaluations.key(t) for t in evaluations.ids(0)]
    other = Evaluations([EvalSet("sampled", [prompt(1), prompt(2)], 2, 1.0)])
    assert [other.key(t) for t in other.ids(0)] == ["sampled 1 0", "sampled 1 1", "sampled 2 0", "sampled 2 1"]


def test_the_digest_of_a_set_depends_on_its_prompts_and_their_order() -> None:
    one, other = prompt(0), replace(prompt(1), answer="04")
    sets = [[one, other], [other, one], [one]]
    digests = [EvalSet("a", prompts, 1, 0.0).digest for prompts in sets]
    assert len({*digests}) == 3
    assert EvalSet("b", sets[0], 4, 1.0).digest == digests[0], "scores with more samples can be paired"


def test_ids_of_different_versions_never_meet(evaluations: Evaluations) -> None:
    ids = [t for version in range(50) for t in evaluations.ids(version)]
    assert len(set(ids)) == len(ids)
    assert max(ids) < 0


def test_every_sample_has_its_prompts_length(evaluations: Evaluations) -> None:
    assert evaluations.prompt_tokens == (3,) * 5


def test_scores_are_means_over_graded_samples_by_set(evaluations: Evaluations) -> None:
    greedy, sampled = evaluations.scores([(1.0, 4), (0.5, 6), (0.0, 10), (1.0, 2), (None, 30)])
    assert (greedy.name, greedy.mean, greedy.num_samples, greedy.num_failed) == ("greedy", 0.75, 2, 0)
    assert greedy.pass_at == {1: 0.5}
    assert (sampled.mean, sampled.num_samples, sampled.num_failed) == (0.5, 2, 1)
    assert sampled.pass_at == {1: 0.5, 2: 1.0}, "of the two that were graded"
    assert (sampled.mean_tokens, sampled.median_tokens, sampled.max_tokens) == (14.0, 10, 30)


def test_a_set_without_graded_samples_has_no_score(evaluations: Evaluations) -> None:
    greedy, _ = evaluations.scores([(None, 4), (None, 6), (1.0, 1), (1.0, 1), (1.0, 1)])
    assert (greedy.mean, greedy.num_samples, greedy.num_failed, greedy.pass_at_n) == (None, 0, 2, None)


@pytest.mark.parametrize(
    ("counts", "k", "chance"),
    [
        *(([(0, 4)], 1, 0.0), ([(4, 4)], 1, 1.0), ([(1, 4)], 1, 0.25), ([(1, 4)], 4, 1.0), ([(2, 4)], 2, 5 / 6)),
        *(([(0, 4), (4, 4)], 2, 0.5), ([(0, 4), (1, 1)], 2, 0.0)),
    ],
)
def test_pass_at_k_is_the_chance_that_one_of_k_samples_solves_the_prompt(
    counts: list[tuple[int, int]], k: int, chance: float
) -> None:
    assert pass_at_k(counts, k=k) == pytest.approx(chance)


def test_without_a_prompt_of_k_graded_samples_there_is_no_pass_at_k() -> None:
    assert pass_at_k([(1, 1), (0, 0)], k=2) is None


def test_no_sets_have_no_samples() -> None:
    none = Evaluations([])
    assert none.prompt_tokens == ()
    assert none.ids(3) == []
    assert none.scores([]) == []
    assert TrajectoryId(-1) not in none.ids(0)
