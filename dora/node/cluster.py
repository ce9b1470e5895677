"""The nodes of a run, as its controller sees them.

Each node has a place: the first ones have ranks, the others roll out. A node that comes back takes its old place; a new
one takes a place whose node is lost, or a further one. Invariant: what a node is to do is a state, which is sent until
the node reports it; a node gets no orders before this host has connected to it. A node that follows a controller with a
higher term ends this one.

Loops: one consumes the messages of nodes; one, every BEAT_S, tells them that this controller is alive and finds those
that are lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version as release_of
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import structlog
from msgspec.structs import replace

from dora import files
from dora.config.load import dump
from dora.config.schema import Config
from dora.core.ids import InstanceId
from dora.errors import RunFailed, first_of
from dora.node.place import Changes, Place
from dora.node.places import NODE_NAME, Known, Places
from dora.node.spread import Spread
from dora.tls import TlsFiles
from dora.transport.node_ends import NodeHub
from dora.transport.node_messages import (
    CONTROLLER_HOST,
    NODE_PROTOCOL,
    Beat,
    FolderOrder,
    FromNode,
    Join,
    NodeOrders,
    NodeWelcome,
    Over,
    Rejected,
    RelaySource,
    Report,
    ServerOrder,
    Superseded,
)
from dora.weights.relay import Relay
from dora.weights.store import VersionStore

log = structlog.get_logger(__name__)

BEAT_S: Final = 2.0
#: Time in which this host must be able to connect to a node that has joined.
ADMIT_S: Final = 30.0
#: Time in which nodes that may join another run let this one go.
LET_GO_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What the run tells of itself."""

    run_id: str
    term: int
    token: str
    live_bytes: int  # for which live versions need room on each node
    model: Path  # folder of the model on this host, which may have no weights
    known: Known  # from earlier starts
    removed: Collection[InstanceId]  # of nodes that have left; their numbers are not given again
    save: Callable[[Known], None]
    tell: Callable[[str], None]
    connects: Callable[[RelaySource], bool | None]  # whether a relay answers this host; None: nothing does; blocks


