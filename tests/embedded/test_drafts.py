"""Drafts by prompt, own text and siblings, and the length that pays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from dora.embedded.drafts import TRIAL_AFTER, DraftLengths, Drafts
from dora.embedded.generation import Generation, SamplingParams


def request(prompt: list[int], *output: int, namespace: str = "") -> Generation:
    one = Generation(rid="", prompt_ids=prompt, sampling=SamplingParams(), namespace=namespace)
    one.output_ids += output
    return one


def drafts(budget: int = 1000) -> Drafts:
    return Drafts(budget_tokens=budget)


def test_a_draft_is_what_followed_the_last_tokens_in_the_prompt() -> None:
    known = drafts()
    assert known.draft(request([1, 2, 3, 4, 5, 9, 1, 2, 3, 4]), 2) == [5, 9]
    assert known.draft(request([1, 2, 3, 4, 5, 9, 8, 3, 4]), 3) == [5, 9, 8]
    assert known.draft(request([1, 2, 3]), 3) == []
    assert known.draft(request([1]), 3) == []


def test_the_longer_context_counts_and_then_the_later_place() -> None:
    known = drafts()
    assert known.draft(request([1, 2, 3, 4, 5, 7, 7, 3, 4, 6, 8, 1, 2, 3, 4]), 1) == [5]
    assert known.draft(request([0, 3, 4, 5, 3, 4, 6, 9, 3, 4]), 1) == [6]


def test_an_answer_is_read_on_as_it_grows() -> None:
    known, one = drafts(), request([1, 2])
    assert known.draft(one, 4) == []
    one.output_ids += [5, 6, 7, 5, 6]
    assert known.draft(one, 4) == [7, 5, 6]
    one.output_ids += [7, 5, 6]
    assert known.draft(one, 2) == [7, 5]


def test_siblings_that_have_ended_or_run_are_read_and_others_are_not() -> None:
    known = drafts()
    known.end(request([1, 2], 5, 6, 7, 8))
    running = request([1, 2], 8, 9, 4)
    known.draft(running, 1)
    running.output_ids += [3]
    known.draft(running, 1)
    assert known.draft(request([1, 2], 5, 6), 3) == [7, 8]
    assert known.draft(request([1, 2], 0, 8, 9), 3) == [4, 3]
    assert known.draft(request([1, 2], 5, 6, namespace="other"), 3) == []
    assert known.draft(request([1, 3], 5, 6), 3) == []


def test_the_prompt_used_least_lately_is_forgotten_beyond_the_budget() -> None:
    known = drafts(budget=12)
    for prompt in (1, 2):
        known.end(request([prompt, prompt], 5, 6, 7))
    assert known.draft(request([1, 1], 5, 6), 1) == [7]
    known.end(request([3, 3], 5, 6, 7))
    assert known.draft(request([2, 2], 5, 6), 1) == []
    assert known.draft(request([1, 1], 5, 6), 1) == [7]


def test_what_is_kept_stays_within_the_budget() -> None:
    rng, known = random.Random(0), drafts(budget=200)
    for _ in range(500):
        one = request([rng.randrange(30)] * rng.randrange(1, 20), *[1] * rng.randrange(20))
        if rng.random() < 0.5:
            known.draft(one, 4)
        known.end(one)
        kept = sum(family.tokens for family in known._families.values())
        assert kept == known._tokens <= 200
    assert not known._answers


# --- lengths


Cost = Callable[[int, int], tuple[float, float]]  # rows, length -> seconds, tokens of a row


def served(
    lengths: DraftLengths | None, rows: list[int], cost: Cost, *, rng: random.Random
) -> tuple[float, Counter[int]]:
    """Seconds until each row has a token more, summed over the steps, and how often each length was used."""
    seconds, used = 0.0, Counter[int]()
    for count in rows:
        length = lengths.length(count) if lengths is not None else 0
        used[length] += 1
        took, each = cost(count, length)
        took *= rng.uniform(0.8, 1.25)
        made = sum(int(each) + (rng.random() < each % 1) for _ in range(count))
        if lengths is not None:
            lengths.took(count, length, seconds=took, tokens=made)
        seconds += took / each
    return seconds, used


def pays(gain: float) -> Cost:
    """A step takes 1, and for each drafted token 0.1 with one row and 0.33 with 24; each adds `gain` tokens."""
    return lambda rows, length: (1 + 0.1 * length * rows**0.38, 1 + gain * length)


def test_the_length_that_makes_most_tokens_a_second_is_used() -> None:
    rng, lengths = random.Random(1), DraftLengths(4)
    _, used = served(lengths, [1] * 500, pays(0.4), rng=rng)
    assert used[4] > 450
    _, used = served(DraftLengths(4), [1] * 500, pays(0.0), rng=rng)
    assert used[0] > 450
    assert sum(used.values()) - used[0] < 30


def test_many_rows_cost_nothing_once_drafts_do_not_pay_with_fewer() -> None:
    rng, lengths = random.Random(2), DraftLengths(4)
    served(lengths, [4] * 100, pays(0.0), rng=rng)
    _, used = served(lengths, [rng.randint(16, 64) for _ in range(500)], pays(0.0), rng=rng)
    assert used == {0: 500}


def test_a_change_of_what_drafts_give_is_noticed() -> None:
    rng, lengths = random.Random(3), DraftLengths(4)
    served(lengths, [1] * 300, pays(0.4), rng=rng)
    _, used = served(lengths, [1] * 300, pays(0.0), rng=rng)
    assert used[0] > 200
    served(lengths, [1] * TRIAL_AFTER[1] * 3, pays(0.4), rng=rng)
    _, used = served(lengths, [1] * 300, pays(0.4), rng=rng)
    assert used[4] > 250


@pytest.mark.parametrize("gain", [0.0, 0.1, 0.3])
def test_trials_cost_at_most_two_in_a_hundred_in_a_long_run(gain: float) -> None:
    rng = random.Random(4)
    rows = [rng.choice((1, 2, 3, 6, 12, 24, 24, 24, 24, 24)) for _ in range(6000)]
    plain, _ = served(None, rows, pays(gain), rng=random.Random(5))
    drafted, _ = served(DraftLengths(4), rows, pays(gain), rng=random.Random(5))
    assert drafted < 1.02 * plain


def test_a_most_of_any_size_is_among_the_lengths() -> None:
    for most in range(1, 17):
        lengths, used = DraftLengths(most), Counter[int]()
        for _ in range(40):
            used[length := lengths.length(1)] += 1
            lengths.took(1, length, seconds=1.0, tokens=1 + length)
        assert max(used) == most
        assert used.most_common(1)[0][0] == most
