"""The nodes of a run in the terms of its controller: how a run begins with them, and the versions they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from dora import files
from dora.app.node_ranks import REPLACE_TIMEOUT_S, fewest_nodes
from dora.app.opening import Opened
from dora.app.resume import Recorded
from dora.app.settings import live_bytes
from dora.config.schema import Config
from dora.core.ids import InstanceId, VersionId
from dora.errors import ConfigError, RemoteError, RunFailed
from dora.node.cluster import Cluster, ClusterSettings
from dora.node.spread import Spread
from dora.tls import TlsFiles
from dora.transport.node_messages import RelaySource
from dora.weights.store import Manifest, VersionStore

#: Time in which the nodes that a run cannot begin without must join.
JOIN_TIMEOUT_S: Final = 1_800.0
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
        model=job.inputs.model,
        known=opened.nodes,
        removed=job.state.removed,
        save=lambda known: files.replace(folder.nodes, msgspec.json.encode(known)),
        tell=opened.tell,
        connects=partial(connects, tls=TlsFiles.of(config.nodes.tls)),
    )
    async with Cluster.listening(config, settings, store=opened.store, checkpoints=folder.checkpoints) as cluster:
        if config.nodes.store == "relay" and job.recorded is not None:
            name_versions(cluster.spread, job.recorded)
        await _wait_for_enough(cluster, config, is_resumed=job.epoch > 0)
        yield cluster


def name_versions(spread: Spread, recorded: Recorded) -> None:
    """Have the nodes hold the versions of an earlier start that are needed, whether or not this host had received them.

    What the ranks write again may have other bytes (on GPUs), so that answers under a version could not be continued.
    """
    for version in recorded.state.window.entries:
        spread.hold(recorded.manifest_of(version))


async def _wait_for_enough(cluster: Cluster, config: Config, *, is_resumed: bool) -> None:
    """Wait for all nodes with ranks, and for servers enough to hold K + 1 versions.

    A resume waits for all nodes with ranks for REPLACE_TIMEOUT_S, and then for as many as `trainer.min_ranks` needs.
    """
    servers = max(1, config.max_staleness + 1 if config.rollout.strategy == "dora" else 1) - len(config.engine.urls)

    def is_enough(wanted: int) -> bool:
        joined = [place for place in cluster.places if place.report is not None]
        training = sum(place.has_ranks for place in joined)
        begun = (len(joined) - training) // config.nodes_of_server * config.servers_of_node
        return training >= wanted and begun >= servers

    fewest = fewest_nodes(config) if is_resumed else config.num_training_nodes
    for wanted, timeout_s in (
        (config.num_training_nodes, REPLACE_TIMEOUT_S),
        (fewest, JOIN_TIMEOUT_S - REPLACE_TIMEOUT_S),
    ):
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await cluster.wait_until(partial(is_enough, wanted))
    missing = [f"{place.number} ({place.lost})" for place in cluster.places if place.report is None]
    raise RunFailed(
        f"nodes.expected: {len(missing)} of {config.nodes.expected} nodes have not joined within "
        f"{JOIN_TIMEOUT_S:g} s: {', '.join(missing)}"
    )


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


@dataclass(frozen=True)
class NodeVersions:
    """The versions on nodes; implements `controller.holders.Holders`."""

    cluster: Cluster
    store: VersionStore

    def hold(self, manifest: Manifest) -> None:
        self.cluster.spread.hold(manifest)

    async def fetch(self, version: VersionId, *, may_wait: Callable[[], bool]) -> None:
        await self.cluster.spread.fetch(version, may_wait=may_wait)

    def release(self, version: VersionId) -> None:
        self.cluster.spread.release(version)

    def drop(self, manifest: Manifest) -> None:
        self.cluster.spread.drop(manifest)

    async def folder(self, instance: InstanceId, version: VersionId) -> Path:
        place = self.cluster.places.of_instance(instance)
        if place is None:  # an external server reads the folder of this host
            return await self.own_folder(version)
        places = self.cluster.places.group_of(place)
        folders = [await self.cluster.spread.folder(place, version) for place in places]
        if len(set(folders)) > 1:
            names = " and ".join(place.name for place in places)
            raise RemoteError(f"nodes {names} have versions in different folders; start them with the same --folder")
        return folders[0]

    async def own_folder(self, version: VersionId) -> Path:
        await self.cluster.spread.fetch(version)
        return await asyncio.to_thread(self.store.folder, version)
