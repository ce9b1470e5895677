"""The controller's link to the trainer: it configures all ranks, sends waves, and converts messages into events.

Invariant: an event about a wave or step is emitted once, after all ranks have completed the wave, in the order wave,
step, version. So a fast rank 0 is never ahead of the others in the journal. The event of a checkpoint is emitted after
the first rank of each folder has reported its files, and after `keep` has copied them.

The start loop sends Configure after HELLO of all ranks, and ends with their `RankReady`. The sender loop sends waves,
waiting for space in each rank's window. The receiver loop handles the messages of all ranks until it is cancelled. The
keeper loop copies checkpoints, one at a time, so that training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dora.controller.batches import spread
from dora.controller.lineage import Lineage
from dora.core import events as ev
from dora.core.ids import StepId
from dora.errors import RemoteError, RunFailed
from dora.transport import messages as wire
from dora.transport.controller_end import ControllerEnd

#: Maximum number of queued waves. The core sends MAX_WAVES_AHEAD = 2 ahead; a restart may add another two.
OUTBOX_SIZE = 8
#: Time between the end of the trainer's process and the end of the run, in which a last message may arrive.
LAST_WORDS_S = 1.0


@dataclass
class StepReport:
    """The trainer's report of a step."""

    step: StepId
    metrics: dict[str, float]


class RankObserver(Protocol):
    """A receiver of what ranks do."""

    def on_rank_spans(self, rank: int, message: wire.RankSpans) -> None: ...

    def on_wave_done(self, rank: int) -> None: ...


