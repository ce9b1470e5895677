"""Fixtures of the engine tests."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from scripted_server import ScriptedServer

from tests.embedded.conftest import model_a, model_b, reference_b  # noqa: F401 - fixtures of real models


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async for running in ScriptedServer().run():
        yield running


@pytest.fixture
def unused_url() -> str:
    """A url at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
