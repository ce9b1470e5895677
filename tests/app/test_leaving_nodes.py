"""Nodes that want to leave a run: each is let go once none of its servers is of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora.app import node_servers
from dora.app.node_servers import add_servers, let_nodes_leave
from dora.controller import inbox as inbox_module
from dora.controller.fleet import Fleet
from dora.controller.inbox import Inbox
from dora.controller.user_requests import UserRequests
from dora.core.events import InstanceDrainRequested
from dora.core.ids import FOREIGN_VERSION, InstanceId
from dora.core.state import State
from dora.core.tables import Server
from dora.transport.node_messages import Over
from tests.controller.fakes import FakeEngines, make_fleet, settings_of
from tests.node.peers import WAIT_S, Controller, Peer, config_of, controller

ZERO = InstanceId(0)
ONE_NODE = ("nodes.expected=1", "nodes.train=0", "rollout.max_staleness=0")


class Run:
    """A controller whose core a test plays, with the server of one node."""

    def __init__(self, there: Controller) -> None:
        self.there = there
        self.state = State(settings_of())
        self.inbox = Inbox()
        self.told: list[str] = []
        engines, config = FakeEngines(1, count=1), config_of(*ONE_NODE)
        self.fleet: Fleet = make_fleet(
            [],
            engine=engines,
            inbox=self.inbox,
            in_flight=None,
            rows=self.state.instances,
            version_of=lambda label: FOREIGN_VERSION,
            now=lambda: 0.0,
        )
        add_servers(self.fleet, there.cluster, config, engine=engines)  # type: ignore[arg-type]
        requests = UserRequests(
            self.fleet,
            state=self.state,
            engine=engines,
            inbox=self.inbox,
            now=lambda: 0.0,  # type: ignore[arg-type]
        )
        opened: Any = SimpleNamespace(job=SimpleNamespace(config=config, state=self.state), tell=self.told.append)
        self.end = let_nodes_leave(there.cluster, requests, self.fleet, opened)


@asynccontextmanager
async def run_with_a_node(tmp_path: Path) -> AsyncIterator[tuple[Run, Peer]]:
    async with controller(tmp_path, *ONE_NODE) as there:
        run = Run(there)
        with Peer(there.address, "n") as peer:
            await peer.take_part()
            await there.until_joined(0)
            async with asyncio.timeout(WAIT_S):
                yield run, peer
            await run.end()


async def let_go(peer: Peer) -> str:
    return (await peer.until(Over, saying=peer.reports(is_leaving=True))).reason


async def test_a_node_whose_server_has_never_come_up_is_let_go(tmp_path: Path) -> None:
    async with run_with_a_node(tmp_path) as (_, peer):
        assert await let_go(peer) == "the node has left the run"


async def test_a_node_whose_instance_a_user_has_removed_is_let_go(tmp_path: Path) -> None:
    async with run_with_a_node(tmp_path) as (run, peer):
        await run.fleet.dismiss(ZERO)
        assert await let_go(peer) == "the node has left the run"


async def test_a_node_whose_servers_have_no_numbers_any_more_is_let_go(tmp_path: Path) -> None:
    """Another node, over which its server extended too, has left before it."""
    async with run_with_a_node(tmp_path) as (run, peer):
        await run.fleet.dismiss(ZERO)
        run.there.cluster.places[0].first_instance = None
        assert await let_go(peer) == "the node has left the run"


async def test_a_node_that_leaves_as_the_run_is_busy_asks_again_and_is_let_go_once_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_servers, "LEAVE_PAUSE_S", 0.0)
    async with run_with_a_node(tmp_path) as (run, peer):
        run.state.instances[ZERO] = Server(ZERO)
        with monkeypatch.context() as busy:
            busy.setattr(inbox_module, "ASK_TIMEOUT_S", 0.0)
            await peer.send(peer.reports(is_leaving=True))
            while not run.told:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0)
        assert run.told == ["node n cannot leave yet: the run did not respond within 0 s; it may be ending"]
        while not run.inbox._asked:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
        while run.inbox._asked:
            event = await run.inbox.take()
            assert isinstance(event, InstanceDrainRequested)
            assert (event.instance, event.leave) == (ZERO, True)
            run.inbox.answer(event, [])
            await asyncio.sleep(0)
        assert run.there.cluster.places[0].report is not None
        await run.fleet.dismiss(ZERO)
        assert await let_go(peer) == "the node has left the run"
