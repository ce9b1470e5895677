"""A run that trains on with fewer ranks while a node with ranks is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dora.core import events as ev
from dora.weights.checkpoints import read_manifest
from tests.cluster.cluster import SMALL, Cluster, HostedRun, assert_run_is_right
from tests.cluster.network import Host, Network, missing, network_at
from tests.e2e.runs import events_of

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

CHANGES = {
    **SMALL,
    "rollout__max_staleness": 0,
    "engine__min_step_ms": 40,  # so that servers have a version, and the next is not there, for a second or so
    "trainer__ranks": 2,
    "trainer__min_ranks": 1,
    "nodes__train": 2,
    "nodes__lease_s": 30.0,
}


@dataclass
class Pair:
    """A run whose ranks are on two nodes, by the names of their hosts."""

    network: Network
    cluster: Cluster
    run: HostedRun
    hosts: dict[str, Host]

    def crash(self, name: str) -> None:
        """Crash a host when all answers of the newest version have just begun, so that other nodes have it, too.

        Fewer ranks write other bytes, so the loss of what only one node has ends the run (docs/RELIABILITY.md).
        """
        wanted = 0.75 * SMALL["rollout__groups_per_step"] * SMALL["rollout__group_size"]
        self.run.until_status(
            lambda s: sum(one["residents"] for one in s["instances"]) >= wanted, what="answers of the newest version"
        )
        self.cluster.nodes.pop(name)
        self.hosts.pop(name).crash()

    def add(self, name: str) -> None:
        self.hosts[name] = self.network.host(name)
        self.cluster.node(self.hosts[name])

    def resume(self) -> None:
        """Stop the run, and resume it."""
        self.run.interrupt()
        assert self.run.end() == 130
        self.run = self.cluster.resume(self.run.host, self.run.folder)

    def until_trains_with(self, ranks: int, *, files: int | None = None) -> None:
        """Wait until this many ranks are ready, have trained a step, and have written a checkpoint of `files` files."""
        wanted = {"ranks": ranks, "ranks_ready": ranks}
        self.run.until_status(
            lambda status: {key: status["trainer"][key] for key in wanted} == wanted, what=f"{ranks} ranks"
        )
        begun = self.run.status()["steps_trained"]
        folders = self.run.folder.checkpoints
        self.run.until_status(
            lambda _: any(
                found.step > begun + 1 and found.world_size == (files or ranks)
                for found in map(read_manifest, folders.glob("step-*"))
                if found is not None
            ),
            what=f"a checkpoint of {ranks} ranks",
        )


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    if lacking := missing():
        pytest.skip(f"needs {lacking}")
    with network_at(tmp_path_factory.mktemp("fewer") / "net") as network:
        controller = network.host("controller")
        cluster = Cluster(network, {**CHANGES, "trainer__parallel__replicate": getattr(request, "param", 1)})
        with cluster.run(controller) as run:
            one = Pair(network, cluster, run, {})
            try:
                for name in ("node-0", "node-1", "node-2"):
                    one.add(name)
                yield one
            finally:
                sys.stdout.write(f"{run.told()}\n{one.run.told()}\n{cluster.told()}\n")
                one.run.kill()


def test_the_ranks_that_are_left_train_on_until_others_join(pair: Pair) -> None:
    """The first to be lost is the node with rank 0, which publishes and whose checkpoints are named first. A resume
    waits for the last one as long as the run did."""
    pair.until_trains_with(2)
    pair.crash("node-0")
    pair.until_trains_with(1)
    pair.add("node-3")
    pair.until_trains_with(2)
    pair.crash("node-1")
    pair.until_trains_with(1)
    pair.resume()
    pair.until_trains_with(1)
    pair.add("node-4")
    pair.until_trains_with(2)
    pair.run.interrupt()
    assert pair.run.end() == 130
    assert_run_is_right(pair.run.folder)
    lost = [event.reason for event in events_of(pair.run.folder, ev.TrainerLost)]
    assert len(lost) == 4, lost
    assert lost[1::2] == [f"all 2 ranks train again, with node node-{number}" for number in (3, 4)]


@pytest.mark.parametrize("pair", [2], indirect=True)
def test_the_copy_of_the_weights_that_is_left_trains_on(pair: Pair) -> None:
    """Only the first copy writes checkpoints; the node of the second gets them."""
    pair.until_trains_with(2, files=1)
    pair.crash("node-0")
    pair.until_trains_with(1, files=1)
    pair.add("node-3")
    pair.until_trains_with(2, files=1)
    pair.run.interrupt()
    assert pair.run.end() == 130
    assert_run_is_right(pair.run.folder)
