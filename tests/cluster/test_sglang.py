"""A run over three hosts whose servers are real SGLang servers, on the CPU; the hosts share no folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dora.config.load import load
from dora.core import events as ev
from tests.cluster.cluster import Cluster, assert_run_is_right
from tests.cluster.network import Network
from tests.e2e.runs import events_of, run_to_end

pytestmark = [pytest.mark.sglang, pytest.mark.deep, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SERVE = "launch/sglang-cpu/serve.py"
JOB = ROOT / "launch" / "configs" / "sglang-cpu.toml"


def test_real_servers_of_a_node_load_the_versions_that_it_receives(network: Network) -> None:
    if os.environ.get("DORA_SGLANG") != "1":
        pytest.skip("the real server is asked for by DORA_SGLANG=1")
    engine = load(JOB, environ={}).engine
    job = {
        "run__steps": 6,
        "rollout__max_staleness": 1,
        "rollout__watchdog_s": 60.0,
        "engine__kind": engine.kind,
        "engine__slots": engine.slots,
        "engine__kv_tokens": engine.kv_tokens,
        "engine__start_timeout_s": 300.0,
        # Hosts have working folders of their own.
        "engine__command": [str(ROOT / word) if word == SERVE else word for word in engine.command],
        "nodes__expected": 2,
        "nodes__train": 1,
        "nodes__servers": 2,
        "eval__sets": "[]",
    }
    cluster = Cluster(network, job)
    hosts = [network.host(name, shm_mb=1024) for name in ("controller", "node-0", "node-1")]
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # hosts have a home of their own
    with cluster.run(hosts[0]) as run:
        for host in hosts[1:]:
            cluster.node(host, XDG_CACHE_HOME=cache)
        assert run.end(timeout_s=600.0) == 0, f"{run.told()}\n{cluster.told()}"
        for node in cluster.nodes.values():
            assert node.wait() == 0, node.told()
    pushed = {event.version for event in events_of(run.folder, ev.WeightPushFinished)}
    assert len(pushed) > 1
    assert_run_is_right(run.folder)
    deep = run_to_end("audit", "--deep", str(run.folder.root))
    assert deep.returncode == 0, deep.stdout
