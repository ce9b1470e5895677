"""A host of environments on another machine, behind a network that loses frames, and that is gone for a while."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from dora.config.schema import EnvironmentConfig
from dora.environments.api import Observation, Reset, Turn
from dora.environments.pool import EnvironmentPool
from dora.environments.replies import EnvironmentFailed
from dora.transport.host_line import BEAT_S, SILENCE_S
from tests.cluster.network import Host, Network
from tests.e2e.runs import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

PORT = 8425
COUNTING = Path(__file__).parents[1] / "environments" / "counting.py"


@pytest.fixture
def away(network: Network) -> Host:
    """The machine of the environment; it serves."""
    host = network.host("away")
    (host.folder / "token").write_text("a token")
    listen = ("--listen", f"0.0.0.0:{PORT}", "--token-file", "token")
    serving = host.start(sys.executable, "-m", "dora", "environments", "serve", *listen)
    until(lambda: "at most" in serving.told(), what="that it listens")
    return host


async def test_calls_are_made_once_over_loss_and_an_outage_and_a_longer_one_ends_both_sides(
    network: Network, away: Host
) -> None:
    here = network.host("here")
    (here.folder / "token").write_text("a token")
    connect = (sys.executable, "-m", "dora", "environments", "connect", f"away:{PORT}", "--token-file", "token")
    settings = EnvironmentConfig(
        name=f"{COUNTING}:Counting",
        options={"file": f"{network.base}/calls"},
        command=(*here.prefix(), *connect),
        call_timeout_s=200,
    )
    made = 0

    async def call(pool: EnvironmentPool) -> None:
        nonlocal made
        answer = await pool.step(0, Turn(f"{made} abc"))
        assert isinstance(answer, Observation), answer
        assert answer.messages[0]["content"] == f"{made} cba"
        made += 1

    async with EnvironmentPool(settings) as pool:
        assert isinstance(await pool.start(0, {"name": "e"}, source="s", name="a"), Reset)
        away.lose(0.2)
        for _ in range(40):
            await call(pool)
        away.cut()
        waiting = asyncio.create_task(call(pool))
        done, _ = await asyncio.wait([waiting], timeout=25)  # ZeroMQ gives the connection up after 10 s
        assert not done
        away.restore()
        await waiting
        for _ in range(40):
            await call(pool)
        lines = away.outside(network.base / "calls").read_text().splitlines()
        assert Counter(int(line.split()[1]) for line in lines) == Counter(range(made))

        away.cut()
        began = time.monotonic()
        failed = await pool.step(0, Turn("late"))
        assert isinstance(failed, EnvironmentFailed)
        assert failed.reason.endswith(f"dora environments serve at away:{PORT} was not heard for {SILENCE_S:g} s")
        assert time.monotonic() - began == pytest.approx(SILENCE_S, abs=15)
        until(lambda: not away.processes("dora.tasks.guard"), what="the end of the host", timeout_s=3 * BEAT_S + 15)
