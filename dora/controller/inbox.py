"""The queue of events from effects, fleet, trainer and users to the core.

Invariant: the core gets each event once, in order of arrival.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from dora.core.commands import Command
from dora.core.events import ENDED, Event
from dora.errors import ConfigError, RemoteError

#: Maximum number of queued events. Each comes from a command in flight or a periodic report, so the queue is never
#: nearly full; if it were, `emit` would wait.
QUEUE_SIZE: Final = 65_536
#: Timeout of `ask`, in seconds.
ASK_TIMEOUT_S: Final = 10.0


class Inbox:
    """A queue of events. The sender of an event may ask for the commands that it leads to."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue(QUEUE_SIZE)
        self._asked: dict[int, asyncio.Future[list[Command]]] = {}  # by id() of the event
        self.is_closed = False  #: no event is handled any more

    async def emit(self, event: Event) -> None:
        """Queue an event."""
        await self._queue.put(event)

    def emit_soon(self, event: Event) -> None:
        """Queue an event without waiting."""
        self._queue.put_nowait(event)

    async def ask(self, event: Event) -> list[Command]:
        """Queue an event and return the commands that it leads to.

        RemoteError after ASK_TIMEOUT_S; ConfigError if the run has ended.
        """
        self.require_open()
        answer: asyncio.Future[list[Command]] = asyncio.get_running_loop().create_future()
        self._asked[id(event)] = answer
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._queue.put(event)
                return await answer
        except TimeoutError:
            raise RemoteError(f"the run did not respond within {ASK_TIMEOUT_S:g} s; it may be ending") from None
        finally:
            del self._asked[id(event)]

    def require_open(self) -> None:
        """Raise ConfigError if the run has ended."""
        if self.is_closed:
            raise ConfigError(ENDED)

    def answer(self, event: Event, commands: list[Command]) -> None:
        """Return the commands for an event to its `ask`, if any."""
        answer = self._asked.get(id(event))
        if answer is not None and not answer.done():  # else its time is up, of which `ask` has not learned yet
            answer.set_result(commands)

    def close(self) -> None:
        """Refuse every `ask` from now on, and those that wait: no event is handled any more."""
        self.is_closed = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConfigError(ENDED))

    async def take(self) -> Event:
        """Wait for the next event."""
        return await self._queue.get()

    async def take_until(self, done: asyncio.Task[Any]) -> Event | None:
        """Wait for the next event; return None if `done` ends first."""
        get = asyncio.create_task(self._queue.get(), name="last-events")
        await asyncio.wait({get, done}, return_when=asyncio.FIRST_COMPLETED)
        if get.done():
            return get.result()
        get.cancel()
        await asyncio.gather(get, return_exceptions=True)
        return None

    def take_now(self) -> Event | None:
        """Return the next event, or None if the queue is empty."""
        return None if self._queue.empty() else self._queue.get_nowait()
