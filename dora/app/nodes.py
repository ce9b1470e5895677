"""The nodes of a run in the terms of its controller: their servers, their ranks, and the versions they hold."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog

from dora import files
from dora.app.opening import Opened
from dora.app.settings import RankPaths, live_bytes
from dora.config.schema import Config
from dora.controller.fleet import Fleet, Started
from dora.controller.user_requests import UserRequests
from dora.core.events import RequestTag
from dora.core.ids import InstanceId, VersionId
from dora.engine.api import InferenceEngine
from dora.errors import ConfigError, RemoteError, RunFailed, one_line
from dora.node.cluster import Cluster, ClusterSettings
from dora.node.place import Place
from dora.tls import TlsFiles
from dora.transport.messages import CheckpointWritten
from dora.transport.node_messages import FolderOrder, ProcessState, RanksOrder, RelaySource, Report, ServerOrder
from dora.weights.checkpoints import read_manifest
from dora.weights.source import VersionSource
from dora.weights.store import Manifest, StoreError, VersionStore

log = structlog.get_logger(__name__)

#: Time in which the nodes that a run cannot begin without must join, and those with ranks come back after a loss.
JOIN_TIMEOUT_S: Final = 1_800.0
#: Time in which a node is replaced, before fewer ranks train on.
REPLACE_TIMEOUT_S: Final = 60.0
#: Time in which the nodes with ranks must have received what these need: versions and a checkpoint.
FETCH_TIMEOUT_S: Final = 7_200.0
#: Delay before a checkpoint that could not be copied is copied again.
COPY_PAUSE_S: Final = 5.0
#: Delay before a node that may not leave yet asks again.
LEAVE_PAUSE_S: Final = 5.0
#: Time in which the controller must be able to connect to a node.
REACH_TIMEOUT_S: Final = 5.0


def require_token(config: Config) -> None:
    """ConfigError if nodes cannot show that they belong to the run."""
    if config.nodes.expected and config.trainer.token is None:
        raise ConfigError("nodes.expected: nodes need the run's token; set DORA_TOKEN here and in their environment")


@asynccontextmanager
async def open_cluster(opened: Opened) -> AsyncIterator[Cluster]:
    """Listen for nodes, and wait for those without which the run cannot begin."""
    job, folder = opened.job, opened.folder
    config = job.config
    assert config.trainer.token is not None, "it was required"
    settings = ClusterSettings(
        run_id=folder.run_id,
        term=opened.term,
        token=config.trainer.token,
        live_bytes=live_bytes(config, job.inputs.model),
        known=opened.nodes,
        removed=job.state.removed,
        save=lambda known: files.replace(folder.nodes, msgspec.json.encode(known)),
        tell=opened.tell,
        connects=partial(connects, tls=TlsFiles.of(config.nodes.tls)),
    )
    async with Cluster.listening(config, settings, store=opened.store, checkpoints=folder.checkpoints) as cluster:
        await asyncio.to_thread(_name_versions, cluster, opened)
        await _wait_for_enough(cluster, config)
        yield cluster


def _name_versions(cluster: Cluster, opened: Opened) -> None:
    """Have the nodes hold the versions of an earlier start that are on the disk."""
    if opened.job.config.nodes.store == "shared":
        return
    for version in opened.store.durable():
        if version in opened.job.state.window.entries:
            cluster.spread.hold(opened.store.manifest(version))
    if opened.job.config.num_training_nodes:
        _hold_again(cluster, opened)


def _hold_again(cluster: Cluster, opened: Opened) -> None:
    """Have the ranks' node receive the versions that its ranks will write again, but for those that it gets anyway."""
    for version in opened.store.durable():
        if version > opened.start.step and version not in opened.job.state.window.entries:
            cluster.spread.hold_again(opened.store.manifest(version))


