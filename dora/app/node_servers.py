"""The servers of nodes in the terms of the controller: added to the fleet, started, and removed with their node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from dora.app.opening import Opened
from dora.config.schema import Config
from dora.controller.fleet import Fleet, Started
from dora.controller.user_requests import UserRequests
from dora.core.events import RequestTag
from dora.core.ids import InstanceId
from dora.engine.api import InferenceEngine
from dora.errors import ConfigError, DoraError, RemoteError, one_line
from dora.node.cluster import Cluster
from dora.node.place import Place
from dora.transport.node_messages import ProcessState, ServerOrder

#: Delay before a node that may not leave yet asks again.
LEAVE_PAUSE_S: Final = 5.0


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
        first, each = place.first_instance, range(opened.job.config.servers_of_node)
        instances = [] if first is None else [InstanceId(first + i) for i in each]  # none: they left with another node
        staying, told = set(instances), False
        while staying and place.report is not None:
            try:
                for instance in sorted(staying):
                    if instance in opened.job.state.instances:
                        await requests.remove(str(instance), RequestTag(by=one_line(f"node {place.name}")))
                    else:
                        await fleet.dismiss(instance)  # it has never come up, or has left
                    staying.remove(instance)
            except DoraError as err:  # again until it may leave: until then it serves
                if not told:
                    opened.tell(f"node {place.name} cannot leave yet: {err}")
                told = True
                await asyncio.sleep(LEAVE_PAUSE_S)
        if place.report is not None and not any(instance in fleet for instance in instances):
            await cluster.let_go(place)

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
    """A server of a node, or of several nodes together; implements `controller.fleet.KeptServer`."""

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
