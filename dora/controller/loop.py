"""The controller: one queue, one consumer. Event → core → journal → effects → event.

Invariant: only this loop calls the core, all events are journaled, and the tokens of an event are passed to the token
log before the event. Actions that cannot be undone (sending a wave, a push, a deletion, a row in metrics.jsonl) wait
until the event that caused them is on the disk. An unexpected error in any task ends the run.

    effects, fleet, trainer ──events──▶ Inbox ──▶ core.handle ──commands──▶ Orders (a task for each effect)
                                                   │
                                                   └──▶ journal, observer (metrics, status)

Shutdown order: stop taking orders, end requests, checkpoint and calls, journal; then the callers close sockets and
processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.orders import Orders
from dora.controller.run_tasks import Loop
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.state import State
from dora.errors import DoraError, RunFailed, first_of
from dora.journal.commits import Commits

log = structlog.get_logger(__name__)

#: Who stops a run by SIGINT (Ctrl-C) or SIGTERM.
SIGNAL: Final = "a signal"


class JournalSink(Protocol):
    """A journal of events and the commands they led to."""

    def handled(self, event: ev.Event, commands: Sequence[cmd.Command]) -> int:
        """Write an event and its commands, and return the position after them."""


class Observer(Protocol):
    """A receiver of all events, for metrics and status."""

    def before(self, event: ev.Event) -> None: ...

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None: ...


class Part(Protocol):
    """A part of the run with its own loops."""

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the named coroutines to run together with the controller."""


class TrainerSide(Part, Protocol):
    """The trainer (TrainerLink or RolloutWriter)."""

    async def checkpoint(self, *, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    finished: bool  # False: interrupted
    reason: str
    violations: int = 0  # found by the audit of a finished run


class Controller:
    """The driver of one run."""

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
        """`beside`: other parts with loops to run. `stop_timeout_s`: limit on a clean stop."""
        self.state = state
        self._inbox = inbox
        self._in_flight = in_flight
        self._orders = orders
        self._tasks = orders.tasks
        self._journal = journal
        self._commits = commits
        self._trainer = trainer
        self._beside = beside
        self._observer = observer
        self._now = now
        self._stop_timeout_s = stop_timeout_s
        self._position = 0  # after the current event
        self._log: Any = log.bind()  # a lazy logger would look up its level as slowly as the core handles an event
        self._outcome: Outcome | None = None
        self._error: RunFailed | None = None

    def interrupt(self) -> None:
        """Stop cleanly, as if a user had asked for it; everything in flight is kept for a resume."""
        self._inbox.emit_soon(ev.StopRequested(self._now(), request=ev.RequestTag(by=SIGNAL)))

    async def run(self, first: list[ev.Event]) -> Outcome:
        """Run until the core ends the run or it is interrupted; `first` are events from before the start."""
        try:
            async with self._tasks.group:
                committing = self._tasks.finishing(self._commits.run(), name="commits")
                self._start_loops()
                for event in first:
                    await self._apply(event)
                await self._consume()
                await self._shut_down()
                await self._commits.durable(self._position)
                committing.cancel()
        except ExceptionGroup as group:
            error = first_of(group)
            if not isinstance(error, DoraError) or self._outcome is None or not self._outcome.finished:
                raise error from None
            log.warning("failed_after_the_end", reason=str(error))
        finally:
            self._inbox.close()
            self._commits.sync()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _start_loops(self) -> None:
        for part in (*self._beside, self._trainer):
            for name, loop in part.loops():
                self._tasks.background(loop, name=name)

    async def _consume(self) -> None:
        while self._outcome is None and self._error is None:
            await self._apply(await self._inbox.take())

    async def _apply(self, event: ev.Event) -> None:
        self._observer.before(event)
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
        if isinstance(event, ev.GenerationFailed) and event.trajectory not in self.state.trajectories:
            self._orders.episodes.close([event.trajectory])  # no order says that a sample was given up
        for command in commands:
            self._note_the_end(command, event)
            self._orders.carry_out(command, position=self._position)
        self._orders.forget_failed(self.state.trajectories)

    def _note_the_end(self, command: cmd.Command, event: ev.Event) -> None:
        if isinstance(command, cmd.FinishRun):
            self._outcome = Outcome(finished=True, reason=command.reason)
            self._orders.close(trains=True)
        elif isinstance(command, cmd.StopRun):
            assert isinstance(event, ev.StopRequested)
            by = event.request.by
            stopped = f"stopped by {by}; " if by != SIGNAL else ""
            self._outcome = Outcome(finished=False, reason=f"{stopped}everything in flight is kept")
            self._orders.close(trains=False)
        elif isinstance(command, cmd.FailRun):
            self._error = RunFailed(command.reason)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """End requests first, so that the token log is complete; then wait for the checkpoint and for calls."""
        self._orders.copies.end()
        self._in_flight.cancel()
        if self._error is None:
            await self._finish()
        self._tasks.cancel()
        while (event := self._inbox.take_now()) is not None:
            await self._apply(event)

    async def _finish(self) -> None:
        """Wait for the last checkpoint and, at the same time, for calls, at most `stop_timeout_s`."""
        last = [
            self._tasks.background(self._save_checkpoint(), name="last-checkpoint"),
            self._tasks.background(self._end_calls(), name="calls"),
        ]
        ended = asyncio.create_task(asyncio.wait(last), name="last")
        while not ended.done():  # a step that is trained now must be journaled
            if (event := await self._inbox.take_until(ended)) is not None:
                await self._apply(event)

    async def _end_calls(self) -> None:
        """Wait for calls of environments that would be lost."""
        if calls := self._orders.awaited_calls():
            await asyncio.wait(calls, timeout=self._stop_timeout_s)

    async def _save_checkpoint(self) -> None:
        """Have the trainer write a checkpoint of the last step; at the end of a job it writes one unasked."""
        feed = self.state.feed
        if self.state.finished and max(feed.checkpoints) >= feed.trained:
            return
        if not await self._trainer.checkpoint(timeout_s=self._stop_timeout_s):
            log.warning("no_checkpoint", after_s=self._stop_timeout_s)
