"""A node as part of a run: its processes, the versions that it holds, its fence.

Invariant: what it holds is what the controller has journaled, verified against its checksums, and nothing of it changes
while the controller wants it. A fetched version is visible only when it is complete.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
import structlog

from dora.config.load import parse
from dora.config.schema import Config
from dora.core.ids import VersionId
from dora.engine.engines import installed_release
from dora.errors import ConfigError
from dora.journal.access import restrict, set_umask
from dora.model_files import ModelFolders
from dora.node.cuda import num_devices
from dora.node.lease import hold
from dora.node.place import Changes
from dora.node.plan import ProcessPlan, RollingNode, ServerPart, TrainingNode, plan_engines, plan_trainer
from dora.node.ports import free_port, interface_of
from dora.node.processes import OrderedProcess
from dora.node.sources import last_known
from dora.node.supervise import IsWell, Node
from dora.tls import TlsFiles
from dora.transport.node_messages import (
    CONTROLLER_HOST,
    FolderOrder,
    NodeOrders,
    NodePaths,
    NodeWelcome,
    RanksOrder,
    RelaySource,
    Report,
    ServerOrder,
)
from dora.weights.fence import raise_fence_patiently
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import Manifest, StoreError, VersionStore, choose_memory_root, claim, sweep_orphans

log = structlog.get_logger(__name__)

#: Delay before a version that could not be fetched is asked for again.
FETCH_PAUSE_S: Final = 1.0
#: How often it is looked whether ranks of this node have written a version that is waited for.
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node is started with."""

    name: str
    host: str  # its address for others
    folder: Path
    token: str
    api_key: str | None  # of its servers; None: each gets its own
    find_models: Callable[[Config], Awaitable[ModelFolders]]
    is_well: IsWell
    tell: Callable[[str], None]  # shows a line to the user


