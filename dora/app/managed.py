"""A server started by the run, and its API key.

Invariant: unless a key is configured, each start has a new one, which is sent to that server only. A process that takes
over the port of a dead server therefore learns no valid key.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from dora.controller.fleet import Started
from dora.engine.api import InferenceEngine
from dora.node.plan import SERVE_KEY
from dora.node.supervise import Child


class ManagedServer:
    """A child process with an API key; implements `controller.fleet.KeptServer`."""

    def __init__(self, child: Child, *, engine: InferenceEngine, api_key: str | None) -> None:
        self._child = child
        self._engine = engine
        self._api_key = api_key

    async def start(self) -> Started:
        key = self._api_key or draw_key()
        self._child.plan = replace(self._child.plan, env={**self._child.plan.env, SERVE_KEY: key})
        url = await self._child.start()
        self._engine.set_key(url, key)
        return Started(url)

    async def ended(self) -> str:
        return await self._child.ended()

    async def kill(self) -> None:
        await self._child.kill()

    async def stop(self) -> None:
        await self._child.stop()


def draw_key() -> str:
    return secrets.token_hex(32)
