"""The built-in task with a tool: its table stays with the host, and only look-ups find the answer."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from typing import Any

import pytest

from dora.environments.api import End, Observation, ToolCall, Turn
from dora.environments.lookup import KEYS, VALUES, Lookup

ROWS = range(4000)
CHANCE = 1 / len(VALUES)


def prompt(env: Lookup, seed: int) -> str:
    (message,) = env.reset({"seed": seed}).messages
    return str(message["content"])


async def look_up(env: Lookup, key: str) -> str:
    outcome = await env.step(Turn("", calls=(ToolCall("call_0", "look_up", {"key": key}),)))
    assert isinstance(outcome, Observation)
    return str(outcome.messages[0]["content"])


async def answer(env: Lookup, value: str) -> float | None:
    outcome = await env.step(Turn(value))
    assert isinstance(outcome, End)
    return outcome.reward


async def follow(env: Lookup, seed: int) -> float | None:
    """Return the reward of a policy that does all it can: it looks up the first key, and then what it is given."""
    found = prompt(env, seed).split()[0]
    while found in KEYS:
        found = await look_up(env, found)
    return await answer(env, found)


def follow_each(seeds: range, **options: Any) -> list[float | None]:
    async def all_of_them() -> list[float | None]:
        return [await follow(Lookup(**options), seed) for seed in seeds]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("options", [{}, {"named": 3, "hops": 4}])
def test_what_the_first_look_up_returns_leads_to_the_answer(options: dict[str, int]) -> None:
    assert follow_each(range(60), **options) == [1.0] * 60


@pytest.mark.parametrize("size", [1, 3])
def test_the_prompt_has_nothing_of_the_table_but_the_keys_it_names(size: int) -> None:
    for seed in range(300):
        env = Lookup(named=size)
        text = prompt(env, seed)
        named = text.split()
        assert re.fullmatch(r"k\d+( k\d+)*", text)
        assert len(set(named)) == size
        assert asyncio.run(look_up(env, named[0])) in set(KEYS) - set(named)
    tools = str(Lookup().schemas())
    assert not any(re.search(rf"\b{word}\b", tools) for word in KEYS + VALUES)


def test_equal_prompts_have_different_answers() -> None:
    """So the answer is not a function of the prompt."""
    answers = defaultdict(set)
    for seed in ROWS:
        env = Lookup()
        answers[prompt(env, seed)].add(env.answer)
    assert len(answers) == len(KEYS)
    assert all(len(found) == len(VALUES) for found in answers.values())


def test_without_calls_no_fixed_answer_and_no_answer_by_the_asked_key_is_better_than_chance() -> None:
    known: Counter[tuple[str, str]] = Counter()
    right = []
    for seed in ROWS:
        env = Lookup()
        asked = prompt(env, seed).split()[0]
        guess = max(VALUES, key=lambda value: known[asked, value])  # the best answer to earlier prompts like this
        right.append(guess == env.answer)
        known[asked, env.answer] += 1
    assert sum(right) / len(right) == pytest.approx(CHANCE, abs=0.015)
    by_value = Counter(value for (_, value), count in known.items() for _ in range(count))
    assert max(by_value.values()) / len(ROWS) <= 0.1


def test_with_the_answers_of_another_table_the_best_policy_is_at_chance() -> None:
    rewards = [reward or 0.0 for reward in follow_each(range(1500), shuffled=True)]
    assert sum(rewards) / len(rewards) == pytest.approx(CHANCE, abs=0.025)
    assert prompt(Lookup(shuffled=True), 5) == prompt(Lookup(), 5)


def test_a_key_that_leads_nowhere_is_told() -> None:
    env = Lookup()
    prompt(env, 0)
    assert asyncio.run(look_up(env, "k99")) == "none"


@pytest.mark.parametrize("options", [{"named": 0}, {"hops": 1}, {"named": 20}])
def test_a_table_that_needs_more_keys_than_there_are_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="named"):
        Lookup(**options)
