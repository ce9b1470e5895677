"""Clusters and their nodes on loopback, each driven by a test through the real sockets of the other."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version as release_of
from pathlib import Path
from typing import Any, TypeVar

from dora.config.load import dump, load
from dora.config.schema import Config
from dora.core.ids import InstanceId
from dora.model_files import ModelFolders
from dora.node.agent import run_node
from dora.node.cluster import Cluster, ClusterSettings
from dora.node.member import NodeSettings
from dora.node.places import Known
from dora.transport.node_ends import NodeEnd, NodeHub
from dora.transport.node_messages import (
    NODE_PROTOCOL,
    Beat,
    FolderOrder,
    FromNode,
    Join,
    NodeOrders,
    NodePaths,
    NodeWelcome,
    Over,
    RanksOrder,
    Rejected,
    RelaySource,
    Report,
    ServerOrder,
    Superseded,
    ToNode,
)
from dora.weights.store import VersionStore

WAIT_S = 20.0
#: Time after which a message that may have been dropped is sent again.
AGAIN_S = 0.05
TOKEN = "secret"
RUN = "run-1"
RELEASE = release_of("dora-rl")
_Told = TypeVar("_Told", Report, Superseded, Join, NodeWelcome, NodeOrders, Beat, Over, Rejected)


def config_of(*overrides: str) -> Config:
    """A job with one training node and two that roll out with one server each, unless that is changed."""
    small = (
        "nodes.expected=3",
        "nodes.train=1",
        "nodes.servers=1",
        "nodes.address=tcp://127.0.0.1:0",
        "rollout.max_staleness=1",
        "trainer.ranks=1",
    )
    return load(None, [*small, *overrides], environ={})


@dataclass
class Controller:
    """A cluster, and what it tells and saves."""

    cluster: Cluster
    address: str
    told: list[str] = field(default_factory=list)
    saved: list[Known] = field(default_factory=list)

    async def until(self, is_so: Callable[[Cluster], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.cluster.changes.until(lambda: is_so(self.cluster))

    async def until_joined(self, number: int) -> None:
        await self.until(lambda cluster: cluster.places[number].report is not None)

    async def until_lost(self, number: int) -> str:
        await self.until(lambda cluster: cluster.places[number].report is None)
        return self.cluster.places[number].lost


@asynccontextmanager
async def controller(
    tmp_path: Path,
    *overrides: str,
    term: int = 0,
    known: Known | None = None,
    removed: Collection[InstanceId] = (),
    connects: Callable[[RelaySource], bool | None] = lambda relay: True,
    full: int = 0,
) -> AsyncIterator[Controller]:
    """`full`: so many times the disk has no room for what is saved."""
    told: list[str] = []
    saved: list[Known] = []
    failures = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(full)]

    def save(known: Known) -> None:
        if failures:
            raise failures.pop()
        saved.append(known)

    settings = ClusterSettings(
        run_id=RUN,
        term=term,
        token=TOKEN,
        live_bytes=1,
        model=tmp_path / "model",
        known=known or {},
        removed=removed,
        save=save,
        tell=told.append,
        connects=connects,
    )
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable")
    config, checkpoints = config_of(*overrides), tmp_path / "checkpoints"
    async with Cluster.listening(config, settings, store=store, checkpoints=checkpoints) as cluster:
        address = told[0].split("tcp://")[1].split()[0]
        yield Controller(cluster, address, told, saved)
    store.close()


class Peer:
    """A node that says what a test wants."""

    def __init__(self, address: str, name: str, *, token: str = TOKEN) -> None:
        self.end = NodeEnd((address,), token=token)
        self.address = address
        self.name = name
        self.fields: dict[str, Any] = {}  # of its reports

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()

    async def send(self, message: FromNode) -> None:
        await self.end.send(self.address, message)

    async def until(
        self,
        kind: type[_Told],
        is_so: Callable[[_Told], bool] = lambda message: True,
        *,
        saying: FromNode | None = None,
    ) -> _Told:
        """Wait for a message, and repeat `saying` until it comes."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if saying is not None:
                    await self.send(saying)
                for _, message in await self.end.receive(AGAIN_S):
                    if isinstance(message, kind) and is_so(message):
                        return message

    async def join(self, *, run_id: str = "", release: str = RELEASE) -> NodeWelcome:
        return await self.until(NodeWelcome, saying=self.asks(run_id=run_id, release=release))

    async def refused(self, *, release: str = RELEASE) -> str:
        return (await self.until(Rejected, saying=self.asks(release=release))).reason

    def asks(self, *, run_id: str = "", release: str = RELEASE) -> Join:
        return Join(protocol=NODE_PROTOCOL, release=release, name=self.name, run_id=run_id)

    async def take_part(self) -> NodeOrders:
        """Join, report, and return the first orders."""
        welcome = await self.join()
        return await self.until(NodeOrders, saying=self.reports(term=welcome.term))

    def reports(self, **changes: Any) -> Report:
        """Remember the changes, for later reports."""
        self.fields |= changes
        return report(**({"relay": RelaySource(url=f"http://{self.name}:1", key="k")} | self.fields))


