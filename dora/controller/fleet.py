"""The instances of a run. One keeper task per instance starts, watches and restarts its server.

Invariant: each incarnation of an instance is reported up once and then lost once. InstanceLost has the token counts
after the trajectories were fenced, so later tokens of the lost server are refused. A controller gives each id to one
server only. A server that was kept running by its node is reported up only at rest, with the version that it serves.

A keeper produces InstanceUp, InstanceLost and PrefillReported. It waits for `condemn`, the end of the server's process
or missed health checks, and is cancelled by `dismiss`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import structlog

from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.run_tasks import Loop
from dora.core.events import InstanceLost, InstanceUp, PrefillReported
from dora.core.ids import FOREIGN_VERSION, InstanceId, TrajectoryId, VersionId
from dora.core.tables import Server
from dora.engine.api import AdapterNeeds, Capabilities, InferenceEngine
from dora.engine.errors import ServerGone
from dora.engine.model_check import require_same_shapes
from dora.engine.names import digest_in
from dora.errors import ConfigError, RemoteError, RunFailed
from dora.observe.facts import Down

log = structlog.get_logger(__name__)

#: Consecutive failed starts after which an instance is given up.
MAX_START_FAILURES = 5
#: Pause before the first restart, in seconds; doubled each time.
RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 30.0
#: Interval and timeout of health checks, and the consecutive failures after which an instance is lost. A busy server
#: may take 20 s to report that it is unhealthy.
HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 30.0
HEALTH_STRIKES = 3
#: Time in which a lost external server has to come back, in each of MAX_START_FAILURES attempts.
RETURN_TIMEOUT_S = 3_600.0
PROBE_TIMEOUT_S = 60.0
#: Time in which a server that its node kept must be at rest; it may first have to finish a load of weights.
TAKE_OVER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers."""

    url: str
    is_kept: bool = False  # it ran before under an earlier controller: requests, a pause or a push may be under way


class KeptServer(Protocol):
    """A managed or external server."""

    async def start(self) -> Started:
        """Start a managed server; return once the server answers. RemoteError if it does not.

        A server that its node kept running is not started again, unless `kill` was called.
        """

    async def ended(self) -> str:
        """Wait until a managed server's process has ended and return why; never returns for an external one."""

    async def kill(self) -> None:
        """Kill a managed server."""

    async def stop(self) -> None:
        """Shut a managed server down; leave an external one running and unpaused."""


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Limits and requirements of a run's instances."""

    streams: int  # connections that this host allows; each slot of an instance needs one
    slots: int | None  # of each; None: as many as the server reports
    kv_tokens: int | None
    context_tokens: int  # longest prompt + token limit, which every server must be able to hold
    model: Path  # every server's model must have the same shapes
    path_map: Mapping[str, str]  # local folders -> folders as servers see them
    adapters: AdapterNeeds | None = None  # that every server must be able to hold; None: versions are full weights
    transfer: str = "disk"  # `weights.transfer`
    routing: bool = False  # the engine's choice of experts is replayed


@dataclass(slots=True)
class _Member:
    """One instance of the run, up or not."""

    server: KeptServer
    incarnation: int = 0
    condemned: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""  # why it is condemned
    has_joined: bool = False  # of a node or a user, at any time of the run
    given_up: bool = False
    inquiry: asyncio.Lock = field(default_factory=asyncio.Lock)  # held during an inquiry
    inquiries: int = 0  # completed
    label: str | None = None  # result of the last inquiry
    keeper: asyncio.Task[None] | None = None


