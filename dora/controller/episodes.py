"""Episodes of several turns: what becomes of a turn's end, and the prompts with which episodes begin.

Invariant: a call is sent to its environment at most once, after its intent is on the disk, and what it gives is in the
token log before the event that reports it. The tokens of a request are those of the record, never text rendered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.environments.api import End, Observation, Turn
from dora.environments.episode import Episode
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import Renderer, RenderingFailed
from dora.environments.replies import EnvironmentFailed
from dora.tasks.prompts import Conversation

#: Numbers of the episodes that only give a prompt; no trajectory has them.
_PROMPTS: Final = count(1 << 62)


class Conversations:
    """Makes the prompts of episodes: their environment gives the messages, the renderer the tokens."""

    def __init__(self, pool: EnvironmentPool, renderer: Renderer) -> None:
        self._pool = pool
        self._renderer = renderer
        self._loop = asyncio.get_running_loop()

    def __call__(self, row: Mapping[str, Any], source: str, where: str) -> Conversation:
        """Return the beginning of an episode with this row. It blocks: call it in a thread."""
        return asyncio.run_coroutine_threadsafe(self._begin(row, source, where), self._loop).result()

    async def _begin(self, row: Mapping[str, Any], source: str, where: str) -> Conversation:
        episode = next(_PROMPTS)
        reset = await self._pool.start(episode, row, source=source, name=where)
        if isinstance(reset, EnvironmentFailed):
            return Conversation(failed=f"the environment failed: {reset.reason}")
        await self._pool.close(episode)
        try:
            tokens = self._renderer.render(reset.messages, tools=reset.tools)
        except RenderingFailed as err:
            return Conversation(failed=str(err))
        return Conversation(tuple(reset.messages), tuple(reset.tools), tuple(tokens))


class Episodes:
    """The episodes under way, and the effect of CallEnvironment."""

    def __init__(
        self,
        pool: EnvironmentPool,
        renderer: Renderer,
        *,
        trajectories: Trajectories,
        max_turns: int,
        max_tokens: int,
        now: Callable[[], float],
    ) -> None:
        """`max_tokens`: of an answer, observations included."""
        self._pool = pool
        self._renderer = renderer
        self._trajectories = trajectories
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._now = now
        self._open: dict[TrajectoryId, Episode] = {}
        self._calling: set[TrajectoryId] = set()
        self._unwanted: set[TrajectoryId] = set()  # to be closed after their call
        self._closing: set[asyncio.Task[None]] = set()

    async def __call__(self, order: cmd.CallEnvironment) -> ev.Event:
        """Give a turn to the environment, and append its observation."""
        trajectory = order.trajectory
        record = self._trajectories.begin(trajectory, order.attempt)
        self._calling.add(trajectory)
        try:
            outcome = await self._step(trajectory, record)
        finally:
            self._calling.discard(trajectory)
        event = self._finished(order, record, outcome)
        if trajectory in self._unwanted:
            self._unwanted.remove(trajectory)
            self.close([trajectory])
        return event

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        """End episodes that their environment has not ended; those with a call under way end after it."""
        for trajectory in trajectories:
            if trajectory in self._calling:
                self._unwanted.add(trajectory)
            elif self._open.pop(trajectory, None) is not None:
                task = asyncio.create_task(self._pool.close(trajectory), name=f"close {trajectory}")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _step(self, trajectory: TrajectoryId, record: TrajectoryRecord) -> Observation | End | EnvironmentFailed:
        episode = self._open.get(trajectory)
        if episode is None:
            began = await self._start(trajectory, record)
            if isinstance(began, EnvironmentFailed):
                return began
            episode = began
        turn = self._end_turn(episode, record)
        outcome = await self._pool.step(trajectory, turn)
        if not isinstance(outcome, Observation):
            self._open.pop(trajectory, None)
        return outcome

    async def _start(self, trajectory: TrajectoryId, record: TrajectoryRecord) -> Episode | EnvironmentFailed:
        if record.observed:
            return EnvironmentFailed("host", "its environment ended with an earlier controller")
        prompt = record.prompt
        conversation = prompt.conversation
        assert conversation is not None
        reset = await self._pool.start(trajectory, prompt.row, source=prompt.label or prompt.source, name=prompt.where)
        if isinstance(reset, EnvironmentFailed):
            return reset
        episode = self._open[trajectory] = Episode(
            self._renderer, reset.messages, max_tokens=self._max_tokens, tools=reset.tools
        )
        if tuple(episode.prompt) != tuple(prompt.tokens):
            self.close([trajectory])
            return EnvironmentFailed("invalid", "reset gave other messages or tools than for the same row before")
        return episode

    def _end_turn(self, episode: Episode, record: TrajectoryRecord) -> Turn:
        start = record.turn_start
        episode.append(record.tokens[start:], record.logprobs[start:])
        return episode.end_turn("stop")

    def _finished(
        self, order: cmd.CallEnvironment, record: TrajectoryRecord, outcome: Observation | End | EnvironmentFailed
    ) -> ev.CallFinished:
        trajectory = order.trajectory
        reward, ended, graded, failed = 0.0, False, False, ""
        if isinstance(outcome, Observation):
            reward = outcome.reward
            ended = len(record.observed) + 1 >= self._max_turns
            record.length_capped = ended
            failed = "" if ended else self._observe(order, record, outcome)
            if ended or failed:
                self.close([trajectory])
        elif isinstance(outcome, End):
            reward, ended, graded = outcome.reward or 0.0, True, outcome.reward is not None
        else:
            failed = f"{outcome.cause}: {outcome.reason}"
        record.turn_rewards.append(reward)
        if graded:
            record.reward = sum(record.turn_rewards)
        return ev.CallFinished(
            self._now(), trajectory, order.attempt, len(record.tokens), ended, failed, reward, graded
        )

    def _observe(self, order: cmd.CallEnvironment, record: TrajectoryRecord, outcome: Observation) -> str:
        """Append the tokens of an observation; return why that is impossible, or ""."""
        episode = self._open[order.trajectory]
        known = len(episode.tokens)
        try:
            episode.observe(outcome.messages)
        except RenderingFailed as err:
            return f"invalid: {err}"
        if episode.forks:
            return "fork: the conversation cannot be continued after its sampled tokens"
        self._trajectories.observe(order.trajectory, order.attempt, episode.tokens[known:])
        return ""


@dataclass(frozen=True)
class NoEpisodes:
    """In runs without an environment."""

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Do nothing."""