async def _wait_for_enough(cluster: Cluster, config: Config) -> None:
    """Wait for all nodes with ranks, and for servers enough to hold K + 1 versions."""
    servers = max(1, config.max_staleness + 1 if config.rollout.strategy == "dora" else 1) - len(config.engine.urls)

    def is_enough() -> bool:
        joined = [place for place in cluster.places if place.report is not None]
        training = sum(place.has_ranks for place in joined)
        begun = (len(joined) - training) // config.nodes_of_server * config.servers_of_node
        return training == config.num_training_nodes and begun >= servers

    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            await cluster.wait_until(is_enough)
    except TimeoutError:
        missing = [f"{place.number} ({place.lost})" for place in cluster.places if place.report is None]
        raise RunFailed(
            f"nodes.expected: {len(missing)} of {config.nodes.expected} nodes have not joined within "
            f"{JOIN_TIMEOUT_S:g} s: {', '.join(missing)}"
        ) from None


def connects(relay: RelaySource, *, tls: TlsFiles | None) -> bool | None:
    """Return whether the relay of a node answers this host, and knows its key; None if there is no answer. It blocks.

    False tells that no process listens there, and True that the network between the hosts works.
    """
    address = urlsplit(relay.url)
    host, timeout_s = address.hostname or "", REACH_TIMEOUT_S
    connection = (
        HTTPSConnection(host, address.port, timeout=timeout_s, context=tls.to_connect())
        if tls is not None
        else HTTPConnection(host, address.port, timeout=timeout_s)
    )
    try:
        connection.request("HEAD", "/", headers={"Authorization": f"Bearer {relay.key}"})
        return connection.getresponse().status == 404  # 401 without the key
    except ConnectionRefusedError:
        return False
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def add_servers(fleet: Fleet, cluster: Cluster, config: Config, *, engine: InferenceEngine) -> None:
    """Add the servers of all places to the fleet, and those of nodes that join later."""

    def servers(place: Place) -> list[NodeServer]:
        each = range(config.servers_of_node)
        return [NodeServer(cluster, place, index, config=config, engine=engine) for index in each]

    def add_new(place: Place) -> int:
        return min([fleet.add(server) for server in servers(place)])

    for place in cluster.places:
        if place.first_instance is not None and cluster.places.group_of(place)[0] is place:
            for index, server in enumerate(servers(place)):
                fleet.add(server, instance=InstanceId(place.first_instance + index))
    cluster.on_new_servers = add_new


def let_nodes_leave(
    cluster: Cluster, requests: UserRequests, fleet: Fleet, opened: Opened
) -> Callable[[], Awaitable[None]]:
    """Have nodes that want to leave do so once their servers are empty. Return what ends this."""
    leaving: set[asyncio.Task[None]] = set()

    async def leave(place: Place) -> None:
        first = place.first_instance
        assert first is not None, "nodes with ranks do not ask"
        staying = {InstanceId(first + index) for index in range(opened.job.config.servers_of_node)}
        told = False
        while staying and place.report is not None:
            try:
                for instance in sorted(staying):
                    if instance in opened.job.state.instances:
                        await requests.remove(str(instance), RequestTag(by=one_line(f"node {place.name}")))
                    else:
                        await fleet.dismiss(instance)  # it has never come up
                    staying.remove(instance)
            except ConfigError as err:
                if not told:
                    opened.tell(f"node {place.name} cannot leave yet: {err}")
                told = True
                await asyncio.sleep(LEAVE_PAUSE_S)

    def begin(place: Place) -> None:
        leaving.add(task := asyncio.create_task(leave(place), name=f"leave-{place.name}"))
        task.add_done_callback(leaving.discard)

    async def end() -> None:
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    cluster.on_leaving = begin
    return end