def report(**changes: Any) -> Report:
    paths = NodePaths(**dict.fromkeys(NodePaths.__struct_fields__, ""))
    fields: dict[str, Any] = {
        "term": 0,
        "serial": -1,
        "clock": 0.0,
        "gpus": 0,
        "memory_bytes": 1,
        "shared_bytes": 1,
        "engine": "1.0",
        "relay": RelaySource(url="http://h:1", key="k"),
        "meeting_port": 1,
        "paths": paths,
        "servers": {},
        "ranks": None,
        "versions": {},
        "fetching": (),
    }
    return Report(**(fields | changes))


# -- the other side: an agent, and a controller that says what a test wants


class Hub:
    """A controller that says what a test wants to one node."""

    def __init__(self, *, address: str = "tcp://127.0.0.1:0", token: str = TOKEN, term: int = 0) -> None:
        self.hub = NodeHub(address=address, token=token)
        self.address = self.hub.start().removeprefix("tcp://")
        self.term = term
        self.serial = 0
        self._identity = b""
        self._messages = self.hub.receive()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.hub.close()

    async def until(self, kind: type[_Told], is_so: Callable[[_Told], bool] = lambda message: True) -> _Told:
        async with asyncio.timeout(WAIT_S):
            while True:
                self._identity, message = await anext(self._messages)
                if isinstance(message, kind) and is_so(message):
                    return message

    async def send(self, message: ToNode) -> None:
        await self.hub.send(self._identity, message)

    async def report(self, is_so: Callable[[Report], bool] = lambda report: True) -> Report:
        """Wait for a report to this controller."""
        return await self.until(Report, lambda report: report.term == self.term and is_so(report))

    async def welcome(self, config: Config, *, first_instance: int = 0) -> Report:
        """Wait until a node asks to join, let it take part, and return its first report."""
        await self.until(Join)
        return await self.take_over(config, first_instance=first_instance)

    async def take_over(self, config: Config, *, first_instance: int = 0) -> Report:
        told = NodeWelcome(term=self.term, run_id=RUN, first_instance=first_instance, config=dump(config), live_bytes=1)
        await self.send(told)
        return await self.report()

    async def order(
        self,
        *,
        servers: dict[int, int] | None = None,
        ranks: RanksOrder | None = None,
        versions: dict[int, FolderOrder] | None = None,
    ) -> int:
        """Send orders; return their number."""
        self.serial += 1
        starts = {index: ServerOrder(start=start) for index, start in (servers or {}).items()}
        told = NodeOrders(term=self.term, serial=self.serial, servers=starts, ranks=ranks, versions=versions or {})
        await self.send(told)
        return self.serial


@dataclass
class Agent:
    """A node's process as a task, and what it tells."""

    ended: asyncio.Task[str]
    leave: asyncio.Event
    told: list[str]


@asynccontextmanager
async def agent(folder: Path, *addresses: str, name: str = "n", token: str = TOKEN) -> AsyncIterator[Agent]:
    told: list[str] = []

    async def is_well(url: str) -> bool:
        return True

    async def find_models(config: Config) -> ModelFolders:
        return ModelFolders(Path(config.model.path), None, None)

    settings = NodeSettings(
        name=name,
        host="127.0.0.1",
        folder=folder,
        token=token,
        api_key=None,
        find_models=find_models,
        is_well=is_well,
        tell=told.append,
    )
    leave = asyncio.Event()
    task = asyncio.create_task(run_node(settings, addresses, leave))
    try:
        yield Agent(task, leave, told)
    finally:
        task.cancel()
        await asyncio.wait({task})
