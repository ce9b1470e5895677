"""Ends of a controller, or of its ranks, after which the run is resumed, and the nodes with their servers go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from dora.journal.run_folder import RunFolder
from tests.chaos.recorded import read_frames, unpack
from tests.cluster.cluster import (
    NODES_PORT,
    PATIENCE_S,
    SMALL,
    Cluster,
    HostedRun,
    assert_run_is_right,
    copied,
    servers,
)
from tests.cluster.network import Host, Network, missing, network_at
from tests.e2e.runs import until, until_gone

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

#: Names by which nodes find a controller; the first moves with it.
CONTROLLERS = f"controller:{NODES_PORT},spare:{NODES_PORT}"


@dataclass
class Life:
    """The newest start of a run, and its hosts."""

    network: Network
    cluster: Cluster
    run: HostedRun
    trainer: Host
    serving: tuple[Host, Host]

    def servers(self) -> list[list[psutil.Process]]:
        return [servers(host) for host in self.serving]

    def kill(self) -> RunFolder:
        """Kill the controller with everything on its host; return the folder that it leaves."""
        folder = self.run.folder
        self.run.kill()
        until_gone(self.run.host.processes())
        return folder

    def resume(self, host: Host, folder: RunFolder) -> HostedRun:
        """Resume on a host, to which the folder is copied unless it is there."""
        here = folder if folder.root.is_relative_to(host.folder) else copied(folder, host=host)
        self.run = self.cluster.resume(host, here)
        return self.run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    if lacking := missing():
        pytest.skip(f"needs {lacking}")
    with network_at(tmp_path_factory.mktemp("cluster") / "net") as network:
        names = ("controller", "spare", "node-0", "node-1", "node-2")
        controller, _, trainer, first, second = (network.host(name) for name in names)
        cluster = Cluster(network, SMALL, CONTROLLERS)
        life = Life(network, cluster, cluster.run(controller), trainer, (first, second))
        cluster.node(trainer)
        for host in life.serving:
            cluster.node(host)
        try:
            life.run.until_trained(1)
            yield life
        finally:
            sys.stdout.write(f"{life.run.told()}\n{cluster.told()}\n")
            life.run.kill()


@pytest.fixture
def life(shared: Life) -> Iterator[Life]:
    """The run, which trains; audited afterwards."""
    shared.run.until_more(2)
    yield shared
    shared.run.until_more(2)
    assert_run_is_right(shared.run.folder)


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return [unpack(record) for record in read_frames(folder.journal).records]


def held_at_the_end(folder: RunFolder) -> dict[int, int]:
    """The version of each instance by a journal, without those that get another."""
    held: dict[int, int] = {}
    for record in records(folder):
        if record["type"] == "Handled":
            event = record["event"]
            if event["type"] in ("InstanceUp", "InstanceLost", "ControllerRestarted"):
                gone = {event["instance"]} if "instance" in event else {*held}
                held = {instance: version for instance, version in held.items() if instance not in gone}
            elif event["type"] == "WeightPushFinished":
                held[event["instance"]] = event["version"]
            for order in record["commands"]:
                if order["type"] == "PushWeights":
                    held.pop(order["instance"], None)
    return held


def adopted(folder: RunFolder) -> dict[int, int]:
    """The versions with which instances came up since the last start of the controller."""
    found: dict[int, int] = {}
    for record in records(folder):
        if record["type"] == "Epoch":
            found = {}
        elif record["type"] == "Handled" and record["event"]["type"] == "InstanceUp":
            event = record["event"]
            if event.get("version") is not None:
                found.setdefault(event["instance"], event["version"])
    return found


def test_a_controller_resumed_on_another_host_takes_over_nodes_and_versions(life: Life) -> None:
    before = life.servers()
    folder = life.kill()
    held = held_at_the_end(folder)
    host = life.network.host("elsewhere")
    life.network.name_host("controller", host)
    life.resume(host, folder)
    life.run.until_more(1)
    assert life.servers() == before
    assert held.items() <= adopted(life.run.folder).items()


def test_a_controller_killed_while_a_training_node_is_lost_is_resumed_with_another_one(life: Life) -> None:
    before = life.servers()
    life.cluster.nodes.pop(life.trainer.name)
    life.trainer.crash()
    life.run.until_status(lambda status: status["trainer"]["ranks_ready"] == 0, what="the trainer is lost")
    folder = life.kill()
    life.trainer = life.network.host("node-3")
    life.cluster.node(life.trainer)
    life.resume(life.run.host, folder)
    life.run.until_more(1)
    assert life.servers() == before


def test_of_two_controllers_the_lower_one_ends_in_one_line(life: Life) -> None:
    before = life.servers()
    folder = life.kill()
    spare = life.network.hosts["spare"]
    copy = copied(folder, host=spare)
    ours = life.resume(life.run.host, folder)
    other = life.cluster.resume(spare, copy)

    def ended() -> HostedRun | None:
        return next((run for run in (ours, other) if run.process.poll() is not None), None)

    lower = until(ended, what="the end of one controller", timeout_s=PATIENCE_S)
    life.run = ours if lower is other else other
    assert lower.end() == 1
    assert lower.err[-1].startswith("dora: another controller has taken over the run"), lower.told()
    lowers = ours.folder if lower is ours else RunFolder(copy.root)
    size = lowers.journal.stat().st_size
    life.run.until_more(1)
    assert lowers.journal.stat().st_size == size
    assert_run_is_right(lowers)
    assert life.servers() == before
