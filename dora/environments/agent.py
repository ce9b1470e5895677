"""Agents that drive themselves: programs of the user that know a base URL and a key, and call the policy as a model.

    [environment]
    name = "dora.environments.agent:Agent"
    options = { command = ["python", "agent.py"] }

A program is started for each episode. It gets the task's row as one line of JSON on stdin, and in OPENAI_BASE_URL and
OPENAI_API_KEY, or those of ANTHROPIC, a session of its own (sessions.py). The episode ends with the program. Its last
line may be the reward, a number; else the task's rewards grade the episode. With `warm` a program is started once, and
serves many episodes.

Invariant: a program ends with its episode, and a warm one with its host; nothing of DORA's settings is in its
environment. Its Python need not be that of the host, which needs aiohttp and msgspec.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, NamedTuple

from dora.environments.api import End, Environment, Observation, Reset, Turn
from dora.environments.sessions import Session, SessionEnded, SessionServer
from dora.environments.token_calls import TokenRequest

#: Longest line that a program may print; of longer output the end counts.
MAX_LINE: Final = 1 << 20
#: Seconds that a program has to end by itself once its session has ended.
GRACE_S: Final = 2.0
_COLUMN: Final = re.compile(r"\{([A-Za-z_]\w*)\}")


class AgentFailed(Exception):
    """A program that cannot go on, which fails its episode."""


class SelfDriven(Environment):
    """One episode of a program that drives itself: a session, and what plays in it.

    A subclass has `play`, which is given the session and plays the episode to its end, and `leave`, if more than the
    task of `play` has to be ended with the episode.
    """

    wants_tokens: ClassVar = True
    asks_itself: ClassVar = True

    def __init__(self, *, strict: bool = False) -> None:
        self._is_strict = strict
        self._session: Session | None = None
        self._running: asyncio.Task[End] | None = None

    async def play(self, session: Session, row: Mapping[str, Any]) -> End:
        """Play an episode with the requests of its session; AgentFailed if that cannot go on."""
        raise NotImplementedError

    async def leave(self) -> None:
        """End what `play` has started, once its task has ended."""

    async def reset(self, row: dict[str, Any]) -> Reset:
        """Begin to play, and wait for the first request."""
        server = await session_server()
        session = self._session = server.open(is_strict=self._is_strict, max_tokens=self.max_tokens)
        self._running = asyncio.create_task(self.play(session, row), name=f"episode of {session.url}")
        self._running.add_done_callback(self._on_end)
        try:
            asked = await session.next_request()
        except SessionEnded:
            await self._end(None)  # says why it ended, if it failed
            raise AgentFailed("the agent ended before its first request") from None
        if isinstance(asked, TokenRequest):
            return Reset([], tokens=asked.tokens, turn_tokens=asked.max_tokens)
        return Reset(session.recorded(asked.messages), asked.tools, turn_tokens=asked.max_tokens)

    async def step(self, turn: Turn) -> Observation | End:
        """Answer the program's request, and wait for its next one, or for its end."""
        assert self._session is not None
        self._session.answer(turn)
        try:
            asked = await self._session.next_request()
        except SessionEnded as end:
            return await self._end(end.reward)
        if isinstance(asked, TokenRequest):
            return Observation([], tokens=asked.tokens, turn_tokens=asked.max_tokens)
        return Observation(self._session.recorded(asked.messages), rewrites=True, turn_tokens=asked.max_tokens)

    async def close(self) -> None:
        """End the session, and the program if it has not ended."""
        if self._session is not None:
            if self._session.counts:
                told = ", ".join(f"{cause}: {count}" for cause, count in sorted(self._session.counts.items()))
                sys.stderr.write(f"| session {self._session.number}: without effect, queued or repeated: {told}\n")
            (await session_server()).close(self._session)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self.leave()

    def _on_end(self, running: asyncio.Task[End]) -> None:
        if not running.cancelled():
            running.exception()  # a failure is raised where the end is awaited, if it is
        if self._session is not None:
            self._session.end()

    async def _end(self, given: float | None) -> End:
        """Return the end: with the reward that the agent gave to its session, else that of `play`. AgentFailed if that
        failed."""
        assert self._running is not None
        if given is not None:
            await asyncio.wait([self._running], timeout=GRACE_S)
            return End(given)
        return await self._running


class Agent(SelfDriven):
    """One episode of a program.

    `command`: its arguments; of a program for each episode, {column} stands for that column of the row. `warm`: it
    reads a line of JSON for each episode from stdin, {"episode": N, "row": {...}, "base_url": URL, "api_key": KEY}, any
    number of them at a time, and prints {"episode": N, "reward": NUMBER or null} or {"episode": N, "error": TEXT}.
    `strict`: requests that set what has no effect are refused. `replays`: the program makes the same requests again if
    it gets the same replies, and does no harm by that; then an episode goes on after its host or the controller was
    lost.
    """

    def __init__(self, command: Sequence[str], warm: bool = False, replays: bool = False, strict: bool = False) -> None:
        super().__init__(strict=strict)
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError('command must be a list of texts, such as ["python", "agent.py"]')
        self.can_replay = replays  # type: ignore[misc]  # here an option, and not of the class
        self._command, self._is_warm = tuple(command), warm
        self._program: _Program | None = None

    async def play(self, session: Session, row: Mapping[str, Any]) -> End:
        """Start the program, or have the warm one serve the episode; the reward is what it prints."""
        if self._is_warm:
            return End(await (await _warm_program(self._command)).run(session, row))
        self._program = _Program(_filled(self._command, row), session)
        return End(await self._program.run(row))

    async def leave(self) -> None:
        """End the program if it has not ended."""
        if self._program is not None:
            await self._program.kill()