class Member:
    """Built by `enter`, whose stack ends everything."""

    def __init__(
        self,
        settings: NodeSettings,
        welcome: NodeWelcome,
        *,
        paths: NodePaths,
        node: Node,
        lease: Path,
        store: VersionStore,
        relay: Relay,
        source: RelaySource,
        gpus: int,
        on_change: Callable[[], None],
    ) -> None:
        self.run_id = welcome.run_id
        self.config = parse(welcome.config)
        self._settings = settings
        self._paths = paths
        self._node = node
        self._lease = lease
        self._store = store
        self._relay = relay
        self._source = source
        self._checkpoints = Path(paths.checkpoints)
        self._gpus = gpus
        self._on_change = on_change
        self._controller = ""  # its host
        self.first_instance = welcome.first_instance
        self._orders: NodeOrders | None = None  # None until the controller that is followed has given any
        self._servers: dict[int, OrderedProcess] = {}
        self._ranks = self._process(self._plan_ranks)
        self._meeting_port = free_port(settings.host)
        self._held: dict[int, Path] = {}  # versions -> folders
        self._manifests: dict[int, Manifest] = {}  # of what it holds and fetches
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._receiving: set[int] = set()  # versions that have a source
        self._ordered = Changes()
        self._problem = ""

    @classmethod
    async def enter(
        cls, stack: AsyncExitStack, settings: NodeSettings, welcome: NodeWelcome, *, on_change: Callable[[], None]
    ) -> Member:
        """Prepare folders, store and relay for a run."""
        config = parse(welcome.config)
        set_umask(config.run.group)
        found = await settings.find_models(config)
        root = (settings.folder / welcome.run_id).resolve()
        store = await asyncio.to_thread(_open_store, stack, settings, welcome, root)
        key, lease = secrets.token_hex(32), root / f"lease-{os.getpid()}"
        relay = Relay(store, key=key, checkpoints=root / "checkpoints", tls=TlsFiles.of(config.nodes.tls))
        url = await stack.enter_async_context(relay.listening(settings.host, 0))
        stack.callback(partial(lease.unlink, missing_ok=True))
        node = await stack.enter_async_context(Node(logs=root / "logs", lease=lease, host=settings.host))
        uses_cuda = "cuda" in (config.engine.device, config.trainer.device)
        member = cls(
            settings,
            welcome,
            paths=NodePaths(
                model=str(found.model),
                reference=str(found.reference or ""),
                adapter=str(found.adapter or ""),
                memory_root=str(store.memory_root),
                durable_root=str(root / "versions"),
                checkpoints=str(root / "checkpoints"),
                fence=str(root / "epoch"),
                logs=str(root / "logs"),
            ),
            node=node,
            lease=lease,
            store=store,
            relay=relay,
            source=RelaySource(url=url, key=key),
            gpus=await asyncio.to_thread(num_devices, os.environ) if uses_cuda else 0,
            on_change=on_change,
        )
        stack.push_async_callback(member._end_fetches)
        return member

    @property
    def logs(self) -> str:
        return self._paths.logs

    @property
    def has_ranks(self) -> bool:
        return self.first_instance < 0

    async def change_controller(self, welcome: NodeWelcome, *, controller: str) -> None:
        """Follow this controller: the ranks of an earlier one end, servers go on."""
        self.config, self.first_instance, self._orders = parse(welcome.config), welcome.first_instance, None
        self._controller = controller
        await raise_fence_patiently(Path(self._paths.fence), epoch=welcome.term)
        await self._ranks.close()

    def report(self, term: int, *, is_leaving: bool) -> Report:
        return Report(
            term=term,
            serial=self._orders.serial if self._orders is not None else -1,
            clock=time.time(),
            gpus=self._gpus,
            memory_bytes=psutil.virtual_memory().total,
            shared_bytes=shutil.disk_usage(self._paths.memory_root).free,
            engine=installed_release(self.config.engine.kind),
            relay=self._source,
            meeting_port=self._meeting_port,
            paths=self._paths,
            servers={index: server.state for index, server in self._servers.items() if server.state is not None},
            ranks=self._ranks.state,
            versions={version: str(folder) for version, folder in self._held.items()},
            fetching=tuple(self._receiving),
            problem=self._problem,
            is_leaving=is_leaving,
        )

    # -- orders -------------------------------------------------------------------------------------------------------

    async def follow(self, orders: NodeOrders) -> None:
        """Have the processes run, and the versions held, that are ordered."""
        before = self._orders
        if before is not None and orders.serial <= before.serial:
            return
        self._orders = orders
        for index in {*self._servers, *orders.servers}:
            if index not in self._servers:
                self._servers[index] = self._process(partial(self._plan_server, index))
            server = orders.servers.get(index)
            self._servers[index].follow(server.start if server is not None else None)
        # A version exists only once the controller has journaled it, so a new controller may not know all of them.
        stored = await asyncio.to_thread(self._stored) if before is None else ()
        for version in {*stored, *self._held, *self._fetches}:
            order = orders.versions.get(version)
            if order is None:
                await self._drop(version)
            elif self._manifests.get(version, _manifest(version, order)) != _manifest(version, order):
                await self._forget(version)  # its files may be those that are wanted now
        for version, order in orders.versions.items():
            if version not in self._held and version not in self._fetches:
                self._manifests[version] = manifest = _manifest(version, order)
                base = VersionId(order.base) if order.base is not None else None
                self._fetches[version] = asyncio.create_task(self._fetch(manifest, base), name=f"fetch-{version}")
        self._ranks.follow(orders.ranks.start if orders.ranks is not None else None)
        self._ordered.tell()
        self._on_change()

    def _process(self, plan: Callable[[], Awaitable[ProcessPlan]]) -> OrderedProcess:
        return OrderedProcess(
            plan,
            node=self._node,
            is_well=self._settings.is_well,
            api_key=self._settings.api_key,
            on_change=self._on_change,
        )

    async def _plan_server(self, index: int) -> ProcessPlan:
        assert self._orders is not None, "there are orders to start it"
        plans = plan_engines(
            self.config,
            model=Path(self._paths.model),
            lease=self._lease,
            environ=os.environ,
            node=RollingNode(
                first_instance=self.first_instance,
                host=self._settings.host,
                part=self._part(self._orders.servers[index]),
            ),
        )
        if index >= len(plans):
            raise ConfigError(f"the controller ordered server {index}, but this node has {len(plans)}")
        return plans[index]

    def _part(self, order: ServerOrder) -> ServerPart | None:
        if order.nodes == 1:
            return None
        interface = interface_of(self._settings.host)
        return ServerPart(nodes=order.nodes, node_rank=order.node_rank, master=order.master, interface=interface)

    async def _plan_ranks(self) -> ProcessPlan:
        """Bring what the ranks need to this node, and return their plan."""
        assert self._orders is not None, "there are orders to start them"
        orders = self._orders.ranks
        assert orders is not None, "there are orders to start them"
        fence = Path(self._paths.fence)
        await raise_fence_patiently(fence, epoch=self._orders.term, incarnation=orders.incarnation)
        await asyncio.to_thread(self._store.unstage)
        for name, wanted in orders.checkpoints.items():
            sources = partial(tuple, tuple(map(self._reachable, wanted.sources)))
            try:
                await self._relay.fetch_checkpoint(
                    name, wanted.files, wanted.num_bytes, sources, into=self._checkpoints
                )
            except StoreError as err:  # the ranks take an older one
                self._settings.tell(f"checkpoint {name} was not received: {err}")
        return plan_trainer(
            self.config,
            controller=f"tcp://{self._controller}:{orders.port}",
            token=self._settings.token,
            lease=self._lease,
            store=self._lease.with_name(f"{self._lease.name}-{self._orders.term}-{orders.incarnation}.store"),
            environ=os.environ,
            incarnation=orders.incarnation,
            node=self._training_node(orders) if self.config.num_training_nodes > 1 else None,
        )

    def _training_node(self, orders: RanksOrder) -> TrainingNode:
        master, _, port = orders.master.rpartition(":")
        return TrainingNode(
            nodes=orders.nodes,
            index=orders.node_rank,
            ranks=self.config.ranks_of_node,
            master=master,
            port=int(port),
            interface=interface_of(self._settings.host),
        )

    # -- versions -----------------------------------------------------------------------------------------------------

    def _stored(self) -> list[VersionId]:
        return [*{*self._store.live(), *self._store.durable()}]

    async def _fetch(self, manifest: Manifest, base: VersionId | None) -> None:
        """Have a version, from a source or because ranks of this node wrote it; repeat until it is there."""
        version = manifest.version
        try:
            while self._is_wanted(version):
                try:
                    await self._receive(manifest, base)
                    return
                except (StoreError, OSError) as err:
                    if not self._is_wanted(version):  # it was released meanwhile
                        return
                    self._problem = str(err)
                    log.warning("version_not_received", version=version, reason=str(err))
                    self._on_change()
                await asyncio.sleep(FETCH_PAUSE_S)
        finally:
            del self._fetches[version]

    async def _receive(self, manifest: Manifest, base: VersionId | None) -> None:
        version = manifest.version
        try:
            is_here = await asyncio.to_thread(self._discard_others, manifest)
            if not is_here:
                is_here = await self._receive_unless_written(manifest, base)
            self._held[version] = await asyncio.to_thread(self._store.folder, version)
        finally:
            self._receiving.discard(version)
        self._problem = ""
        self._on_change()
        if is_here and base is not None:
            with suppress(StoreError):  # its base is not here; others fetch the whole version
                await self._relay.offer_delta(version, base)

    async def _receive_unless_written(self, manifest: Manifest, base: VersionId | None) -> bool:
        """Receive a version; return whether ranks of this node have written it before it was received.

        The only node that had it may have been lost.
        """
        receiving = asyncio.create_task(self._receive_from_sources(manifest, base), name=f"receive-{manifest.version}")
        try:
            while not (await asyncio.wait({receiving}, timeout=LOOK_S))[0]:
                if self.has_ranks and await asyncio.to_thread(self._is_here, manifest):
                    return True
            receiving.result()
            return False
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})

    async def _receive_from_sources(self, manifest: Manifest, base: VersionId | None) -> None:
        sources = partial(self._sources, manifest.version)
        await self._ordered.until(lambda: bool(sources()))
        self._receiving.add(manifest.version)
        self._on_change()
        await self._relay.fetch(manifest, last_known(sources), base=base, model=Path(self._paths.model))

    def _is_wanted(self, version: int) -> bool:
        return self._orders is None or version in self._orders.versions

    def _discard_others(self, manifest: Manifest) -> bool:
        """Delete files of another history under the version's number; return whether the version is here already."""
        is_here = self._is_here(manifest)
        if not is_here:
            self._store.discard(manifest.version)
        return is_here

    def _is_here(self, manifest: Manifest) -> bool:
        try:
            return self._store.manifest(manifest.version) == manifest
        except StoreError:
            return False

    def _sources(self, version: int) -> list[VersionSource]:
        order = self._orders.versions.get(version) if self._orders is not None else None
        return [self._reachable(source) for source in order.sources] if order is not None else []

    def _reachable(self, source: RelaySource) -> VersionSource:
        address = urlsplit(source.url)
        if address.hostname == CONTROLLER_HOST:
            return VersionSource(f"{address.scheme}://{self._controller}:{address.port}", source.key)
        return VersionSource(source.url, source.key)

    async def _forget(self, version: int) -> None:
        """Hold and fetch a version no more."""
        await self._withdraw(version)
        self._held.pop(version, None)
        self._manifests.pop(version, None)

    async def _drop(self, version: int) -> None:
        """Delete a version that is released or unknown. Until it is deleted, it is reported."""
        await self._withdraw(version)
        with suppress(StoreError):
            await asyncio.to_thread(self._store.discard, VersionId(version))
        self._held.pop(version, None)
        self._manifests.pop(version, None)

    async def _withdraw(self, version: int) -> None:
        """Neither receive nor offer a version any more."""
        if (fetch := self._fetches.get(version)) is not None:
            fetch.cancel()
            await asyncio.wait({fetch})
        await self._relay.stop(VersionId(version))

    async def _end_fetches(self) -> None:
        fetches = [*self._fetches.values()]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)


