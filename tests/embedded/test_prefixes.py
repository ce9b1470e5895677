"""The prefix cache: longest match, namespaces, and eviction order."""

from __future__ import annotations

from dora.embedded.prefixes import PrefixCache


def cache(budget: int = 100, *, entries: int = 100) -> PrefixCache[str]:
    return PrefixCache(budget_tokens=budget, budget_entries=entries)


def test_the_longest_common_prefix_is_found_with_a_payload_that_covers_it() -> None:
    held = cache()
    held.put("", [1, 2, 3, 4], "abcd")
    held.put("", [1, 2, 9], "abz")
    assert held.match("", [1, 2, 3, 4]) == (4, "abcd")
    assert held.match("", [1, 2, 3, 7, 7]) == (3, "abcd")
    assert held.match("", [1, 2, 9, 9]) == (3, "abz")
    assert held.match("", [1, 2]) == (2, "abcd")
    assert held.match("", [5]) == (0, None)


def test_namespaces_do_not_see_each_other() -> None:
    held = cache()
    held.put("v1", [1, 2], "one")
    assert held.match("v2", [1, 2]) == (0, None)


def test_the_least_recently_used_entries_are_evicted_first() -> None:
    held = cache(budget=4)
    held.put("", [1, 1], "one")
    held.put("", [2, 2], "two")
    held.put("", [3, 3], "three")  # over budget: one and two are the old generation now
    assert held.match("", [1, 1]) == (2, "one")  # a hit: moves to the young generation, which is now full
    held.put("", [4, 4], "four")
    assert held.match("", [2, 2]) == (0, None)
    assert held.match("", [1, 1]) == (2, "one")
    assert held.match("", [3, 3]) == (2, "three")


def test_the_cache_holds_two_budgets_at_most_and_no_prompt_longer_than_one() -> None:
    held = cache(budget=10)
    for first in range(50):
        held.put("", [first, *range(100, 103)], str(first))
        assert held.tokens <= 20
    held.put("", list(range(11)), "giant")
    assert held.match("", list(range(11)))[1] != "giant"


def test_the_cache_holds_twice_as_many_entries_as_a_generation_at_most() -> None:
    held = cache(entries=2)
    for first in range(9):
        held.put("", [first], str(first))
    assert [held.match("", [first])[1] for first in range(9)] == [*[None] * 6, "6", "7", "8"]


def test_clear_drops_everything() -> None:
    held = cache()
    held.put("", [1], "one")
    held.clear()
    assert held.match("", [1]) == (0, None)
    assert held.tokens == 0
