"""The trainer as the controller sees it: configure all ranks, feed waves in order, turn their messages into facts.

Invariant: a fact about a wave or a step is emitted once, after all ranks have said it, and in the order wave, step,
version; so a fast rank 0 never runs ahead of the others in the journal.

Start loop. Produces: Configure. Waits for: HELLO, then `RankReady` of all ranks. Ends when it has both.
Sender loop. Consumes: waves from `train` (at most MAX_WAVES_AHEAD of them, the core's rule). Waits for: room in each
rank's window. Receiver loop. Consumes: messages of all ranks. Produces: events. Unblocked by any message; ended by
cancellation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from dora.controller.lineage import Lineage
from dora.core import events as ev
from dora.core.ids import StepId
from dora.errors import RemoteError, RunFailed
from dora.transport import messages as wire
from dora.transport.controller_end import ControllerEnd

#: Waves waiting to be sent. The core sends MAX_WAVES_AHEAD = 2 ahead; a restart may add as many.
OUTBOX_SIZE = 8
#: Between the end of the trainer's process and the end of the run, so that its last message can arrive.
LAST_WORDS_S = 1.0


@dataclass
class StepReport:
    """What the trainer said of a step."""

    step: StepId
    metrics: dict[str, float]


@dataclass
class TrainerLink:
    """All ranks of one trainer."""

    end: ControllerEnd
    num_ranks: int
    configure: wire.Configure
    start_timeout_s: float
    process_ended: Callable[[], Awaitable[str]] | None  # of ranks that we started; None: others did
    now: Callable[[], float]
    emit: Callable[[ev.Event], Awaitable[None]]
    on_step: Callable[[StepReport], None]
    durable: Callable[[int], Awaitable[None]]  # waits until the disk has the journal up to a position
    lineage: Lineage
    tell: Callable[[str], None]  # a line for the user
    _outbox: asyncio.Queue[tuple[int, list[wire.MicroBatch]]] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_SIZE)
    )
    _ready: dict[int, StepId] = field(default_factory=dict)
    _skipped: dict[str, None] = field(default_factory=dict)  # checkpoints that could not be loaded, with the reasons
    _waves_done: list[int] = field(default_factory=list)  # by rank, since it was ready
    _waves_emitted: int = 0
    _script: deque[wire.ToController] = field(default_factory=deque)  # what rank 0 said and is not emitted yet
    _all_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _checkpoint: asyncio.Event = field(default_factory=asyncio.Event)

    def train(self, wave: list[wire.MicroBatch], *, position: int) -> None:
        """One micro-batch per rank, in rank order; it leaves once the journal is on the disk up to `position`."""
        self._outbox.put_nowait((position, wave))

    def loops(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """To be run beside the controller."""
        loops: list[tuple[str, Coroutine[Any, Any, None]]] = [("trainer-start", self.start_ranks())]
        loops += [("trainer-sender", self.send_waves()), ("trainer-receiver", self.receive_messages())]
        return [*loops, ("trainer-process", self._watch())] if self.process_ended is not None else loops

    async def start_ranks(self) -> None:
        """Wait for all ranks, tell them what to train, and see that they get ready."""
        try:
            await self.end.wait_ready(self.start_timeout_s)
            for rank in range(self.num_ranks):
                await self.end.send(rank, self.configure)
            async with asyncio.timeout(self.start_timeout_s):
                await self._all_ready.wait()
        except RemoteError as err:
            raise RunFailed(f"trainer.start_timeout_s: {err}") from err
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(self.num_ranks) if rank not in self._ready)
            raise RunFailed(
                f"trainer.start_timeout_s: ranks {missing} did not load the model within {self.start_timeout_s:g} s"
            ) from None

    async def send_waves(self) -> None:
        """The sender loop."""
        while True:
            position, wave = await self._outbox.get()
            await self.durable(position)
            await self.send(wave)

    async def send(self, wave: list[wire.MicroBatch]) -> None:
        """One micro-batch to every rank, once all are ready; waits for room in each rank's window."""
        await self._all_ready.wait()
        for rank, batch in enumerate(wave):
            await self.end.send(rank, batch)

    async def receive_messages(self) -> None:
        """The receiver loop."""
        while True:
            rank, message = await self.end.receive()
            match message:
                case wire.RankReady():
                    await self._on_ready(rank, message)
                case wire.MicroBatchDone():
                    self._waves_done[rank] += 1
                    if rank == 0:
                        self._script.append(message)
                    await self._emit_script()
                case wire.StepDone() | wire.VersionWritten() | wire.CheckpointWritten():
                    self._script.append(message)
                    await self._emit_script()
                case wire.TrainerFailed():
                    raise RunFailed(f"trainer rank {message.rank}: {message.reason}")

    async def checkpoint(self, *, timeout_s: float) -> bool:
        """Ask for a checkpoint of the last step boundary; False if it did not come in time."""
        if not self._all_ready.is_set():
            return True  # nothing was trained since the one they start from
        self._checkpoint.clear()
        for rank in range(self.num_ranks):
            await self.end.send(rank, wire.SaveCheckpoint())
        try:
            async with asyncio.timeout(timeout_s):
                await self._checkpoint.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, reason: str) -> bool:
        """Tell all ranks to end; False if they are not ready to be told anything, as they were not needed."""
        if not self._all_ready.is_set():
            return False
        for rank in range(self.num_ranks):
            await self.end.send(rank, wire.Stop(reason=reason))
        return True

    async def _watch(self) -> None:
        """The run cannot go on without its trainer."""
        assert self.process_ended is not None
        reason = await self.process_ended()
        await asyncio.sleep(LAST_WORDS_S)  # what a rank said before it ended is the better reason
        raise RunFailed(reason)

    async def _on_ready(self, rank: int, message: wire.RankReady) -> None:
        self._ready[rank] = message.next_step
        self._skipped |= dict.fromkeys(message.skipped)
        if len(self._ready) < self.num_ranks:
            return
        steps = set(self._ready.values())
        if len(steps) != 1:
            raise RunFailed(f"trainer ranks disagree on the step to resume at: {self._ready}")
        self._waves_done = [0] * self.num_ranks
        self._waves_emitted = 0
        self._all_ready.set()
        for reason in self._skipped:
            self.tell(f"{reason}; the trainer goes on from step {message.next_step}")
        await self.emit(ev.TrainerReady(self.now(), steps.pop()))

    async def _emit_script(self) -> None:
        """Follow rank 0's order; a wave waits until every rank has done as many."""
        while self._script:
            message = self._script[0]
            if isinstance(message, wire.MicroBatchDone):
                if min(self._waves_done) <= self._waves_emitted:
                    return
                self._waves_emitted += 1
            self._script.popleft()
            await self._emit_one(message)

    async def _emit_one(self, message: wire.ToController) -> None:
        match message:
            case wire.MicroBatchDone():
                await self.emit(ev.MicroBatchTrained(self.now(), message.step, message.index))
            case wire.StepDone():
                self._require_chain(message.chain, step=message.step, what=f"step {message.step}")
                self.on_step(StepReport(message.step, dict(message.metrics)))
                await self.emit(ev.StepTrained(self.now(), message.step, message.chain))
            case wire.CheckpointWritten():
                self._require_chain(message.chain, step=StepId(message.step - 1), what=f"checkpoint {message.folder}")
                await self.emit(ev.CheckpointSaved(self.now(), message.step, message.folder, message.chain))
                self._checkpoint.set()
            case wire.VersionWritten():
                self._require_chain(message.chain, step=StepId(message.version - 1), what=f"version {message.version}")
                await self.emit(
                    ev.VersionPublished(
                        self.now(),
                        message.version,
                        message.num_bytes,
                        dict(message.files),
                        message.chain,
                        message.differs,
                    )
                )

    def _require_chain(self, chain: str, *, step: StepId, what: str) -> None:
        """What the ranks have made comes from the history that they were sent."""
        expected = self.lineage.after(step)
        if chain != expected:
            raise RunFailed(f"the trainer's {what} has chain {chain}, but what it was sent has {expected}")