class Cluster:
    """All nodes of a run. `listening` makes it."""

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        *,
        hub: NodeHub,
        store: VersionStore,
        relay: Relay,
        source: RelaySource,
    ) -> None:
        """`relay`, of this host, is `source` for nodes."""
        self.relay = relay
        self.own_source = source
        self._config = config
        self._settings = settings
        self._hub = hub
        self._dumped = dump(config)
        self._checks: dict[int, asyncio.Task[None]] = {}  # of addresses, by place
        self._running: asyncio.Task[None] | None = None
        self._is_saved = True
        self._free: set[bytes] | None = None  # after the end: the nodes that look for another controller
        self.changes = Changes()
        self.places = Places(config, known=settings.known, removed=settings.removed, now=time.monotonic())
        self.spread = Spread(
            self.places,
            store=store,
            relay=relay,
            source=source,
            changes=self.changes,
            whole_every=config.nodes.deltas,
            model=settings.model,
        )
        self.on_new_servers: Callable[[Place], int] | None = None  #: returns the first instance of a place
        self.on_leaving: Callable[[Place], None] = lambda place: None

    @classmethod
    @asynccontextmanager
    async def listening(
        cls, config: Config, settings: ClusterSettings, *, store: VersionStore, checkpoints: Path
    ) -> AsyncIterator[Cluster]:
        """Listen for nodes, and serve the versions of this host to them."""
        hub = NodeHub(address=config.nodes.address, token=settings.token)
        tls = TlsFiles.of(config.nodes.tls)
        relay = Relay(store, key=(key := token_hex(32)), checkpoints=checkpoints, tls=tls)
        host = config.nodes.address.removeprefix("tcp://").rpartition(":")[0]
        try:
            address = hub.start()
            async with relay.listening(host.strip("[]").replace("*", "0.0.0.0"), 0) as url:
                scheme, port = url.partition(":")[0], url.rpartition(":")[2]
                source = RelaySource(url=f"{scheme}://{CONTROLLER_HOST}:{port}", key=key)
                cluster = cls(config, settings, hub=hub, store=store, relay=relay, source=source)
                settings.tell(f"waiting for nodes at {address} (dora node, DORA_CONTROLLER, DORA_TOKEN)")
                cluster._running = asyncio.create_task(cluster._run(), name="nodes")
                try:
                    yield cluster
                finally:
                    cluster._running.cancel()
                    await asyncio.wait({cluster._running})
        finally:
            hub.close()

    # -- loops --------------------------------------------------------------------------------------------------------

    def loops(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Return what ends the controller when another one has taken over."""
        return [("nodes", self._failed())]

    async def _failed(self) -> None:
        assert self._running is not None, "it is listening"
        await asyncio.shield(self._running)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until that is so; RunFailed if another controller takes over."""
        waiting = asyncio.create_task(self.changes.until(is_so), name="nodes-wait")
        assert self._running is not None, "it is listening"
        try:
            await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._running.done():
            self._running.result()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(), name="node-messages")
                group.create_task(self._watch(), name="node-beats")
                group.create_task(self._follow_changes(), name="node-orders")
        except ExceptionGroup as group:
            raise first_of(group) from None

    async def _listen(self) -> None:
        async for identity, message in self._hub.receive():
            await self._on_message(identity, message)

    async def _watch(self) -> None:
        while True:
            for place in self.places:
                silent_s = time.monotonic() - place.heard_at
                if place.identity is not None and silent_s > self._config.nodes.lease_s:
                    self._lose(place, f"nothing was heard from it for {silent_s:.0f} s")
                elif place.report is not None and place.is_silent:
                    self._start_check(place, self._lose_if_ended(place, place.report))
                    self.changes.tell()  # others no longer wait for what it was to pass on
                elif place.identity is not None:
                    await self._hub.send(place.identity, Beat(term=self._settings.term, serial=place.serial))
                    if place.orders is not None and place.report is not None and place.report.serial != place.serial:
                        await self._hub.send(place.identity, place.orders)
            if not self._is_saved:
                self._save()
            await asyncio.sleep(BEAT_S)

    def _save(self) -> None:
        """Save the places of nodes; on a full disk, it is tried again every BEAT_S."""
        try:
            self._settings.save(self.places.known())
            self._is_saved = True
        except OSError as err:
            if not files.is_full(err):
                raise
            if self._is_saved:
                log.warning("nodes_not_saved", reason=err.strerror)
            self._is_saved = False

    async def _follow_changes(self) -> None:
        """Send new orders whenever they differ from the last ones."""
        while True:
            changed = self.changes.next()
            for place, versions in zip([*self.places], self.spread.orders(), strict=True):
                await self._send_orders(place, versions)
            await changed.wait()

    # -- nodes --------------------------------------------------------------------------------------------------------

    async def _on_message(self, identity: bytes, message: FromNode) -> None:
        place = next((place for place in self.places if place.identity == identity), None)
        match message:
            case Superseded() if message.term > self._settings.term:
                raise RunFailed(
                    f"another controller has taken over the run (term {message.term}, this one has "
                    f"{self._settings.term}); this one ends and changes nothing any more"
                )
            case Join():
                await self._on_join(identity, message)
            case Report() if place is not None and message.term == self._settings.term:
                self._on_report(place, message)

    async def _on_join(self, identity: bytes, join: Join) -> None:
        if self._free is not None:
            self._free.add(identity)
            self.changes.tell()
            return
        release = release_of("dora-rl")
        if (join.protocol, join.release) != (NODE_PROTOCOL, release):
            reason = (
                f"it has DORA {join.release} (protocol {join.protocol}), the controller {release} ({NODE_PROTOCOL})"
            )
            await self._hub.send(identity, Rejected(reason=f"{reason}; install the same release"))
            return
        if not NODE_NAME.fullmatch(join.name):
            await self._hub.send(identity, Rejected(reason="a name has up to 200 letters, digits, '-', '_' and '.'"))
            return
        if join.problem:
            if (place := next((place for place in self.places if place.identity == identity), None)) is not None:
                self._lose(place, f"it cannot take part: {join.problem}")
            return
        if join.run_id not in ("", self._settings.run_id):
            return  # its own controller may be elsewhere; otherwise its lease ends it
        place, reason = self.places.place_for(join.name, identity, now=time.monotonic())
        if place is None:
            if reason:
                await self._hub.send(identity, Rejected(reason=reason))
            return
        if place.first_instance is None and not place.has_ranks and not await self._number(place):
            return
        if place.identity != identity:
            if place.identity is not None:
                self._lose(place, "its process was started again")
            place.name, place.identity, place.lost = join.name, identity, "it has not reported yet"
            place.joined_at = time.monotonic()
            self._save()
        place.heard_at = time.monotonic()
        await self._welcome(place)

    async def _welcome(self, place: Place) -> None:
        assert place.identity is not None, "it has joined"
        welcome = NodeWelcome(
            term=self._settings.term,
            run_id=self._settings.run_id,
            first_instance=-1 if place.first_instance is None else place.first_instance,
            config=self._dumped,
            live_bytes=self._settings.live_bytes,
        )
        await self._hub.send(place.identity, welcome)

    async def _number(self, place: Place) -> bool:
        """Give numbers to the servers of a place, and of those with which it shares one; False if it is too early."""
        group = self.places.group_of(place)
        if group[0].first_instance is None:
            if self.on_new_servers is None:
                return False
            first = self.on_new_servers(group[0])
            for other in group:
                other.first_instance = first
                if other.identity is not None:
                    await self._welcome(other)
        place.first_instance = group[0].first_instance
        return True

    def _on_report(self, place: Place, report: Report) -> None:
        was_silent, place.heard_at = place.is_silent, time.monotonic()
        place.clock_ahead_s = report.clock - time.time()
        if place.report is None:
            self._start_check(place, self._admit(place, report))
            return
        if report.is_leaving and place.has_ranks:  # it does not wait for anything
            self._lose(place, "it was told to end")
            return
        self._note_wishes(place, place.report, report)
        if was_silent or place.report != replace(
            report, clock=place.report.clock, shared_bytes=place.report.shared_bytes
        ):
            place.report = report
            self.changes.tell()

    def _note_wishes(self, place: Place, before: Report | None, report: Report) -> None:
        """Tell the user what is new, and let a node leave that wants to."""
        if report.problem and (before is None or report.problem != before.problem):
            self._settings.tell(f"node {place.name}: {report.problem}")
        if report.is_leaving and not (before is not None and before.is_leaving):
            self._settings.tell(f"node {place.name} leaves: its instances are drained")
            self.on_leaving(place)

    def _start_check(self, place: Place, check: Coroutine[Any, Any, None]) -> None:
        """Run a check of a place, unless one is under way."""
        if place.number in self._checks:
            check.close()
            return
        self._checks[place.number] = asyncio.create_task(check, name=f"check-{place.name}")
        self._checks[place.number].add_done_callback(lambda _: self._checks.pop(place.number))

    async def _lose_if_ended(self, place: Place, report: Report) -> None:
        """Do not wait for the lease if the host of a silent node says that no process listens there."""
        has_ended = await asyncio.to_thread(self._settings.connects, report.relay) is False
        if has_ended and place.report is not None and place.is_silent:
            self._lose(place, "its process has ended")

    async def _admit(self, place: Place, report: Report) -> None:
        """Connect to a node; then its place is ready."""
        identity = place.identity
        assert identity is not None, "it has reported"
        reason = self._why_unfit(place, report)
        if not reason and not await asyncio.to_thread(self._settings.connects, report.relay):
            if time.monotonic() - place.joined_at < ADMIT_S:
                return  # the next report leads to another attempt
            reason = f"the controller cannot connect to {report.relay.url}; give the address of this node (--address)"
        if place.identity != identity:
            return
        if reason:
            await self._hub.send(identity, Rejected(reason=reason))
            self._lose(place, reason)
            return
        self._note_wishes(place, None, report)
        place.report, place.lost = report, ""
        place.servers = {
            index: ServerOrder(start=server.start) for index, server in report.servers.items() if server.phase == "up"
        }
        joined = sum(place.report is not None for place in self.places)
        first, each = place.first_instance, self._config.servers_of_node
        what = "with ranks" if first is None else f"with instances {first} to {first + each - 1}"
        self._settings.tell(
            f"node {place.name} has joined {what} ({joined} here, {self._config.nodes.expected} expected)"
        )
        self.changes.tell()

    def _why_unfit(self, place: Place, report: Report) -> str:
        config = self._config
        needs_gpus = (config.trainer if place.has_ranks else config.engine).device == "cuda"
        if needs_gpus and report.gpus < config.nodes.gpus:
            return f"it has {report.gpus} GPUs, and the run is planned for {config.nodes.gpus} (nodes.gpus)"
        if not place.has_ranks and not config.engine.command and not report.engine:
            return f"the servers of engine.kind = {config.engine.kind} are not installed there"
        return ""

    def _lose(self, place: Place, reason: str) -> None:
        log.warning("node_lost", node=place.name, reason=reason)
        self._settings.tell(f"node {place.name} is lost: {reason}")
        place.identity = place.report = place.orders = None
        place.servers, place.ranks, place.lost = {}, None, reason
        self.changes.tell()

    async def _send_orders(self, place: Place, versions: dict[int, FolderOrder]) -> None:
        if place.identity is None or place.report is None:
            return
        wanted = NodeOrders(
            term=self._settings.term,
            serial=place.serial,
            servers=dict(place.servers),
            ranks=place.ranks,
            versions=versions,
        )
        if place.orders != wanted:
            place.serial = 1 + max(other.serial for other in self.places)  # a node may have had another place
            place.orders = replace(wanted, serial=place.serial)
            await self._hub.send(place.identity, place.orders)
            await asyncio.sleep(0)  # others get their turn

    async def end(self, reason: str, *, may_join_another: bool = False) -> None:
        """Tell all nodes that the run is over, and wait until those that may join another look for it.

        Whoever closes the connection before that may lose the message, which leaves a node to its lease.
        """
        over = Over(term=self._settings.term, reason=reason, may_join_another=may_join_another)
        told = [place.identity for place in self.places if place.identity is not None]
        self._free = free = set[bytes]()
        for identity in told:
            await self._hub.send(identity, over)
        if may_join_another:
            with suppress(TimeoutError):
                async with asyncio.timeout(LET_GO_S):
                    await self.wait_until(lambda: free.issuperset(told))

    async def let_go(self, place: Place) -> None:
        """Tell a node that it has left; the next one in its place has servers with other numbers."""
        if place.identity is not None:
            await self._hub.send(place.identity, Over(term=self._settings.term, reason="the node has left the run"))
        place.name, place.identity, place.report, place.orders = "", None, None, None
        place.lost = "the node has left"
        for other in self.places.group_of(place):
            other.first_instance = None
        self._save()
        self.changes.tell()
