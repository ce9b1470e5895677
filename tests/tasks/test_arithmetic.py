"""The built-in task: a pure function, two splits that cannot overlap, and sizes with a heavy tail."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from statistics import median

import pytest

from dora.errors import ConfigError
from dora.tasks.arithmetic import LABELS, LARGEST_TOTAL, problem, split_of

NUM_PROBLEMS = 4_000


def problems(split: str, *, seed: int = 0, count: int = NUM_PROBLEMS) -> list[tuple[str, str]]:
    return [problem(index, seed=seed, split=split) for index in range(count)]


def num_terms(prompt: str) -> int:
    return len(prompt) // 2


def test_a_problem_is_the_same_in_every_process():
    # Another hash seed: nothing may depend on the order of a set or on hash().
    code = "from dora.tasks.arithmetic import problem; print(problem(12345, seed=6, split='train'))"
    environment = {"PYTHONHASHSEED": "99"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str(problem(12345, seed=6, split="train"))


def test_the_stream_of_a_seed_is_fixed():
    # A change here changes the problems that a resumed run sees.
    assert problems("train", count=3) == [("a3b3c0=", "06"), ("a3b0c4=", "07"), ("a3b0c1=", "04")]


def test_the_answer_is_the_total_in_two_digits():
    for prompt, answer in problems("train") + problems("heldout"):
        assert prompt[0:-1:2] == LABELS[: num_terms(prompt)]
        assert answer == f"{sum(map(int, prompt[1:-1:2])):02d}"
        assert len(answer) == 2


def test_no_total_needs_a_third_digit():
    assert max(int(answer) for _, answer in problems("train", count=20_000)) <= LARGEST_TOTAL
    assert all(len(problem(i, seed=0, split="train", min_terms=52, max_terms=52)[1]) == 2 for i in range(200))


def test_no_text_of_the_heldout_split_is_ever_in_the_training_stream():
    train = {prompt for seed in range(3) for prompt, _ in problems("train", seed=seed)}
    heldout = {prompt for seed in range(3) for prompt, _ in problems("heldout", seed=seed)}
    assert train.isdisjoint(heldout)
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in heldout} == {"heldout"}


def test_other_seeds_and_indices_give_other_problems():
    first, second = problems("train", seed=0), problems("train", seed=1)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < NUM_PROBLEMS / 20
    assert sum(a == b for a, b in pairwise(first)) < NUM_PROBLEMS / 20


def test_sizes_have_a_heavy_tail_in_both_splits():
    for split in ("train", "heldout"):
        sizes = [num_terms(prompt) for prompt, _ in problems(split)]
        assert min(sizes) == 3
        assert 28 < max(sizes) <= 32
        assert max(sizes) >= 7 * median(sizes)
        # Long ones are rare, but a step of 16 groups has one almost always.
        assert 0.1 < sum(size > 8 for size in sizes) / len(sizes) < 0.25


def test_sizes_stay_within_the_given_bounds():
    sizes = {num_terms(problem(i, seed=0, split="train", min_terms=2, max_terms=5)[0]) for i in range(500)}
    assert sizes == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("options", "named"),
    [({"split": "test"}, "'test'"), ({"min_terms": 9, "max_terms": 4}, "9 and 4"), ({"max_terms": 53}, "53")],
)
def test_options_that_cannot_work_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        problem(0, **{"seed": 0, "split": "train"} | options)
