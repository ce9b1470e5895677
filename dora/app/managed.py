"""A server that this run starts, and the key that it demands.

Invariant: unless one is configured, every start has a key of its own, and it is sent to the server so started alone.
So a key that was told to whoever took the port of a dead server opens nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from dora.engine.api import InferenceEngine
from dora.node.plan import SERVE_KEY
from dora.node.supervise import Child


class ManagedServer:
    """A child with a key; the shape of `controller.fleet.Server`."""

    def __init__(self, child: Child, *, engine: InferenceEngine, api_key: str | None) -> None:
        self._child = child
        self._engine = engine
        self._api_key = api_key

    async def start(self) -> str:
        key = self._api_key or draw_key()
        self._child.plan = replace(self._child.plan, env={**self._child.plan.env, SERVE_KEY: key})
        url = await self._child.start()
        self._engine.set_key(url, key)
        return url

    async def ended(self) -> str:
        return await self._child.ended()

    async def kill(self) -> None:
        await self._child.kill()

    async def stop(self) -> None:
        await self._child.stop()


def draw_key() -> str:
    return secrets.token_hex(32)
