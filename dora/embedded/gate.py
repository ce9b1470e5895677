"""Who may generate: a pause holds new requests outside, an unpaused weight update waits until nobody is inside.

A request that waits at the gate is not live: it cannot be aborted, is in no queue, and goes on under whatever weights
the server holds when it gets in. Called by the HTTP handlers only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    def __init__(self) -> None:
        self.paused = False
        self._inside = 0
        self._updates = 0
        self._changed = asyncio.Condition()

    @property
    def closing(self) -> bool:
        """A weight update waits for, or has, an empty server."""
        return self._updates > 0

    @property
    def closed(self) -> bool:
        return self.paused or self.closing

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Around one generate call. Waits without limit: a paused stream is silent but open."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.closed)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            await self._tell()

    async def pause(self) -> None:
        self.paused = True
        await self._tell()

    async def resume(self) -> None:
        self.paused = False
        await self._tell()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Around a weight update: new calls wait, running ones finish first, unless the server is paused."""
        self._updates += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.paused or not self._inside)
            yield
        finally:
            self._updates -= 1
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
