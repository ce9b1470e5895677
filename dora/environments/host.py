"""A process that runs environments: many episodes at once in one event loop (`python -m dora.environments.host`).

It may run under another Python than the controller: this file needs Python 3.11 and no packages. The protocol on its
stdin and stdout is described in docs/ENVIRONMENTS-PROTOCOL.md; a host in another language replaces this file.

Invariant: each request has one reply, and code of the user can neither delay nor break the replies to other episodes:
methods that are not `async` run in threads, and every call has a time limit. A thread cannot be stopped, so a thread
that exceeds the limit goes on running, and the reply says so (`stuck`). A call that blocks the loop is ended
(watch.py). If the whole process is blocked, the controller notices. User code is imported in the main thread, before
the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, BinaryIO

from dora.environments.api import (
    SPARE_THREADS,
    End,
    Environment,
    EnvironmentLost,
    Message,
    Observation,
    Reset,
    ToolCall,
    ToolEnvironment,
    Turn,
    run,
)
from dora.environments.watch import Blocked, LoopWatch
from dora.errors import ConfigError
from dora.functions import definition_of, describe, load_function, place_of_error
from dora.pipes import HEADER, print_failure, read_frame, take_pipes, write_frame

if TYPE_CHECKING:
    from dora.environments.mcp_tools import EpisodeTools, McpServers

PROTOCOL = 1

#: Stack size of a thread. The default of 8 MiB would count towards the memory limit even if it is never used.
_STACK_BYTES = 2 << 20

#: Threads in addition to one for each episode; they replace threads that are stuck.
_STUCK_THREADS = 16

#: After a call has blocked the loop, the other calls get this much time to read what has arrived for them. It is
#: shorter than the controller's own extra time for a call.
_CATCH_UP_S = 2.0

#: The task of the call for which code of the user runs, in the loop, in tasks of its own, or in threads.
_CALL: ContextVar[asyncio.Task[Any] | None] = ContextVar("call", default=None)

Reply = dict[str, Any]


class CallFailed(Exception):
    """A call that failed its episode: `cause` is "raised", "timeout", "invalid" or "host"."""

    def __init__(self, cause: str, reason: str, *, stuck: bool = False, loss: int = 0) -> None:
        super().__init__(reason)
        self.reply = {"type": "failed", "cause": cause, "reason": reason, "stuck": stuck, "loss": loss}


def main() -> None:
    began = time.monotonic()
    requests, replies = take_pipes()
    hello = read_frame(requests)
    if hello is None:
        return
    setup = json.loads(hello)
    try:
        make = build(setup)
        one = make()
    except ConfigError as err:
        return _refuse(setup, replies, err)
    asyncio.run(_serve(setup, make, one, requests, replies, began=began))


async def _serve(
    setup: dict[str, Any],
    make: Callable[[], Environment],
    one: Environment,
    requests: BinaryIO,
    replies: BinaryIO,
    *,
    began: float,
) -> None:
    """Connect the servers of tools, say that the host is ready, and serve. `began`: time at which the start began."""
    try:
        servers = await _connect(setup, one, left_s=setup.get("start_timeout_s", 0) - (time.monotonic() - began))
    except ConfigError as err:
        _refuse(setup, replies, err)
        os._exit(0)  # the guards end the servers that have started
    gives_rewards = type(one).step is not ToolEnvironment.step
    traits = {
        "can_replay": bool(one.can_replay),
        "gives_rewards": gives_rewards,
        "wants_tokens": bool(one.wants_tokens),
    }
    write_frame(replies, _encode({"id": setup["id"], "type": "ready", "protocol": PROTOCOL, **traits}))
    await _Host(setup, make, servers).serve(requests, replies)


async def _connect(setup: dict[str, Any], one: Environment, *, left_s: float) -> McpServers | None:
    """Connect the MCP servers of `setup`, for environments like `one`; None if there are none."""
    if not setup.get("mcp"):
        return None
    from dora.environments.mcp_tools import McpServers

    servers = McpServers(setup["mcp"], field=f"{setup['field']}.mcp", timeout_s=max(left_s, 0.0))
    await servers.connect(one)
    return servers


def _refuse(setup: dict[str, Any], replies: BinaryIO, err: ConfigError) -> None:
    write_frame(replies, _encode({"id": setup["id"], "type": "refused", "reason": str(err)}))


def build(setup: dict[str, Any]) -> Callable[[], Environment]:
    """Return the function that makes the environments named by `setup`, after a first try; or raise ConfigError."""
    field = setup["field"]
    maker = load_function(setup["environment"], field=f"{field}.name")

    def make() -> Environment:
        environment = maker(**setup["options"])
        if not isinstance(environment, Environment):
            raise TypeError(f"it made {type(environment).__name__}, not an Environment")
        for name in ("reset", "step"):
            if getattr(type(environment), name) is getattr(Environment, name):
                raise TypeError(f"{type(environment).__name__} has no method '{name}'")
        return environment

    try:
        one = make()
        if isinstance(one, ToolEnvironment):
            one.schemas()
    except ConfigError:  # of an environment of DORA, which names the field
        raise
    except Exception as err:  # user code may raise anything
        raise ConfigError(
            f"{field}.name: {setup['environment']} cannot be created ({describe(err, of=maker)})"
        ) from err
    return make


class _Hosted:
    """An environment, and its current call."""

    def __init__(self) -> None:
        self.environment: Environment | None = None  # until `start` has made it
        self.first: Sequence[Message] = ()  # messages of the first prompt
        self.tools: EpisodeTools | None = None  # of MCP servers
        self.call: asyncio.Task[None] | None = None


class _Host:
    """The episodes of one process."""

    def __init__(
        self, setup: dict[str, Any], make: Callable[[], Environment], servers: McpServers | None = None
    ) -> None:
        self._make = make
        self._servers = servers
        self._pid = os.getpid()
        self._limit_s: float = setup["call_timeout_s"]
        Environment.max_tokens = setup.get("max_tokens", 0)
        self._output_bytes: int = setup["output_bytes"]
        self._reply_bytes: int = setup["reply_bytes"]
        self._episodes: dict[int, _Hosted] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._threads = _Threads(setup["episodes"] + _STUCK_THREADS + SPARE_THREADS)
        self._limits: set[asyncio.Timeout] = set()  # time limits of the running calls
        self._replies: asyncio.WriteTransport | None = None

    async def serve(self, requests: BinaryIO, replies: BinaryIO) -> None:
        """Consumes requests until stdin closes; each becomes a task that sends one reply."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        LoopWatch(self._limit_s, on_blocked=self._catch_up).start()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        self._replies, _ = await loop.connect_write_pipe(asyncio.Protocol, replies)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                self._begin(json.loads(await reader.readexactly(size)))
        os._exit(0)  # asyncio would wait for threads, which may be stuck

    def _begin(self, request: dict[str, Any]) -> None:
        number = request["episode"]
        if request["type"] == "start":
            episode = self._episodes[number] = _Hosted()
        elif number in self._episodes:
            episode = self._episodes[number]
        else:
            self._send(request["id"], CallFailed("invalid", "the episode has ended, or never began").reply)
            return
        if request["type"] == "close":
            self._drop(number, episode, reply_to=request["id"])
        else:
            episode.call = asyncio.create_task(self._call(request, episode), name=f"episode {number}")

    async def _call(self, request: dict[str, Any], episode: _Hosted) -> None:
        """Answer `start` or `step`, and drop the episode if that was its end."""
        try:
            reply = await self._limited(self._start if request["type"] == "start" else self._step, request, episode)
        except CallFailed as err:
            reply = err.reply
        if self._send(request["id"], reply) in ("end", "failed"):
            self._drop(request["episode"], episode)

    async def _start(self, request: dict[str, Any], episode: _Hosted) -> Reply:
        episode.environment = await asyncio.to_thread(self._make)
        episode.environment.is_graded = request.get("is_graded", True)
        if self._servers is not None:
            assert isinstance(episode.environment, ToolEnvironment)
            episode.tools = self._servers.for_episode(request["row"])
            episode.environment.served = await episode.tools.open()
        reset = await self._run(episode.environment.reset, request["row"])
        _require(reset, Reset, of=episode.environment.reset)
        episode.first = reset.messages
        told: Reply = {"type": "reset", "messages": list(reset.messages), "tools": list(reset.tools)}
        return told | ({"tokens": list(reset.tokens)} if reset.tokens else {}) | _limit(reset)

    async def _step(self, request: dict[str, Any], episode: _Hosted) -> Reply:
        assert episode.environment is not None
        result = await self._run(episode.environment.step, _turn(request["turn"]))
        _require(result, (Observation, End), of=episode.environment.step)
        if isinstance(result, End):
            messages = cut_messages(result.messages, limit=self._output_bytes)
            ended: Reply = {"type": "end", "messages": messages, "reward": result.reward}
            named = {"terms": dict(result.terms), "metrics": dict(result.metrics)}
            return ended | {name: values for name, values in named.items() if values}
        told: Reply = {"type": "observation", "messages": [], "reward": result.reward, **_limit(result)}
        if result.tokens:
            return told | {"tokens": list(result.tokens)}
        if result.rewrites:
            messages = [one for message in result.messages for one in self._cut_if_new(message, episode)]
            return told | {"messages": messages, "rewrites": True}
        return told | {"messages": cut_messages(result.messages, limit=self._output_bytes)}

    def _cut_if_new(self, message: Message, episode: _Hosted) -> list[Message]:
        """Return a message of a whole conversation as the policy saw it before, or with a limit of its own."""
        is_whole = episode.environment is not None and episode.environment.asks_itself
        if is_whole or message.get("role") == "assistant" or message in episode.first:
            return [message]
        return cut_messages([message], limit=self._output_bytes)

    async def _limited(self, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Run code of the user within the time limit; raise CallFailed for anything that goes wrong."""
        call = asyncio.current_task()
        assert call is not None
        _CALL.set(call)
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                self._limits.add(limit)
                return await method(*arguments)
        except CallFailed:
            raise
        except BaseException as err:  # noqa: BLE001  code of the user; SystemExit too
            stuck = self._threads.are_left_by(call)
            if limit.expired() and isinstance(err, TimeoutError):
                raise CallFailed("timeout", f"timed out after {self._limit_s:g} s", stuck=stuck) from None
            if isinstance(err, asyncio.CancelledError):
                raise CallFailed("raised", "cancelled", stuck=stuck) from None
            raise self._failure(err) from None
        finally:
            self._limits.discard(limit)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the user."""
        try:
            return await run(function, *arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as err:  # noqa: BLE001  code of the user
            raise self._failure(err, of=function) from None

    def _failure(self, err: BaseException, *, of: object = None) -> CallFailed:
        first = err
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, EnvironmentLost):
            return CallFailed("host", str(first), loss=first.loss)
        print_failure("a call failed", err)
        if isinstance(first, Blocked):
            where = place_of_error(first)
            reason = f"timed out after {self._limit_s:g} s, blocking all episodes of its host ({where})"
            return CallFailed("timeout", reason)
        return CallFailed("raised", f"raised {describe(err, of=of)}")

    def _catch_up(self) -> None:
        """Give calls time to read what arrived while another one blocked the loop, so that they do not time out."""
        until = asyncio.get_running_loop().time() + _CATCH_UP_S
        for limit in self._limits:
            if not limit.expired() and (limit.when() or 0.0) < until:
                limit.reschedule(until)

    def _drop(self, number: int, episode: _Hosted, *, reply_to: int | None = None) -> None:
        """Forget an episode, end its call, and close its environment, once; then reply, if asked."""
        if self._episodes.get(number) is not episode:
            return  # `close` came during its last call
        del self._episodes[number]
        task = asyncio.create_task(self._close(episode, reply_to=reply_to), name=f"close {number}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, episode: _Hosted, *, reply_to: int | None) -> None:
        if episode.call is not None and reply_to is not None:  # without `reply_to`, the call itself drops the episode
            episode.call.cancel()
            await asyncio.wait([episode.call])
        reply: Reply = {"type": "closed"}
        if episode.environment is not None and type(episode.environment).close is not Environment.close:
            try:
                await self._limited(self._run, episode.environment.close)
            except CallFailed as err:
                reply = err.reply
        if episode.tools is not None:
            await episode.tools.close()
        if reply_to is not None:
            self._send(reply_to, reply)
        elif reply["type"] == "failed":
            sys.stderr.write(f"close {reply['reason']}\n")

    def _send(self, number: int, reply: Reply) -> str:
        """Send a reply, or the reason why it cannot be sent; return the type of the message that was sent."""
        _end_if_forked(self._pid)
        try:
            frame = _encode({"id": number, **reply})
            if len(frame) > self._reply_bytes:
                raise ValueError(f"{len(frame):,} bytes; at most {self._reply_bytes:,} are allowed")
        except (TypeError, ValueError, RecursionError) as err:  # not JSON, NaN
            reply = CallFailed("invalid", str(err)).reply
            frame = _encode({"id": number, **reply})
        assert self._replies is not None
        self._replies.write(HEADER.pack(len(frame)) + frame)
        return str(reply["type"])


class _Threads(ThreadPoolExecutor):
    """Threads that know for which call they work."""

    def __init__(self, max_threads: int) -> None:
        threading.stack_size(_STACK_BYTES)
        super().__init__(max_threads, thread_name_prefix="environment")
        self._working: dict[Future[Any], asyncio.Task[Any] | None] = {}

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = super().submit(_unforked, function, *arguments, **named)
        self._working[future] = _CALL.get()
        future.add_done_callback(lambda done: self._working.pop(done, None))
        return future

    def are_left_by(self, call: asyncio.Task[Any]) -> bool:
        """Return whether a thread still works for a call that no longer waits for it."""
        return call in [*self._working.values()]


def _unforked(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function, and return in this process alone."""
    own = os.getpid()
    try:
        return function(*arguments, **named)
    finally:
        _end_if_forked(own)


def _end_if_forked(own: int) -> None:
    """End a process that code of the user has forked from process `own`, and let return."""
    if os.getpid() != own:
        os._exit(1)


def cut_messages(messages: Sequence[Message], *, limit: int) -> list[Message]:
    """Return messages with at most `limit` bytes of content in all; a mark, not counted, says what was cut.

    >>> cut_messages([{"role": "tool", "content": "abcdef"}], limit=4)[0]["content"]
    'abcd\\n[output cut: 6 bytes, 4 kept]'
    """
    kept = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            data = content.encode("utf-8", "replace")
            if len(data) > limit:
                head = data[:limit].decode("utf-8", "ignore")
                mark = f"[output cut: {len(data):,} bytes, {len(head.encode()):,} kept]"
                message = {**message, "content": f"{head}\n{mark}" if head else mark}
            limit -= min(len(data), limit)
        kept.append(message)
    return kept


def _turn(fields: dict[str, Any]) -> Turn:
    tuples = {name: tuple(fields.get(name, ())) for name in ("token_ids", "logprobs")}
    return Turn(**{**fields, **tuples, "calls": tuple(ToolCall(**call) for call in fields["calls"])})


def _limit(given: Reset | Observation) -> Reply:
    return {"turn_tokens": given.turn_tokens} if given.turn_tokens else {}


def _require(result: object, kinds: type | tuple[type, ...], *, of: Callable[..., Any]) -> None:
    if not isinstance(result, kinds):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        where = f" ({place})" if (place := definition_of(of)) else ""
        raise CallFailed("invalid", f"{of.__name__} returned {type(result).__name__}, not {wanted}{where}")


def _encode(content: dict[str, Any]) -> bytes:
    """JSON in UTF-8; a lone surrogate, which has no UTF-8, becomes a question mark."""
    return json.dumps(content, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")


if __name__ == "__main__":
    main()
