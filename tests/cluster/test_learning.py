"""Whole runs over a controller, a node with two ranks, and two nodes with two engines each; they share no folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.cluster.cluster import Cluster, assert_run_is_right
from tests.cluster.network import Network
from tests.e2e.conftest import slow_model  # noqa: F401
from tests.e2e.runs import events_of, run_to_end

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

DEFAULT_JOB = Path(__file__).parents[2] / "launch" / "configs" / "arithmetic-cpu.toml"
#: Times that a version may pass an interface, with everything else that passes it meanwhile.
MOST = 1.1
#: Share of a version that its delta may take, with everything else that passes meanwhile; 0.2 if one of five is whole.
LARGEST_DELTA = 0.1
#: Maximum of the bytes that a host receives, as a share of the size of all versions; checkpoints count too.
LARGEST_ADAPTER = 0.1


def test_the_default_job_learns_over_four_hosts(network: Network) -> None:
    folder = finished(network, {"run__steps": 24}).folder
    scores = {}
    for row in map(json.loads, folder.metrics.read_text().splitlines()):
        if row["kind"] == "evaluation":
            scores[row["version"]] = row["mean"]
    assert scores[0] < 0.35 < 0.5 < scores[24], scores
    assert_run_is_right(folder)
    deep = run_to_end("audit", "--deep", str(folder.root))
    assert deep.returncode == 0, deep.stdout


#: A few steps of a larger policy, whose versions are most of what passes an interface.
LARGE: dict[str, object] = {
    "run__steps": 5,
    "rollout__groups_per_step": 4,
    "rollout__group_size": 4,
    "rollout__max_new_tokens": 32,
    "rollout__filter_zero_variance": False,
    "eval__sets": "[]",
}


def test_a_version_passes_each_interface_once(network: Network, slow_model: Path) -> None:  # noqa: F811
    found = finished(network, LARGE | {"model__path": slow_model})
    published = events_of(found.folder, ev.VersionPublished)
    assert len(published) == 6
    versions = sum(event.num_bytes for event in published)
    checkpoint = sum(path.stat().st_size for path in found.folder.checkpoints.rglob("*"))
    _, sent = found.counted["node-0"]
    assert versions + checkpoint < sent < MOST * (versions + checkpoint), found.counted
    for name, expected in (("node-1", versions), ("node-2", versions), ("controller", versions + checkpoint)):
        received, _ = found.counted[name]
        assert 0.5 * versions < received < MOST * expected, (name, found.counted)
    assert_run_is_right(found.folder)


def rewards_of_length(folder: Path) -> str:
    """Rewards that differ between random answers, so that the weights change."""
    (rewards := folder / "rewards.py").write_text("def reward(response):\n    return len(response) % 5\n")
    return f'[{{kind="function", name="{rewards}:reward"}}]'


def test_deltas_take_a_fraction_of_each_interface(network: Network, slow_model: Path, tmp_path: Path) -> None:  # noqa: F811
    changes = {
        "model__path": slow_model,
        "task__rewards": rewards_of_length(tmp_path),
        "trainer__learning_rate": 1e-6,
        "trainer__publish_dtype": "bfloat16",
        "nodes__deltas": 100,  # version 0 is sent whole
    }
    found = finished(network, LARGE | changes)
    sizes = [event.num_bytes for event in events_of(found.folder, ev.VersionPublished)]
    assert len(sizes) == 6
    for name in ("node-1", "node-2"):
        received, _ = found.counted[name]
        assert sizes[0] < received < sizes[0] + LARGEST_DELTA * sum(sizes[1:]), (name, sizes, found.counted)
    assert_run_is_right(found.folder)


def test_only_adapters_pass_each_interface(network: Network, slow_model: Path) -> None:  # noqa: F811
    """Nodes, and the controller's host for its copies, make the weights of their own model."""
    found = finished(network, LARGE | {"model__path": slow_model, "trainer__lora__rank": 4})
    versions = sum(event.num_bytes for event in events_of(found.folder, ev.VersionPublished))
    for name in ("node-1", "node-2", "controller"):
        received, _ = found.counted[name]
        assert received < LARGEST_ADAPTER * versions, (name, versions, found.counted)
    assert_run_is_right(found.folder)


def test_servers_of_nodes_hold_versions_as_adapters(network: Network, slow_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """A version is its adapter alone, also as it passes from host to host, and each proves itself."""
    changes = {
        "model__path": slow_model,
        "task__rewards": rewards_of_length(tmp_path),
        "trainer__lora__rank": 4,
        "trainer__learning_rate": 1e-3,
        "engine__adapters": True,
        "rollout__max_staleness": 2,
    }
    found = finished(network, LARGE | changes)
    published = events_of(found.folder, ev.VersionPublished)
    assert all(not name.startswith("model") for event in published for name in event.files)
    assert sum(event.num_bytes for event in published) < 1e7
    deep = run_to_end("audit", "--deep", str(found.folder.root))
    assert deep.returncode == 0, deep.stdout
    assert events_of(found.folder, ev.VersionUnloaded)
    assert_run_is_right(found.folder)


@dataclass
class Finished:
    folder: RunFolder
    counted: dict[str, tuple[int, int]]  # bytes received and sent, by host


def finished(network: Network, changes: dict[str, object]) -> Finished:
    """Run a job to its end; all nodes end with it."""
    job: dict[str, object] = {
        "nodes__expected": 3,
        "nodes__train": 1,
        "nodes__servers": 2,
    }
    cluster = Cluster(network, job | changes)
    hosts = [network.host(name) for name in ("controller", "node-0", "node-1", "node-2")]
    with cluster.run(hosts[0], config=DEFAULT_JOB) as run:
        for host in hosts[1:]:
            cluster.node(host)
        assert run.end() == 0, f"{run.told()}\n{cluster.told()}"
        counted = {host.name: host.counted() for host in hosts}
        for node in cluster.nodes.values():
            assert node.wait() == 0, node.told()
        return Finished(run.folder, counted)
