"""The servers of a run, one keeper each: up, watched, lost, back again.

Invariant: an incarnation of an instance is reported up once and lost once, in this order; InstanceLost carries the
token counts after the trajectories were fenced, so nothing the dead server still says can count.

Keeper loop, per instance. Consumes: condemnations and the end of the server's process. Produces: InstanceUp,
InstanceLost. Waits for: either of the two (and for the server to start, with a limit). Unblocked by: `condemn`, the
process's exit, a failed health check of an external server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from dora.core.events import Event, InstanceLost, InstanceUp
from dora.core.ids import InstanceId, TrajectoryId
from dora.engine.client import EngineClient
from dora.engine.probe import is_alive, probe
from dora.errors import ConfigError, RemoteError, RunFailed

log = structlog.get_logger(__name__)

#: Starts of one instance that may fail in a row; after that it is left out of the run.
MAX_START_FAILURES = 5
#: Pause before the n-th restart, doubled each time, seconds.
RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 30.0
#: How often an external server is asked whether it lives, and how long it may take to answer (a paused SGLang
#: answers 503 after 20 s).
HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 30.0
HEALTH_STRIKES = 3
#: How long a lost external server may take to come back; as often as MAX_START_FAILURES.
RETURN_TIMEOUT_S = 3_600.0
PROBE_TIMEOUT_S = 60.0


class Server(Protocol):
    """One server as its owner (the node's supervisor, or somebody else) offers it."""

    async def start(self) -> str:
        """Start it if it is ours to start; returns its URL once it answers. RemoteError if it does not."""

    async def ended(self) -> str:
        """Waits until the server is gone; returns why. Never returns for a server that is not ours."""

    async def kill(self) -> None:
        """End it now if it is ours."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run lets one instance do."""

    slots: int
    kv_tokens: int
    context_tokens: int  # longest prompt + token budget: what every server must be able to hold


class Fleet:
    """All instances of the run."""

    def __init__(
        self,
        servers: list[Server],
        *,
        client: EngineClient,
        limits: Limits,
        emit: Callable[[Event], Awaitable[None]],
        fence: Callable[[InstanceId], dict[TrajectoryId, int]],
        now: Callable[[], float],
        incarnations: dict[InstanceId, int],
    ) -> None:
        self._servers = servers
        self._client = client
        self._limits = limits
        self._emit = emit
        self._fence = fence
        self._now = now
        self._incarnation = [incarnations.get(InstanceId(i), 0) for i in range(len(servers))]
        self._condemned = [asyncio.Event() for _ in servers]
        self._reason = [""] * len(servers)
        self.urls: dict[InstanceId, str] = {}  #: of the instances that are up
        self._given_up = 0

    @property
    def size(self) -> int:
        """Number of instances, up or not."""
        return len(self._servers)

    def condemn(self, instance: InstanceId, *, incarnation: int, reason: str) -> None:
        """Have an instance declared lost and brought back."""
        if self._incarnation[instance] == incarnation and instance in self.urls:
            self._reason[instance] = reason
            self._condemned[instance].set()

    async def keep(self, index: int) -> None:
        """Keep one instance in the run until cancelled, or until it failed to start too often."""
        instance = InstanceId(index)
        failures = 0
        while failures < MAX_START_FAILURES:
            if failures:
                await asyncio.sleep(min(RESTART_PAUSE_S * 2**failures, MAX_RESTART_PAUSE_S))
            try:
                await self._bring_up(instance)
            except RemoteError as err:
                failures += 1
                log.warning("instance_start_failed", instance=instance, failures=failures, reason=str(err))
                await self._servers[index].kill()
                continue
            reason = await self._wait_for_its_end(instance)
            del self.urls[instance]
            counts = self._fence(instance)
            log.warning("instance_lost", instance=instance, reason=reason, trajectories=len(counts))
            await self._emit(InstanceLost(self._now(), instance, self._incarnation[instance], counts, reason))
            await self._servers[index].kill()
            failures = 1  # a short pause before it is started again
        self._given_up += 1
        log.error("instance_given_up", instance=instance, failures=failures)
        if self._given_up == len(self._servers):
            raise RunFailed("no inference server is left: each failed to start five times; see the servers' logs")

    async def _bring_up(self, instance: InstanceId) -> None:
        url = await self._servers[instance].start()
        capabilities = await probe(self._client, url, timeout_s=PROBE_TIMEOUT_S)
        room = capabilities.context_length or capabilities.max_total_tokens
        if min(room, capabilities.max_total_tokens) < self._limits.context_tokens:
            raise ConfigError(
                f"{url}: holds {min(room, capabilities.max_total_tokens)} tokens of one request, but "
                f"task.max_prompt_tokens + rollout.max_new_tokens is {self._limits.context_tokens}; lower one of them"
            )
        self._condemned[instance].clear()
        self._incarnation[instance] += 1
        self.urls[instance] = url
        log.info("instance_up", instance=instance, url=url, incarnation=self._incarnation[instance])
        await self._emit(
            InstanceUp(
                self._now(),
                instance,
                self._incarnation[instance],
                min(self._limits.slots, capabilities.max_running),
                min(self._limits.kv_tokens, capabilities.max_total_tokens),
            )
        )

    async def _wait_for_its_end(self, instance: InstanceId) -> str:
        """Why the instance is lost."""
        condemned = asyncio.create_task(self._condemned[instance].wait(), name=f"condemned-{instance}")
        ended = asyncio.create_task(self._servers[instance].ended(), name=f"ended-{instance}")
        try:
            await asyncio.wait({condemned, ended}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else self._reason[instance]
        finally:
            condemned.cancel()
            ended.cancel()
            await asyncio.gather(condemned, ended, return_exceptions=True)


class ExternalServer:
    """A server that others started: it is watched, never killed."""

    def __init__(self, url: str, *, client: EngineClient) -> None:
        self._url = url
        self._client = client

    async def start(self) -> str:
        """Its URL, once it is well: whoever started it may need a while to start it again."""
        try:
            async with asyncio.timeout(RETURN_TIMEOUT_S):
                while not await self._is_well():  # noqa: ASYNC110 - another process can only be asked again
                    await asyncio.sleep(HEALTH_INTERVAL_S)
        except TimeoutError:
            raise RemoteError(f"{self._url}: did not answer its health check for {RETURN_TIMEOUT_S:g} s") from None
        return self._url

    async def ended(self) -> str:
        """Waits until it has missed several health checks in a row."""
        strikes = 0
        while strikes < HEALTH_STRIKES:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            strikes = 0 if await self._is_well() else strikes + 1
        return f"{self._url}: missed {strikes} health checks in a row"

    async def kill(self) -> None:
        """It is not ours."""

    async def _is_well(self) -> bool:
        return await is_alive(self._client, self._url, timeout_s=HEALTH_TIMEOUT_S)