class NodeServer:
    """A server of a node, or of several nodes together; implements `controller.fleet.Server`."""

    def __init__(self, cluster: Cluster, place: Place, index: int, *, config: Config, engine: InferenceEngine) -> None:
        """`place`: the one of its node, or of the first of them."""
        self._cluster = cluster
        self._place = place
        self._index = index
        self._num_nodes = config.nodes_of_server
        self._timeout_s = config.engine.start_timeout_s + config.nodes.lease_s
        self._engine = engine
        self._may_keep = True  # an earlier controller may have started it
        self._started: dict[int, int] = {}  # number of the start, by place

    async def start(self) -> Started:
        """Wait for its nodes, for as long as it takes, and have them start it; or take it over if it runs."""
        changes = self._cluster.changes
        await changes.until(lambda: len(self._places) == self._num_nodes and not self._why_lost())
        is_kept = self._may_keep and all(state is not None and state.phase == "up" for state in self._states())
        self._may_keep = False
        self._order(is_kept=is_kept)
        try:
            async with asyncio.timeout(self._timeout_s):
                await changes.until(lambda: bool(self._why_lost()) or self._has_begun())
        except TimeoutError:
            names = " and ".join(place.name for place in self._places)
            raise RemoteError(f"node {names}: server {self._index} is not ready after {self._timeout_s:g} s") from None
        if reason := self._why_lost():
            raise RemoteError(reason)
        for place, state in zip(self._places, self._states(), strict=True):
            if state is not None and state.phase == "ended":
                message = f"node {place.name}: {state.reason}"
                raise ConfigError(message) if state.is_final else RemoteError(message)
        first = self._states()[0]
        assert first is not None, "it has begun"
        self._engine.set_key(first.url, first.key)
        return Started(first.url, is_kept=is_kept)

    def _order(self, *, is_kept: bool) -> None:
        """Have every node start its part, or keep the one that runs."""
        places, states = self._places, self._states()
        master = self._place.report
        assert master is not None, "start has waited for it"
        for rank, (place, state) in enumerate(zip(places, states, strict=True)):
            last = state.start if state is not None else self._started.get(place.number, 0)
            self._started[place.number] = last + (not is_kept)
            place.servers[self._index] = ServerOrder(
                start=self._started[place.number],
                nodes=len(places),
                node_rank=rank,
                master=f"{urlsplit(master.relay.url).hostname}:{master.meeting_port}" if len(places) > 1 else "",
            )
        self._cluster.changes.tell()

    @property
    def _places(self) -> list[Place]:
        return self._cluster.places.group_of(self._place)

    def _states(self) -> list[ProcessState | None]:
        reports = [place.report for place in self._places]
        return [report.servers.get(self._index) if report is not None else None for report in reports]

    def _why_lost(self) -> str:
        return next((f"node {p.name} is lost: {p.lost}" for p in self._places if p.report is None), "")

    def _has_begun(self) -> bool:
        """Whether all parts are up, or one has ended."""
        phases = [self._phase(*found) for found in zip(self._places, self._states(), strict=True)]
        return "ended" in phases or all(phase == "up" for phase in phases)

    def _phase(self, place: Place, state: ProcessState | None) -> str:
        return state.phase if state is not None and state.start == self._started[place.number] else ""

    async def ended(self) -> str:
        """Wait until a part of it has ended or a node of it is lost, and return why."""

        def why() -> str:
            for place, state in zip(self._places, self._states(), strict=True):
                if self._phase(place, state) != "up":
                    return f"node {place.name}: {state.reason if state is not None else 'the server was ended'}"
            return ""

        await self._cluster.changes.until(lambda: bool(self._why_lost() or why()))
        return self._why_lost() or why()

    async def kill(self) -> None:
        """Have its nodes end it, which they do before they start it again."""
        for place in self._places:
            place.servers.pop(self._index, None)
        self._cluster.changes.tell()

    async def stop(self) -> None:
        """End it for good; a node that is leaving goes with its last server."""
        await self.kill()
        for place in self._places:
            if place.report is not None and place.report.is_leaving and not place.servers:
                await self._cluster.let_go(place)


