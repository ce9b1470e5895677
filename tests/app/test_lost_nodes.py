"""What `dora check --nodes` says of nodes that are lost while the model is on its way to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dora.app.node_check import _report_links
from dora.node import cluster as cluster_module
from dora.node import place as place_module
from dora.transport.node_messages import NodeOrders
from tests.node.peers import WAIT_S, Peer, controller
from tests.weights.nodes import publish


async def test_a_node_that_is_lost_on_the_way_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "BEAT_S", 0.02)
    monkeypatch.setattr(place_module, "ALIVE_S", 0.2)
    answers = [True]  # and then its host refuses connections
    said: list[tuple[str, str]] = []
    one = ("nodes.expected=1", "nodes.train=0", "rollout.max_staleness=0")
    async with controller(tmp_path, *one, connects=lambda relay: bool(answers and answers.pop())) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.until(NodeOrders, saying=peer.reports())
            manifest = publish(there.cluster.spread._store, 0)
            async with asyncio.timeout(WAIT_S):
                rates = await _report_links(there.cluster, manifest, lambda *line: said.append(line))
    assert rates is None
    assert said == [("version", "n: NOT RECEIVED: its process has ended")]
