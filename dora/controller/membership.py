"""What people ask of a running fleet: add, drain, remove. Each request is answered in a sentence or refused in one.

Invariant: the core decides; this only puts the question, carries a join out, and words the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from dora.controller.fleet import HEALTH_TIMEOUT_S, Fleet
from dora.controller.inbox import Inbox
from dora.core.commands import Command, RefuseRequest, StopRequest
from dora.core.events import Event, InstanceDrainRequested, InstanceRecalled
from dora.core.ids import InstanceId
from dora.core.state import State
from dora.engine.api import InferenceEngine
from dora.errors import ConfigError


class MembershipRequests:
    """The requests of one run."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        state: State,
        engine: InferenceEngine,
        inbox: Inbox,
        now: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._state = state
        self._engine = engine
        self._inbox = inbox
        self._now = now

    async def add(self, which: str) -> str:
        """A server joins by its address; one that was drained takes part again, by its id or address."""
        url = which.rstrip("/")
        known = InstanceId(int(which)) if which.isdecimal() else self._fleet.find(url)
        if known is not None:
            await self._decide(InstanceRecalled(self._now(), known))
            return f"instance {known} takes part again"
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"{which}: is neither an instance's number nor an http:// or https:// address")
        if not await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S):
            raise ConfigError(f"{url}: does not answer its health check; start the server or correct the address")
        found = await self._fleet.examine(url)
        if (known := self._fleet.find(url)) is not None:
            raise ConfigError(f"{url}: has become instance {known} meanwhile")
        return f"instance {self._fleet.join(url)} joins: {url}, {found.release}"

    async def drain(self, which: str) -> str:
        """No new work; what runs there moves where there is room, and else ends there."""
        instance = self._id(which)
        moves = await self._decide(InstanceDrainRequested(self._now(), instance, leave=False))
        return f"instance {instance} drains: {self._rest(instance, moves)}"

    async def remove(self, which: str) -> str:
        """As drained; and it leaves the run once it is empty."""
        instance = self._id(which)
        moves = await self._decide(InstanceDrainRequested(self._now(), instance, leave=True))
        return f"instance {instance} leaves when it is empty: {self._rest(instance, moves)}"

    def _id(self, which: str) -> InstanceId:
        known = InstanceId(int(which)) if which.isdecimal() else self._fleet.find(which.rstrip("/"))
        if known is None:
            raise ConfigError(f"{which}: is no instance of this run; `dora instances URL list` shows them")
        return known

    async def _decide(self, event: Event) -> list[Command]:
        commands = await self._inbox.ask(event)
        for command in commands:
            if isinstance(command, RefuseRequest):
                raise ConfigError(command.reason)
        return commands

    def _rest(self, instance: InstanceId, commands: list[Command]) -> str:
        row = self._state.instances.get(instance)
        residents = len(row.residents) if row is not None else 0
        moving = sum(isinstance(command, StopRequest) for command in commands)
        return f"{moving} of its {residents} requests move to peers now"
