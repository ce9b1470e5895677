"""One host process, from its start to its end: requests and replies in any order.

Invariant: each call has one outcome, and no request is sent twice. A host that exceeds a time limit, dies or breaks the
protocol is killed with everything it started (dora/tasks/guard.py), and never used again; all its calls then raise
HostLost.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from dora.environments.bootstrap import command_of
from dora.environments.failures import Death
from dora.environments.replies import Head, Ready, decode
from dora.errors import ConfigError, ProtocolError
from dora.tasks.child import GuardedProcess

if TYPE_CHECKING:
    from dora.config.schema import EnvironmentConfig

log = structlog.get_logger(__name__)

#: Maximum size of a reply: the messages of `reset`, or an observation of 1 MiB with every byte escaped.
REPLY_BYTES = 16 << 20

#: A host must report that a call, or the start of a server, exceeded its time limit within this much more time;
#: otherwise the host itself hangs.
_GRACE_S = 5.0

#: Losses that are kept, in which episodes may still fail.
MAX_LOSSES = 16

#: Timeout for reading a reply that is already in the pipe.
_UNREAD_S = 0.1


class HostLost(Exception):
    """The host of an episode is gone. `is_own`: the episode may have caused it, because the host was running a call of
    the episode, or no call at all."""

    def __init__(self, how: str, *, is_own: bool) -> None:
        super().__init__(how)
        self.is_own = is_own


class StartFailed(Exception):
    """A host did not become ready; the message says how it ended."""


class HostProcess:
    """A host with the environment of `settings`, at the config key `field`.

    `on_lost` is called when it is lost, with False if `kill` was the reason; `on_output` with what it prints.
    `max_tokens`: of an episode, prompt included; 0: not known.
    """

    def __init__(
        self,
        settings: EnvironmentConfig,
        *,
        field: str,
        on_lost: Callable[[bool], None],
        number: int = 0,
        max_tokens: int = 0,
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        self._settings = settings
        self._max_tokens = max_tokens
        self._field = field
        self._on_lost = on_lost
        self._process = GuardedProcess(
            "host",
            max_bytes=REPLY_BYTES,
            argv=_argv(settings, number=number),
            environment=HOST_VARIABLES,
            on_output=on_output,
        )
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._num_requests = 0
        self._reader: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None  # set as soon as the host is lost
        self._how = ""  # how the host ended; set when `_end` is done
        self._was_calling = False  # whether a call was running when the host was lost
        self.can_replay, self.gives_rewards, self.wants_tokens = False, True, False
        self.num_episodes = 0
        #: The sources and rows against which the loss of this host was counted.
        self.death = Death()
        self._deaths: dict[int, Death] = {}  # by their number, losses that the host survived, of servers of its tools
        #: Threads that never returned, and still take memory and time.
        self.num_stuck = 0

    @property
    def is_lost(self) -> bool:
        return self._end is not None

    async def start(self) -> None:
        """Start the process and wait until it is ready. ConfigError if it rejects the configuration, or StartFailed."""
        limit_s = self._settings.start_timeout_s
        await self._process.spawn()
        try:
            async with asyncio.timeout(limit_s + (_GRACE_S if self._settings.mcp else 0.0)):
                self._process.write(msgspec.json.encode({"id": 0, "type": "hello", **self._setup()}))
                ready: Ready = decode(await self._process.read(), Ready)
        except TimeoutError:
            raise StartFailed(f"not ready after {limit_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as err:
            raise StartFailed(await self._process.ending(err)) from None
        if ready.type == "refused":
            raise ConfigError(ready.reason)
        self.can_replay, self.gives_rewards = ready.can_replay, ready.gives_rewards
        self.wants_tokens = ready.wants_tokens
        self._reader = asyncio.create_task(self._read(), name="host-replies")

    def call(self, request: Mapping[str, Any]) -> Awaitable[bytes]:
        """Send a request at once, and return its reply as an awaitable. Awaiting it raises TimeoutError if the reply is
        not there in time (the host is then killed), and HostLost if the host is lost."""
        if self._end is not None:
            return self._refuse(self._end)
        self._num_requests += 1
        body = msgspec.json.encode({"id": self._num_requests, **request})
        reply = self._pending[self._num_requests] = asyncio.get_running_loop().create_future()
        try:
            self._process.write(body)
        except (OSError, RuntimeError) as err:  # the host died, and `_read` has not noticed it yet
            self._lose(ConnectionError(str(err)))
        return self._in_time(reply)

    def death_of(self, loss: int) -> Death:
        """Return what a loss that the host survived was counted against; episodes that failed by it have its number, or
        0 if it has none."""
        if not loss:
            return Death()
        if loss not in self._deaths and len(self._deaths) >= MAX_LOSSES:
            del self._deaths[next(iter(self._deaths))]
        return self._deaths.setdefault(loss, Death())

    async def kill(self) -> None:
        """End the process; every pending call raises HostLost."""
        if self._reader is None:  # it was never ready
            await self._process.kill()
        else:
            self._lose("killed", is_unexpected=False)
        if self._end is not None:
            await asyncio.wait([self._end])

    def _setup(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "protocol": 1,
            "field": self._field,
            "environment": settings.name,
            "options": settings.options,
            "episodes": settings.episodes_per_host,
            "call_timeout_s": settings.call_timeout_s,
            "max_tokens": self._max_tokens,
            "output_bytes": settings.output_bytes,
            "reply_bytes": REPLY_BYTES,
            "start_timeout_s": settings.start_timeout_s,
            "mcp": [server.model_dump() for server in settings.mcp],
        }

    async def _refuse(self, end: asyncio.Task[None]) -> bytes:
        await asyncio.wait([end])  # a kill takes at most some seconds
        raise HostLost(self._how, is_own=not self._was_calling)

    async def _in_time(self, reply: asyncio.Future[bytes]) -> bytes:
        """Return the reply. If this process was itself stopped during the wait (as in the wait for graders), a reply
        that the host sent within the limit is still read and counts."""
        limit_s = self._settings.call_timeout_s
        try:
            for each_s in (limit_s + _GRACE_S, _UNREAD_S):
                done, _ = await asyncio.wait([reply], timeout=each_s)
                if done:
                    return reply.result()
            self._lose(f"killed, because a call did not return within {limit_s:g} s")
            raise TimeoutError
        finally:
            reply.cancel()  # no effect if it is done

    async def _read(self) -> None:
        try:
            while True:
                body = await self._process.read()
                reply = self._pending.pop(decode(body, Head).id, None)
                if reply is None:
                    raise ProtocolError("a reply to no request")
                if not reply.done():  # else nobody waits for it any more
                    reply.set_result(body)
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError) as err:
            self._lose(err)

    def _lose(self, cause: str | Exception, *, is_unexpected: bool = True) -> None:
        if self._end is None:
            self._was_calling = any(not reply.done() for reply in self._pending.values())
            self._end = asyncio.create_task(self._end_by(cause, is_unexpected=is_unexpected), name="host-end")
            self._on_lost(is_unexpected)

    async def _end_by(self, cause: str | Exception, *, is_unexpected: bool) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if isinstance(cause, str):
            await self._process.kill()
            self._how = cause
        else:
            self._how = await self._process.ending(cause)
        if is_unexpected:
            log.warning("host_lost", reason=self._how, episodes=self.num_episodes)
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(HostLost(self._how, is_own=True))


#: glibc reserves 64 MiB of address space for each arena, of which it makes up to 8 per core.
HOST_VARIABLES = {"MALLOC_ARENA_MAX": "2"}


def host_command(python: str) -> list[str]:
    """Return the command that starts a host in Python with this copy of DORA; "": the interpreter of this process."""
    return command_of(python or sys.executable, "dora.environments.host")


def _argv(settings: EnvironmentConfig, *, number: int) -> list[str]:
    command = settings.command or host_command(settings.python)
    return [str(settings.memory_mb), _cores(settings.cores, number=number), *command]


def _cores(count: int, *, number: int) -> str:
    """Return the CPU cores of host `number`: those after the host before it, from the last core down; "": all."""
    if not count or not hasattr(os, "sched_getaffinity"):
        return ""
    allowed = sorted(os.sched_getaffinity(0), reverse=True)
    return ",".join(str(allowed[(number * count + i) % len(allowed)]) for i in range(min(count, len(allowed))))
