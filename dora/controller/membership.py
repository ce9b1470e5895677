"""Users' requests to add, drain or remove instances of a running fleet.

Invariant: the core decides on each request; this module only adds servers and phrases the answers.
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
    """Requests to one run. Each method returns a sentence, or raises ConfigError if the request is refused."""

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
        """Recall the drained instance with this id or address, or add the server at this address."""
        known = self._find(which)
        if known is not None:
            await self._decide(InstanceRecalled(self._now(), known))
            return f"instance {known} gets work again"
        url = which.rstrip("/")
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"{which}: neither an instance number nor an http:// or https:// address")
        if not await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S):
            raise ConfigError(f"{url}: does not answer its health check; start the server or correct the address")
        found = await self._fleet.examine(url)
        if (known := self._fleet.find(url)) is not None:
            raise ConfigError(f"{url}: was added as instance {known} in the meantime")
        return f"instance {self._fleet.join(url, slots=found.slots)} joins: {url}, {found.release}"

    async def drain(self, which: str) -> str:
        """Drain an instance: no new work; its requests move where there is room, and otherwise finish there."""
        return await self._drain(which, "drains", leave=False)

    async def remove(self, which: str) -> str:
        """Drain an instance, and let it leave the run once it is empty."""
        return await self._drain(which, "leaves when it is empty", leave=True)

    async def _drain(self, which: str, effect: str, *, leave: bool) -> str:
        instance = self._find(which)
        if instance is None:
            raise ConfigError(f"{which}: not an instance of this run; `dora instances URL list` lists them")
        commands = await self._decide(InstanceDrainRequested(self._now(), instance, leave=leave))
        row = self._state.instances.get(instance)
        residents = len(row.residents) if row is not None else 0
        moving = sum(isinstance(command, StopRequest) for command in commands)
        return f"instance {instance} {effect}: {moving} of its {residents} requests move to peers now"

    def _find(self, which: str) -> InstanceId | None:
        return InstanceId(int(which)) if which.isdecimal() else self._fleet.find(which.rstrip("/"))

    async def _decide(self, event: Event) -> list[Command]:
        """Return the core's commands for a request; ConfigError if it refuses the request."""
        commands = await self._inbox.ask(event)
        for command in commands:
            if isinstance(command, RefuseRequest):
                raise ConfigError(command.reason)
        return commands
