"""One wave: balanced over the ranks, within the budget, siblings together where that saves more than it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.ids import GroupId, TrajectoryId
from dora.core.waves import MIN_SAVING, Answer, Pending, answers_of, load_of, split_wave

BUDGET = 100


def apart(*sizes: int) -> list[Answer]:
    """Answers that share nothing, with ids from 0."""
    return [Answer(TrajectoryId(t), size, GroupId(t)) for t, size in enumerate(sizes)]


def groups_of(
    count: int, *, group_size: int = 8, prompt: int, mean: float, seed: int = 0, shared: bool = True
) -> list[Answer]:
    """Groups with answers of exponential lengths."""
    rng = random.Random(seed)
    found = []
    for group in range(count):
        ids = range(group * group_size, (group + 1) * group_size)
        lengths = [(TrajectoryId(t), max(1, round(rng.expovariate(1 / mean)))) for t in ids]
        found += answers_of(GroupId(group), lengths, prompt=prompt, shared_prompts=shared)
    return found


def ids(ranks: list[list[Answer]]) -> list[list[int]]:
    return [[a.trajectory for a in rank] for rank in ranks]


@given(sizes=st.lists(st.integers(1, 150), max_size=40), num_ranks=st.integers(1, 6))
def test_every_rank_gets_one_micro_batch_within_the_budget_and_no_trajectory_is_lost(
    sizes: list[int], num_ranks: int
) -> None:
    answers = apart(*sizes)
    ranks, left = split_wave(answers, num_ranks=num_ranks, budget=BUDGET)
    assert len(ranks) == num_ranks
    assert sorted([a for rank in ranks for a in rank] + left) == answers
    for rank in ranks:
        assert len(rank) == 1 or load_of(rank) <= BUDGET
    for answer in left:  # only what fits nowhere is left
        assert all(rank and load_of(rank) + answer.size > BUDGET for rank in ranks)


def test_the_longest_goes_first_to_the_least_loaded_rank() -> None:
    ranks, left = split_wave(apart(10, 60, 30, 50), num_ranks=2, budget=BUDGET)
    assert ids(ranks) == [[1, 0], [3, 2]]
    assert not left


def test_a_trajectory_beyond_the_budget_has_a_rank_of_its_own() -> None:
    ranks, left = split_wave(apart(150, 90, 20), num_ranks=2, budget=BUDGET)
    assert ids(ranks) == [[0], [1]]
    assert [a.trajectory for a in left] == [2]


# -- shared prompts ---------------------------------------------------------------------------------------------------


def test_a_prompt_is_shared_if_that_saves_enough_of_the_group() -> None:
    lengths = [(TrajectoryId(t), 240) for t in range(8)]
    long = answers_of(GroupId(0), lengths, prompt=100, shared_prompts=True)
    assert {a.shared for a in long} == {100}
    assert load_of(long) == 100 + 8 * 240
    short = answers_of(GroupId(0), lengths, prompt=2, shared_prompts=True)
    assert short == answers_of(GroupId(0), lengths, prompt=2, shared_prompts=False)
    assert {(a.num_tokens, a.shared) for a in short} == {(242, 0)}
    (alone,) = answers_of(GroupId(0), lengths[:1], prompt=1000, shared_prompts=True)
    assert alone.shared == 0  # there is nobody to share it with
    for prompt in range(1, 60):
        factor = 8 * (prompt + 240) / (prompt + 8 * 240)
        chosen = answers_of(GroupId(0), lengths, prompt=prompt, shared_prompts=True)
        assert bool(chosen[0].shared) == (factor >= MIN_SAVING)


def test_siblings_come_together_if_their_prompt_is_long() -> None:
    answers = groups_of(12, prompt=1000, mean=240)
    ranks, left = split_wave(answers, num_ranks=4, budget=100_000)
    assert not left
    assert all(len({i for i, rank in enumerate(ranks) for a in rank if a.group == g}) == 1 for g in range(12))


def test_siblings_are_spread_if_the_prompt_is_shorter_than_what_waiting_for_one_rank_costs() -> None:
    one_group = groups_of(1, prompt=100, mean=240)
    ranks, _ = split_wave(one_group, num_ranks=4, budget=100_000)
    assert all(ranks)


@given(data=st.data(), num_ranks=st.integers(1, 6), budget=st.integers(50, 4000))
def test_keeping_siblings_together_loses_nothing_and_never_costs_more_than_placing_them_one_by_one(
    data: st.DataObject, num_ranks: int, budget: int
) -> None:
    groups = data.draw(st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 300), min_size=2)), max_size=6))
    answers: list[Answer] = []
    for g, (prompt, lengths) in enumerate(groups):
        named = [(TrajectoryId(100 * g + t), n) for t, n in enumerate(lengths)]
        answers += answers_of(GroupId(g), named, prompt=prompt, shared_prompts=True)
    ranks, left = split_wave(answers, num_ranks=num_ranks, budget=budget)
    assert sorted([a for rank in ranks for a in rank] + left) == sorted(answers)
    assert all(len(rank) <= 1 or load_of(rank) <= budget for rank in ranks)
    assert bool(answers) == any(ranks)
    blind, rest = split_wave(
        [Answer(a.trajectory, a.size, a.group) for a in answers], num_ranks=num_ranks, budget=budget
    )
    if not left and not rest:
        by_id = {a.trajectory: a for a in answers}
        assert max(map(load_of, ranks)) <= max(load_of(by_id[a.trajectory] for a in rank) for rank in blind)


@pytest.mark.parametrize(("prompt", "most"), [(100, 1.05), (1000, 1.1)])
def test_full_waves_stay_balanced(prompt: int, most: float) -> None:
    for seed in range(5):
        pending = Pending()
        for answer in groups_of(64, prompt=prompt, mean=240, seed=seed):
            pending.add(answer)
        ranks = pending.cut(num_ranks=4, budget=16_384)
        loads = [load_of(rank) for rank in ranks]
        assert max(loads) <= most * sum(loads) / len(loads)
