"""Faults that a run over several hosts goes on through: one run, to which they happen one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version as release_of
from pathlib import Path
from typing import Any

import pytest

from dora.core import events as ev
from dora.transport.node_messages import NODE_PROTOCOL, Join
from tests.cluster.cluster import (
    NODES_PORT,
    PATIENCE_S,
    RANKS_PORT,
    SMALL,
    Cluster,
    Confirmed,
    HostedRun,
    assert_run_is_right,
)
from tests.cluster.network import Host, Network, clock_library, missing, network_at
from tests.cluster.strangers import attack
from tests.e2e.runs import assert_audit_clean, events_of, until
from tests.transport.peers import hello

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

MB = 1_000_000
CUT_S = 30.0
RELEASE = "99.0"
#: The name of a node that takes part.
JOIN = Join(protocol=NODE_PROTOCOL, release=release_of("dora-rl"), name="node-0", run_id="")
#: What a node has sent after several handshakes that fail.
HANDSHAKES_BYTES = 3_000


@dataclass
class Life:
    """The run, and its hosts: `first` and `second` have a server each, and `trainer` has the rank."""

    network: Network
    cluster: Cluster
    run: HostedRun
    trainer: Host
    first: Host
    second: Host
    confirmed: Confirmed

    def until_serves(self, host: Host, version: int = 0) -> None:
        """Wait until the instance on a host has confirmed this version, or a newer one."""

        def ask() -> bool:
            assert self.run.process.poll() is None, self.run.told()
            confirmed = self.confirmed.on(host)
            return confirmed is not None and confirmed >= version

        until(ask, what=f"version {version} on {host.name}", timeout_s=PATIENCE_S)

    def newest(self) -> int:
        return int(max(row["version"] for row in self.run.status()["versions"]))

    def add(self, name: str, **options: Any) -> Host:
        """Add a host with a node."""
        host = self.network.host(name, **options)
        self.cluster.node(host)
        self.until_serves(host)
        return host

    def remove(self, host: Host) -> None:
        """Let a node leave in order, and end its host."""
        node = self.cluster.nodes.pop(host.name)
        node.process.terminate()
        assert node.wait() == 0, node.told()
        assert host.processes() == []
        self.network.forget(host)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    if lacking := missing():
        pytest.skip(f"needs {lacking}")
    with network_at(tmp_path_factory.mktemp("cluster") / "net") as network:
        controller, trainer = network.host("controller"), network.host("node-0")
        first, second = network.host("node-1"), network.host("node-2", slow=True)
        cluster = Cluster(network, {**SMALL, "nodes__max": 4})
        with cluster.run(controller) as run:
            cluster.node(trainer)
            for host in (first, second):
                cluster.node(host)
            try:
                run.until_trained(1)
                yield Life(network, cluster, run, trainer, first, second, Confirmed(run))
            finally:
                sys.stdout.write(f"{run.told()}\n{cluster.told()}\n")
            run.interrupt()
            assert run.end() == 130
            assert_run_is_right(run.folder)


@pytest.fixture
def life(shared: Life) -> Iterator[Life]:
    """The run with both servers, audited after the fault."""
    for host in (shared.first, shared.second):
        shared.until_serves(host)
    yield shared
    shared.run.until_more(1)
    assert_audit_clean(shared.run.folder)


def test_a_node_whose_link_was_cut_for_half_a_minute_serves_again(life: Life) -> None:
    end, trained = time.monotonic() + CUT_S, life.run.status()["steps_trained"]
    life.first.cut()
    until(lambda: time.monotonic() > end, what="half a minute")
    assert life.run.status()["steps_trained"] > trained + 1  # the other server goes on
    life.first.restore()
    life.until_serves(life.first, life.newest())


def test_a_link_of_one_megabyte_a_second_brings_new_versions(life: Life) -> None:
    life.first.limit(MB)
    life.until_serves(life.first, life.newest() + 2)
    life.first.limit(None)


def test_a_link_with_delay_and_loss_brings_new_versions(life: Life) -> None:
    life.second.delay(0.1, loss=0.05)
    life.until_serves(life.second, life.newest() + 1)
    life.second.delay(0.0)


def test_nodes_cut_off_from_each_other_alone_get_versions_from_others(life: Life) -> None:
    life.first.cut(life.second)
    newest = life.newest()
    for host in (life.first, life.second):
        life.until_serves(host, newest + 2)
    life.first.restore()


def test_a_node_joins_and_another_leaves_in_mid_run(life: Life) -> None:
    life.add("node-3")
    life.remove(life.first)
    life.run.until_more(1)
    life.first = life.network.hosts["node-3"]


def test_a_serving_node_that_crashes_is_replaced_while_the_run_goes_on(life: Life) -> None:
    life.cluster.nodes.pop(life.first.name)
    life.first.crash()
    life.run.until_more(3)
    life.first = life.add(life.first.name)


@pytest.mark.parametrize(("how", "next_one"), [("told to leave", "node-8"), ("crashes", "node-9")])
def test_a_node_with_ranks_is_replaced_while_the_run_goes_on(life: Life, how: str, next_one: str) -> None:
    gone, losses = life.trainer, len(events_of(life.run.folder, ev.TrainerLost))
    node = life.cluster.nodes.pop(gone.name)
    if how == "crashes":
        gone.crash()
    else:
        node.process.terminate()
        assert node.wait() == 0, node.told()
    life.run.until_status(lambda status: status["trainer"]["ranks_ready"] == 0, what="the trainer is lost")
    life.trainer = life.network.host(next_one)
    life.cluster.node(life.trainer)
    life.run.until_more(2)
    lost = events_of(life.run.folder, ev.TrainerLost)[losses:]
    assert [event.reason.partition(": ")[0] for event in lost] == [f"node {gone.name}, which has ranks, is lost"]


def test_a_node_whose_clock_is_an_hour_ahead_serves_as_any_other(life: Life) -> None:
    if clock_library() is None:
        pytest.skip("needs libfaketime (apt install faketime)")
    host = life.add("node-4", clock_offset_s=3600.0)
    life.until_serves(host, life.newest() + 2)
    life.remove(host)


def test_a_node_of_another_release_is_refused_in_one_line(life: Life) -> None:
    host = life.network.host("node-5")
    metadata = host.folder / "release" / "dora_rl-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: dora-rl\nVersion: {RELEASE}\n")
    path = f"{life.network.base / 'release'}:{Path.cwd()}"
    node = life.cluster.node(host, PYTHONPATH=path)
    assert node.wait() == 2
    [_, line] = life.cluster.nodes.pop(host.name).told().splitlines()  # the first one says where it looks for a run
    assert line.startswith("dora: ")
    assert RELEASE in line


def test_a_node_with_another_token_takes_no_part(life: Life) -> None:
    before = life.run.status()["instances"]
    host = life.network.host("node-6")
    node = life.cluster.node(host, DORA_TOKEN="a guess")
    until(lambda: host.counted()[1] > HANDSHAKES_BYTES, what="some handshakes")
    life.run.until_more(1)
    assert "takes part" not in life.cluster.nodes.pop(host.name).told()
    assert [row["url"] for row in life.run.status()["instances"]] == [row["url"] for row in before]
    node.process.terminate()
    assert node.wait() == 0
    life.network.forget(host)


@pytest.mark.parametrize("port", [NODES_PORT, RANKS_PORT])
def test_strangers_at_the_ports_of_a_controller_change_nothing(life: Life, port: int) -> None:
    host = life.network.host(f"stranger-{port}")
    address = life.run.host.address
    before, instances = memory_of(life.run), life.run.status()["instances"]
    attack(host, address, port, messages=(JOIN, hello()))
    life.run.until_more(1)
    assert memory_of(life.run) - before < 8 * MB
    assert [row["url"] for row in life.run.status()["instances"]] == [row["url"] for row in instances]
    life.network.forget(host)


def memory_of(run: HostedRun) -> int:
    """Largest resident memory of the controller so far, bytes."""
    status = Path(f"/proc/{run.controller.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
