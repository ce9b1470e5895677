"""The controller's side of environments: hosts, places in them, and one outcome for each call.

Invariant: a call is sent at most once, and a failure is never a reward. A host that hangs or dies is killed with
everything it started, and replaced when a place in it is needed. Only its own episodes fail. A failure is returned as
`EnvironmentFailed`, with its cause. Callers record a call durably before they make it.

Waits: `start` waits at most an hour for a place, and for a host at most START_ATTEMPTS times `start_timeout_s` plus a
minute of back-off if hosts are lost one after another. Each call waits for its reply, at most `call_timeout_s` plus the
time to kill the host.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog

from dora.environments.api import End, Observation, Reset, Turn
from dora.environments.failures import NORMAL, Death, FailureLimits, Failures
from dora.environments.logs import HostLog
from dora.environments.process import HostLost, HostProcess, StartFailed
from dora.environments.replies import EnvironmentFailed, FailedCall, Head, Outcome, decode, outcome_of, read_reply
from dora.errors import ProtocolError, RunFailed, one_line
from dora.pipes import SURVIVED

if TYPE_CHECKING:
    from dora.config.schema import EnvironmentConfig

log = structlog.get_logger(__name__)

#: Number of consecutive failed starts of a host after which the run fails.
START_ATTEMPTS = 3

#: The run fails after this number of hosts in a row was lost and no turn was answered between the losses.
LOST_IN_A_ROW = 10

#: Delay in seconds before the second host lost in this way is replaced; it doubles with each further loss.
_BACKOFF_S = 0.25

#: Longest wait for a place in a host; a place gets free when another episode ends.
PLACE_TIMEOUT_S = 3_600.0

_NO_REWARD = "the environment ended without a reward, and task.rewards has no term that could grade the episode"

#: A host with this many stuck threads gets no new episode, and is replaced when it has none left.
_MAX_STUCK = 8


class EnvironmentPool:
    """Hosts with the environment of `settings`; errors name the config key `field`.

    Entering the pool starts one host, so that an environment that cannot be created is a `ConfigError` before anything
    else starts. The others start on first use.
    """

    def __init__(
        self,
        settings: EnvironmentConfig,
        *,
        limits: FailureLimits = NORMAL,
        field: str = "environment",
        max_tokens: int = 0,
    ) -> None:
        """`max_tokens`: the longest that an episode may become, which hosts are told; 0: not known."""
        self._settings = settings
        self._losses = _Losses(field)
        self._slots = [
            _Slot(settings, number=number, field=field, max_tokens=max_tokens, wake=self._wake, losses=self._losses)
            for number in range(settings.hosts)
        ]
        self._episodes: dict[int, _Episode] = {}
        self.without_place: set[int] = set()  #: episodes that wait for one to begin
        self._waiting: deque[asyncio.Future[_Slot]] = deque()  # `start`, for a place
        self._closing: set[asyncio.Task[None]] = set()
        self._failures = Failures(limits, field=field)

    async def __aenter__(self) -> EnvironmentPool:
        try:
            await self._slots[0].ready()
        except BaseException:
            await self._slots[0].kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(slot.kill() for slot in self._slots))
        await asyncio.gather(*self._closing)
        for slot in self._slots:
            slot.log.close()

    def log_into(self, folder: Path) -> None:
        """Write what hosts print, from the beginning, into files of this folder (logs.py)."""
        for number, slot in enumerate(self._slots):
            slot.log.open(folder / f"host-{number}.log")

    @property
    def free(self) -> int:
        """The number of episodes that can start now without waiting for a place."""
        return max(0, sum(slot.free for slot in self._slots) - len(self._waiting))

    @property
    def can_replay(self) -> bool:
        """Whether an episode may be repeated from its recorded turns (`Environment.can_replay`)."""
        return self._slots[0].host is not None and self._slots[0].host.can_replay

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment may give rewards of its own."""
        return self._slots[0].host is not None and self._slots[0].host.gives_rewards

    @property
    def wants_tokens(self) -> bool:
        """Whether turns have their token ids and log-probs."""
        return self._slots[0].host is not None and self._slots[0].host.wants_tokens

    @property
    def set_aside(self) -> Mapping[str, str]:
        """The rows that are no longer tried, by name, with the reason of the last failure."""
        return self._failures.set_aside

    async def start(
        self,
        episode: int,
        row: Mapping[str, Any],
        *,
        source: str,
        name: str,
        is_graded: bool = True,
        may_replay: bool = False,
    ) -> Reset | EnvironmentFailed:
        """Begin an episode with a row of `source`, called `name` in errors; `episode` is a number not in use.

        `is_graded`: the episode may end without a reward of its own, because `task.rewards` then grade it.
        `may_replay`: the caller begins the episode again if its host is lost. If the environment can be replayed, that
        loss is then no failure.
        RunFailed or ConfigError if no host can be started, or too many episodes have failed.
        """
        if name in self.set_aside:
            return EnvironmentFailed("set_aside", one_line(f"{name} is set aside; it failed: {self.set_aside[name]}"))
        self.without_place.add(episode)
        try:
            slot = await self._place()
        except TimeoutError:
            return EnvironmentFailed("no_place", f"no place in a host for {PLACE_TIMEOUT_S:g} s")
        finally:
            self.without_place.discard(episode)
        try:
            host = await slot.ready()
        except BaseException:
            self._leave(slot, host=None)
            raise
        known = self._episodes[episode] = _Episode(slot, host, source=source, row=name, is_graded=is_graded)
        slot.enter(host)
        request = {"type": "start", "row": row, "is_graded": is_graded}
        outcome = await self._call(episode, known, request, expected=("reset",), may_replay=may_replay)
        assert isinstance(outcome, Reset | EnvironmentFailed)
        return outcome

    async def step(
        self, episode: int, turn: Turn, *, may_replay: bool = False
    ) -> Observation | End | EnvironmentFailed:
        """Answer a turn. After `End` or a failure, the episode is over. `may_replay` and RunFailed as for `start`."""
        known = self._episodes.get(episode)
        if known is None:
            return EnvironmentFailed("invalid", "the episode has ended, or never began")
        request = {"type": "step", "turn": turn}
        outcome = await self._call(episode, known, request, expected=("observation", "end"), may_replay=may_replay)
        assert not isinstance(outcome, Reset)
        return outcome

    async def close(self, episode: int) -> None:
        """End an episode that its environment has not ended; do nothing if it is over."""
        known = self._episodes.get(episode)
        if known is not None:
            self._forget(episode, known)
            if known.was_answered:  # otherwise the environment has only given a prompt
                self._failures.ended(source=known.source, row=known.row)
            await self._closed(known, known.host.call({"type": "close", "episode": episode}))

    def fail(self, episode: int, failed: EnvironmentFailed) -> EnvironmentFailed:
        """End an episode that cannot use its environment's messages, and return the failure; RunFailed as in
        `start`."""
        known = self._episodes.get(episode)
        if known is not None:
            self._abandon(episode, known)
            self._note_failed(failed, known)
        return failed

    async def _call(
        self,
        episode: int,
        known: _Episode,
        request: Mapping[str, Any],
        *,
        expected: Sequence[str],
        may_replay: bool,
    ) -> Outcome:
        outcome: Outcome
        is_own, death = True, None
        try:
            reply = read_reply(await known.host.call({"episode": episode, **request}), expected=expected)
            known.host.num_stuck += isinstance(reply, FailedCall) and reply.stuck
            outcome = outcome_of(reply) if isinstance(reply, FailedCall) else reply
            if isinstance(reply, FailedCall) and reply.cause == "host":
                death = known.host.death_of(reply.loss)
            if isinstance(outcome, End) and outcome.reward is None and not known.is_graded:
                outcome = EnvironmentFailed("invalid", _NO_REWARD)
            if isinstance(outcome, Observation | End):
                known.was_answered = True
                self._losses.in_a_row = 0
        except TimeoutError:
            outcome = EnvironmentFailed("timeout", f"timed out after {self._settings.call_timeout_s:g} s")
            death = known.host.death
        except HostLost as err:
            outcome = EnvironmentFailed("host", one_line(f"host died: {err}"))
            is_own, death = err.is_own, known.host.death
        except ProtocolError as err:
            outcome = EnvironmentFailed("invalid", str(err))
            self._abandon(episode, known)
        except (TypeError, ValueError, OverflowError) as err:
            outcome = EnvironmentFailed("invalid", one_line(f"the row or turn is not JSON: {err}"))
            self._abandon(episode, known)
        except BaseException:
            self._abandon(episode, known)
            raise
        if isinstance(outcome, End | EnvironmentFailed):
            self._forget(episode, known)
        if isinstance(outcome, End):
            self._failures.ended(source=known.source, row=known.row)
        elif isinstance(outcome, EnvironmentFailed) and not (
            may_replay and outcome.cause == "host" and known.host.can_replay
        ):
            self._note_failed(outcome, known, is_own=is_own, death=death)
        return outcome

    def _note_failed(
        self, failed: EnvironmentFailed, known: _Episode, *, is_own: bool = True, death: Death | None = None
    ) -> None:
        was_set_aside = known.row in self.set_aside
        self._failures.failed(failed.reason, source=known.source, row=known.row, is_own=is_own, death=death)
        if known.row in self.set_aside and not was_set_aside:
            log.warning("row_set_aside", row=known.row, source=known.source, reason=failed.reason)

    def _abandon(self, episode: int, known: _Episode) -> None:
        """Forget an episode, and tell its environment that the episode is over."""
        self._forget(episode, known)
        closing = known.host.call({"type": "close", "episode": episode})  # sent before its number is used again
        task = asyncio.create_task(self._closed(known, closing), name=f"close {episode}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, known: _Episode, closing: Awaitable[bytes]) -> None:
        with suppress(TimeoutError, HostLost, ProtocolError):
            reply = await closing
            if decode(reply, Head).type == "failed":
                known.host.num_stuck += decode(reply, FailedCall).stuck

    def _forget(self, episode: int, known: _Episode) -> None:
        if self._episodes.get(episode) is known:
            del self._episodes[episode]
            self._leave(known.slot, host=known.host)

    async def _place(self) -> _Slot:
        """Take a place in the slot with the most free places; calls that must wait are served in their order."""
        if self.free:
            return self._take()
        turn: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(PLACE_TIMEOUT_S):
                return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._leave(turn.result(), host=None)
            else:
                with suppress(ValueError):  # `_wake` may have passed it over already
                    self._waiting.remove(turn)
            raise

    def _take(self) -> _Slot:
        slot = max(self._slots, key=lambda slot: slot.free)
        slot.num_waiting += 1
        return slot

    def _leave(self, slot: _Slot, *, host: HostProcess | None) -> None:
        slot.leave(host)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and any(slot.free for slot in self._slots):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._take())


