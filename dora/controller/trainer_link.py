"""The controller's link to the trainer: it configures all ranks, sends waves, and converts messages into events.

Invariant: an event about a wave or step is emitted once, after all ranks have completed the wave, in the order wave,
step, version. So a fast rank 0 is never ahead of the others in the journal. The event of a checkpoint is emitted after
the first rank of each folder has reported its files, and after `keep` has copied them. After TrainerLost, nothing that
the lost ranks have sent leads to an event.

The trainer loop runs the other loops until the ranks are lost, and waits then for the core's order to start them again.
The start loop sends Configure after HELLO of all ranks, and ends with their `RankReady`. The sender loop sends waves,
waiting for space in each rank's window. The receiver loop handles the messages of all ranks. The keeper loop copies
checkpoints, one at a time, so that training goes on meanwhile. The watch loop waits for the end of the ranks, and the
vitals loop judges whether they make progress, once they are ready.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dora.controller.batches import spread
from dora.controller.lineage import Lineage
from dora.controller.vitals import LOOK_S, Vitals
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import StepId
from dora.errors import RemoteError, RunFailed
from dora.transport import messages as wire
from dora.transport.controller_end import ControllerEnd

#: Maximum number of queued waves. The core sends MAX_WAVES_AHEAD = 2 ahead; a restart may add another two.
OUTBOX_SIZE = 8
#: Time after the first sign of a loss in which a rank may still say that it would fail again.
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


class Ranks(Protocol):
    """The processes of the ranks."""

    @property
    def are_cut_off(self) -> bool:
        """Whether a host of theirs is, which is for others to judge."""

    async def ended(self) -> str:
        """Wait until one of them has ended, and return why."""

    async def restart(self, incarnation: int) -> int:
        """End what is left of them, start them again, and return how many. RemoteError if that may be tried again."""

    def why_restart(self) -> str:
        """Return why they should start again after a checkpoint although none is lost, or an empty text."""


@dataclass
class _Start:
    """What is known of one start of the ranks."""

    incarnation: int
    num_ranks: int = 0  # 0 until they are started
    steps: int = 0  # of the run; 0 until they are configured
    ranks_per_part: int = 1  # consecutive ranks that get the same micro-batches
    outbox: asyncio.Queue[tuple[int, list[wire.MicroBatch]]] = field(default_factory=lambda: asyncio.Queue(OUTBOX_SIZE))
    ready: dict[int, StepId] = field(default_factory=dict)
    skipped: dict[str, None] = field(default_factory=dict)  # why checkpoints could not be loaded
    all_loaded: asyncio.Event = field(default_factory=asyncio.Event)  # all have reported ready
    all_ready: asyncio.Event = field(default_factory=asyncio.Event)  # and what they need is recalled
    waves_done: Counter[int] = field(default_factory=Counter)  # by rank
    waves_emitted: int = 0
    next_step: int = 0  # that rank 0 has not trained
    script: deque[wire.ToController] = field(default_factory=deque)  # messages of rank 0 without an event yet
    #: Reports of checkpoints without an event yet, by the first rank of their folder.
    written: dict[int, deque[wire.CheckpointWritten]] = field(default_factory=lambda: {0: deque()})
    owners: list[int] = field(default_factory=list)  # first ranks that delete checkpoints on our behalf
    to_keep: asyncio.Queue[dict[int, wire.CheckpointWritten]] = field(default_factory=asyncio.Queue)
    vitals: Vitals | None = None  # None until all are ready
    failure: str = ""  # the first that a rank has reported
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waves_of_all(self) -> int:
        """Number of waves that all ranks have done."""
        return min(self.waves_done[rank] for rank in range(self.num_ranks))


@dataclass
class TrainerLink:
    """All ranks of one trainer."""

    end: ControllerEnd
    ranks: Ranks
    num_ranks: int  # at the first start
    configure: Callable[[int], wire.Configure]  # receives the rank; the incarnation is added
    start_timeout_s: float
    now: Callable[[], float]
    emit: Callable[[ev.Event], Awaitable[None]]
    on_ready: Callable[[int, int], None]  # receives how many ranks are ready, of how many
    on_step: Callable[[StepReport], None]
    durable: Callable[[int], Awaitable[None]]  # waits until a journal position is on the disk
    lineage: Lineage
    tell: Callable[[str], None]  # shows a line to the user
    spans: RankObserver | None = None
    on_logprobs: Callable[[wire.TrainerLogprobs], None] = lambda message: None
    on_flight_record: Callable[[int, str], None] = lambda rank, record: None
    #: Copies a checkpoint to where a resume finds it, given the report of each folder by its first rank; returns the
    #: folder of the copy. None: it is there already.
    keep: Callable[[Mapping[int, wire.CheckpointWritten]], Awaitable[str]] | None = None
    #: Called before ranks that were started again get waves from a step on: what these need may have been forgotten.
    recall: Callable[[StepId], Awaitable[None]] | None = None
    _start: _Start = field(init=False)
    _restarts: asyncio.Queue[cmd.RestartTrainer] = field(default_factory=asyncio.Queue)
    _recalling: asyncio.Task[None] | None = None  # the latest
    _checkpoint: asyncio.Event = field(default_factory=asyncio.Event)
    _is_ending: bool = False  # the last checkpoint was requested
    _last_step: int = 0  # that of the last checkpoint; one that is being written may come before it

    def __post_init__(self) -> None:
        self._start = _Start(0, self.num_ranks)

    def train(self, wave: list[wire.MicroBatch], *, position: int) -> None:
        """Queue the parts of a wave, to be sent once the journal is on the disk up to `position`."""
        self._start.outbox.put_nowait((position, wave))

    def restart(self, order: cmd.RestartTrainer) -> None:
        """Have the trainer loop, whose ranks are lost, start them again. What was queued for them is dropped."""
        self._start = _Start(order.incarnation)
        self._restarts.put_nowait(order)

    def loops(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the named coroutines to run together with the controller."""
        return [("trainer", self.run())]

    async def run(self) -> None:
        """Keep the ranks running (the trainer loop)."""
        reason = await self._until_lost()
        while True:
            self._start.lost.set()
            self.on_ready(0, self._start.num_ranks or self.num_ranks)
            await self.emit(ev.TrainerLost(self.now(), self._start.incarnation, reason))
            order = await self._restarts.get()
            await asyncio.sleep(order.after_s)
            self.end.renew(order.incarnation)
            try:
                self._start.num_ranks = await self.ranks.restart(order.incarnation)
            except RemoteError as err:
                reason = str(err)
            else:
                reason = await self._until_lost()

    async def _until_lost(self) -> str:
        """Run the loops of one start until its ranks are lost, which is a RemoteError; return why."""
        loops = [("start", self.start_ranks()), ("sender", self.send_waves()), ("receiver", self.receive_messages())]
        loops += [("watch", self._watch()), ("vitals", self._judge())]
        if self.keep is not None:
            loops.append(("keeper", self.keep_checkpoints(self.keep)))
        pending = {asyncio.create_task(loop, name=f"trainer-{name}") for name, loop in loops}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except RemoteError as err:
            return str(err)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def start_ranks(self) -> None:
        """Wait for all ranks, configure them, and wait until they are ready."""
        start = self._start
        try:
            found = await self.end.wait_ready(self.start_timeout_s)
            if found != start.num_ranks:
                raise RunFailed(
                    f"trainer.ranks: {start.num_ranks} ranks were to be started, but {found} have connected"
                )
            for rank in range(start.num_ranks):
                order = msgspec.structs.replace(self.configure(rank), incarnation=start.incarnation)
                settings = order.settings
                start.steps, start.ranks_per_part = settings.steps, settings.context_ranks * settings.tensor_ranks
                if rank == (order.ranks_here or (0,))[0]:
                    if rank < (order.settings.shard_ranks or found):  # others only read
                        start.written[rank] = deque()
                    start.owners += [rank] * order.owns_checkpoints
                await self.end.send(rank, order)
            async with asyncio.timeout(self.start_timeout_s):
                await start.all_loaded.wait()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(start.num_ranks) if rank not in start.ready)
            late = f"ranks {missing} did not load the model within {self.start_timeout_s:g} s"
            raise self._start_failed(late) from None
        except RemoteError as err:
            raise self._start_failed(str(err)) from err

    def _start_failed(self, reason: str) -> RemoteError | RunFailed:
        """Return the error for ranks that did not become ready: the first start of a run is not repeated."""
        reason = f"trainer.start_timeout_s: {reason}"
        return RemoteError(reason) if self._start.incarnation else RunFailed(reason)

    async def send_waves(self) -> None:
        """Send queued waves (the sender loop)."""
        while True:
            position, wave = await self._start.outbox.get()
            await self.durable(position)
            await self.send(wave)

    async def send(self, wave: list[wire.MicroBatch]) -> None:
        """Send the parts of a wave to the ranks once all are ready, waiting for space in each rank's window."""
        await self._start.all_ready.wait()
        start = self._start
        parts = spread(wave, num_ranks=start.num_ranks, ranks_per_part=start.ranks_per_part)
        for rank, batch in enumerate(parts):
            await self.end.send(rank, batch)

    async def receive_messages(self) -> None:
        """Handle the messages of all ranks (the receiver loop)."""
        start = self._start
        while True:
            rank, message = await self.end.receive()
            match message:
                case wire.RankReady():
                    await self._on_ready(rank, message)
                case wire.RankSpans():
                    if start.vitals is not None:
                        start.vitals.note_spans(message)
                    if self.spans is not None:
                        self.spans.on_rank_spans(rank, message)
                case wire.RankPulse():
                    if start.vitals is not None:
                        start.vitals.note(rank, message, at=asyncio.get_running_loop().time())
                case wire.FlightRecord():
                    self.on_flight_record(rank, message.record)  # a rank speaks for itself alone
                case wire.TrainerLogprobs():
                    self.on_logprobs(message)
                case wire.MicroBatchDone():
                    self._start.waves_done[rank] += 1
                    if self.spans is not None:
                        self.spans.on_wave_done(rank)
                    if rank == 0:
                        self._start.script.append(message)
                    await self._emit_script()
                case wire.CheckpointWritten() if rank not in self._start.written:
                    raise RunFailed(f"trainer rank {rank}: reported a checkpoint, but has no folder of its own")
                case wire.CheckpointWritten():
                    self._start.written[rank].append(message)
                    if rank == 0:
                        self._start.script.append(message)
                    await self._emit_script()
                case wire.StepDone() | wire.VersionWritten():
                    if isinstance(message, wire.StepDone):
                        self._start.next_step = message.step + 1
                    self._start.script.append(message)
                    await self._emit_script()
                case wire.TrainerFailed():
                    reason = f"trainer rank {message.rank}: {message.reason}"
                    if message.is_final:
                        raise RunFailed(reason)
                    start.failure = start.failure or reason
                    start.failed.set()

    async def keep_checkpoints(self, keep: Callable[[Mapping[int, wire.CheckpointWritten]], Awaitable[str]]) -> None:
        """Copy checkpoints (the keeper loop). Of those that wait, only the newest is copied and the others are deleted,
        so that ranks may write faster than this loop copies."""
        while True:
            reports = await self._start.to_keep.get()
            while not self._start.to_keep.empty():
                name, reports = Path(reports[0].folder).name, self._start.to_keep.get_nowait()
                if name != Path(reports[0].folder).name:
                    await self.drop_checkpoint(name)
            await self._emit_checkpoint(reports[0], folder=await keep(reports))

    async def drop_checkpoint(self, name: str) -> None:
        """Have the ranks delete a checkpoint in the folders that they own."""
        if self._is_up:  # otherwise they cannot be told; what is unknown is deleted at their next start
            for rank in self._start.owners:
                await self.end.send(rank, wire.DeleteCheckpoint(name=name))

    async def checkpoint(self, *, timeout_s: float) -> bool:
        """Request a checkpoint of the last step and wait for it; False after `timeout_s`, or if the ranks are lost."""
        if not self._is_up:
            never_was = not (self._start.incarnation or self._start.lost.is_set())
            return never_was  # then nothing was trained since the last checkpoint
        self._checkpoint.clear()
        self._is_ending, self._last_step = True, self._start.next_step
        for rank in range(self._start.num_ranks):
            await self.end.send(rank, wire.SaveCheckpoint())
        ends = [asyncio.create_task(event.wait()) for event in (self._checkpoint, self._start.lost)]
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return self._checkpoint.is_set()

    async def stop(self, reason: str) -> bool:
        """Tell all ranks to end; False if they are not up, as they are not needed."""
        if not self._is_up:
            return False
        for rank in range(self._start.num_ranks):
            await self.end.send(rank, wire.Stop(reason=reason))
        return True

    @property
    def _is_up(self) -> bool:
        return self._start.all_ready.is_set() and not self._start.lost.is_set()

    async def _watch(self) -> None:
        """Raise RemoteError once the ranks have ended, or one of them has failed (the watch loop)."""
        start = self._start
        signs = [asyncio.create_task(self.ranks.ended()), asyncio.create_task(start.failed.wait())]
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(LAST_WORDS_S)  # a rank's own reason says more than that of its process
            raise RemoteError(start.failure or str(signs[0].result()))
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def _judge(self) -> None:
        """Raise RemoteError once a rank is silent, or none makes progress (the vitals loop)."""
        start, loop = self._start, asyncio.get_running_loop()
        await start.all_ready.wait()
        start.vitals = Vitals(start.num_ranks, at=loop.time())
        while True:
            await asyncio.sleep(LOOK_S)
            if problem := start.vitals.problem(at=loop.time(), are_cut_off=self.ranks.are_cut_off):
                raise RemoteError(problem)

    async def _on_ready(self, rank: int, message: wire.RankReady) -> None:
        self._start.ready[rank] = message.next_step
        self._start.skipped |= dict.fromkeys(message.skipped)
        self.on_ready(len(self._start.ready), self._start.num_ranks)
        if len(self._start.ready) < self._start.num_ranks:
            return
        steps = set(self._start.ready.values())
        if len(steps) != 1:
            raise RunFailed(f"trainer ranks disagree on the step to resume at: {self._start.ready}")
        [step] = steps
        self._start.next_step = step
        self._start.all_loaded.set()
        if self._start.incarnation:
            self._recalling = asyncio.create_task(self._recall(step, after=self._recalling), name="recall")
            await asyncio.shield(self._recalling)
        self._start.all_ready.set()
        if message.note:
            self.tell(message.note)
        for reason in self._start.skipped:
            self.tell(f"{reason}; the trainer continues from step {message.next_step + 1}")
        await self.emit(ev.TrainerReady(self.now(), step))

    async def _recall(self, step: StepId, *, after: asyncio.Task[None] | None) -> None:
        """Recall what ranks need: a file that grows with the run is read, within `run.no_progress_s`. The
        thread that reads cannot be ended: if the ranks are lost meanwhile, the next recall waits for it."""
        if after is not None:
            await after
        if self.recall is not None:
            await self.recall(step)

    async def _emit_script(self) -> None:
        """Emit events in the order of rank 0's messages; the event of a wave waits for all ranks to complete it, and
        that of a checkpoint for the reports of all folders."""
        while self._start.script:
            message = self._start.script[0]
            if isinstance(message, wire.CheckpointWritten) and not all(self._start.written.values()):
                return
            if isinstance(message, wire.MicroBatchDone):
                if self._start.waves_of_all <= self._start.waves_emitted:
                    return
                self._start.waves_emitted += 1
            self._start.script.popleft()
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
                await self._on_checkpoint({rank: reports.popleft() for rank, reports in self._start.written.items()})
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
            self._start.to_keep.put_nowait(reports)

    async def _emit_checkpoint(self, message: wire.CheckpointWritten, *, folder: str) -> None:
        await self.emit(ev.CheckpointSaved(self.now(), message.step, folder, message.chain))
        if message.step >= self._last_step:
            self._checkpoint.set()
        is_needed = not self._is_ending and message.step < self._start.steps
        if is_needed and (reason := self.ranks.why_restart()):
            raise RemoteError(reason)

    def _require_chain(self, chain: str, *, step: StepId, what: str) -> None:
        """RunFailed unless the ranks' output has the chain of the waves sent to them."""
        expected = self.lineage.after(step)
        if chain != expected:
            raise RunFailed(f"the trainer's {what} has chain {chain}, but the waves sent have {expected}")
