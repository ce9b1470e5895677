"""A process of a node that follows orders: started, started again, and ended as the controller wants.

Invariant: at most one process of it runs, and its state tells of the start that was ordered last. Unless an API key is
configured, a server gets a new one at each start, so that what takes over a dead server's port learns no valid key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from dora.errors import ConfigError, DoraError
from dora.node.plan import SERVE_KEY, ProcessPlan
from dora.node.supervise import Child, IsWell, Node
from dora.transport.node_messages import ProcessState


async def start_server(child: Child, *, api_key: str | None) -> tuple[str, str]:
    """Start a server; return its URL and its API key."""
    key = api_key or secrets.token_hex(32)
    child.plan = replace(child.plan, env={**child.plan.env, SERVE_KEY: key})
    return await child.start(), key


class OrderedProcess:
    """One server, or torchrun with the ranks of a node."""

    def __init__(
        self,
        plan: Callable[[], Awaitable[ProcessPlan]],
        *,
        node: Node,
        is_well: IsWell,
        api_key: str | None,
        on_change: Callable[[], None],
    ) -> None:
        """`plan` is called at each start. `on_change`: the state has changed."""
        self.state: ProcessState | None = None  #: None: it does not run, and has not run
        self._plan = plan
        self._node = node
        self._is_well = is_well
        self._api_key = api_key
        self._on_change = on_change
        self._wanted: int | None = None
        self._child: Child | None = None
        self._running: asyncio.Task[None] | None = None

    def follow(self, start: int | None) -> None:
        """Have the process run since this start, or not run."""
        if start != self._wanted:
            self._wanted = start
            self._running = asyncio.create_task(self._run(start, self._running), name="ordered-process")

    async def close(self) -> None:
        """End the process."""
        self.follow(None)
        if self._running is not None:
            await asyncio.wait({self._running})

    async def _run(self, start: int | None, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
        try:
            if self._child is not None:
                await self._child.stop()
            if start is None:
                self._note(None)
                return
            self._note(ProcessState(start=start, phase="starting"))
            self._child = child = self._node.add(await self._plan(), is_well=self._is_well)
            url, key = await start_server(child, api_key=self._api_key)
            self._note(ProcessState(start=start, phase="up", url=url, key=key))
            self._note(ProcessState(start=start, phase="ended", reason=await child.ended()))
        except (DoraError, OSError) as err:
            is_final = isinstance(err, ConfigError)
            self._note(ProcessState(start=start or 0, phase="ended", reason=str(err), is_final=is_final))
            if start is None and self._child is not None:  # it was killed, but takes long to end: to free its memory
                await self._child.ended()
                self._note(None)

    def _note(self, state: ProcessState | None) -> None:
        self.state = state
        self._on_change()
