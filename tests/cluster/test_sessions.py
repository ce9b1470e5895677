"""Many nodes of one controller, each a session of the protocol that follows its orders at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from dora.config.load import load
from dora.core.ids import VersionId
from dora.node.cluster import Cluster, ClusterSettings
from dora.node.place import ALIVE_S
from dora.node.places import Known
from dora.weights.store import VersionStore
from tests.cluster import sessions
from tests.cluster.sessions import session
from tests.weights.nodes import publish

TOKEN = "secret"
NODES = 24
WAIT_S = 30.0


class Controller:
    """The controller's side, and what it has told and recorded."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.saved: Known = {}
        self.store = VersionStore(memory_root=folder / "memory", durable_root=folder / "durable")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Cluster]:
        job = [f"nodes.expected={NODES}", "nodes.train=0", "nodes.servers=2", "nodes.address=tcp://127.0.0.1:0"]
        settings = ClusterSettings(
            run_id="run",
            term=1,
            token=TOKEN,
            live_bytes=1,
            model=Path("/nonexistent"),
            known={},
            removed=(),
            save=self._save,
            tell=self.told.append,
            connects=lambda _: True,
        )
        config = load(None, job, environ={"DORA_TOKEN": TOKEN})
        checkpoints = Path("/nonexistent")
        async with Cluster.listening(config, settings, store=self.store, checkpoints=checkpoints) as cluster:
            yield cluster

    def _save(self, known: Known) -> None:
        self.saved = known

    @property
    def address(self) -> str:
        [address] = re.findall(r"tcp://(\S+)", self.told[0])
        return str(address)


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setattr(sessions, "REPORT_S", 0.5)
    return Controller(tmp_path)


async def until(cluster: Cluster, is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        await cluster.changes.until(is_so)


def is_held(cluster: Cluster, version: int, number: int) -> bool:
    return holders(cluster, version) == number


def holders(cluster: Cluster, version: int) -> int:
    return sum(place.report is not None and version in place.report.versions for place in cluster.places)


async def test_all_join_hold_what_is_published_drop_what_is_released_and_end(controller: Controller) -> None:
    async with controller.listening() as cluster, asyncio.TaskGroup() as group:
        for index in range(NODES):
            group.create_task(session(controller.address, TOKEN, f"node-{index}"))
        await until(cluster, lambda: all(place.report is not None for place in cluster.places))
        assert [place.name for place in cluster.places] == [f"node-{index}" for index in range(NODES)]
        assert [place.first_instance for place in cluster.places] == [2 * index for index in range(NODES)]
        assert {name: known.place for name, known in controller.saved.items()} == {
            f"node-{index}": index for index in range(NODES)
        }
        for version in map(VersionId, (3, 4)):
            manifest = publish(controller.store, version)
            cluster.spread.hold(manifest)
            await until(cluster, partial(is_held, cluster, version, NODES))
        cluster.spread.release(VersionId(3))
        await until(cluster, partial(is_held, cluster, 3, 0))
        assert holders(cluster, 4) == NODES
        await cluster.end("it is over")


async def test_a_node_that_is_silent_holds_up_no_other(controller: Controller) -> None:
    async with controller.listening() as cluster, asyncio.TaskGroup() as group:
        tasks = [group.create_task(session(controller.address, TOKEN, f"node-{i}")) for i in range(NODES)]
        await until(cluster, lambda: all(place.report is not None for place in cluster.places))
        tasks[1].cancel()
        await asyncio.wait({tasks[1]})
        cluster.places[1].heard_at -= 2 * ALIVE_S
        cluster.spread.hold(publish(controller.store))
        await until(cluster, partial(is_held, cluster, 3, NODES - 1))
        await cluster.end("it is over")
