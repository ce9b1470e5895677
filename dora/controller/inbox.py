"""Facts on their way to the core, from whoever has them: effects, fleet, trainer, people.

Invariant: the core is given them in the order in which they came, each once.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from dora.core.commands import Command
from dora.core.events import Event
from dora.errors import RemoteError

#: Events on their way to the core: each comes from a command in flight or a ticking reporter, so far fewer than this
#: wait at any time; a full queue only makes reporters wait.
QUEUE_SIZE: Final = 65_536
#: How long whoever asks for something waits until the core has decided.
ASK_TIMEOUT_S: Final = 10.0


class Inbox:
    """The queue before the core."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue(QUEUE_SIZE)
        self._asked: dict[int, asyncio.Future[list[Command]]] = {}  # by the id of the event's object

    async def emit(self, event: Event) -> None:
        """Give the core a fact."""
        await self._queue.put(event)

    def emit_soon(self, event: Event) -> None:
        """Give the core a fact from where nothing can wait."""
        self._queue.put_nowait(event)

    async def ask(self, event: Event) -> list[Command]:
        """Give the core a fact; what it orders on it."""
        answer: asyncio.Future[list[Command]] = asyncio.get_running_loop().create_future()
        self._asked[id(event)] = answer
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._queue.put(event)
                return await answer
        except TimeoutError:
            raise RemoteError(f"the run did not take it up within {ASK_TIMEOUT_S:g} s; it may be ending") from None
        finally:
            del self._asked[id(event)]

    def answer(self, event: Event, commands: list[Command]) -> None:
        """The core has decided; whoever asked with this event learns what."""
        if id(event) in self._asked:
            self._asked[id(event)].set_result(commands)

    async def take(self) -> Event:
        """The next fact, once there is one."""
        return await self._queue.get()

    async def take_until(self, done: asyncio.Task[Any]) -> Event | None:
        """The next fact, or None if `done` is done before there is one."""
        get = asyncio.create_task(self._queue.get(), name="last-events")
        await asyncio.wait({get, done}, return_when=asyncio.FIRST_COMPLETED)
        if get.done():
            return get.result()
        get.cancel()
        await asyncio.gather(get, return_exceptions=True)
        return None

    def take_now(self) -> Event | None:
        """The next fact if there is one."""
        return None if self._queue.empty() else self._queue.get_nowait()
