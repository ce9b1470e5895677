"""What becomes of the end of a turn: an observation, a fork, or a budget that ends the episode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dora.controller.episodes import EpisodeLimits, Episodes
from dora.controller.trajectories import Trajectories
from dora.core.commands import CallEnvironment
from dora.core.events import CallFinished
from dora.core.ids import TrajectoryId
from dora.environments.api import Observation, Reset, Turn
from dora.environments.renderer import open_renderer
from dora.environments.replies import EnvironmentFailed
from dora.journal.tokens import TokenWriter, read_tokens
from dora.tasks.prompts import Conversation, Prompt
from tests.environments.tokenizers_of_families import family_tokenizer

QUESTION = [{"role": "user", "content": "what is k?"}]
MORE = [{"role": "user", "content": "sure?"}]


class Pool:
    """A host whose environment answers every turn with `outcome`."""

    can_replay = False
    wants_tokens = False

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.turns: list[Turn] = []
        self.closed: list[int] = []
        self.silent = False

    async def start(self, episode: int, row: Any, **_: Any) -> Reset:
        return Reset(QUESTION)

    async def step(self, episode: int, turn: Turn, **_: Any) -> Any:
        self.turns.append(turn)
        if self.silent:
            await asyncio.get_running_loop().create_future()
        return self.outcome

    def fail(self, episode: int, failed: EnvironmentFailed) -> EnvironmentFailed:
        self.closed.append(episode)
        return failed

    async def close(self, episode: int) -> None:
        if episode not in self.closed:
            self.closed.append(episode)


class Dialog:
    """An episode of one turn, "so", whose call is answered."""

    def __init__(self, folder: Path, outcome: Any, *, trajectory: int = 0, **limits: Any) -> None:
        tokenizer = family_tokenizer(folder, "qwen3")
        self.renderer = open_renderer(tokenizer, settings={"name": "qwen3"})
        self.pool, self.at = Pool(outcome), 5.0
        prompt = tuple(self.renderer.render(QUESTION))
        self.sampled = tokenizer.encode("so<|im_end|>", special_tokens=False)
        self.path, self.trajectory = folder / "tokens", TrajectoryId(trajectory)
        self.log = TokenWriter(self.path)
        trajectories = Trajectories(self.log, group_size=1)
        trajectories.open(
            self.trajectory, Prompt(0, "", "", prompt, "", {}, conversation=Conversation(QUESTION, (), prompt))
        )
        self.record = trajectories.begin(self.trajectory, 1)
        self.record.began_at = 0.0
        trajectories.append(self.trajectory, 1, self.sampled, [-1.0] * len(self.sampled))
        self.episodes = Episodes(
            self.pool,  # type: ignore[arg-type]
            self.renderer,
            trajectories=trajectories,
            limits=EpisodeLimits(**{"max_turns": 9, "max_prompt_tokens": 500, "max_tokens": 1000, **limits}),
            now=lambda: self.at,
        )

    async def call(self) -> CallFinished:
        event = await self.episodes(CallEnvironment(self.trajectory, 2))
        assert isinstance(event, CallFinished)
        await asyncio.gather(*self.episodes._closing)
        return event


Start = Callable[..., Dialog]


@pytest.fixture
def dialog(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as opened:
        numbers = count()

        def start(outcome: Any, **settings: Any) -> Dialog:
            made = Dialog(tmp_path / str(next(numbers)), outcome, **settings)
            opened.enter_context(made.log)
            return made

        yield start


async def test_an_observation_continues_the_row(dialog: Start) -> None:
    made = dialog(Observation(MORE, reward=0.5))
    event = await made.call()
    assert (event.ended, event.failed, event.reward, event.truncated, event.repeated) == (False, "", 0.5, "", 0)
    assert event.num_tokens == len(made.record.tokens)
    assert made.record.context().tolist() == [*made.record.prompt.tokens, *made.record.tokens]
    assert made.record.turn_start == len(made.record.tokens) > len(made.sampled)


@pytest.mark.parametrize("trajectory", [0, -1])
async def test_a_rewritten_conversation_goes_on_in_a_row_of_its_own(dialog: Start, trajectory: int) -> None:
    whole = [*QUESTION, {"role": "assistant", "content": "no"}, *MORE]
    made = dialog(Observation(whole, rewrites=True), trajectory=trajectory)
    event = await made.call()
    rendered = made.renderer.render(whole)
    (fork,) = made.record.forks
    assert made.record.context().tolist() == rendered
    assert (fork.start, fork.parent) == (len(made.sampled), 0)
    assert event.repeated == fork.keep >= len(made.record.prompt.tokens)
    assert event.fork == "rewritten"
    assert not event.ended
    made.log.store(made.log.take())
    assert read_tokens(made.path).answers[made.trajectory].forks == (fork,)
    assert made.pool.closed == []


async def test_a_fork_whose_rows_would_not_fit_together_ends_the_episode_of_training(dialog: Start) -> None:
    whole = [*QUESTION, {"role": "assistant", "content": "no"}, *MORE]
    free = dialog(Observation(whole, rewrites=True))
    needed = len(free.record.prompt.tokens) + (await free.call()).num_tokens + free.record.repeated + 1
    for room, truncated in ((needed, ""), (needed - 1, "tokens")):
        made = dialog(Observation(whole, rewrites=True), max_row_tokens=room)
        event = await made.call()
        assert (event.ended, event.truncated) == (bool(truncated), truncated)
    assert made.record.tokens.tolist() == made.sampled
    assert not made.record.forks
    assert made.pool.closed == [0]
    held_out = dialog(Observation(whole, rewrites=True), trajectory=-1, max_row_tokens=needed - 1)
    assert not (await held_out.call()).ended


async def test_an_observation_beyond_the_token_budget_ends_the_episode_without_it(dialog: Start) -> None:
    made = dialog(Observation(MORE, reward=0.5), max_tokens=10)
    event = await made.call()
    assert (event.ended, event.truncated, event.reward, event.graded) == (True, "tokens", 0.5, False)
    assert made.record.tokens.tolist() == made.sampled
    assert made.pool.closed == [0]


async def test_the_last_turn_is_answered_and_its_reward_counts(dialog: Start) -> None:
    made = dialog(Observation(MORE, reward=0.5), max_turns=1)
    event = await made.call()
    assert (event.ended, event.truncated, event.reward) == (True, "turns", 0.5)
    assert len(made.pool.turns) == 1
    assert made.record.truncated == "turns"


async def test_an_episode_beyond_its_time_ends_without_a_call(dialog: Start) -> None:
    made = dialog(Observation(MORE), timeout_s=4.0)
    event = await made.call()
    assert (event.ended, event.truncated, event.graded) == (True, "time", False)
    assert made.pool.turns == []
    in_time = dialog(Observation(MORE), timeout_s=5.0)
    assert not (await in_time.call()).ended


async def test_an_episode_whose_agent_is_silent_ends_at_its_time_and_not_at_that_of_a_call(dialog: Start) -> None:
    made = dialog(Observation(MORE), timeout_s=5.05)
    made.pool.silent = True
    event = await asyncio.wait_for(made.call(), 20)
    assert (event.ended, event.truncated, event.graded, event.num_tokens) == (True, "time", False, len(made.sampled))
    assert made.record.turn_rewards == [0.0]
    assert made.pool.closed == [0]
    assert not made.episodes._unwanted


@pytest.mark.parametrize(
    ("rewards", "total", "to_go"),
    [([0.25, 0.5], 1.0, [1.0, 0.75]), ([0.25], 1.0, [1.0, 0.75]), ([0.0, 1.0], None, None)],
    ids=["graded beside", "ended in the middle of a turn", "not graded"],
)
def test_rewards_to_go_are_what_is_left_from_each_turn_on(dialog, rewards, total, to_go) -> None:
    made = dialog(Observation(MORE))
    record = made.record
    record.observed, record.turn_rewards = [(2, 4)], rewards
    found = record.rewards_to_go(total)
    assert found == to_go or (to_go is None and all(math.isnan(one) for one in found))
