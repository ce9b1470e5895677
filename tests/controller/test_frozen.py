"""A real server that is stopped with its connections open: nothing ends, nothing answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dora.controller import fleet as fleet_module
from dora.controller.fleet import ExternalServer, Fleet, FleetLimits
from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.trajectories import Trajectories
from dora.core.events import InstanceLost, InstanceUp
from dora.core.ids import FOREIGN_VERSION, InstanceId
from dora.core.tables import Server
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.journal.tokens import TokenWriter
from dora.node.plan import ProcessPlan
from dora.node.supervise import Child, Node
from dora.seed.policy import path as seed_path

ZERO = InstanceId(0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Child]:
    argv = (sys.executable, "-m", "dora", "serve", "--port", "0", "--incremental-streaming-output")
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    async with Node(logs=tmp_path, lease=tmp_path / "lease") as node:
        yield node.add(ProcessPlan(name="engine-0", argv=argv, env=env, ready_timeout_s=90.0))


async def test_a_frozen_server_without_work_is_lost_by_its_health_and_comes_back_when_it_thaws(
    server: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await server.start()
    assert server.pid is not None
    process = psutil.Process(server.pid)
    inbox = Inbox()
    rows = {ZERO: Server(ZERO)}
    with TokenWriter(tmp_path / "tokens.bin") as tokens:
        in_flight = InFlight(Trajectories(tokens, group_size=1), rows=rows)
    async with EngineClient(max_connections=4) as client, asyncio.timeout(90):
        engine = SglangEngine(client)
        fleet = Fleet(
            [ExternalServer(url, engine=engine)],
            engine=engine,
            limits=FleetLimits(streams=2, slots=2, kv_tokens=1024, context_tokens=128, model=seed_path(), path_map={}),
            inbox=inbox,
            in_flight=in_flight,
            rows=rows,
            removed=(),
            version_of=lambda label: FOREIGN_VERSION,
            now=lambda: 0.0,
        )
        keeper = asyncio.create_task(fleet.run(), name="fleet")
        first = await inbox.take()
        monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.05)
        monkeypatch.setattr(fleet_module, "HEALTH_TIMEOUT_S", 0.5)
        process.suspend()
        lost = await inbox.take()
        process.resume()
        monkeypatch.setattr(fleet_module, "HEALTH_TIMEOUT_S", 30.0)
        back = await inbox.take()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    assert isinstance(first, InstanceUp)
    assert lost == InstanceLost(0.0, ZERO, 1, {}, f"{url}: missed 3 health checks in a row")
    assert isinstance(back, InstanceUp)
    assert back.incarnation == 2
