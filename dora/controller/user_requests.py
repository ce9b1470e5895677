"""What users ask of a run: to add, drain or remove instances, to evaluate the newest version, or to stop.

Invariant: the core decides on each request; this module only finds instances, adds servers and phrases the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import structlog

from dora.controller.fleet import HEALTH_TIMEOUT_S, Fleet
from dora.controller.inbox import Inbox
from dora.core.commands import Command, RefuseRequest, StopRequest
from dora.core.events import (
    EvaluationRequested,
    InstanceDrainRequested,
    InstanceRecalled,
    RequestTag,
    ServerOffered,
    StopRequested,
    UserRequest,
)
from dora.core.ids import InstanceId
from dora.core.state import State
from dora.engine.api import InferenceEngine
from dora.errors import ConfigError

log = structlog.get_logger(__name__)

#: Most digits of an instance's number.
_DIGITS = 9


class UserRequests:
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
        self._adding = asyncio.Lock()  # two requests with one address join once

    async def add(self, which: str, request: RequestTag) -> str:
        """Recall the drained instance with this id or address, or add the server at this address."""
        async with self._adding:
            known = self._find(which)
            if known is not None:
                await self._decide(InstanceRecalled(self._now(), known, request=request))
                return f"instance {known} gets work again"
            url = _address(which)
            self._inbox.require_open()  # else the engine has been closed
            if not await self._engine.is_alive(url, timeout_s=HEALTH_TIMEOUT_S):
                raise ConfigError(f"{url}: does not answer its health check; start the server or correct the address")
            found = await self._fleet.examine(url)
            self._fleet.require_room(url, slots=found.slots)
            await self._decide(ServerOffered(self._now(), url, request=request))
            return f"instance {self._fleet.join(url, slots=found.slots)} joins: {url}, {found.release}"

    async def drain(self, which: str, request: RequestTag) -> str:
        """Drain an instance: no new work; its requests move where there is room, and otherwise finish there."""
        return await self._drain(which, "drains", request, leave=False)

    async def remove(self, which: str, request: RequestTag) -> str:
        """Drain an instance, and let it leave the run once it is empty."""
        return await self._drain(which, "leaves when it is empty", request, leave=True)

    async def evaluate(self, request: RequestTag) -> str:
        """Have the newest version evaluated next."""
        await self._decide(EvaluationRequested(self._now(), request=request))
        return "the newest version is evaluated next"

    async def stop(self, request: RequestTag) -> str:
        """Stop the run cleanly."""
        await self._decide(StopRequested(self._now(), request=request))
        return "the run stops; everything in flight is kept for a resume"

    async def _drain(self, which: str, effect: str, request: RequestTag, *, leave: bool) -> str:
        instance = self._find(which)
        if instance is None:
            raise ConfigError(f"{which}: not an instance of this run; `dora instances URL list` lists them")
        commands = await self._decide(InstanceDrainRequested(self._now(), instance, leave=leave, request=request))
        row = self._state.instances.get(instance)
        residents = len(row.residents) if row is not None else 0
        moving = sum(isinstance(command, StopRequest) for command in commands)
        return f"instance {instance} {effect}: {moving} of its {residents} requests move to peers now"

    def _find(self, which: str) -> InstanceId | None:
        if which.isascii() and which.isdecimal() and len(which) <= _DIGITS:
            return InstanceId(int(which))
        return self._fleet.find(which.rstrip("/"))

    async def _decide(self, event: UserRequest) -> list[Command]:
        """Return the core's commands for a request; ConfigError if it refuses the request."""
        commands = await self._inbox.ask(event)
        refused = next((command.reason for command in commands if isinstance(command, RefuseRequest)), "")
        log.info("user_request", what=type(event).__name__, by=event.request.by, refused=refused)
        if refused:
            raise ConfigError(refused)
        return commands


def _address(which: str) -> str:
    """Return the address of a server; ConfigError if it is none, or has a password, which everyone would be shown."""
    url = which.rstrip("/")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError(f"{which}: neither an instance number nor an http:// or https:// address")
    if parts.username is not None:
        raise ConfigError(f"{parts.hostname}: an address has no name or password; the key is DORA_ENGINE_API_KEY")
    return url
