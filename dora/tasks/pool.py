"""Grading in separate processes with a memory limit and a timeout per answer.

Invariant: every request has exactly one outcome, and a failure is never a reward. A grader that times out, dies or
breaks the protocol is killed with every process it started (guard.py), and replaced before the next request. Its
request is `GradingFailed` without a retry, which would only hang the next grader.

Each `grade` call waits for an idle grader, at most the start timeout plus `timeout_s` for each call before it. There is
no other queue: the number of calls is bounded by the trajectories in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgpack

from dora.errors import ConfigError, ProtocolError, RunFailed, one_line
from dora.tasks.grader import HEADER
from dora.tasks.rewards import LARGEST_REWARD, GradeRequest

if TYPE_CHECKING:
    from dora.config.schema import RewardConfig

#: Timeout of a grader's start; a reward's module may import torch.
START_TIMEOUT_S = 60.0

#: Number of consecutive failed starts after which the run fails.
START_ATTEMPTS = 3

#: Timeout for a guard to kill its descendants, which only a stopped guard exceeds.
_KILL_TIMEOUT_S = 5.0

#: Timeout for reading a reply that is already in the pipe.
_UNREAD_S = 0.1

#: Time for a process that closed its pipe to exit by itself, so that its own exit status is reported.
_EXIT_GRACE_S = 1.0

#: A reply is one number or one error line.
_MAX_REPLY_BYTES = 1 << 20

#: Bytes kept of a grader's stderr, to explain its death.
_STDERR_TAIL_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Graded:
    """The outcome of an answer that was judged."""

    reward: float  # finite, also in 32 bits


@dataclass(frozen=True, slots=True)
class GradingFailed:
    """The outcome of an answer that could not be judged; not a reward of 0."""

    reason: str  # `timeout`, `not finite: <the sum>`, `crashed: <how it ended>` or `error: <what the reward raised>`


class GraderPool:
    """`graders` processes with the same `rewards`; errors name their config key `field`.

    Entering the pool starts one process, so that a reward that cannot be built is a `ConfigError` before anything else
    starts. The others start on first use.
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
        self._graders = [_Grader(setup, timeout_s=timeout_s) for _ in range(graders)]
        self._idle: asyncio.LifoQueue[_Grader] = asyncio.LifoQueue()  # at most all graders; the last used one is warm

    async def __aenter__(self) -> GraderPool:
        try:
            await self._graders[0].start()
        except BaseException:
            await self._graders[0].kill()
            raise
        for grader in reversed(self._graders):
            self._idle.put_nowait(grader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(grader.kill() for grader in self._graders))

    async def grade(self, request: GradeRequest) -> Graded | GradingFailed:
        """Judge one answer; raise `RunFailed` or `ConfigError` only if a dead grader cannot be replaced."""
        try:
            frame = _pack(asdict(request))
        except (TypeError, ValueError, OverflowError) as err:  # metadata that msgpack cannot hold
            return GradingFailed(f"error: {err}")
        grader = await self._idle.get()
        try:
            return await grader.grade(frame)
        finally:
            self._idle.put_nowait(grader)


