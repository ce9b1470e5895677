"""A server over two nodes: one instance to the run, a part with a rank of its own on each node."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dora.app.node_servers import NodeServer
from dora.controller.fleet import Started
from dora.errors import RemoteError
from dora.node import cluster as cluster_module
from dora.node.plan import RollingNode, ServerPart, plan_engines
from dora.transport.node_messages import NodeOrders, ProcessState, ServerOrder
from tests.node.peers import WAIT_S, Controller, Peer, config_of, controller

WIDE = (
    *("nodes.expected=2", "nodes.train=0", "nodes.gpus=8", "engine.tensor_parallel=16", "engine.kind=sglang"),
    "rollout.max_staleness=0",
)


class Keys(dict[str, str]):
    """An engine that is only given keys."""

    def set_key(self, url: str, key: str) -> None:
        self[url] = key


def server_of(there: Controller, keys: Keys) -> NodeServer:
    engine: Any = keys
    return NodeServer(there.cluster, there.cluster.places[0], 0, config=config_of(*WIDE), engine=engine)


async def ordered(peer: Peer, start: int) -> ServerOrder:
    def is_it(orders: NodeOrders) -> bool:
        return 0 in orders.servers and orders.servers[0].start == start

    return (await peer.until(NodeOrders, is_it, saying=peer.reports())).servers[0]


def up(start: int, name: str) -> dict[int, ProcessState]:
    return {0: ProcessState(start=start, phase="up", url=f"http://{name}:2", key=f"key of {name}")}


async def test_it_starts_on_both_nodes_and_ends_with_either(tmp_path: Path) -> None:
    keys = Keys()
    async with controller(tmp_path, *WIDE) as there:
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            welcomes = await asyncio.gather(first.join(), second.join())
            assert [welcome.first_instance for welcome in welcomes] == [0, 0]
            server = server_of(there, keys)
            starting = asyncio.create_task(server.start())
            orders = await asyncio.gather(ordered(first, 1), ordered(second, 1))
            assert orders == [ServerOrder(start=1, nodes=2, node_rank=rank, master="a:1") for rank in range(2)]
            await first.send(first.reports(servers=up(1, "a")))
            await there.until(lambda cluster: bool(cluster.places[0].report.servers))
            assert not starting.done()
            await second.send(second.reports(servers=up(1, "b")))
            async with asyncio.timeout(WAIT_S):
                assert await starting == Started("http://a:2")
            assert keys == {"http://a:2": "key of a"}
            ended = {0: ProcessState(start=1, phase="ended", reason="killed")}
            await second.send(second.reports(servers=ended))
            async with asyncio.timeout(WAIT_S):
                assert await server.ended() == "node b: killed"
            await server.kill()
            again = asyncio.create_task(server.start())
            assert [(await ordered(first, 2)).node_rank, (await ordered(second, 2)).node_rank] == [0, 1]
            again.cancel()


async def test_it_is_kept_only_if_both_parts_run(tmp_path: Path) -> None:
    for parts, is_kept in (((4, 7), True), ((4, None), False)):
        async with controller(tmp_path, *WIDE) as there:
            with ExitStack() as stack:
                peers = [stack.enter_context(Peer(there.address, name)) for name in "ab"]
                await asyncio.gather(*(peer.join() for peer in peers))
                for peer, start in zip(peers, parts, strict=True):
                    peer.reports(servers=up(start, peer.name) if start is not None else {})
                await asyncio.gather(*(peer.until(NodeOrders, saying=peer.reports()) for peer in peers))
                starting = asyncio.create_task(server_of(there, Keys()).start())
                if is_kept:
                    async with asyncio.timeout(WAIT_S):
                        assert await starting == Started("http://a:2", is_kept=True)
                else:
                    starts = [(await ordered(peer, start)).start for peer, start in zip(peers, (5, 1), strict=True)]
                    assert starts == [5, 1]
                    starting.cancel()


async def test_the_loss_of_a_node_is_the_loss_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "BEAT_S", 0.02)
    async with controller(tmp_path, *WIDE, "nodes.lease_s=0.3") as there:
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await asyncio.gather(first.join(), second.join())
            starting = asyncio.create_task(server_of(there, Keys()).start())
            await asyncio.gather(ordered(first, 1), ordered(second, 1))
            while not starting.done():
                await first.send(first.reports())
                await asyncio.sleep(0)
            with pytest.raises(RemoteError, match="node b is lost: nothing was heard from it"):
                await starting


async def test_nodes_that_stay_get_the_number_of_the_next_server(tmp_path: Path) -> None:
    async with controller(tmp_path, *WIDE, "nodes.max=2") as there:
        there.cluster.on_new_servers = lambda place: 9
        with ExitStack() as stack:
            a, b, c = (stack.enter_context(Peer(there.address, name)) for name in "abc")
            await asyncio.gather(a.take_part(), b.take_part())
            await there.cluster.let_go(there.cluster.places[1])
            assert [place.first_instance for place in there.cluster.places] == [None, None]
            assert (await c.join()).first_instance == 9
            assert [place.first_instance for place in there.cluster.places] == [9, 9]
            assert there.cluster.places.of_instance(9) is there.cluster.places[0]


def test_a_part_knows_its_place_and_its_interface(tmp_path: Path) -> None:
    def argv(part: ServerPart | None) -> list[str]:
        config = config_of(*WIDE, "engine.device=cuda")
        node = RollingNode(first_instance=0, host="h", part=part)
        environ = {"NCCL_SOCKET_IFNAME": "ib0"}
        [plan] = plan_engines(config, model=tmp_path, lease=tmp_path, environ=environ, node=node)
        names.append((plan.env["GLOO_SOCKET_IFNAME"], plan.env["NCCL_SOCKET_IFNAME"]))
        assert plan.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        return list(plan.argv)

    names: list[tuple[str, str]] = []
    alone, part = argv(None), argv(ServerPart(nodes=2, node_rank=1, master="m:5", interface="eth1"))
    assert part == [*alone, "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "m:5"]
    assert names[1] == ("eth1", "ib0")
