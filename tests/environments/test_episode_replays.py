"""Episodes whose environment is lost: replayed from their recorded tokens, in real hosts."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dora.config.schema import EnvironmentConfig
from dora.controller.episodes import MAX_REPLAYS, Conversations, EpisodeLimits, Episodes, append
from dora.controller.trajectories import Trajectories
from dora.core.commands import CallEnvironment
from dora.core.events import CallFinished
from dora.core.ids import GroupId, TrajectoryId
from dora.environments.api import Observation
from dora.environments.episode import Episode
from dora.environments.failures import NORMAL, FailureLimits
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import Renderer, RenderingFailed, open_renderer
from dora.errors import RunFailed
from dora.tasks.prompts import Prompt
from dora.tasks.tokenizer import Tokenizer

WORLDS = Path(__file__).parent / "worlds.py"
EPISODE = TrajectoryId(0)
LIMITS = EpisodeLimits(max_turns=9, max_prompt_tokens=500, max_tokens=1_000)


class NoLog:
    """A token log that keeps nothing."""

    def prompt(self, group: int, tokens: Sequence[int], **_: Any) -> None: ...

    def append(self, trajectory: int, attempt: int, tokens: Sequence[int], logprobs: Sequence[float], **_: Any) -> None:
        assert len(tokens) == len(logprobs)


class Played:
    """One episode, whose turns are what the test says."""

    def __init__(self, tokenizer: Tokenizer, row: dict[str, str], *, is_graded: bool = True) -> None:
        self.renderer = open_renderer(tokenizer, settings={"name": "qwen3"})
        self.tokenizer = tokenizer
        self.row = row
        self.is_graded = is_graded
        self.trajectories = Trajectories(NoLog(), group_size=1)
        self.attempts = count()

    async def begin(self, pool: EnvironmentPool) -> Played:
        """Begin the episode, or go on with a new controller."""
        if EPISODE not in self.trajectories.records:
            conversation = await asyncio.to_thread(Conversations(pool, self.renderer), self.row, "s", "row 1")
            tokens = tuple(conversation.tokens)
            self.trajectories.prompts[GroupId(0)] = Prompt(
                0, "s", "", tokens, "", {}, row=self.row, where="row 1", conversation=conversation
            )
            self.trajectories.admit(GroupId(0))
        self.episodes = Episodes(
            pool,
            self.renderer,
            trajectories=self.trajectories,
            limits=LIMITS,
            now=lambda: 0.0,
            is_graded=lambda trajectory: self.is_graded,
        )
        return self

    async def turn(self, content: str, *, is_cut: bool = False) -> CallFinished:
        tokens = self.tokenizer.encode(content, special_tokens=False)
        tokens = tokens if is_cut else [*tokens, self.renderer.stop_ids[0]]
        self.trajectories.begin(EPISODE, attempt := next(self.attempts))
        self.trajectories.append(EPISODE, attempt, tokens, [-0.5] * len(tokens))
        event = await self.episodes(CallEnvironment(EPISODE, next(self.attempts)))
        assert isinstance(event, CallFinished)
        return event

    @property
    def last_observation(self) -> str:
        record = self.trajectories.records[EPISODE]
        start, end = record.observed[-1]
        return self.tokenizer.decode(record.tokens[start:end].tolist())


def pool_of(name: str = "Replayed", *, limits: FailureLimits = NORMAL, **settings: Any) -> EnvironmentPool:
    settings = {"call_timeout_s": 20, "memory_mb": 1_024, **settings}
    return EnvironmentPool(EnvironmentConfig(name=f"{WORLDS}:{name}", **settings), limits=limits)


@pytest.fixture
def row(tmp_path: Path) -> dict[str, str]:
    return {"prompt": "hello", "file": str(tmp_path / "died")}


async def test_a_stop_waits_for_calls_that_cannot_be_repeated_and_have_a_place(
    qwen3: Tokenizer, row: dict[str, str]
) -> None:
    async with pool_of("World", episodes_per_host=1) as pool, pool_of() as replayable:
        assert not (await Played(qwen3, row).begin(replayable)).episodes.is_awaited(EPISODE)
        played = await Played(qwen3, row).begin(pool)
        assert played.episodes.is_awaited(EPISODE)
        await pool.start(EPISODE + 1, row, source="s", name="row 2")
        call = asyncio.create_task(played.turn("turns"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not played.episodes.is_awaited(EPISODE)
        await pool.close(EPISODE + 1)
        await call
        assert played.episodes.is_awaited(EPISODE)


async def test_an_episode_goes_on_in_a_new_host(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of() as pool:
        played = await Played(qwen3, row).begin(pool)
        assert not (await played.turn("turns")).replays
        assert not (await played.turn("turns")).replays
        known = array("i", played.trajectories.records[EPISODE].tokens)
        event = await played.turn("die_once")
        assert (event.failed, event.replays) == ("", 1)
        assert "3" in played.last_observation, "the two turns before were fed again"
        record = played.trajectories.records[EPISODE]
        assert record.tokens[: len(known)] == known
        assert len(record.observed) == len(record.turn_rewards) == 3
        assert not (await played.turn("turns")).replays
        assert (await played.turn("finish")).ended


async def test_an_episode_goes_on_with_a_new_controller(qwen3: Tokenizer, row: dict[str, str]) -> None:
    played = Played(qwen3, row)
    for number in range(3):
        async with pool_of() as pool:
            await played.begin(pool)
            event = await played.turn("turns")
            assert (event.failed, event.replays) == ("", int(number > 0))
            assert str(number + 1) in played.last_observation


async def test_an_environment_that_answers_in_another_way_has_failed(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of() as pool:
        played = await Played(qwen3, row).begin(pool)
        await played.turn("turns")
        await played.turn("pid")
        event = await played.turn("die_once")
        assert event.failed == "replay: the environment answered turn 1 differently than before"


async def test_a_call_that_kills_every_host_fails_its_episode(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of() as pool:
        played = await Played(qwen3, row).begin(pool)
        await played.turn("turns")
        event = await played.turn("die")
        assert event.failed == "host: host died: exit code 3: no license"
        assert event.replays == MAX_REPLAYS


async def test_an_environment_that_cannot_be_replayed_is_called_once(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of("World") as pool:
        played = await Played(qwen3, row).begin(pool)
        await played.turn("turns")
        event = await played.turn("die_once")
        assert (event.failed, event.replays) == ("host: host died: exit code 3", 0)
    async with pool_of("World") as pool:
        played = await Played(qwen3, row).begin(pool)
        await played.turn("turns")
        await played.begin(pool)
        event = await played.turn("turns")
        assert event.failed == "host: its environment ended with an earlier controller"


async def test_a_row_is_not_blamed_for_a_death_that_its_replay_made_good(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of(limits=FailureLimits(row=1, budget=0)) as pool:
        played = await Played(qwen3, row).begin(pool)
        event = await played.turn("die_once")
        assert (event.failed, event.replays, dict(pool.set_aside)) == ("", 1, {})


async def test_no_replay_is_counted_where_none_was_possible(qwen3: Tokenizer, row: dict[str, str]) -> None:
    played = Played(qwen3, row)
    for _ in range(2):
        async with pool_of("World") as pool:
            await played.begin(pool)
            event = await played.turn("turns")
    assert (event.failed, event.replays) == ("host: its environment ended with an earlier controller", 0)


async def test_messages_that_cannot_be_rendered_are_failures_of_the_environment(
    qwen3: Tokenizer, row: dict[str, str]
) -> None:
    async with pool_of(limits=FailureLimits(budget=0)) as pool:
        played = await Played(qwen3, row).begin(pool)
        with pytest.raises(RunFailed, match=r"^environment: 1 of .* messages are not a conversation"):
            await played.turn("impossible")
        assert pool.free == 256


async def test_a_prompt_that_cannot_be_rendered_is_a_failure_of_the_environment(qwen3: Tokenizer) -> None:
    row = {"reset": "impossible_prompt"}
    async with pool_of(limits=FailureLimits(row=2)) as pool:
        converse = Conversations(pool, open_renderer(qwen3, settings={"name": "qwen3"}))
        said = [(await asyncio.to_thread(converse, row, "s", "row 1")).failed for _ in range(3)]
        assert said[0] == said[1]
        assert said[2] == f"the environment failed: row 1 is set aside; it failed: {said[0]}"


async def test_what_is_no_message_or_no_tool_is_invalid(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of() as pool:
        played = await Played(qwen3, row).begin(pool)
        assert (await played.turn("odd_message")).failed.startswith("invalid: the environment's messages are not")
        converse = Conversations(pool, played.renderer)
        failed = (await asyncio.to_thread(converse, {"reset": "odd_tool"}, "s", "row 2")).failed
        assert failed == "the environment failed: invalid reply: a tool whose function has no name"
        assert pool.free == 256


def test_messages_that_are_nested_too_deeply_cannot_be_rendered(qwen3: Tokenizer) -> None:
    arguments: dict[str, Any] = {}
    for _ in range(100_000):
        arguments = {"a": arguments}
    ask = {"role": "user", "content": "go on"}
    calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    episode = Episode(open_renderer(qwen3, settings={"name": "qwen3"}), [ask], max_tokens=100)
    with pytest.raises(RenderingFailed, match="nested too deeply"):
        append(episode, Observation([ask, {"role": "assistant", "tool_calls": calls}, ask], rewrites=True))


async def test_a_large_observation_is_rendered_beside_the_loop(
    qwen3: Tokenizer, row: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, threads = Renderer.bridge, []

    def noted(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return bridge(*given, **named)

    monkeypatch.setattr(Renderer, "bridge", noted)
    async with pool_of(output_bytes=1_000_000) as pool:
        played = await Played(qwen3, row).begin(pool)
        threads.clear()
        assert (await played.turn("turns")).truncated == ""
        assert (await played.turn("long")).truncated == "tokens"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_an_environment_that_is_not_the_one_that_was_recorded_is_a_failure_of_its_row(
    qwen3: Tokenizer, row: dict[str, str]
) -> None:
    async with pool_of(limits=FailureLimits(row=1)) as pool:
        played = await Played(qwen3, row).begin(pool)
        await played.turn("pid")
        assert (await played.turn("die_once")).failed.startswith("replay: ")
        assert set(pool.set_aside) == {"row 1"}


async def test_a_prompt_is_asked_for_again_if_its_host_is_lost(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of(limits=FailureLimits(row=1)) as pool:
        converse = Conversations(pool, open_renderer(qwen3, settings={"name": "qwen3"}))
        conversation = await asyncio.to_thread(converse, {**row, "reset": "die_at_first"}, "s", "row 1")
        assert (conversation.failed, dict(pool.set_aside)) == ("", {})


async def test_an_end_without_a_reward_needs_someone_who_grades(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of(limits=FailureLimits(row=1)) as pool:
        event = await (await Played(qwen3, row).begin(pool)).turn("finish_ungraded")
        assert (event.ended, event.graded, event.failed) == (True, False, "")
        event = await (await Played(qwen3, row, is_graded=False).begin(pool)).turn("finish_ungraded")
        assert event.failed.startswith("invalid: the environment ended without a reward, and task.rewards has no term")
        assert set(pool.set_aside) == {"row 1"}


async def test_a_turn_that_its_server_cut_is_told_so(qwen3: Tokenizer, row: dict[str, str]) -> None:
    async with pool_of() as pool:
        played = await Played(qwen3, row).begin(pool)
        await played.turn("finish_of_the_turn", is_cut=True)
        assert "length" in played.last_observation
        await played.turn("finish_of_the_turn")
        assert "stop" in played.last_observation
