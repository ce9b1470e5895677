"""The controller: one queue, one consumer. Event → core → journal → effects → event.

Invariant: the core is called from this loop alone, every event it is given is in the journal, and the tokens an event
speaks of were handed to the token log before. What cannot be taken back (a wave that leaves, a push, anything deleted,
a row for people) first waits until the disk has the event that caused it. A failure that no effect foresees ends the
run.

    effects, fleet, trainer ──events──▶ Inbox ──▶ State.handle ──commands──▶ Orders (a task for each effect)
                                                   │
                                                   └──▶ journal, observer (metrics, status)

Loop. Consumes: events. Produces: tasks and notices. Waits for: the next event (Ticked comes every second, so never
for long). Unblocked by: any event. Shutdown order: stop taking orders, end effects, checkpoint, journal, sockets,
processes (the last two belong to whoever made them).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.orders import Orders
from dora.controller.work import Loop
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.state import State
from dora.errors import DoraError, RunFailed
from dora.journal.commits import Commits

log = structlog.get_logger(__name__)


class JournalSink(Protocol):
    """Where events and the decisions they led to are written."""

    def handled(self, event: ev.Event, commands: Sequence[cmd.Command]) -> int:
        """Returns the position behind them, to be waited for."""


class Observer(Protocol):
    """Whoever turns what happens into metrics and a status."""

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None: ...


class Part(Protocol):
    """What has loops of its own."""

    def loops(self) -> list[tuple[str, Loop]]:
        """Named loops to run beside the controller's."""


class TrainerSide(Part, Protocol):
    """The trainer's side (TrainerLink, or a writer of rollouts)."""

    async def checkpoint(self, *, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    finished: bool  # False: interrupted
    reason: str
    violations: int = 0  # that the audit found; it is asked about finished runs


class Controller:
    """Drives one run to its end."""

    def __init__(
        self,
        state: State,
        *,
        inbox: Inbox,
        in_flight: InFlight,
        orders: Orders,
        journal: JournalSink,
        commits: Commits,
        trainer: TrainerSide,
        beside: Sequence[Part],
        observer: Observer,
        now: Callable[[], float],
        stop_timeout_s: float = 600.0,
    ) -> None:
        """`beside`: other parts with loops. `stop_timeout_s`: for the checkpoint of a clean stop."""
        self.state = state
        self._inbox = inbox
        self._in_flight = in_flight
        self._orders = orders
        self._work = orders.work
        self._journal = journal
        self._commits = commits
        self._trainer = trainer
        self._beside = beside
        self._observer = observer
        self._now = now
        self._stop_timeout_s = stop_timeout_s
        self._position = 0  # behind the event at hand
        self._log: Any = log.bind()  # once: a lazy logger takes as long to say its level as the core for an event
        self._outcome: Outcome | None = None
        self._error: RunFailed | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """Stop cleanly: everything in flight is kept for a resume."""
        self._interrupted = True
        self._orders.close(trains=False)
        self._inbox.emit_soon(ev.Ticked(self._now()))  # unblocks the loop

    async def run(self, first: list[ev.Event]) -> Outcome:
        """Until the core says that the run is over, or it is interrupted; `first` are facts known before the start."""
        try:
            async with self._work.group:
                committing = self._work.finishing(self._commits.run(), name="commits")
                self._start_loops()
                for event in first:
                    await self._apply(event)
                await self._consume()
                await self._shut_down()
                await self._commits.durable(self._position)
                committing.cancel()
        except* DoraError as group:
            if self._outcome is None or not self._outcome.finished:
                raise _first(group) from None
            log.warning("failed_after_the_end", reason=str(_first(group)))
        finally:
            self._commits.sync()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _start_loops(self) -> None:
        for part in (*self._beside, self._trainer):
            for name, loop in part.loops():
                self._work.background(loop, name=name)

    async def _consume(self) -> None:
        while self._outcome is None and self._error is None and not self._interrupted:
            await self._apply(await self._inbox.take())
        if self._outcome is None and self._interrupted:
            self._outcome = Outcome(finished=False, reason="everything in flight is kept")

    async def _apply(self, event: ev.Event) -> None:
        commands = handle(self.state, event)
        if any(isinstance(command, cmd.FinishRun) for command in commands):
            await self._orders.copies.keep_result(event)
        self._inbox.answer(event, commands)
        self._position = self._journal.handled(event, commands)
        if isinstance(event, ev.VersionPublished):
            self._orders.copies.publish(event, position=self._position)
        if self._log.is_enabled_for(10):
            self._log.debug("event_handled", fact=event, commands=len(commands))
        self._observer.on_event(event, commands, position=self._position)
        for command in commands:
            self._note_the_end(command)
            self._orders.carry_out(command, position=self._position)

    def _note_the_end(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.FinishRun):
            self._outcome = Outcome(finished=True, reason=command.reason)
            self._orders.close(trains=True)
        elif isinstance(command, cmd.FailRun):
            self._error = RunFailed(command.reason)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """No more orders are taken. Effects end first, so that the token log is complete; then the checkpoint."""
        self._in_flight.cancel()
        if self._error is None:
            await self._save_checkpoint()
        self._work.cancel()
        while (event := self._inbox.take_now()) is not None:
            await self._apply(event)

    async def _save_checkpoint(self) -> None:
        """Of the last step boundary. At the end of a job the trainer writes it by itself, but its news may be on the
        way."""
        feed = self.state.feed
        if not self._interrupted and max(feed.checkpoints) >= feed.trained:
            return
        checkpoint = asyncio.create_task(
            self._trainer.checkpoint(timeout_s=self._stop_timeout_s), name="last-checkpoint"
        )
        while not checkpoint.done():  # what still arrives is journaled: a step that ends now must be known as trained
            if (event := await self._inbox.take_until(checkpoint)) is not None:
                await self._apply(event)
        if not checkpoint.result():
            log.warning("no_checkpoint", after_s=self._stop_timeout_s)


def _first(group: BaseExceptionGroup[DoraError]) -> DoraError:
    """The first error of a group, however deep."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
