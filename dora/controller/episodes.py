"""Episodes of several turns: the prompts with which they begin, and the calls of the environment between turns.

Invariant: a call is sent to an environment at most once, after its intent is on the disk, and the observation is in the
token log before the event that reports it. The tokens of a request are those of the record, never text rendered again.

When an environment is lost that can be replayed, a new environment gets the recorded turns again. It must answer them
with the recorded tokens and rewards; then it gets the call.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import structlog
from msgspec.structs import replace

from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import ForkCause, TrajectoryId
from dora.environments.api import End, Observation, Reset, Turn
from dora.environments.episode import Episode, conversation_of
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import Renderer, RenderingFailed
from dora.environments.replies import EnvironmentFailed, Outcome
from dora.errors import one_line
from dora.tasks.prompts import Conversation

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Begun:
    """An episode that has begun with a prompt of its own, which is not in its record yet."""

    turn_tokens: int


_Outcome = Observation | End | EnvironmentFailed | _Begun

#: How often a lost environment is replayed for one call: the call itself may be what kills the environment.
MAX_REPLAYS: Final = 3

#: Characters or tokens of an observation that are rendered beside the event loop if there are more.
LARGE: Final = 1 << 15

#: Numbers of episodes that are begun only for their prompt. No trajectory has such a number.
_PROMPTS: Final = count(1 << 62)


class Conversations:
    """Makes the prompts of episodes: their environment gives the messages, the renderer the tokens."""

    def __init__(self, pool: EnvironmentPool, renderer: Renderer, *, own_prompts: bool = False) -> None:
        """`own_prompts`: each episode begins with a prompt of its own; then one of each source is begun as a check."""
        self._pool = pool
        self._renderer = renderer
        self._own_prompts = own_prompts
        self._checked: set[str] = set()  # sources
        #: Names of the tools that the first prompts have.
        self.tools: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def __call__(self, row: Mapping[str, Any], source: str, where: str) -> Conversation:
        """Return the beginning of an episode with this row. It blocks: call it in a thread."""
        if source in self._checked:
            return Conversation(is_own=True)
        conversation = asyncio.run_coroutine_threadsafe(self._begin(row, source, where), self._loop).result()
        if conversation.failed:
            log.warning("no_prompt", row=where, source=source, reason=conversation.failed)
        elif self._own_prompts:
            self._checked.add(source)
            return Conversation(is_own=True)
        return conversation

    async def _begin(self, row: Mapping[str, Any], source: str, where: str) -> Conversation:
        episode = next(_PROMPTS)
        for replays in range(MAX_REPLAYS + 1):
            reset = await self._pool.start(episode, row, source=source, name=where, may_replay=replays < MAX_REPLAYS)
            if not (_is_lost(reset) and self._pool.can_replay):
                break
        if isinstance(reset, EnvironmentFailed):
            return Conversation(failed=f"the environment failed: {reset.reason}", may_pass=True)
        try:
            if reset.tokens:
                tokens = self._renderer.require_known(reset.tokens)
            else:
                messages = conversation_of(reset.messages)
                tokens = await asyncio.to_thread(self._renderer.begin, messages, tools=reset.tools)
        except RenderingFailed as err:
            return Conversation(failed=self._pool.fail(episode, EnvironmentFailed("invalid", str(err))).reason)
        await self._pool.close(episode)
        self.tools.update(str(one.get("function", {}).get("name")) for one in reset.tools)
        return Conversation(tuple(reset.messages), tuple(reset.tools), tuple(tokens))


@dataclass(frozen=True)
class EpisodeLimits:
    """What ends an episode that its environment does not end."""

    max_turns: int
    max_prompt_tokens: int  # of an episode's own prompt
    max_tokens: int  # of an answer, observations included
    max_row_tokens: int | None = None  # of all rows together of a forked episode in training; None: no bound
    timeout_s: float | None = None  # since the first request of the episode; None: no bound


class Episodes:
    """The episodes under way, and the effect of CallEnvironment."""

    def __init__(
        self,
        pool: EnvironmentPool,
        renderer: Renderer,
        *,
        trajectories: Trajectories,
        limits: EpisodeLimits,
        now: Callable[[], float],
        is_graded: Callable[[TrajectoryId], bool] = lambda trajectory: True,
        own_prompts: bool = False,
    ) -> None:
        """`is_graded`: whether the task's rewards grade an episode that its environment ends without a reward.
        `own_prompts`: agents drive themselves."""
        self._pool = pool
        self._renderer = renderer
        self._trajectories = trajectories
        self._limits = limits
        self._now = now
        self._is_graded = is_graded
        self._own_prompts = own_prompts
        self._open: dict[TrajectoryId, Episode] = {}
        self._calling: set[TrajectoryId] = set()
        self._unwanted: set[TrajectoryId] = set()  # to be closed after their call
        self._closing: set[asyncio.Task[None]] = set()

    def is_awaited(self, trajectory: TrajectoryId) -> bool:
        """Whether a clean stop waits for a call under way: not if it can be repeated, not for agents, which may take as
        long as they like, and not without a place in a host, which it may never get."""
        return not (self._pool.can_replay or self._own_prompts or trajectory in self._pool.without_place)

    async def __call__(self, order: cmd.CallEnvironment) -> ev.Event:
        """Give a turn to the environment, and append its observation; or begin an episode that has its own prompt."""
        trajectory = order.trajectory
        record = self._trajectories.begin(trajectory, order.attempt)
        if record.began_at is None:
            record.began_at = self._now()
        left_s = self._left_s(record)
        if left_s is not None and left_s < 0:
            return self._late(order, record)
        self._calling.add(trajectory)
        outcome: _Outcome | None = None
        replays = 0
        try:
            try:
                async with asyncio.timeout(left_s) as limit:
                    outcome, replays = await self._outcome(trajectory, record)
            except TimeoutError:
                if not limit.expired():
                    raise
            event = self._late(order, record) if outcome is None else await self._finished(order, record, outcome)
        finally:
            self._calling.discard(trajectory)
        if replays:
            event = replace(event, replays=replays)
        if trajectory in self._unwanted:
            self._unwanted.remove(trajectory)
            self.close([trajectory])
        return event

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        """End episodes that their environment has not ended. An episode with a call under way ends after the call."""
        for trajectory in trajectories:
            if trajectory in self._calling:
                self._unwanted.add(trajectory)
            elif self._open.pop(trajectory, None) is not None:
                self._leave(trajectory)

    def _left_s(self, record: TrajectoryRecord) -> float | None:
        """Return how long the episode may still take. A program that is to begin has the limit of its call alone."""
        if self._limits.timeout_s is None or record.began_at is None or not record.tokens:
            return None
        return self._limits.timeout_s - (self._now() - record.began_at)

    def _late(self, order: cmd.CallEnvironment, record: TrajectoryRecord) -> ev.CallFinished:
        """End an episode at its time limit, and the call that may be under way."""
        self._open.pop(order.trajectory, None)
        self._leave(order.trajectory)
        record.truncated = "time"
        record.turn_rewards.append(0.0)
        return self._event(order, record, ended=True)

    def _leave(self, trajectory: TrajectoryId) -> None:
        task = asyncio.create_task(self._pool.close(trajectory), name=f"close {trajectory}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _outcome(self, trajectory: TrajectoryId, record: TrajectoryRecord) -> tuple[_Outcome, int]:
        """Return what becomes of a call, and how often the episode was replayed for it."""
        replays = int(self._pool.can_replay and bool(record.observed) and trajectory not in self._open)
        while True:
            may_replay = replays < MAX_REPLAYS
            outcome = await self._step(trajectory, record, may_replay=may_replay)
            if not (_is_lost(outcome) and may_replay and self._pool.can_replay) or trajectory in self._unwanted:
                return outcome, replays
            replays += 1

    async def _step(self, trajectory: TrajectoryId, record: TrajectoryRecord, *, may_replay: bool) -> _Outcome:
        episode = self._open.get(trajectory)
        if episode is None:
            began = await self._start(trajectory, record, may_replay=may_replay)
            if isinstance(began, EnvironmentFailed):
                return began
            episode, turn_tokens = began
            self._open[trajectory] = episode
            if not record.tokens:
                return _Begun(turn_tokens)
        outcome = await self._pool.step(trajectory, self._end_turn(episode, record), may_replay=may_replay)
        if not isinstance(outcome, Observation):
            self._open.pop(trajectory, None)
        return outcome

    async def _start(
        self, trajectory: TrajectoryId, record: TrajectoryRecord, *, may_replay: bool
    ) -> tuple[Episode, int] | EnvironmentFailed:
        """Begin an episode; if it has recorded turns, replay them to the new environment. Return the limit of the first
        turn, too."""
        if record.observed and not self._pool.can_replay:
            return EnvironmentFailed("host", "its environment ended with an earlier controller")
        prompt = record.prompt
        if prompt.skipped:
            return EnvironmentFailed("invalid", prompt.skipped)
        source = prompt.label or prompt.source
        reset = await self._pool.start(
            trajectory,
            prompt.row,
            source=source,
            name=prompt.where,
            is_graded=self._is_graded(trajectory),
            may_replay=may_replay,
        )
        if isinstance(reset, EnvironmentFailed):
            return reset
        episode = await self._begun(trajectory, record, reset)
        if isinstance(episode, EnvironmentFailed):
            return self._pool.fail(trajectory, episode)
        for turn, span in enumerate(record.observed[bool(record.prompt_end) :]):
            ended = self._end_turn(episode, record, end=span[0])
            outcome = await self._pool.step(trajectory, ended, may_replay=may_replay)
            if isinstance(outcome, EnvironmentFailed):
                return outcome
            if not _is_as_recorded(outcome, episode, record, span=span, reward=record.turn_rewards[turn]):
                reason = f"the environment answered turn {turn} differently than before"
                return self._pool.fail(trajectory, EnvironmentFailed("replay", reason))
        return episode, reset.turn_tokens

    async def _begun(
        self, trajectory: TrajectoryId, record: TrajectoryRecord, reset: Reset
    ) -> Episode | EnvironmentFailed:
        """Return an episode with its prompt, which must be the recorded one."""
        conversation = record.prompt.conversation
        assert conversation is not None
        new = partial(
            Episode,
            self._renderer,
            max_tokens=self._limits.max_tokens,
            max_row_tokens=self._limits.max_row_tokens if trajectory >= 0 else None,
        )
        if not conversation.is_own:
            prompt = record.prompt.tokens
            given = [*reset.messages, *reset.tools, [*(reset.tokens or prompt)]]
            if given != [*conversation.messages, *conversation.tools, [*prompt]]:
                reason = "reset returned other messages or tools than before for the same row"
                return EnvironmentFailed("invalid", reason)
            return new(reset.messages, tools=reset.tools, prompt=prompt)
        episode = new((), own_prompt=True)
        try:
            await asyncio.to_thread(episode.begin, reset.messages, tools=reset.tools, tokens=reset.tokens)
        except RenderingFailed as err:
            return EnvironmentFailed("invalid", str(err))
        if (found := len(episode.tokens)) > self._limits.max_prompt_tokens:
            most = self._limits.max_prompt_tokens
            return EnvironmentFailed("invalid", f"it begins with {found} tokens, task.max_prompt_tokens allows {most}")
        if record.observed and episode.tokens != record.tokens[: record.prompt_end]:
            return EnvironmentFailed("replay", "the environment began differently than before")
        return episode

    def _end_turn(self, episode: Episode, record: TrajectoryRecord, *, end: int | None = None) -> Turn:
        """Append the recorded tokens of the next turn, and parse it. `end` is None for the last turn of the record."""
        start = len(episode.tokens)
        episode.append(record.tokens[start:end], record.logprobs[start:end])
        is_cut = episode.tokens[-1] not in self._renderer.stop_ids
        turn = episode.end_turn("length" if is_cut else "stop")
        if not self._pool.wants_tokens:
            return turn
        ids, logprobs = episode.tokens[start:].tolist(), episode.logprobs[start:].tolist()
        return dataclasses.replace(turn, token_ids=tuple(ids), logprobs=tuple(logprobs))

    async def _finished(
        self, order: cmd.CallEnvironment, record: TrajectoryRecord, outcome: _Outcome
    ) -> ev.CallFinished:
        reward, graded, failed = 0.0, False, ""
        follows_turn = bool(record.tokens)
        episode, num_forks = self._open.get(order.trajectory), len(record.forks)
        record.turn_tokens = outcome.turn_tokens if isinstance(outcome, Observation | _Begun) else 0
        if isinstance(outcome, _Begun):
            self._trajectories.observe(order.trajectory, order.attempt, self._open[order.trajectory].tokens)
        elif isinstance(outcome, Observation):
            reward = outcome.reward
            failed = await self._observe(order, record, outcome)
        elif isinstance(outcome, End):
            reward, graded = outcome.reward or 0.0, outcome.reward is not None
            record.terms = tuple((one_line(name), value) for name, value in outcome.terms.items()) if graded else ()
            record.metrics = tuple((one_line(name), value) for name, value in outcome.metrics.items())
        else:
            failed = f"{outcome.cause}: {outcome.reason}"
        if follows_turn:
            record.turn_rewards.append(reward)
        fork = episode.fork_causes[-1] if episode is not None and len(record.forks) > num_forks else ""
        ended = isinstance(outcome, End)
        return self._event(order, record, reward=reward, graded=graded, failed=failed, ended=ended, fork=fork)

    def _event(
        self,
        order: cmd.CallEnvironment,
        record: TrajectoryRecord,
        *,
        ended: bool,
        failed: str = "",
        reward: float = 0.0,
        graded: bool = False,
        fork: ForkCause = "",
    ) -> ev.CallFinished:
        if graded:
            record.reward = sum(record.turn_rewards)
        ended = ended or bool(record.truncated)
        if failed or record.truncated:
            self.close([order.trajectory])
        return ev.CallFinished(
            self._now(),
            order.trajectory,
            order.attempt,
            len(record.tokens),
            ended,
            failed,
            reward,
            graded,
            truncated=record.truncated,
            repeated=record.repeated,
            turn_tokens=record.turn_tokens,
            fork=fork,
        )

    async def _observe(self, order: cmd.CallEnvironment, record: TrajectoryRecord, outcome: Observation) -> str:
        """Append the tokens of an observation, unless a budget ends the episode; return why it cannot go on, or ""."""
        turns = len(record.observed) + 1 - bool(record.prompt_end)
        if turns >= self._limits.max_turns:
            record.truncated = "turns"
            return ""
        episode = self._open[order.trajectory]
        known = len(episode.tokens)
        try:
            if len(outcome.tokens) + sum(len(message["content"]) for message in outcome.messages) > LARGE:
                await asyncio.to_thread(append, episode, outcome)
            else:
                append(episode, outcome)
        except RenderingFailed as err:
            self._pool.fail(order.trajectory, EnvironmentFailed("invalid", str(err)))
            return f"invalid: {err}"
        if episode.truncated:
            record.truncated = "tokens"
            return ""
        fork = episode.forks[-1] if len(episode.forks) > len(record.forks) else None
        self._trajectories.observe(order.trajectory, order.attempt, episode.tokens[known:], fork=fork)
        return ""


def _is_lost(outcome: Outcome | _Begun) -> bool:
    return isinstance(outcome, EnvironmentFailed) and outcome.cause == "host"


def append(episode: Episode, outcome: Observation) -> None:
    """Append what an environment answered to a turn. RenderingFailed if it cannot be used."""
    try:
        if outcome.tokens:
            episode.continue_from(outcome.tokens)
        elif outcome.rewrites:
            episode.rewrite(outcome.messages)
        else:
            episode.observe(outcome.messages)
    except RecursionError as err:
        raise RenderingFailed("the environment's messages are nested too deeply") from err


def _is_as_recorded(
    outcome: Observation | End, episode: Episode, record: TrajectoryRecord, *, span: tuple[int, int], reward: float
) -> bool:
    """Append an observation to an episode that is replayed; return whether it is the same as the recorded one."""
    start, end = span
    if isinstance(outcome, End) or outcome.reward != reward:
        return False
    try:
        append(episode, outcome)
    except RenderingFailed:
        return False
    is_same = episode.tokens[start:] == record.tokens[start:end]
    return is_same and [*episode.forks] == record.forks[: len(episode.forks)]


@dataclass(frozen=True)
class NoEpisodes:
    """A replacement for `Episodes` in runs without an environment."""

    def is_awaited(self, trajectory: TrajectoryId) -> bool:
        """There is no call."""
        return False

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Do nothing."""
