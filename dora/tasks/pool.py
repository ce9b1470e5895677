"""Grading in separate processes with a memory limit and a timeout per answer.

Invariant: every request has exactly one outcome, and a failure is never a reward. A grader that times out, dies or
breaks the protocol is killed with every process it started (guard.py), and replaced before the next request. The
request that it was grading is `GradingFailed`; a retry would only hang the next grader.

Each `grade` call waits for an idle grader, at most the start timeout plus `timeout_s` for each earlier call. There is
no other queue: the number of calls is bounded by the trajectories in flight.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from dora.core.events import JudgeUse
from dora.errors import ConfigError, ProtocolError, RunFailed, one_line
from dora.tasks.child import GuardedProcess
from dora.tasks.judge import Judge
from dora.tasks.rewards import LARGEST_REWARD, GradeRequest, term_name

if TYPE_CHECKING:
    from dora.config.schema import RewardConfig

#: Timeout of a grader's start; a reward's module may import torch.
START_TIMEOUT_S = 60.0

#: Number of consecutive failed starts after which the run fails.
START_ATTEMPTS = 3

#: Timeout for reading a reply that is already in the pipe.
_UNREAD_S = 0.1

#: A reply is one number or one error line.
_MAX_REPLY_BYTES = 1 << 20
_REPLY = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Graded:
    """The outcome of an answer that was judged."""

    reward: float  # finite, also in 32 bits
    terms: tuple[tuple[str, float], ...] = ()  # (name, weighted reward) of each term
    verdicts: tuple[tuple[str, str], ...] = ()  # (name of a judge's term, what it said)
    judged: JudgeUse | None = None  # None: without a judge


@dataclass(frozen=True, slots=True)
class GradingFailed:
    """The outcome of an answer that could not be judged; not a reward of 0."""

    #: `timeout`, `not finite: <the sum>`, `memory: <whose, and the limit>`, `crashed: <how it ended>` or `error: <what
    #: the reward raised>`.
    reason: str
    judged: JudgeUse | None = None


class GraderPool:
    """`graders` processes with the same `rewards`; errors name their config key `field`.

    Entering the pool starts one process and reaches the judges, so that a reward that cannot be built is a
    `ConfigError` before anything else starts. The other processes start on first use.
    """

    def __init__(
        self, rewards: Sequence[RewardConfig], *, graders: int, timeout_s: float, memory_mb: int, field: str
    ) -> None:
        setup = {
            "rewards": [reward.model_dump(mode="json") for reward in rewards],
            "field": field,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
        }
        self._rewards = rewards
        self._names = [term_name(reward, field=f"{field}.{index}") for index, reward in enumerate(rewards)]
        self._judges = {
            index: Judge(reward, field=f"{field}.{index}")
            for index, reward in enumerate(rewards)
            if reward.kind == "judge"
        }
        self._entered = AsyncExitStack()
        self._graders = [_Grader(setup, rewards=", ".join(self._names), timeout_s=timeout_s) for _ in range(graders)]
        self._idle: asyncio.LifoQueue[_Grader] = asyncio.LifoQueue()  # the last used, warm grader is taken first

    async def __aenter__(self) -> GraderPool:
        try:
            await self._graders[0].start()
            for judge in self._judges.values():
                await self._entered.enter_async_context(judge)
        except BaseException:
            await self._close()
            raise
        for grader in reversed(self._graders):
            self._idle.put_nowait(grader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await self._entered.aclose()
        await asyncio.gather(*(grader.process.kill() for grader in self._graders))

    async def grade(self, request: GradeRequest) -> Graded | GradingFailed:
        """Judge one answer; raise `RunFailed` or `ConfigError` only if a dead grader cannot be replaced."""
        asked = [index for index in self._judges if self._rewards[index].applies_to(request.source)]
        if not asked:
            return await self._grade(request)
        verdicts = dict(zip(asked, await asyncio.gather(*(self._judges[i].ask(request) for i in asked)), strict=True))
        judged = _sum([verdict.use for verdict in verdicts.values()])
        for index, verdict in verdicts.items():
            if verdict.failed:
                return GradingFailed(one_line(f"error: {self._names[index]}: {verdict.failed}"), judged)
        texts = [verdicts[i].text if i in verdicts else "" for i in range(len(self._rewards))]
        outcome = replace(await self._grade(replace(request, verdicts=texts)), judged=judged)
        if isinstance(outcome, GradingFailed):
            return outcome
        return replace(outcome, verdicts=tuple((self._rewards[i].name, v.text) for i, v in verdicts.items()))

    async def _grade(self, request: GradeRequest) -> Graded | GradingFailed:
        try:
            body = _encoded(asdict(request))
        except (TypeError, ValueError, RecursionError) as err:  # metadata that JSON cannot hold
            return GradingFailed(f"error: {err}")
        grader = await self._idle.get()
        try:
            return await grader.grade(body)
        finally:
            self._idle.put_nowait(grader)


def _encoded(request: dict[str, Any]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode()


def _sum(uses: Sequence[JudgeUse]) -> JudgeUse:
    return JudgeUse(
        sum(use.requests for use in uses),
        sum(use.prompt_tokens for use in uses),
        sum(use.sampled_tokens for use in uses),
    )


class _Grader:
    """A slot of the pool, whose process is started on demand, and killed after any failure."""

    def __init__(self, setup: dict[str, Any], *, rewards: str, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._rewards = rewards
        self.process = GuardedProcess("grader", max_bytes=_MAX_REPLY_BYTES, total_mb=setup["memory_mb"])

    async def grade(self, body: bytes) -> Graded | GradingFailed:
        if not self.process.is_running:
            await self.start()
        is_complete = False  # while False, the pipes may contain part of an exchange
        try:
            outcome = outcome_of(await self._exchange_in_time(body))
            is_complete = True
            return outcome
        except TimeoutError:
            return GradingFailed("timeout")
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as err:
            how = await self.process.ending(err)
            kind = f"memory: {self._rewards}: " if self.process.was_over_memory else "crashed: "
            return GradingFailed(one_line(f"{kind}{how}"))
        finally:
            if not is_complete:
                await self.process.kill()

    async def start(self) -> None:
        """Start the process and wait until it is ready. Retry unless it rejects the configuration."""
        ending = ""
        for _ in range(START_ATTEMPTS):
            await self.process.kill()
            await self.process.spawn()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    reply = await self._exchange(_encoded(self._setup))
            except TimeoutError:
                ending = f"not ready after {START_TIMEOUT_S:g} s"
                continue
            except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as err:
                ending = await self.process.ending(err)
                continue
            if "config_error" in reply:
                await self.process.kill()
                raise ConfigError(str(reply["config_error"]))
            return
        await self.process.kill()
        raise RunFailed(f"{self._setup['field']}: no grader started in {START_ATTEMPTS} attempts ({ending})")

    async def _exchange_in_time(self, body: bytes) -> dict[str, Any]:
        """Return the reply; TimeoutError if the grader sent none within the limit. A reply that arrived in time counts
        even if this process was stopped or busy and reads it much later."""
        exchange = asyncio.create_task(self._exchange(body), name="grader-exchange")
        try:
            for limit_s in (self._timeout_s, _UNREAD_S):
                done, _ = await asyncio.wait([exchange], timeout=limit_s)
                if done:
                    return exchange.result()
        finally:
            exchange.cancel()
        raise TimeoutError

    async def _exchange(self, body: bytes) -> dict[str, Any]:
        self.process.write(body)
        await self.process.drained()
        return read_reply(await self.process.read())


def read_reply(body: bytes) -> dict[str, Any]:
    """Decode a grader's reply. What it claims about its lengths reserves no memory, and its nesting is limited."""
    try:
        return _REPLY.decode(body)
    except (ValueError, RecursionError) as err:
        raise ProtocolError(f"grader's reply is not a map in msgpack ({err})") from err


def outcome_of(reply: dict[str, Any]) -> Graded | GradingFailed:
    """Return the outcome that a reply reports."""
    if "error" in reply:
        return GradingFailed(one_line(f"error: {reply['error']}"))
    reward = reply.get("reward")
    if not isinstance(reward, float):
        raise ProtocolError("grader's reply has neither a reward nor an error")
    if not abs(reward) <= LARGEST_REWARD:
        return GradingFailed(f"not finite: the sum of all terms is {reward:g}, expected a finite number of 32 bits")
    try:
        return Graded(reward, msgspec.convert(reply.get("terms", ()), tuple[tuple[str, float], ...]))
    except msgspec.ValidationError as err:
        raise ProtocolError(f"grader's reply: terms: {err}") from err
