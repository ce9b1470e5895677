"""The controller: one queue, one consumer. Event → core → journal → effects → event.

Invariant: the core is called from this loop alone, every event it is given is in the journal, and the tokens an event
speaks of were handed to the token log before. A failure that no effect foresees ends the run.

    effects, fleet, trainer ──events──▶ queue ──▶ ControllerState.handle ──commands──▶ effects (one task each)
                                                   │
                                                   └──▶ journal, observer (metrics, status)

Loop. Consumes: events. Produces: tasks and notices. Waits for: the next event (Ticked comes every second, so never
for long). Unblocked by: any event. Shutdown order: stop taking orders, end effects, checkpoint, journal, sockets,
processes (the last two belong to whoever made them).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from dora.controller import effects
from dora.controller.batches import build_wave
from dora.controller.effects import Io
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.instances import Instance
from dora.core.state import ControllerState
from dora.engine.rids import request_id
from dora.errors import DoraError, RemoteError, RunFailed
from dora.transport.messages import MicroBatch
from dora.weights.store import StoreError, StoreFull

log = structlog.get_logger(__name__)

TICK_S: Final = 1.0
#: Events on their way to the core: each comes from a command in flight or a ticking reporter, so far fewer than this
#: wait at any time; a full queue only makes reporters wait.
QUEUE_SIZE: Final = 65_536
#: KV use from which a server will soon have to retract a request, and below which it takes work again.
KV_PRESSED: Final = 0.95
KV_RELIEVED: Final = 0.8
#: How long a clean stop waits for the trainer's checkpoint.
CHECKPOINT_TIMEOUT_S: Final = 6.0
#: Pauses after tries of a durable copy that found the disk full.
COPY_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
#: How long whoever asks for something waits until the core has decided.
ASK_TIMEOUT_S: Final = 10.0
_LAG_PROBE_S: Final = 0.1

#: What runs beside the loop until the run ends.
Loop = Coroutine[Any, Any, None]


class Journal(Protocol):
    """Where events and the decisions they led to are written; a flush writes the tokens they speak of first."""

    def handled(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None: ...

    def flush(self) -> None: ...


class Observer(Protocol):
    """Whoever turns what happens into metrics and a status."""

    def on_event(self, event: ev.Event, commands: list[cmd.Command]) -> None: ...

    def on_evaluation(self, version: int) -> None: ...

    def on_lag(self, seconds: float) -> None: ...


class Trainer(Protocol):
    """The trainer's side: waves in, events out (TrainerLink, or a writer of rollouts)."""

    def train(self, wave: list[MicroBatch]) -> None: ...

    def loops(self) -> list[tuple[str, Loop]]:
        """Named loops to run beside the controller's."""

    async def checkpoint(self, *, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    finished: bool  # False: interrupted
    reason: str


class Controller:
    """Drives one run to its end."""

    def __init__(
        self,
        state: ControllerState,
        *,
        io: Io,
        journal: Journal,
        trainer: Trainer,
        observer: Observer,
        tick_s: float = TICK_S,
    ) -> None:
        self.state = state
        self._io = io
        self._journal = journal
        self._trainer = trainer
        self._observer = observer
        self._tick_s = tick_s  # by the wall clock
        self._queue: asyncio.Queue[ev.Event] = asyncio.Queue(QUEUE_SIZE)
        self._tasks: asyncio.TaskGroup | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._generating: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._reported: dict[InstanceId, dict[TrajectoryId, int]] = {}
        self._looked_at: set[InstanceId] = set()  # being asked for their KV
        self._log: Any = log.bind()  # once: a lazy logger takes as long to say its level as the core for an event
        self._outcome: Outcome | None = None
        self._error: RunFailed | None = None
        self._interrupted = False
        self._asked: dict[int, asyncio.Future[list[cmd.Command]]] = {}  # by the id of the event's object
        self._copies: dict[int, asyncio.Task[None]] = {}  # durable copies under way, by version

    async def emit(self, event: ev.Event) -> None:
        """Give the core a fact."""
        await self._queue.put(event)

    def emit_soon(self, event: ev.Event) -> None:
        """Give the core a fact from where nothing can wait."""
        self._queue.put_nowait(event)

    async def ask(self, event: ev.Event) -> list[cmd.Command]:
        """Give the core a fact; what it orders on it."""
        answer: asyncio.Future[list[cmd.Command]] = asyncio.get_running_loop().create_future()
        self._asked[id(event)] = answer
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._queue.put(event)
                return await answer
        except TimeoutError:
            raise RemoteError(f"the run did not take it up within {ASK_TIMEOUT_S:g} s; it may be ending") from None
        finally:
            del self._asked[id(event)]

    def fence(self, instance: InstanceId) -> dict[TrajectoryId, int]:
        """Void everything that runs on an instance; returns the token counts its trajectories go on from."""
        residents = self.state.instances[instance].residents if instance in self.state.instances else {}
        counts = self._io.trajectories.fence(residents)
        for trajectory in counts:
            task = self._generating.pop(trajectory, None)
            if task is not None:
                task.cancel()
        return counts

    def interrupt(self) -> None:
        """Stop cleanly: everything in flight is kept for a resume."""
        self._interrupted = True
        self.emit_soon(ev.Ticked(self._io.now()))  # unblocks the loop

    async def run(self, first: list[ev.Event]) -> Outcome:
        """Until the core says that the run is over, or it is interrupted; `first` are facts known before the start."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._start_loops()
                for event in first:
                    self._apply(event)
                await self._consume()
                await self._shut_down()
        except* DoraError as group:
            raise _first(group) from None
        finally:
            self._journal.flush()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _start_loops(self) -> None:
        assert self._tasks is not None
        loops: list[tuple[str, Loop]] = [("ticks", self._tick()), ("event-loop-lag", self._measure_lag())]
        loops += [("fleet", self._io.fleet.run()), *self._trainer.loops()]
        for name, loop in loops:
            self._background(loop, name=name)

    def _background(self, work: Loop, *, name: str) -> asyncio.Task[None]:
        """Work that the shutdown cancels."""
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _consume(self) -> None:
        while self._outcome is None and self._error is None and not self._interrupted:
            self._apply(await self._queue.get())
        if self._outcome is None and self._interrupted:
            self._outcome = Outcome(finished=False, reason="everything in flight is kept")

    def _apply(self, event: ev.Event) -> None:
        commands = self.state.handle(event)
        if id(event) in self._asked:
            self._asked[id(event)].set_result(commands)
        self._journal.handled(event, commands)
        if isinstance(event, ev.VersionPublished) and event.files:
            assert self._tasks is not None
            self._copies[event.version] = self._tasks.create_task(
                self._copy(event.version), name=f"durable-{event.version}"
            )
        if self._log.is_enabled_for(10):
            self._log.debug("event_handled", fact=event, commands=len(commands))
        self._observer.on_event(event, commands)
        for command in commands:
            _CARRY_OUT[type(command)](self, command)

    # -- commands -----------------------------------------------------------------------------------------------------

    def _start(self, effect: Callable[..., Awaitable[ev.Event]], order: cmd.Command) -> asyncio.Task[None] | None:
        """Work: one task that ends in one event."""
        if self._interrupted or self._outcome is not None:
            return None

        async def work() -> None:
            await self.emit(await effect(order, io=self._io))

        return self._background(work(), name=f"{type(order).__name__}")

    def _generate(self, order: cmd.Generate) -> None:
        if order.trajectory < 0:
            eval_set, place = self._io.evaluations.locate(order.trajectory)
            self._io.trajectories.open(order.trajectory, eval_set.prompts[place])
        task = self._start(effects.generate, order)
        if task is not None:
            self._generating[order.trajectory] = task
            task.add_done_callback(lambda done: self._generated(order.trajectory, done))

    def _generated(self, trajectory: TrajectoryId, task: asyncio.Task[None]) -> None:
        if self._generating.get(trajectory) is task:
            del self._generating[trajectory]

    def _grade(self, order: cmd.GradeTrajectory) -> None:
        self._start(effects.grade, order)

    def _push(self, order: cmd.PushWeights) -> None:
        self._start(effects.push_weights, order)

    def _dismiss(self, order: cmd.DismissInstance) -> None:
        self._start(effects.dismiss, order)

    def _fetch(self, order: cmd.FetchPrompts) -> None:
        self._start(effects.fetch_prompts, order)

    def _train(self, order: cmd.TrainMicroBatch) -> None:
        if self._interrupted:
            return
        groups = {g.id: g for g in self.state.feed.step(order.step).groups}
        wave = build_wave(
            order,
            records=self._io.trajectories.records,
            groups=groups,
            group_size=self._io.group_size,
        )
        self._trainer.train(wave)

    def _stop(self, order: cmd.StopRequest) -> None:
        self._background(self._abort(order), name="stop-request")

    async def _abort(self, order: cmd.StopRequest) -> None:
        """The answer comes from the request itself; if the server cannot be told, the request runs to its end."""
        url = self._io.fleet.urls.get(order.instance)
        if url is None:
            return
        rid = request_id(self._io.run_id, trajectory=order.trajectory, attempt=order.attempt)
        try:
            await self._io.client.abort(url, rid)
        except RemoteError as err:
            log.warning("abort_failed", trajectory=order.trajectory, instance=order.instance, reason=str(err))

    def _condemn(self, order: cmd.CondemnInstance) -> None:
        self._io.fleet.condemn(order.instance, incarnation=order.incarnation, reason=order.reason)

    def _forget(self, order: cmd.ForgetGroups) -> None:
        self._io.trajectories.forget(order.groups)

    def _drop(self, order: cmd.DropGroup) -> None:
        if order.outcome == "filtered":  # others may still have siblings that run
            self._io.trajectories.forget([order.group])

    def _admit(self, order: cmd.AdmitGroup) -> None:
        self._io.trajectories.admit(order.group)

    def _release(self, order: cmd.ReleaseVersion) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._release_when_copied(order.version), name="release")  # the shutdown waits for it

    async def _copy(self, version: int) -> None:
        """A durable copy, needed by a resume and by the audit; without it the run goes on, and says so."""
        for pause_s in COPY_PAUSES_S:
            try:
                await asyncio.to_thread(self._io.store.copy_durable, version)
                return
            except StoreFull:
                await asyncio.sleep(pause_s)
            except StoreError as err:
                log.error("version_not_durable", version=version, reason=str(err))
                return
        log.error("version_not_durable", version=version, reason="the disk of the run folder is full")

    async def _release_when_copied(self, version: int) -> None:
        copy = self._copies.pop(version, None)
        if copy is not None:
            await copy
        await asyncio.to_thread(self._io.store.release, version)
        keep = self._io.keep_versions
        newest = self.state.window.newest or 0
        if keep and version < newest - keep:
            await asyncio.to_thread(self._io.store.release_durable, version)

    def _report(self, order: cmd.ReportEvaluation) -> None:
        self._observer.on_evaluation(order.version)
        for trajectory in self._io.evaluations.ids(order.version):
            self._io.trajectories.records.pop(trajectory, None)

    def _finish(self, order: cmd.FinishRun) -> None:
        self._outcome = Outcome(finished=True, reason=order.reason)

    def _fail(self, order: cmd.FailRun) -> None:
        self._error = RunFailed(order.reason)

    def _note(self, order: cmd.Command) -> None:
        """A decision: it is in the journal."""

    # -- reporters ----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            for instance in list(self.state.instances.values()):
                if instance.residents:
                    await self._report_progress(instance.id)
                if instance.pressed or instance.kv_load >= KV_RELIEVED * instance.kv_tokens:
                    self._look_at_kv(instance)
            self._journal.flush()
            await self.emit(ev.Ticked(self._io.now()))

    async def _report_progress(self, instance: InstanceId) -> None:
        records = self._io.trajectories.records
        counts = {t: len(records[t].tokens) for t in self.state.instances[instance].residents if t in records}
        if counts != self._reported.get(instance):
            self._reported[instance] = counts
            await self.emit(ev.ProgressReported(self._io.now(), instance, counts))

    def _look_at_kv(self, instance: Instance) -> None:
        """Beside the ticks: a server that does not answer must not hold them up."""
        if instance.id not in self._looked_at:
            self._looked_at.add(instance.id)
            look = self._background(self._report_kv(instance), name=f"kv-{instance.id}")
            look.add_done_callback(lambda _: self._looked_at.discard(instance.id))

    async def _report_kv(self, instance: Instance) -> None:
        """What the server says of its KV, where our own count cannot rule pressure out."""
        url = self._io.fleet.urls.get(instance.id)
        if url is None:
            return
        try:
            loads = await self._io.client.loads(url)
        except RemoteError as err:
            log.warning("loads_failed", instance=instance.id, reason=str(err))
            return
        limit = KV_RELIEVED if instance.pressed else KV_PRESSED
        pressed = loads.used_tokens >= limit * loads.max_total_tokens
        if pressed != instance.pressed:
            await self.emit(ev.KvPressureReported(self._io.now(), instance.id, pressed))

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LAG_PROBE_S)
            self._observer.on_lag(max(0.0, loop.time() - before - _LAG_PROBE_S))

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """No more orders are taken. Effects end first, so that the token log is complete; then the checkpoint."""
        for task in list(self._generating.values()):
            task.cancel()
        if self._interrupted and self._error is None:
            checkpoint = asyncio.create_task(
                self._trainer.checkpoint(timeout_s=CHECKPOINT_TIMEOUT_S), name="last-checkpoint"
            )
            while not checkpoint.done():
                await self._take_one(checkpoint)
            if not checkpoint.result():
                log.warning("no_checkpoint", after_s=CHECKPOINT_TIMEOUT_S)
        for task in list(self._work):
            task.cancel()
        while not self._queue.empty():
            self._apply(self._queue.get_nowait())

    async def _take_one(self, until: asyncio.Task[bool]) -> None:
        """Journal what still arrives: a step that ends now is trained, and must be known as trained."""
        get = asyncio.create_task(self._queue.get(), name="last-events")
        await asyncio.wait({get, until}, return_when=asyncio.FIRST_COMPLETED)
        if get.done():
            self._apply(get.result())
        else:
            get.cancel()
            await asyncio.gather(get, return_exceptions=True)


def _first(group: BaseExceptionGroup[DoraError]) -> DoraError:
    """The first error of a group, however deep."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


_CARRY_OUT: Final[dict[type[cmd.Command], Callable[[Controller, Any], None]]] = {
    cmd.FetchPrompts: Controller._fetch,
    cmd.Generate: Controller._generate,
    cmd.GradeTrajectory: Controller._grade,
    cmd.PushWeights: Controller._push,
    cmd.TrainMicroBatch: Controller._train,
    cmd.CondemnInstance: Controller._condemn,
    cmd.DismissInstance: Controller._dismiss,
    cmd.RefuseRequest: Controller._note,
    cmd.StopRequest: Controller._stop,
    cmd.ForgetGroups: Controller._forget,
    cmd.ReleaseVersion: Controller._release,
    cmd.ReportEvaluation: Controller._report,
    cmd.FinishRun: Controller._finish,
    cmd.FailRun: Controller._fail,
    cmd.AdmitGroup: Controller._admit,
    cmd.CommitGroup: Controller._note,
    cmd.DropGroup: Controller._drop,
    cmd.CloseStep: Controller._note,
}
