"""The servers of a run, one keeper each: up, watched, lost, back again; and those that join and leave meanwhile.

Invariant: an incarnation of an instance is reported up once and lost once, in this order; InstanceLost carries the
token counts after the trajectories were fenced, so nothing the dead server still says can count. An id is never given
to a second server within one controller's life.

Keeper loop, per instance. Consumes: condemnations, the end of the server's process, health checks. Produces:
InstanceUp, InstanceLost, PrefillReported. Waits for: any of the three (and for the server to start, with a limit).
Unblocked by: `condemn`, the process's exit, missed health checks; cancelled by `dismiss`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.work import Loop
from dora.core.events import InstanceLost, InstanceUp, PrefillReported
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.tables import Instance
from dora.engine.api import Capabilities, InferenceEngine
from dora.engine.errors import ServerGone
from dora.engine.shapes import require_same_shapes
from dora.errors import ConfigError, RemoteError, RunFailed

log = structlog.get_logger(__name__)

#: Starts of one instance that may fail in a row; after that it is left out of the run.
MAX_START_FAILURES = 5
#: Pause before the n-th restart, doubled each time, seconds.
RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 30.0
#: How often a server is asked whether it lives, and how long it may take to answer (a busy one may look
#: for a sign of life in itself for 20 s before it says no).
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
        """Waits until the process is gone; returns why. Never returns for a server that is not ours."""

    async def kill(self) -> None:
        """End it now if it is ours."""

    async def stop(self) -> None:
        """Let the server leave the run: shut a managed one down, and leave an external one running and unpaused."""


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What the run lets its instances be and do."""

    instances: int  # at the same time: the client has streams for so many
    slots: int
    kv_tokens: int
    context_tokens: int  # longest prompt + token budget: what every server must be able to hold
    model: Path  # whose shapes every server's model must have
    path_map: Mapping[str, str]  # folders here -> folders as servers see them


@dataclass(slots=True)
class _Member:
    """One instance of the run, up or not."""

    server: Server
    incarnation: int = 0
    condemned: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""  # of its condemnation
    has_joined: bool = False  # at run time: what is wrong with it does not end the run
    given_up: bool = False
    inquiry: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the server is asked whether it is well
    inquiries: int = 0  # that have ended
    label: str | None = None  # what the last one found
    keeper: asyncio.Task[None] | None = None