class NodeRanks:
    """The ranks on nodes, the same number on each; implements `controller.trainer_link.Ranks`."""

    def __init__(self, cluster: Cluster, opened: Opened, *, port: int) -> None:
        """`port`: at which the controller listens for them."""
        nodes = opened.job.config.nodes
        self._cluster = cluster
        self._opened = opened
        self._port = port
        self._places = [place for place in cluster.places if place.has_ranks]
        self._active = self._places  # those whose ranks take part
        config = opened.job.config
        self._each = config.ranks_of_node
        #: Ranks take part in whole copies of the weights, each of which is sharded over so many; 0: over all.
        self._shard_ranks = config.shard_ranks if config.trainer.replicate > 1 else 0
        self._nodes_at_once = self._shard_ranks // math.gcd(self._shard_ranks, self._each) or 1
        at_least = -(-(config.trainer.min_ranks or config.trainer.ranks) // self._each)
        self._fewest = -(-at_least // self._nodes_at_once) * self._nodes_at_once
        self._has_own_store = nodes.store == "relay"
        self.are_apart = opened.job.config.checkpoints_are_copied

    @property
    def are_cut_off(self) -> bool:
        return any(place.is_silent for place in self._active)

    async def start(self, incarnation: int = 0) -> None:
        """Have the nodes start them, which fetch what they need first."""
        maker, spread = self._active[0], self._cluster.spread
        spread.maker = maker
        await self._within(lambda: spread.has_again(maker), "the versions of the run")
        first = self._report(maker)
        for number, place in enumerate(self._active):
            running = self._report(place).ranks
            place.ranks = RanksOrder(
                start=running.start + 1 if running is not None else 1,
                incarnation=incarnation,
                port=self._port,
                node_rank=number,
                nodes=len(self._active),
                master=f"{urlsplit(first.relay.url).hostname}:{first.meeting_port}",
                checkpoints=self._checkpoints(number) if self.are_apart else {},
            )
        self._cluster.changes.tell()
        await self._within(lambda: all(map(self._has_begun, self._active)), "its checkpoint")

    async def restart(self, incarnation: int) -> int:
        """End what is left of them, wait for nodes, and start them again.

        It waits for a node in each place, but after REPLACE_TIMEOUT_S only for as many as `trainer.min_ranks` needs.
        """
        await self._opened.fence_ranks(incarnation)
        for place in self._places:
            place.ranks = None
        self._cluster.changes.tell()
        self._active = self._places
        if not await self._are_free(len(self._places), REPLACE_TIMEOUT_S):
            if not await self._are_free(self._fewest, JOIN_TIMEOUT_S - REPLACE_TIMEOUT_S):
                late = self._why_lost() or "a node has not ended its ranks"
                raise RemoteError(f"{late} (waited for {JOIN_TIMEOUT_S:g} s)")
            free = [place for place in self._places if _has_none(place)]
            self._active = free[: len(free) // self._nodes_at_once * self._nodes_at_once]
        num_ranks = self._each * len(self._active)
        if len(self._active) < len(self._places):
            why = self._why_lost(self._places) or "a node has not ended its ranks"
            self._opened.tell(f"{why}; training goes on with {num_ranks} of {len(self._places) * self._each} ranks")
        if self._has_own_store:
            await asyncio.to_thread(_hold_again, self._cluster, self._opened)
        await self.start(incarnation)
        return num_ranks

    async def _are_free(self, count: int, timeout_s: float) -> bool:
        """Wait until this many nodes are there and have no ranks; return whether they are in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._cluster.wait_until(lambda: sum(map(_has_none, self._places)) >= count)
                return True
        return False

    def why_restart(self) -> str:
        others = [place for place in self._places if place not in self._active]
        if not others or not all(map(_has_none, others)):
            return ""
        return f"all {self._each * len(self._places)} ranks train again, with node {', '.join(p.name for p in others)}"

    async def _within(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for what the nodes need; RemoteError if one is lost, or takes too long."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await self._cluster.wait_until(lambda: bool(self._why_lost() or self._why_ended()) or is_so())
        except TimeoutError:
            raise RemoteError(f"the nodes with ranks have not received {what} in {FETCH_TIMEOUT_S:g} s") from None
        if reason := self._why_lost() or self._why_ended():
            raise RemoteError(reason)

    def _has_begun(self, place: Place) -> bool:
        state = place.report.ranks if place.report is not None else None
        return (
            state is not None and place.ranks is not None and state.start == place.ranks.start and state.phase == "up"
        )

    def _checkpoints(self, number: int) -> dict[str, FolderOrder]:
        """Return what a node needs of each checkpoint from which its ranks may start."""
        found = {}
        for folder in self._opened.start.folders:
            manifest = read_manifest(folder)
            if manifest is not None:
                num_files = self._shard_ranks or self._each * len(self._active)
                needed = sorted({rank % num_files for rank in self._ranks_of(number)})
                ranks = needed if manifest.world_size == num_files else range(manifest.world_size)
                found[folder.name] = FolderOrder(
                    files=manifest.files(ranks),
                    num_bytes=len(manifest.encode()) + sum(manifest.num_bytes[rank] for rank in ranks),
                    chain=manifest.chain,
                    sources=(self._cluster.own_source,),
                )
        return found

    def _ranks_of(self, number: int) -> tuple[int, ...]:
        return tuple(range(number * self._each, (number + 1) * self._each))

    def paths(self, rank: int) -> RankPaths:
        """Return what a rank reads and writes on its node."""
        number = rank // self._each
        own, folder = self._report(self._active[number]).paths, self._opened.folder
        here = RankPaths.here(
            folder,
            model=Path(own.model),
            reference=Path(own.reference) if own.reference else None,
            memory_root=self._opened.store.memory_root,
            resume_from=self._opened.start.folders,
        )
        if not self._has_own_store:
            return here
        with_store = replace(
            here, memory_root=Path(own.memory_root), durable_root=Path(own.durable_root), fence=Path(own.fence)
        )
        if not self.are_apart:
            return with_store
        return replace(
            with_store,
            checkpoints=Path(own.checkpoints),
            resume_from=tuple(Path(own.checkpoints, path.name) for path in here.resume_from),
            ranks_here=self._ranks_of(number),
            owns_checkpoints=True,
        )

    async def keep(self, reports: Mapping[int, CheckpointWritten]) -> str:
        """Copy a checkpoint from the nodes into the run folder; return its folder there."""
        parent, name = self._opened.folder.checkpoints, Path(reports[0].folder).name
        for rank, report in reports.items():
            place = self._active[rank // self._each]
            while True:
                try:
                    await self._cluster.relay.fetch_checkpoint(
                        name, report.files, report.num_bytes, partial(_relay_of, place), into=parent
                    )
                    break
                except StoreError as err:  # a full disk; if the node is lost, this is cancelled
                    log.warning("checkpoint_not_copied", checkpoint=name, reason=str(err))
                    await asyncio.sleep(COPY_PAUSE_S)
        return str(parent / name)

    async def ended(self) -> str:
        """Wait until the ranks of a node have ended, or the node is lost, and return why."""
        await self._cluster.changes.until(lambda: bool(self._why_lost() or self._why_ended()))
        return self._why_lost() or self._why_ended()

    def _why_lost(self, among: Sequence[Place] | None = None) -> str:
        for place in among or self._active:
            if place.report is None:
                return f"node {place.name}, which has ranks, is lost: {place.lost}"
        return ""

    def _why_ended(self) -> str:
        for place in self._active:
            if place.report is None:
                continue
            state, ordered = place.report.ranks, place.ranks
            if state is not None and ordered is not None and state.start == ordered.start and state.phase == "ended":
                return f"node {place.name}: {state.reason}"
        return ""

    def _report(self, place: Place) -> Report:
        if place.report is None:
            raise RemoteError(f"node {place.name}, which has ranks, is lost: {place.lost}")
        return place.report


def _has_none(place: Place) -> bool:
    """Whether a node is there, and has no ranks."""
    return place.report is not None and place.report.ranks is None


def _relay_of(place: Place) -> list[VersionSource]:
    return [VersionSource(place.report.relay.url, place.report.relay.key)] if place.report is not None else []


@dataclass(frozen=True)
class NodeVersions:
    """The versions on nodes; implements `controller.holders.Holders`."""

    cluster: Cluster
    store: VersionStore

    def hold(self, manifest: Manifest) -> None:
        self.cluster.spread.hold(manifest)

    async def fetch(self, version: VersionId) -> None:
        await self.cluster.spread.fetch(version)

    def release(self, version: VersionId) -> None:
        self.cluster.spread.release(version)

    async def folder(self, instance: InstanceId, version: VersionId) -> Path:
        place = self.cluster.places.of_instance(instance)
        if place is None:  # an external server reads the folder of this host
            await self.fetch(version)
            return await asyncio.to_thread(self.store.folder, version)
        places = self.cluster.places.group_of(place)
        folders = [await self.cluster.spread.folder(place, version) for place in places]
        if len(set(folders)) > 1:
            names = " and ".join(place.name for place in places)
            raise RemoteError(f"nodes {names} have versions in different folders; start them with the same --folder")
        return folders[0]