@dataclass(slots=True)
class _Episode:
    slot: _Slot
    host: HostProcess
    source: str
    row: str
    is_graded: bool
    was_answered: bool = False  # a turn


class _Losses:
    """Counts the hosts that were lost in a row, without an answered turn between the losses."""

    def __init__(self, field: str) -> None:
        self._field = field
        self.in_a_row = 0

    async def back_off(self) -> None:
        """Wait before another host is started, longer after each loss; RunFailed if there were too many."""
        if self.in_a_row >= LOST_IN_A_ROW:
            raise RunFailed(f"{self._field}: {self.in_a_row} hosts in a row were lost; log.jsonl has the reasons")
        if self.in_a_row > 1:
            await asyncio.sleep(_BACKOFF_S * 2 ** (self.in_a_row - 2))


class _Slot:
    """A place for a host, which is started on demand, and replaced when it is lost."""

    def __init__(
        self,
        settings: EnvironmentConfig,
        *,
        number: int,
        field: str,
        max_tokens: int,
        wake: Callable[[], None],
        losses: _Losses,
    ) -> None:
        self._number = number
        self._max_tokens = max_tokens
        self._losses = losses
        self._settings = settings
        self._field = field
        self._wake = wake
        self._starting = asyncio.Lock()
        self.log = HostLog()
        self.host: HostProcess | None = None
        #: Episodes that have a place here, and no host yet.
        self.num_waiting = 0

    @property
    def free(self) -> int:
        host = None if self.host is None or self.host.is_lost else self.host
        taken = 0 if host is None else host.num_episodes
        if host is not None and taken and host.num_stuck >= _MAX_STUCK:
            return 0
        return max(0, self._settings.episodes_per_host - self.num_waiting - taken)

    def enter(self, host: HostProcess) -> None:
        self.num_waiting -= 1
        host.num_episodes += 1

    def leave(self, host: HostProcess | None) -> None:
        if host is None:
            self.num_waiting -= 1
        else:
            host.num_episodes -= 1

    async def ready(self) -> HostProcess:
        """Return a host that is ready. It is a new one if the last one is lost, or has stuck threads and no episode."""
        async with self._starting:
            host = self.host
            if host is not None and not host.is_lost and (host.num_episodes or not host.num_stuck):
                return host
            await self.kill()
            if host is not None:
                await self._losses.back_off()
            self.host = await self._start()
            if host is not None:
                log.warning("host_replaced", lost_in_a_row=self._losses.in_a_row)
            return self.host

    def _on_lost(self, is_unexpected: bool) -> None:
        self._losses.in_a_row += is_unexpected
        self._wake()

    async def kill(self) -> None:
        if self.host is not None:
            await self.host.kill()

    async def _start(self) -> HostProcess:
        ending = ""
        for _ in range(START_ATTEMPTS):
            self.log.write(f"{SURVIVED}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: a host starts\n".encode())
            host = HostProcess(
                self._settings,
                field=self._field,
                on_lost=self._on_lost,
                number=self._number,
                max_tokens=self._max_tokens,
                on_output=self.log.write,
            )
            try:
                await host.start()
            except BaseException as err:
                await host.kill()
                if not isinstance(err, StartFailed):
                    raise
                ending = str(err)
            else:
                return host
        raise RunFailed(f"{self._field}: no host started in {START_ATTEMPTS} attempts ({ending})")