class Fleet:
    """All instances of the run."""

    def __init__(
        self,
        servers: list[Server],
        *,
        engine: InferenceEngine,
        limits: FleetLimits,
        inbox: Inbox,
        in_flight: InFlight,
        rows: Mapping[InstanceId, Instance],
        now: Callable[[], float],
    ) -> None:
        """`rows` is the core's instance table: read for incarnations of an earlier controller, and by the watch."""
        self._engine = engine
        self._limits = limits
        self._inbox = inbox
        self._in_flight = in_flight
        self._rows = rows
        self._now = now
        self._members = {InstanceId(i): _Member(server) for i, server in enumerate(servers)}
        for instance, member in self._members.items():
            if instance in rows:
                member.incarnation = rows[instance].incarnation
        self._next = InstanceId(max([len(servers) - 1, *rows]) + 1)
        self._keepers: asyncio.TaskGroup | None = None
        self.urls: dict[InstanceId, str] = {}  #: of the instances that are up

    def loops(self) -> list[tuple[str, Loop]]:
        """To be run beside the controller."""
        return [("fleet", self.run())]

    async def run(self) -> None:
        """Keep all instances until cancelled. RunFailed when none is left."""
        async with asyncio.TaskGroup() as self._keepers:
            for instance in self._members:
                self._start_keeper(instance)

    def _start_keeper(self, instance: InstanceId) -> None:
        assert self._keepers is not None, "the fleet runs"
        self._members[instance].keeper = self._keepers.create_task(self.keep(instance), name=f"instance-{instance}")

    # -- who takes part -----------------------------------------------------------------------------------------------

    def join(self, url: str) -> InstanceId:
        """An external server takes part from now on; the caller has examined it."""
        if len(self._members) >= self._limits.instances:
            raise ConfigError(f"{url}: the run has {len(self._members)} instances, and no more can join")
        instance, self._next = self._next, InstanceId(self._next + 1)
        self._members[instance] = _Member(ExternalServer(url, engine=self._engine), has_joined=True)
        self._start_keeper(instance)
        return instance

    def find(self, url: str) -> InstanceId | None:
        """The instance at this address."""
        for instance, member in self._members.items():
            held = member.server.url if isinstance(member.server, ExternalServer) else self.urls.get(instance)
            if held == url:
                return instance
        return None

    async def dismiss(self, instance: InstanceId) -> None:
        """An instance leaves the run for good; the core has seen to it that it is empty."""
        member = self._members.pop(instance)
        if member.keeper is not None:
            member.keeper.cancel()
            await asyncio.wait({member.keeper})
        self.urls.pop(instance, None)
        try:
            await member.server.stop()
        except RemoteError as err:
            log.warning("instance_stop_failed", instance=instance, reason=str(err))
        log.info("instance_removed", instance=instance)

    def condemn(self, instance: InstanceId, *, incarnation: int, reason: str) -> None:
        """Have an instance declared lost and brought back."""
        member = self._members.get(instance)
        if member is not None and member.incarnation == incarnation and instance in self.urls:
            member.reason = reason
            member.condemned.set()

    # -- keepers ------------------------------------------------------------------------------------------------------

    async def keep(self, instance: InstanceId) -> None:
        """Keep one instance in the run until cancelled, or until it failed to start too often."""
        member = self._members[instance]
        failures = 0
        while failures < MAX_START_FAILURES:
            if failures:
                await asyncio.sleep(min(RESTART_PAUSE_S * 2**failures, MAX_RESTART_PAUSE_S))
            try:
                url = await self._bring_up(instance, member)
            except (RemoteError, ConfigError) as err:
                if isinstance(err, ConfigError) and not member.has_joined:
                    raise
                failures += 1
                log.warning("instance_start_failed", instance=instance, failures=failures, reason=str(err))
                await member.server.kill()
                continue
            reason = await self._wait_for_its_end(instance, member, url)
            del self.urls[instance]
            counts = self._in_flight.fence(instance)
            log.warning("instance_lost", instance=instance, reason=reason, trajectories=len(counts))
            await self._inbox.emit(InstanceLost(self._now(), instance, member.incarnation, counts, reason))
            await member.server.kill()
            failures = 1  # a short pause before it is started again
        member.given_up = True
        log.error("instance_given_up", instance=instance, failures=failures)
        if all(member.given_up for member in self._members.values()):
            raise RunFailed("no inference server is left: each failed to start five times; see the servers' logs")

    async def _bring_up(self, instance: InstanceId, member: _Member) -> str:
        url = await member.server.start()
        capabilities = await self.examine(url)
        member.condemned.clear()
        member.incarnation += 1
        self.urls[instance] = url
        log.info("instance_up", instance=instance, url=url, incarnation=member.incarnation)
        await self._inbox.emit(
            InstanceUp(
                self._now(),
                instance,
                member.incarnation,
                min(self._limits.slots, capabilities.slots),
                min(self._limits.kv_tokens, capabilities.kv_tokens),
            )
        )
        return url

    async def examine(self, url: str) -> Capabilities:
        """What the server can do; ConfigError if that is not enough for this run."""
        capabilities = await self._engine.examine(url, timeout_s=PROBE_TIMEOUT_S)
        if capabilities.longest_request < self._limits.context_tokens:
            raise ConfigError(
                f"{url}: holds {capabilities.longest_request} tokens of one request, but "
                f"task.max_prompt_tokens + rollout.max_new_tokens is {self._limits.context_tokens}; lower one of them"
            )
        limits = self._limits
        require_same_shapes(url, capabilities.model_path, model=limits.model, path_map=limits.path_map)
        return capabilities

    async def _wait_for_its_end(self, instance: InstanceId, member: _Member, url: str) -> str:
        """Why the instance is lost."""

        async def condemned() -> str:
            await member.condemned.wait()
            return member.reason

        waits = [
            asyncio.create_task(wait, name=f"{what}-{instance}")
            for what, wait in (
                ("condemned", condemned()),
                ("ended", member.server.ended()),
                ("unwell", self._unwell(instance, url)),
            )
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return min(done, key=waits.index).result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # -- health -------------------------------------------------------------------------------------------------------

    async def _unwell(self, instance: InstanceId, url: str) -> str:
        """Waits until the server has missed several checks in a row, those apart that a pause of ours may explain."""
        strikes = 0
        prefill = _Prefill()
        while strikes < HEALTH_STRIKES:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            row = self._rows.get(instance)
            if row is None or row.may_be_paused:
                is_well = not await self._is_gone(url)
            else:
                is_well = await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S)
                if await self._prefills(row, url, prefill):
                    await self._inbox.emit(PrefillReported(self._now(), instance))
                    is_well = True
                is_well |= row.may_be_paused
            strikes = 0 if is_well else strikes + 1
        return f"{url}: missed {strikes} health checks in a row"

    async def inquire(self, instance: InstanceId) -> str | None:
        """The label of the weights that the server holds, None if it is not well: asked when a stream broke off.

        Who asks while an inquiry is under way shares its answer: all streams of a server may break off at once.
        """
        member, url = self._members.get(instance), self.urls.get(instance)
        if member is None or url is None:
            return None
        before = member.inquiries
        async with member.inquiry:
            if member.inquiries == before:
                member.label = await self._ask_label(instance, url)
                member.inquiries += 1
            return member.label

    async def _ask_label(self, instance: InstanceId, url: str) -> str | None:
        row = self._rows.get(instance)
        is_paused = row is not None and row.may_be_paused
        if not is_paused and not await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S):
            return None
        try:
            return await self._engine.label(url)
        except RemoteError:
            return None

    async def _is_gone(self, url: str) -> bool:
        """Does nobody listen? A pause may silence a server's health check, but explains no refused connection."""
        try:
            await self._engine.label(url)
        except ServerGone:
            return True
        except RemoteError:
            return False
        return False

    async def _prefills(self, row: Instance, url: str, seen: _Prefill) -> bool:
        """Has its KV grown to a new height while no resident got a token? A prefill fills it; nothing else may."""
        if row.reported is not seen.reported or list(row.residents) != seen.residents or not seen.residents:
            seen.reported, seen.residents, seen.peak = row.reported, list(row.residents), None
            return False
        try:
            used_tokens = (await self._engine.kv_use(url)).used_tokens
        except RemoteError:
            return False  # its health says the rest
        grew = seen.peak is not None and used_tokens > seen.peak
        seen.peak = max(used_tokens, seen.peak or 0)
        return grew


