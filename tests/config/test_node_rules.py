"""The rules of the section `nodes`."""

from __future__ import annotations

import pytest

from dora.config.load import load
from dora.errors import ConfigError

PLANNED = ("nodes.expected=4", "rollout.max_staleness=1", "trainer.ranks=2")


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, [*PLANNED, *overrides], environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["nodes.address=h:1"], "nodes.address: cannot listen on h:1; write it as tcp://HOST:PORT"),
        (["nodes.max=3"], "nodes.max: 3 is less than nodes.expected (4)"),
        (["nodes.train=5"], "nodes.train: 5 of 4 nodes (nodes.expected) cannot train"),
        (["nodes.train=4"], "nodes.expected: 4 nodes train and none is left to roll out; raise it, or lower"),
        (["nodes.train=3"], "nodes.train: 2 trainer.ranks cannot be divided equally among 3 nodes"),
        (
            ["trainer.parallel.replicate=3"],
            "trainer.parallel.replicate: 2 trainer.ranks cannot be divided into 3 equal groups",
        ),
        (
            ["trainer.parallel.expert=3"],
            "trainer.parallel.expert: 3 ranks that divide experts must divide the 2 ranks of a copy of the weights",
        ),
        (
            ["trainer.parallel.tensor=2", "nodes.train=2"],
            "trainer.parallel.tensor: 2 ranks that divide matrices must be on one node, and a node has 1 ranks",
        ),
        (
            ["trainer.parallel.tensor=2", "trainer.optimizer=muon"],
            "trainer.parallel.tensor: not with trainer.optimizer = muon, which needs whole rows; use adamw",
        ),
        (
            ["trainer.parallel.tensor=2", "trainer.optimizer_state=8bit"],
            "trainer.parallel.tensor: not with trainer.optimizer_state = 8bit, whose blocks it would cut; use device",
        ),
        (
            ["trainer.parallel.context=2", "trainer.parallel.replicate=2"],
            "trainer.parallel.context: 2 ranks that divide sequences must divide the 1 ranks of a copy of the weights",
        ),
        (
            ["trainer.parallel.context=4"],
            "trainer.parallel.context: 4 ranks that divide sequences must divide the 2 ranks of a copy of the weights",
        ),
        (
            ["trainer.parallel.context=2", "nodes.train=2"],
            "trainer.parallel.context: 2 ranks that divide sequences must be on one node, and a node has 1 ranks",
        ),
        (
            ["trainer.parallel.context=2", "trainer.parallel.expert=2"],
            "trainer.parallel.expert: not together with trainer.parallel.context; set one of them to 1",
        ),
        (["trainer.min_ranks=1"], "trainer.min_ranks: no rank is left if the only host with ranks is lost"),
        (["nodes.expected=0", "trainer.min_ranks=1"], "trainer.min_ranks: no rank is left if the only host with ranks"),
        (["nodes.train=2", "trainer.min_ranks=3"], "trainer.min_ranks: 3 is more than trainer.ranks (2)"),
        (["engine.instances=4"], "engine.instances: with nodes, nodes.servers says how many servers each has"),
        (["engine.gpus=[0]"], "engine.gpus: with nodes, the GPUs of a node are divided among its servers; remove it"),
        (
            ["engine.kind=sglang", "engine.device=cuda", "engine.tensor_parallel=16"],
            "nodes.expected: 3 nodes without ranks cannot be divided into servers of 2 nodes (16 GPUs: "
            "engine.tensor_parallel)",
        ),
        (
            ["engine.kind=sglang", "engine.device=cuda", "engine.tensor_parallel=12"],
            "engine.tensor_parallel: 12 GPUs cannot be divided among nodes of 8 (nodes.gpus)",
        ),
        (
            ["engine.kind=sglang", "engine.device=cuda", "engine.tensor_parallel=24", "nodes.servers=2"],
            "nodes.servers: a server of 24 GPUs takes 3 nodes of 8 (nodes.gpus); remove it",
        ),
        (
            ["engine.kind=sglang", "engine.device=cuda", "engine.tensor_parallel=4", "nodes.servers=3"],
            "nodes.servers: 3 servers need 12 GPUs, and a node has 8 (nodes.gpus); lower it",
        ),
        (["nodes.deltas=2"], "nodes.deltas: differences of float32 weights are half as large as the weights"),
        (
            ["weights.transfer=distributed", "engine.kind=sglang"],
            "weights.transfer: distributed needs nodes.store = shared: senders read this host's folder",
        ),
        (
            ["nodes.servers=1", "nodes.train=3", "trainer.ranks=3"],
            "K = 1 keeps up to 2 versions alive",
        ),
        (["nodes.expected=-1"], "nodes.expected: got -1"),
        (["nodes.lease_s=0"], "nodes.lease_s: got 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_nodes_that_cannot_work_are_refused(overrides: list[str], says: str) -> None:
    assert says in refused(*overrides)


def test_what_cannot_work_with_nodes_is_allowed_without_them() -> None:
    load(None, ["nodes.max=3", "nodes.train=5", "nodes.deltas=2", "engine.instances=5", "engine.gpus=[]"], environ={})


@pytest.mark.parametrize(
    ("overrides", "training", "instances", "most"),
    [
        pytest.param([], 1, 6, 4, id="on the CPU one node trains and each other one has two servers"),
        pytest.param(["nodes.servers=3", "nodes.train=2", "nodes.max=9"], 2, 6, 9, id="as given"),
        pytest.param(
            ["engine.kind=sglang", "engine.tensor_parallel=16", "nodes.train=2", "rollout.max_staleness=0"],
            *(2, 1, 4),
            id="a server over two nodes",
        ),
        pytest.param(["nodes.train=0"], 0, 8, 4, id="the ranks on the controller's host"),
        pytest.param(
            ["trainer.device=cuda", "engine.device=cuda", "trainer.ranks=16"], 2, 16, 4, id="as many as 16 ranks need"
        ),
        pytest.param(
            ["engine.kind=sglang", "engine.device=cuda", "engine.tensor_parallel=4"], 1, 6, 4, id="servers of 4 GPUs"
        ),
        pytest.param(
            ['engine.urls=["http://h:1"]', "nodes.train=4", "trainer.ranks=4", "rollout.max_staleness=0"],
            4,
            1,
            4,
            id="external servers",
        ),
    ],
)
def test_a_plan_divides_the_nodes(overrides: list[str], training: int, instances: int, most: int) -> None:
    config = load(None, [*PLANNED, *overrides], environ={})
    assert (config.num_training_nodes, config.num_instances, config.max_nodes) == (training, instances, most)
