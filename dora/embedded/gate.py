"""The gate in front of generation: a pause holds new requests back; a weight update without a pause waits until the
server is empty.

A request that waits at the gate is not live: it cannot be aborted and is in no queue. It is generated under the weights
that the server holds when the request passes the gate.
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
        """Whether a weight update is waiting for an empty server, or running."""
        return self._updates > 0

    @property
    def closed(self) -> bool:
        return self.paused or self.closing

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Enclose one generate call. There is no time limit: a paused stream is silent but open."""
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
        """Enclose a weight update: new calls wait and, unless the server is paused, running ones finish first."""
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