@dataclass(slots=True)
class _Prefill:
    """What the last look at a server showed."""

    reported: Mapping[TrajectoryId, int] | None = None
    residents: list[TrajectoryId] = field(default_factory=list)
    peak: int | None = None  # most KV tokens in use since a resident last got a token; None: not asked yet


class ExternalServer:
    """A server that others started: it is watched, never ended."""

    def __init__(self, url: str, *, engine: InferenceEngine) -> None:
        self.url = url
        self._engine = engine

    async def start(self) -> str:
        """Its URL, once it is well: whoever started it may need a while to start it again."""
        try:
            async with asyncio.timeout(RETURN_TIMEOUT_S):
                while not await self._is_well():  # noqa: ASYNC110 - another process can only be asked again
                    await asyncio.sleep(HEALTH_INTERVAL_S)
        except TimeoutError:
            raise RemoteError(f"{self.url}: did not answer its health check for {RETURN_TIMEOUT_S:g} s") from None
        return self.url

    async def ended(self) -> str:
        """Nobody tells us."""
        await asyncio.Event().wait()
        raise AssertionError("waits until it is cancelled")

    async def kill(self) -> None:
        """It is not ours."""

    async def stop(self) -> None:
        """A push that failed may have left it paused."""
        await self._engine.resume(self.url)

    async def _is_well(self) -> bool:
        return await self._engine.is_alive(self.url, timeout_s=HEALTH_TIMEOUT_S)