@dataclass
class TrainerLink:
    """All ranks of one trainer."""

    end: ControllerEnd
    num_ranks: int
    configure: Callable[[int], wire.Configure]  # receives the rank
    start_timeout_s: float
    process_ended: Callable[[], Awaitable[str]]
    now: Callable[[], float]
    emit: Callable[[ev.Event], Awaitable[None]]
    on_ready: Callable[[int], None]  # receives the number of ranks that are ready
    on_step: Callable[[StepReport], None]
    durable: Callable[[int], Awaitable[None]]  # waits until a journal position is on the disk
    lineage: Lineage
    tell: Callable[[str], None]  # shows a line to the user
    spans: RankObserver | None = None
    on_logprobs: Callable[[wire.TrainerLogprobs], None] = lambda message: None
    #: Copies a checkpoint to where a resume finds it, given the report of each folder by its first rank; returns the
    #: folder of the copy. None: it is there already.
    keep: Callable[[Mapping[int, wire.CheckpointWritten]], Awaitable[str]] | None = None
    _outbox: asyncio.Queue[tuple[int, list[wire.MicroBatch]]] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_SIZE)
    )
    _ready: dict[int, StepId] = field(default_factory=dict)
    _skipped: dict[str, None] = field(default_factory=dict)  # why checkpoints could not be loaded
    _waves_done: list[int] = field(default_factory=list)  # by rank, since it was ready
    _waves_emitted: int = 0
    _script: deque[wire.ToController] = field(default_factory=deque)  # messages of rank 0 without an event yet
    _all_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _checkpoint: asyncio.Event = field(default_factory=asyncio.Event)
    #: Reports of checkpoints without an event yet, by the first rank of their folder.
    _written: dict[int, deque[wire.CheckpointWritten]] = field(default_factory=lambda: {0: deque()})
    _owners: list[int] = field(default_factory=list)  # first ranks that delete checkpoints on our behalf
    _to_keep: asyncio.Queue[dict[int, wire.CheckpointWritten]] = field(default_factory=asyncio.Queue)

    def train(self, wave: list[wire.MicroBatch], *, position: int) -> None:
        """Queue the parts of a wave, to be sent once the journal is on the disk up to `position`."""
        self._outbox.put_nowait((position, wave))

    def loops(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the named coroutines to run together with the controller."""
        loops: list[tuple[str, Coroutine[Any, Any, None]]] = [("trainer-start", self.start_ranks())]
        loops += [("trainer-sender", self.send_waves()), ("trainer-receiver", self.receive_messages())]
        if self.keep is not None:
            loops.append(("trainer-keeper", self.keep_checkpoints(self.keep)))
        return [*loops, ("trainer-process", self._watch())]

    async def start_ranks(self) -> None:
        """Wait for all ranks, configure them, and wait until they are ready."""
        try:
            await self.end.wait_ready(self.start_timeout_s)
            for rank in range(self.num_ranks):
                order = self.configure(rank)
                if rank == (order.ranks_here or (0,))[0]:
                    self._written[rank] = deque()
                    self._owners += [rank] * order.owns_checkpoints
                await self.end.send(rank, order)
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
        """Send queued waves (the sender loop)."""
        while True:
            position, wave = await self._outbox.get()
            await self.durable(position)
            await self.send(wave)

    async def send(self, wave: list[wire.MicroBatch]) -> None:
        """Send the parts of a wave to the ranks once all are ready, waiting for space in each rank's window."""
        await self._all_ready.wait()
        for rank, batch in enumerate(spread(wave, num_ranks=self.num_ranks)):
            await self.end.send(rank, batch)

    async def receive_messages(self) -> None:
        """Handle the messages of all ranks (the receiver loop)."""
        while True:
            rank, message = await self.end.receive()
            match message:
                case wire.RankReady():
                    await self._on_ready(rank, message)
                case wire.RankSpans():
                    if self.spans is not None:
                        self.spans.on_rank_spans(rank, message)
                case wire.TrainerLogprobs():
                    self.on_logprobs(message)
                case wire.MicroBatchDone():
                    self._waves_done[rank] += 1
                    if self.spans is not None:
                        self.spans.on_wave_done(rank)
                    if rank == 0:
                        self._script.append(message)
                    await self._emit_script()
                case wire.CheckpointWritten() if rank not in self._written:
                    raise RunFailed(f"trainer rank {rank}: reported a checkpoint, but has no folder of its own")
                case wire.CheckpointWritten():
                    self._written[rank].append(message)
                    if rank == 0:
                        self._script.append(message)
                    await self._emit_script()
                case wire.StepDone() | wire.VersionWritten():
                    self._script.append(message)
                    await self._emit_script()
                case wire.TrainerFailed():
                    raise RunFailed(f"trainer rank {message.rank}: {message.reason}")

    async def keep_checkpoints(self, keep: Callable[[Mapping[int, wire.CheckpointWritten]], Awaitable[str]]) -> None:
        """Copy checkpoints (the keeper loop). Of those that wait, only the newest is copied and the others are deleted,
        so that ranks may write faster than this loop copies."""
        while True:
            reports = await self._to_keep.get()
            while not self._to_keep.empty():
                name, reports = Path(reports[0].folder).name, self._to_keep.get_nowait()
                if name != Path(reports[0].folder).name:
                    await self.drop_checkpoint(name)
            await self._emit_checkpoint(reports[0], folder=await keep(reports))

    async def drop_checkpoint(self, name: str) -> None:
        """Have the ranks delete a checkpoint in the folders that they own."""
        if (
            self._all_ready.is_set()
        ):  # otherwise they may not be told yet; what is unknown is deleted at their next start
            for rank in self._owners:
                await self.end.send(rank, wire.DeleteCheckpoint(name=name))

    async def checkpoint(self, *, timeout_s: float) -> bool:
        """Request a checkpoint of the last step and wait for it; False after `timeout_s`."""
        if not self._all_ready.is_set():
            return True  # nothing was trained since the last checkpoint
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
        """Tell all ranks to end; False if they never became ready, as they were not needed."""
        if not self._all_ready.is_set():
            return False
        for rank in range(self.num_ranks):
            await self.end.send(rank, wire.Stop(reason=reason))
        return True

    async def _watch(self) -> None:
        """Fail the run when the trainer's process ends."""
        reason = await self.process_ended()
        await asyncio.sleep(LAST_WORDS_S)  # a last message of a rank gives a better reason
        raise RunFailed(reason)

    async def _on_ready(self, rank: int, message: wire.RankReady) -> None:
        self._ready[rank] = message.next_step
        self._skipped |= dict.fromkeys(message.skipped)
        self.on_ready(len(self._ready))
        if len(self._ready) < self.num_ranks:
            return
        steps = set(self._ready.values())
        if len(steps) != 1:
            raise RunFailed(f"trainer ranks disagree on the step to resume at: {self._ready}")
        self._waves_done = [0] * self.num_ranks
        self._waves_emitted = 0
        self._all_ready.set()
        if message.note:
            self.tell(message.note)
        for reason in self._skipped:
            self.tell(f"{reason}; the trainer continues from step {message.next_step + 1}")
        await self.emit(ev.TrainerReady(self.now(), steps.pop()))

    async def _emit_script(self) -> None:
        """Emit events in the order of rank 0's messages; the event of a wave waits for all ranks to complete it, and
        that of a checkpoint for the reports of all folders."""
        while self._script:
            message = self._script[0]
            if isinstance(message, wire.CheckpointWritten) and not all(self._written.values()):
                return
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
                self._require_chain(message.chain, step=message.step, what=f"step {message.step + 1}")
                self.on_step(StepReport(message.step, dict(message.metrics)))
                await self.emit(ev.StepTrained(self.now(), message.step, message.chain))
            case wire.CheckpointWritten():
                await self._on_checkpoint({rank: reports.popleft() for rank, reports in self._written.items()})
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

    async def _on_checkpoint(self, reports: dict[int, wire.CheckpointWritten]) -> None:
        for report in reports.values():
            step, folder = StepId(report.step - 1), Path(report.folder)
            self._require_chain(report.chain, step=step, what=f"checkpoint {folder}")
            if folder.name != Path(reports[0].folder).name:
                raise RunFailed(f"the trainer's hosts have different checkpoints: {reports[0].folder} and {folder}")
        if self.keep is None:
            await self._emit_checkpoint(reports[0], folder=reports[0].folder)
        else:
            self._to_keep.put_nowait(reports)

    async def _emit_checkpoint(self, message: wire.CheckpointWritten, *, folder: str) -> None:
        await self.emit(ev.CheckpointSaved(self.now(), message.step, folder, message.chain))
        self._checkpoint.set()

    def _require_chain(self, chain: str, *, step: StepId, what: str) -> None:
        """RunFailed unless the ranks' output has the chain of the waves sent to them."""
        expected = self.lineage.after(step)
        if chain != expected:
            raise RunFailed(f"the trainer's {what} has chain {chain}, but the waves sent have {expected}")
