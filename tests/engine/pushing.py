"""Fixtures of pushes over process groups, for the tests here and those on real servers."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.senders import Senders


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def senders(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Senders]:
    """One pool for all tests: a sender takes seconds to start."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    senders = Senders([sys.executable, "-m", "dora", "send"], env=env, log=tmp_path_factory.mktemp("logs") / "sender")
    yield senders
    await senders.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=8) as client:
        yield client