class Fleet:
    """All instances of the run."""

    def __init__(
        self,
        servers: list[KeptServer],
        *,
        engine: InferenceEngine,
        limits: FleetLimits,
        inbox: Inbox,
        in_flight: InFlight,
        rows: Mapping[InstanceId, Server],
        removed: Collection[InstanceId],
        version_of: Callable[[str], VersionId],
        now: Callable[[], float],
    ) -> None:
        """`rows` is the core's instance table, which is read only; `removed` has the instances that have left, whose
        numbers are not given again. `version_of` returns the journaled version with a label, or FOREIGN_VERSION."""
        self._engine = engine
        self._limits = limits
        self._inbox = inbox
        self._in_flight = in_flight
        self._rows = rows
        self._version_of = version_of
        self._now = now
        self._members = {InstanceId(i): _Member(server) for i, server in enumerate(servers)}
        for instance, member in self._members.items():
            if instance in rows:
                member.incarnation = rows[instance].incarnation
        self._next = InstanceId(max([len(servers) - 1, *rows, *removed]) + 1)
        self._keepers: asyncio.TaskGroup | None = None
        self._streams = Counter[InstanceId]()  # under way
        self._has_served = False  # an instance has been up
        self.urls: dict[InstanceId, str] = {}  #: of the instances that are up
        self.labels: dict[InstanceId, str] = {}  #: of the weights with which each came up
        self.down: dict[InstanceId, Down] = {}  #: the instances that are not

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the named coroutines to run together with the controller."""
        return [("fleet", self.run())]

    async def run(self) -> None:
        """Run the keepers until cancelled; RunFailed once every instance is given up."""
        async with asyncio.TaskGroup() as self._keepers:
            for instance in self._members:
                self._start_keeper(instance)

    def _start_keeper(self, instance: InstanceId) -> None:
        assert self._keepers is not None, "the fleet is not running"
        self._members[instance].keeper = self._keepers.create_task(self.keep(instance), name=f"instance-{instance}")

    # -- membership ---------------------------------------------------------------------------------------------------

    def require_room(self, url: str, *, slots: int) -> None:
        """Raise ConfigError if a server with so many slots needs more connections than this host allows."""
        limits = self._limits
        slots = min(limits.slots or slots, slots)
        needed = slots + sum(self._rows[id].slots if id in self._rows else slots for id in self._members)
        if needed > limits.streams:
            raise ConfigError(
                f"{url}: the requests of {len(self._members) + 1} instances need up to {needed} connections, but this "
                f"host allows {limits.streams}; raise the hard limit of open files (ulimit -Hn), or lower engine.slots"
            )

    def join(self, url: str, *, slots: int) -> InstanceId:
        """Add an external server, which the caller has examined: it has so many slots."""
        self.require_room(url, slots=slots)
        instance, self._next = self._next, InstanceId(self._next + 1)
        self._members[instance] = _Member(ExternalServer(url, engine=self._engine), has_joined=True)
        self._start_keeper(instance)
        return instance

    def add(self, server: KeptServer, *, instance: InstanceId | None = None) -> InstanceId:
        """Add a server of a node, as this instance or as a further one."""
        if instance is None:
            instance = self._next
        self._next = InstanceId(max(self._next, instance + 1))
        member = self._members[instance] = _Member(server, has_joined=True)
        if instance in self._rows:
            member.incarnation = self._rows[instance].incarnation
        if self._keepers is not None:
            self._start_keeper(instance)
        return instance

    def url(self, instance: InstanceId) -> str:
        """Return the address of an instance; RemoteError if it is down."""
        if (url := self.urls.get(instance)) is None:
            raise RemoteError(f"instance {instance} is down")
        return url

    def find(self, url: str) -> InstanceId | None:
        """Return the instance at this address."""
        for instance, member in self._members.items():
            held = member.server.url if isinstance(member.server, ExternalServer) else self.urls.get(instance)
            if held == url:
                return instance
        return None

    def __contains__(self, instance: InstanceId) -> bool:
        """Whether an instance is of the run, up or not."""
        return instance in self._members

    async def dismiss(self, instance: InstanceId) -> None:
        """Remove an instance, which the core has emptied, from the run, unless it has left already."""
        if (member := self._members.pop(instance, None)) is None:
            return
        if member.keeper is not None:
            member.keeper.cancel()
            await asyncio.wait({member.keeper})
        self.urls.pop(instance, None)
        self.down.pop(instance, None)
        try:
            await member.server.stop()
        except RemoteError as err:
            log.warning("instance_stop_failed", instance=instance, reason=str(err))
        log.info("instance_removed", instance=instance)

    def condemn(self, instance: InstanceId, *, incarnation: int, reason: str) -> None:
        """Have an instance declared lost and restarted."""
        member = self._members.get(instance)
        if member is not None and member.incarnation == incarnation and instance in self.urls:
            member.reason = reason
            member.condemned.set()

    # -- keepers ------------------------------------------------------------------------------------------------------

    async def keep(self, instance: InstanceId) -> None:
        """Keep one instance up until cancelled, or until MAX_START_FAILURES consecutive starts have failed.

        ConfigError if a server that the configuration names is unsuitable at its first start, or any before one is up.
        """
        member = self._members[instance]
        failures = 0
        self._note_down(instance, "")
        while failures < MAX_START_FAILURES:
            if failures:
                await asyncio.sleep(min(RESTART_PAUSE_S * 2**failures, MAX_RESTART_PAUSE_S))
            try:
                url = await self._bring_up(instance, member)
            except (RemoteError, ConfigError) as err:
                is_first = not self._has_served or (not failures and not member.has_joined)
                if isinstance(err, ConfigError) and is_first:  # otherwise this server is at fault, not the file
                    raise
                failures += 1
                self._note_down(instance, str(err))
                log.warning("instance_start_failed", instance=instance, failures=failures, reason=str(err))
                await self._kill(instance, member)
                continue
            reason = await self._wait_for_its_end(instance, member, url)
            del self.urls[instance]
            self._note_down(instance, reason)
            counts = self._in_flight.fence(instance)
            log.warning("instance_lost", instance=instance, reason=reason, trajectories=len(counts))
            await self._inbox.emit(InstanceLost(self._now(), instance, member.incarnation, counts, reason))
            await self._kill(instance, member)
            failures = 1  # for a short pause before the restart
        member.given_up = True
        self.down[instance] = replace(self.down[instance], then=f"given up after {failures} failed starts")
        log.error("instance_given_up", instance=instance, failures=failures)
        if all(member.given_up for member in self._members.values()):
            raise RunFailed("no inference server is left: each failed to start five times; see the servers' logs")

    async def _kill(self, instance: InstanceId, member: _Member) -> None:
        """Kill a server. If it does not end (stuck in a driver, for example), its next start fails."""
        try:
            await member.server.kill()
        except RemoteError as err:
            log.warning("instance_kill_failed", instance=instance, reason=str(err))

    def _note_down(self, instance: InstanceId, reason: str) -> None:
        is_external = isinstance(self._members[instance].server, ExternalServer)
        since = self.down[instance].since if instance in self.down else self._now()
        then = "waiting for it to answer" if is_external else "being restarted"
        self.down[instance] = Down(since, reason, then)

    async def _bring_up(self, instance: InstanceId, member: _Member) -> str:
        started = await member.server.start()
        url, version, digest = started.url, None, ""
        if started.is_kept:
            version, digest = await self._take_over(url)
        try:
            capabilities = await self.examine(url)
        except ConfigError as err:
            if started.is_kept:  # perhaps of another configuration; one that is started for this one will tell
                raise RemoteError(str(err)) from err
            raise
        if self._limits.adapters is not None:
            await self._engine.clear_adapters(url, timeout_s=TAKE_OVER_TIMEOUT_S)
        member.condemned.clear()
        member.incarnation += 1
        self.labels[instance] = capabilities.label
        self.urls[instance] = url
        self._has_served = True
        self.down.pop(instance, None)
        log.info("instance_up", instance=instance, url=url, incarnation=member.incarnation, version=version)
        await self._inbox.emit(
            InstanceUp(
                self._now(),
                instance,
                member.incarnation,
                min(self._limits.slots or capabilities.slots, capabilities.slots),
                min(self._limits.kv_tokens or capabilities.kv_tokens, capabilities.kv_tokens),
                version,
                digest,
            )
        )
        return url

    async def _take_over(self, url: str) -> tuple[VersionId | None, str]:
        """Bring a kept server to rest; return the journaled version that it holds, if any, and its digest."""
        label = await self._engine.take_over(url, timeout_s=TAKE_OVER_TIMEOUT_S)
        version = self._version_of(label)
        return (version, digest_in(label)) if version != FOREIGN_VERSION else (None, "")

    async def examine(self, url: str) -> Capabilities:
        """Return the capabilities of a server; ConfigError if they are not sufficient for this run."""
        capabilities = await self._engine.examine(url, timeout_s=PROBE_TIMEOUT_S)
        if capabilities.longest_request < self._limits.context_tokens:
            raise ConfigError(
                f"{url}: accepts requests of up to {capabilities.longest_request} tokens, but "
                f"task.max_prompt_tokens + rollout.max_new_tokens is {self._limits.context_tokens}; lower one of them"
            )
        limits = self._limits
        capabilities.require_meant(url, slots=limits.slots, transfer=limits.transfer, routing=limits.routing)
        if limits.adapters is not None:
            await self._engine.require_adapters(url, limits.adapters)
        require_same_shapes(url, capabilities.model_path, model=limits.model, path_map=limits.path_map)
        return capabilities

    async def _wait_for_its_end(self, instance: InstanceId, member: _Member, url: str) -> str:
        """Wait until the instance is lost, and return why."""

        async def condemned() -> str:
            await member.condemned.wait()
            return member.reason

        waits = [
            asyncio.create_task(wait, name=f"{name}-{instance}")
            for name, wait in (
                ("condemned", condemned()),
                ("ended", member.server.ended()),
                ("unhealthy", self._unhealthy(instance, url)),
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

    async def _unhealthy(self, instance: InstanceId, url: str) -> str:
        """Wait until the server has missed HEALTH_STRIKES consecutive checks, except while a push may pause it."""
        strikes = 0
        prefill = _Prefill()
        while strikes < HEALTH_STRIKES:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            row = self._rows.get(instance)
            if row is None or row.may_be_paused:
                is_healthy = not await self._refuses_connections(url)
            else:
                is_healthy = await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S)
                if await self._prefills(row, url, prefill):
                    await self._inbox.emit(PrefillReported(self._now(), instance))
                    is_healthy = True
                is_healthy |= row.may_be_paused
                if is_healthy and await self._has_restarted(instance):
                    return f"{url}: was started again, and has none of its versions any more"
            strikes = 0 if is_healthy else strikes + 1
        return f"{url}: missed {strikes} health checks in a row"

    async def inquire(self, instance: InstanceId) -> str | None:
        """Return the label of the weights of a server whose stream broke off, or None if it is not healthy.

        Calls during an inquiry share its result, because all streams of a server may break off at once.
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

    def is_known(self, label: str, *, instance: InstanceId) -> bool:
        """Whether a server with this label has weights of this run; with adapters, those with which it came up."""
        if self._limits.adapters is not None:
            return label == self.labels.get(instance)
        return self._version_of(label) != FOREIGN_VERSION

    @asynccontextmanager
    async def stream(self, instance: InstanceId) -> AsyncIterator[None]:
        """Open while a request streams; ServerGone if its server was started again or does not answer."""
        if await self._has_restarted(instance) is not False:
            raise ServerGone(f"instance {instance}: does not answer, or was started again and has lost its versions")
        self._streams[instance] += 1
        try:
            yield
        finally:
            self._streams[instance] -= 1

    async def _has_restarted(self, instance: InstanceId) -> bool | None:
        """Whether an external server, whose end nobody sees, has lost its versions; None if it does not answer.

        One with streams has not, as a restart breaks them off. What they report at their end is not judged here.
        """
        member, held = self._members.get(instance), self._versions_of(instance)
        if member is None or not isinstance(member.server, ExternalServer) or not held or self._streams[instance]:
            return False
        label = await self.inquire(instance)
        if self._versions_of(instance) != held:  # the label may be older than a push, or that of one under way
            return False
        return label if label is None else not self.is_known(label, instance=instance)

    def _versions_of(self, instance: InstanceId) -> list[VersionId]:
        row = self._rows.get(instance)
        return [holding.version for holding in row.holdings if holding.version is not None] if row is not None else []

    async def _ask_label(self, instance: InstanceId, url: str) -> str | None:
        row = self._rows.get(instance)
        is_paused = row is not None and row.may_be_paused
        if not is_paused and not await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S):
            return None
        try:
            return await self._engine.label(url)
        except RemoteError:
            return None

    async def _refuses_connections(self, url: str) -> bool:
        """Whether connections are refused. A paused server may fail health checks, but it accepts connections."""
        try:
            await self._engine.label(url)
        except ServerGone:
            return True
        except RemoteError:
            return False
        return False

    async def _prefills(self, row: Server, url: str, seen: _Prefill) -> bool:
        """Whether KV use has reached a new maximum while no resident got a token, which only a prefill explains."""
        if row.reported is not seen.reported or list(row.residents) != seen.residents or not seen.residents:
            seen.reported, seen.residents, seen.peak = row.reported, list(row.residents), None
            return False
        try:
            used_tokens = (await self._engine.kv_use(url)).used_tokens
        except RemoteError:
            return False  # the health check decides
        grew = seen.peak is not None and used_tokens > seen.peak
        seen.peak = max(used_tokens, seen.peak or 0)
        return grew


@dataclass(slots=True)
class _Prefill:
    """The state of an instance at its last health check."""

    reported: Mapping[TrajectoryId, int] | None = None
    residents: list[TrajectoryId] = field(default_factory=list)
    peak: int | None = None  # maximum of KV tokens in use since a resident last got a token; None: unknown


class ExternalServer:
    """A server that is not managed by the run: it is watched, but never started or ended."""

    def __init__(self, url: str, *, engine: InferenceEngine) -> None:
        self.url = url
        self._engine = engine

    async def start(self) -> Started:
        """Return once the server is healthy; its owner may need a while to restart it."""
        try:
            async with asyncio.timeout(RETURN_TIMEOUT_S):
                while not await self._engine.is_alive(self.url, timeout_s=HEALTH_TIMEOUT_S):  # noqa: ASYNC110 - polling
                    await asyncio.sleep(HEALTH_INTERVAL_S)
        except TimeoutError:
            raise RemoteError(f"{self.url}: did not answer its health check for {RETURN_TIMEOUT_S:g} s") from None
        return Started(self.url)

    async def ended(self) -> str:
        """Never return: the process cannot be observed."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def kill(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Resume the server, which a failed push may have left paused."""
        await self._engine.resume(self.url)
