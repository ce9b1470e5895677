"""A node: one process per machine that joins a run, starts what the controller orders, and holds the live versions.

Invariant: everything that it starts ends with it, or when it has heard no controller for the lease. It follows the
controller with the highest term, and raises its own fence to that before it reports, so that ranks of an earlier
controller publish nothing afterwards. A new controller finds the servers as they are; ranks end.

Listening loop: consumes what controllers send, waits for the next message. Reporting loop: consumes changes, produces
the report; waits for a change or REPORT_S.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version as release_of
from typing import Final

from dora.errors import ConfigError, DoraError, RunFailed
from dora.node.member import Member, NodeSettings
from dora.transport.node_ends import NodeEnd
from dora.transport.node_messages import NODE_PROTOCOL, Beat, Join, NodeOrders, NodeWelcome, Over, Rejected, Superseded

REPORT_S: Final = 2.0
#: A controller that has been silent for this long may have been replaced: the node introduces itself again.
SILENT_S: Final = 3 * REPORT_S
#: A node that leaves does not wait for a controller that has been silent for this long.
ALONE_S: Final = 15.0
#: Time without an answer after which the user is told.
COMPLAIN_S: Final = 10.0
#: Time in which a controller must answer at first.
JOIN_TIMEOUT_S: Final = 600.0


async def run_node(settings: NodeSettings, controllers: tuple[str, ...], leave: asyncio.Event) -> str:
    """Follow a controller until the run is over or, after `leave` is set, until it lets the node go or is silent for
    ALONE_S; return why.

    ConfigError if the node is rejected; RunFailed if there is no controller.
    """
    end = NodeEnd(controllers, token=settings.token)
    try:
        while True:
            async with AsyncExitStack() as stack:
                over = await _Agent(settings, end, stack, leave).run()
            if not over.may_join_another:
                return over.reason
            settings.tell(over.reason)
    finally:
        end.close()


class _Agent:
    def __init__(self, settings: NodeSettings, end: NodeEnd, stack: AsyncExitStack, leave: asyncio.Event) -> None:
        self._settings = settings
        self._end = end
        self._stack = stack
        self._leave = leave
        self._heard_at = dict.fromkeys(end.addresses, -JOIN_TIMEOUT_S)
        self._term = -1  # of the controller that is followed
        self._followed = ""  # its address
        self._member: Member | None = None  # None before the first welcome
        self._changed = asyncio.Event()
        self._began = time.monotonic()
        self._has_complained = False

    async def run(self) -> Over:
        loops = [
            asyncio.create_task(self._listen(), name="listen"),
            asyncio.create_task(self._report(), name="report"),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            return next(loop.result() for loop in done)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    # -- listening ----------------------------------------------------------------------------------------------------

    async def _listen(self) -> Over:
        while True:
            for address, message in await self._end.receive(REPORT_S):
                if isinstance(message, Over) and message.term >= self._term:
                    return message
                if isinstance(message, Rejected) and self._followed in ("", address):
                    raise ConfigError(f"the controller at {address} rejects this node: {message.reason}")
                if not isinstance(message, Rejected):
                    await self._on_message(address, message)
            self._require_controller()

    async def _on_message(self, address: str, message: NodeWelcome | NodeOrders | Beat | Over) -> None:
        if message.term < self._term:
            await self._end.send(address, Superseded(term=self._term))
            return
        self._heard_at[address] = time.monotonic()
        if isinstance(message, NodeWelcome):
            if message.term > self._term or self._first_instance != message.first_instance:
                await self._take_part(message, address)
        elif isinstance(message, NodeOrders) and message.term == self._term and self._member is not None:
            await self._member.follow(message)

    @property
    def _first_instance(self) -> int | None:
        return self._member.first_instance if self._member is not None else None

    async def _take_part(self, welcome: NodeWelcome, address: str) -> None:
        member = self._member
        if member is None:
            try:
                member = await Member.enter(self._stack, self._settings, welcome, on_change=self._changed.set)
            except DoraError as err:
                await self._end.send(address, self._join(problem=str(err)))
                raise
        await member.change_controller(welcome, controller=address.rpartition(":")[0])
        self._heard_at[address] = time.monotonic()  # a download, or a full disk, may take longer than the lease
        self._settings.tell(f"takes part in {welcome.run_id}; logs: {member.logs}")
        self._member, self._term, self._followed = member, welcome.term, address
        self._changed.set()

    def _require_controller(self) -> None:
        """RunFailed if no controller is left."""
        limit_s = self._member.config.nodes.lease_s if self._member is not None else JOIN_TIMEOUT_S
        heard_at = self._heard_at[self._followed] if self._followed else self._began
        if time.monotonic() - heard_at > limit_s:
            raise RunFailed(
                f"no controller at {', '.join(self._end.addresses)} for {limit_s:g} s; is it running, is "
                "DORA_CONTROLLER its address, and has it the same DORA_TOKEN?"
            )

    # -- reporting ----------------------------------------------------------------------------------------------------

    async def _report(self) -> Over:
        leaving = asyncio.create_task(self._leave.wait(), name="leave")
        leaving.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                await self._introduce()
                self._complain_once()
                is_leaving = self._leave.is_set()
                if self._member is not None:
                    await self._end.send(self._followed, self._member.report(self._term, is_leaving=is_leaving))
                if is_leaving and (self._member is None or self._member.has_ranks):
                    return Over(term=self._term, reason="the node has left")
                if is_leaving and time.monotonic() - self._heard_at[self._followed] > ALONE_S:
                    return Over(term=self._term, reason="the node has left; no controller was there to let it go")
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            leaving.cancel()

    def _complain_once(self) -> None:
        if not self._followed and not self._has_complained and time.monotonic() - self._began > COMPLAIN_S:
            self._has_complained = True
            self._settings.tell(
                "no answer yet; is the controller running, has it the same DORA_TOKEN, and a place for this node?"
            )

    async def _introduce(self) -> None:
        """Join wherever no controller is heard."""
        run_id = self._member.run_id if self._member is not None else ""
        for address, heard_at in self._heard_at.items():
            if time.monotonic() - heard_at > SILENT_S:
                await self._end.send(address, self._join(run_id=run_id))

    def _join(self, *, run_id: str = "", problem: str = "") -> Join:
        release = release_of("dora-rl")
        return Join(protocol=NODE_PROTOCOL, release=release, name=self._settings.name, run_id=run_id, problem=problem)