class _Grader:
    """A slot of the pool, whose process is started on demand, and killed after any failure."""

    def __init__(self, setup: dict[str, Any], *, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: asyncio.Task[None] | None = None
        self._stderr_tail = b""

    async def grade(self, frame: bytes) -> Graded | GradingFailed:
        if self._process is None or self._process.returncode is not None:
            await self.start()
        is_complete = False  # if not, the pipes may contain part of an exchange
        try:
            outcome = outcome_of(await self._exchange_in_time(frame))
            is_complete = True
            return outcome
        except TimeoutError:
            return GradingFailed("timeout")
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as err:
            return GradingFailed(f"crashed: {await self._ending(err)}")
        finally:
            if not is_complete:
                await self.kill()

    async def start(self) -> None:
        """Start the process and wait until it is ready. Retry unless it rejects the configuration."""
        ending = ""
        for _ in range(START_ATTEMPTS):
            await self.kill()
            await self._spawn()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    reply = await self._exchange(_pack(self._setup))
            except TimeoutError:
                ending = f"not ready after {START_TIMEOUT_S:g} s"
                continue
            except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as err:
                ending = await self._ending(err)
                continue
            if "config_error" in reply:
                await self.kill()
                raise ConfigError(str(reply["config_error"]))
            return
        await self.kill()
        raise RunFailed(f"{self._setup['field']}: no grader started in {START_ATTEMPTS} attempts ({ending})")

    async def kill(self) -> None:
        """Kill the process and every process it started, even in other sessions."""
        process, self._process = self._process, None
        if process is None or self._stderr is None:
            return
        with contextlib.suppress(ProcessLookupError):  # already gone
            process.terminate()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.wait()
                await self._stderr
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        finally:
            self._stderr.cancel()

    async def _spawn(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C reaches the controller only."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DORA_")}  # no tokens
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dora.tasks.guard",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._stderr_tail = b""
        self._stderr = asyncio.create_task(self._drain_stderr(self._process), name="grader-stderr")

    async def _exchange_in_time(self, frame: bytes) -> dict[str, Any]:
        """TimeoutError if there is no reply within the limit; one that is there by then counts even if this process was
        stopped, or busy, until long after it."""
        exchange = asyncio.create_task(self._exchange(frame), name="grader-exchange")
        try:
            for limit_s in (self._timeout_s, _UNREAD_S):
                done, _ = await asyncio.wait([exchange], timeout=limit_s)
                if done:
                    return exchange.result()
        finally:
            exchange.cancel()
        raise TimeoutError

    async def _exchange(self, frame: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(frame)
        await self._process.stdin.drain()
        (size,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
        if size > _MAX_REPLY_BYTES:
            raise ProtocolError(f"grader announced a reply of {size} bytes")
        return read_reply(await self._process.stdout.readexactly(size))

    async def _drain_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Read stderr to its end, so that a verbose reward never blocks on a full pipe."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(_STDERR_TAIL_BYTES):
            self._stderr_tail = (self._stderr_tail + chunk)[-_STDERR_TAIL_BYTES:]

    async def _ending(self, err: Exception) -> str:
        """Return how the process ended, with its last line of stderr."""
        process = self._process
        assert process is not None
        if isinstance(err, ProtocolError):
            return str(err)
        with contextlib.suppress(TimeoutError):  # it closed its pipe but is alive: killed below
            async with asyncio.timeout(_EXIT_GRACE_S):
                await process.wait()
        await self.kill()
        code = process.returncode
        how = "no exit status" if code is None else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:200]}" if lines else how


def read_reply(body: bytes) -> dict[str, Any]:
    """Decode a grader's reply."""
    try:
        reply = msgpack.unpackb(body)
    except (ValueError, OverflowError) as err:
        raise ProtocolError(f"grader's reply is not msgpack ({err})") from err
    if not isinstance(reply, dict):
        raise ProtocolError(f"grader's reply is {type(reply).__name__}, not a map")
    return reply


def outcome_of(reply: dict[str, Any]) -> Graded | GradingFailed:
    """Return the outcome that a reply reports."""
    if "error" in reply:
        return GradingFailed(one_line(f"error: {reply['error']}"))
    reward = reply.get("reward")
    if not isinstance(reward, float):
        raise ProtocolError("grader's reply has neither a reward nor an error")
    if not abs(reward) <= LARGEST_REWARD:
        return GradingFailed(f"not finite: the sum of all terms is {reward:g}, expected a finite number of 32 bits")
    return Graded(reward)


def _pack(content: dict[str, Any]) -> bytes:
    body: bytes = msgpack.packb(content)
    return HEADER.pack(len(body)) + body