def _manifest(version: int, order: FolderOrder) -> Manifest:
    return Manifest(version=VersionId(version), files=order.files, num_bytes=order.num_bytes, chain=order.chain)


def _open_store(stack: AsyncExitStack, settings: NodeSettings, welcome: NodeWelcome, root: Path) -> VersionStore:
    """Make the folders of a run on this node. What an earlier process of the node left is not used."""
    config = parse(welcome.config)
    durable = root / "versions"
    try:
        for folder in (root, root / "logs", root / "checkpoints", durable):
            folder.mkdir(parents=True, exist_ok=True)
        restrict(root, group=config.run.group)
    except OSError as err:
        raise ConfigError(f"--folder: cannot create {root} ({err.strerror})") from err
    try:
        stack.enter_context(hold(root / "lock"))
    except ConfigError as err:
        raise ConfigError(f"--folder (each node needs its own): {err}") from err
    # The parts of a server over several nodes need the same paths, so their number is in the name, not the node's.
    name = f"{welcome.run_id}-{settings.name if welcome.first_instance < 0 else welcome.first_instance}"
    sweep_orphans(config.weights.memory_folder, run_id=name)
    memory = choose_memory_root(
        config.weights.memory_folder,
        run_id=name,
        needed_bytes=welcome.live_bytes,
        fallback=durable,
        group=config.run.group,
    )
    if memory != durable:
        stack.enter_context(claim(memory))  # whatever is only here is lost with this process
    store = VersionStore(memory_root=memory, durable_root=durable)
    stack.callback(store.close)
    store.sweep()
    for version in {*store.live(), *store.durable()}:
        store.discard(version)
    return store
