"""The ranks on nodes in the terms of the controller: started, and started again on the nodes that are there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import structlog

from dora.app.opening import Opened
from dora.app.settings import RankPaths
from dora.config.schema import Config
from dora.errors import RemoteError
from dora.node.cluster import Cluster
from dora.node.place import Place
from dora.transport.messages import CheckpointWritten
from dora.transport.node_messages import FolderOrder, RanksOrder, Report
from dora.weights.checkpoints import read_manifest
from dora.weights.source import VersionSource
from dora.weights.store import StoreError

log = structlog.get_logger(__name__)

#: Time in which nodes must be in the places that are needed, after a loss.
NODES_TIMEOUT_S: Final = 1_800.0
#: Time in which a node is replaced, before fewer ranks train on.
REPLACE_TIMEOUT_S: Final = 60.0
#: Time in which the nodes with ranks must have received what these need: versions and a checkpoint.
FETCH_TIMEOUT_S: Final = 7_200.0
#: Delay before a checkpoint that could not be copied is copied again.
COPY_PAUSE_S: Final = 5.0


class NodeRanks:
    """The ranks on nodes, the same number on each; implements `controller.trainer_link.Ranks`."""

    def __init__(self, cluster: Cluster, opened: Opened, *, port: int) -> None:
        """`port`: at which the controller listens for them."""
        config = opened.job.config
        self._cluster = cluster
        self._opened = opened
        self._port = port
        self._places = [place for place in cluster.places if place.has_ranks]
        self._each = config.ranks_of_node
        #: Number of ranks that share one copy of the weights; 0: all ranks.
        self._shard_ranks = config.shard_ranks if config.trainer.parallel.replicate > 1 else 0
        self._groups = config.trainer.parallel.expert, config.trainer.parallel.tensor
        self._nodes_at_once = nodes_at_once(config)
        self._fewest = fewest_nodes(config)
        there = self._of_whole_copies([place for place in self._places if place.report is not None])
        self._active = there if len(there) >= self._fewest else self._places  # those whose ranks take part
        self._has_own_store = config.nodes.store == "relay"
        self.are_apart = config.checkpoints_are_copied

    @property
    def are_cut_off(self) -> bool:
        return any(place.is_silent for place in self._active)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part."""
        return self._each * len(self._active)

    async def start(self, incarnation: int = 0) -> None:
        """Have the nodes start them, which fetch what they need first."""
        if len(self._active) < len(self._places):
            why = self._why_lost(self._places) or "a node has not ended its ranks"
            of_all = f"{self.num_ranks} of {len(self._places) * self._each} ranks"
            self._opened.tell(f"{why}; training goes on with {of_all}")
        maker, spread = self._active[0], self._cluster.spread
        spread.maker = maker
        self._cluster.changes.tell()  # it is to receive the versions
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
            if not await self._are_free(self._fewest, NODES_TIMEOUT_S - REPLACE_TIMEOUT_S):
                late = self._why_lost() or "a node has not ended its ranks"
                raise RemoteError(f"{late} (waited for {NODES_TIMEOUT_S:g} s)")
            self._active = self._of_whole_copies([place for place in self._places if _has_none(place)])
        await self.start(incarnation)
        return self.num_ranks

    def _of_whole_copies(self, places: list[Place]) -> list[Place]:
        """Return the first of these places that have whole copies of the weights together."""
        return places[: len(places) // self._nodes_at_once * self._nodes_at_once]

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
                written_by = manifest.world_size, (manifest.expert_ranks, manifest.tensor_ranks)
                is_own = written_by == (num_files, self._groups)
                ranks = needed if is_own else range(manifest.world_size)
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
            adapter=Path(own.adapter) if own.adapter else None,
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


def nodes_at_once(config: Config) -> int:
    """Return how many nodes at least have whole copies of the weights together, of which only whole ones take part, or
    whole groups that divide the experts."""
    together = config.shard_ranks if config.trainer.parallel.replicate > 1 else config.trainer.parallel.expert
    return together // math.gcd(together, config.ranks_of_node)


def fewest_nodes(config: Config) -> int:
    """Return the number of nodes with ranks that `trainer.min_ranks` needs; without it, that of all."""
    if not config.num_training_nodes:
        return 0
    at_least, at_once = config.trainer.min_ranks or config.trainer.ranks, nodes_at_once(config)
    return math.ceil(at_least / (at_once * config.ranks_of_node)) * at_once


def _has_none(place: Place) -> bool:
    """Whether a node is there, and has no ranks."""
    return place.report is not None and place.report.ranks is None


def _relay_of(place: Place) -> list[VersionSource]:
    return [VersionSource(place.report.relay.url, place.report.relay.key)] if place.report is not None else []