class _Program:
    """A process that serves one episode."""

    def __init__(self, command: Sequence[str], session: Session) -> None:
        self._command = command
        self._session = session
        self._last = b""
        self._output: Output | None = None
        self._reading: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, row: Mapping[str, Any]) -> float | None:
        """Run it to its end; return the reward in its last line. AgentFailed unless its exit code is 0."""
        process, self._output = await started(self._command, _environment(self._session))
        self._process = process
        self._reading = asyncio.create_task(self._read(self._output.lines), name=f"output of {self._session.url}")
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(row).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        code = await process.wait()
        kill_group(process.pid)  # what it has left behind, which may have its output open
        await self._end_of_output()
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise AgentFailed(f"{self._command[0]} ended with {how}; its output is in the log of the host")
        return _number(self._last)

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """Log what it prints, and keep the last line."""
        while line := await next_line(lines):
            self._last = line if line.strip() else self._last
            sys.stderr.write(f"| {line.decode(errors='replace').rstrip()[:1000]}\n")

    async def kill(self) -> None:
        """End it with all of its process group."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
            await self._process.wait()
        await self._end_of_output()

    async def _end_of_output(self) -> None:
        """Wait until its output is read, unless a process outside of its group has it open."""
        if self._reading is not None and self._output is not None:
            await asyncio.wait([self._reading], timeout=GRACE_S)
            self._reading.cancel()
            self._output.pipe.close()


class _WarmProgram:
    """A warm process, which serves many episodes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[float | None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.has_ended = False

    async def start(self) -> None:
        """Start it."""
        self._process, output = await started(self._command, _environment(None))
        self._reading = asyncio.create_task(self._read(output), name=f"lines of {self._command[0]}")

    async def run(self, session: Session, row: Mapping[str, Any]) -> float | None:
        """Have it serve an episode; return the reward. AgentFailed if it says so, or ends."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self.has_ended:
            raise AgentFailed(f"{self._command[0]} has ended; its output is in the log of the host")
        number = next(self._numbers)
        done: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = done
        order = {"episode": number, "row": row, "base_url": f"{session.url}/v1", "api_key": session.key}
        with suppress(ConnectionError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
        try:
            return await done
        finally:
            del self._waiting[number]

    async def _read(self, output: Output) -> None:
        assert self._process is not None
        while line := await next_line(output.lines):
            try:
                said = json.loads(line)
                done, error, reward = self._waiting.get(said["episode"]), said.get("error"), _number(said.get("reward"))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                sys.stderr.write(f"| {line.decode(errors='replace').rstrip()[:1000]}\n")
                continue
            if done is None or done.done():
                continue
            if error is not None:
                done.set_exception(AgentFailed(str(error)[:1000]))
            else:
                done.set_result(reward)
        self.has_ended = True
        output.pipe.close()
        code = await self._process.wait()
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(AgentFailed(f"{self._command[0]} ended with exit code {code}"))


def kill_group(leader: int) -> None:
    """Kill a process group, if it is there."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _number(text: Any) -> float | None:
    """Return a finite number that is written there, if any."""
    with suppress(ValueError, TypeError, OverflowError):
        return reward if math.isfinite(reward := float(text)) else None
    return None


def _filled(command: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """Return a command with the columns of a row in place of their names.

    >>> _filled(["solve", "--task={prompt}", "{other}"], {"prompt": "1+1"})
    ['solve', '--task=1+1', '{other}']
    """

    def column(found: re.Match[str]) -> str:
        return str(row[found[1]]) if found[1] in row else found[0]

    return [_COLUMN.sub(column, word) for word in command]


def _environment(session: Session | None) -> dict[str, str]:
    """Return the variables of a program, which finds its session there."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("DORA_")}
    if session is not None:
        found |= {"OPENAI_BASE_URL": f"{session.url}/v1", "OPENAI_API_KEY": session.key, "DORA_SESSION": session.url}
        found |= {"ANTHROPIC_BASE_URL": session.url, "ANTHROPIC_API_KEY": session.key}
    return found


class Output(NamedTuple):
    """What a program prints. Its pipe is not that of asyncio, which would wait for all that have it open."""

    lines: asyncio.StreamReader
    pipe: asyncio.ReadTransport


async def started(command: Sequence[str], environment: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, Output]:
    """Start a program in a process group of its own; AgentFailed if that is not possible."""
    ours, theirs = os.pipe()
    lines = asyncio.StreamReader(limit=MAX_LINE)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(ours, "rb", 0))
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=theirs,
            env=environment,
            start_new_session=True,  # a process group, so that what it starts ends with it
        )
    except OSError as err:
        pipe.close()
        raise AgentFailed(f"{command[0]} cannot be started: {err.strerror}") from err
    finally:
        os.close(theirs)
    return process, Output(lines, pipe)


async def next_line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or of a longer one its next part; b"" at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as err:
        return err.partial
    except asyncio.LimitOverrunError:
        return await stream.read(MAX_LINE)


_shared: dict[str, Any] = {}  # the server of this process, and its warm programs by command


async def session_server() -> SessionServer:
    """Return the server of this process, which listens from the first episode on."""
    async with _shared.setdefault("lock", asyncio.Lock()):
        if "server" not in _shared:
            server = SessionServer()
            await server.start()
            _shared["server"] = server
    server = _shared["server"]
    assert isinstance(server, SessionServer)
    return server


async def _warm_program(command: tuple[str, ...]) -> _WarmProgram:
    """Return the warm program of this process; another one if it has ended."""
    async with _shared.setdefault("lock", asyncio.Lock()):
        program = _shared.get("warm")
        if not isinstance(program, _WarmProgram) or program.has_ended:
            program = _WarmProgram(command)
            await program.start()
            _shared["warm"] = program
    return program
