"""What a controller knows of one node, and wants of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dora.transport.node_messages import NodeOrders, RanksOrder, Report, ServerOrder

#: A node that was heard this recently is alive; it reports every 2 s.
ALIVE_S: Final = 6.0


@dataclass(slots=True)
class Place:
    """The part of a run that one node has."""

    number: int
    has_ranks: bool
    first_instance: int | None = None  # of its servers; None if it has none, or no node has joined after one left
    name: str = ""  # of its node, or of the last one
    identity: bytes | None = None  # of the node's process; None: none has joined, or it is lost
    report: Report | None = None  # the last one; None until this host has connected to the node
    heard_at: float = 0.0
    joined_at: float = 0.0
    lost: str = "no node has joined"  # why there is no report
    servers: dict[int, ServerOrder] = field(default_factory=dict)  # wanted, by index
    ranks: RanksOrder | None = None  # wanted
    orders: NodeOrders | None = None  # the last ones
    serial: int = 0  # of the last ones
    clock_ahead_s: float = 0.0  # of the node, against this host, less what a report takes to arrive

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.heard_at > ALIVE_S


class Changes:
    """Wakes everyone who waits for something to be so."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Return what is set by the first change from now on."""
        return self._event

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._event.wait()
