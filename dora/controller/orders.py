"""Execution of commands: some start a task, others take effect at once.

Invariant: an action that cannot be undone begins once the event that caused it is on the disk. After `close` no work
begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dora.controller.copies import Copies
from dora.controller.effects import Effects, SendWave, StopAttempt
from dora.controller.episodes import Episodes, NoEpisodes
from dora.controller.evaluations import Evaluations
from dora.controller.fleet import Fleet
from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.run_tasks import RunTasks
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import commands as cmd
from dora.core.ids import GroupId, TrajectoryId, VersionId
from dora.core.phases import GroupPhase
from dora.journal.commits import Commits

#: How long a stop may take before it is sent again: a server ignores one that arrives before its request. More would
#: not help, as a server that is paused keeps its requests until it goes on.
STOP_AGAIN_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)


class EvaluationObserver(Protocol):
    """A receiver of completed evaluations."""

    def on_evaluation(self, version: VersionId, *, position: int) -> None: ...


@dataclass
class Orders:
    """Executor of the core's commands."""

    effects: Effects
    stop: StopAttempt
    train: SendWave
    copies: Copies
    fleet: Fleet
    trajectories: Trajectories
    evaluations: Evaluations
    observer: EvaluationObserver
    inbox: Inbox
    in_flight: InFlight
    commits: Commits
    tasks: RunTasks
    restart: Callable[[cmd.RestartTrainer], None] | None = None  #: None: there is no trainer
    episodes: Episodes | NoEpisodes = field(default_factory=NoEpisodes)
    calls: dict[asyncio.Task[None], TrajectoryId] = field(default_factory=dict)  #: of environments, under way
    _takes_work: bool = True
    _trains: bool = True
    _failed: set[GroupId] = field(default_factory=set)  #: groups, some of whose answers may still be open

    def carry_out(self, order: cmd.Command, *, position: int) -> None:
        """Carry out a command; `position` is the journal position after the event that led to it."""
        _CARRY_OUT[type(order)](self, order, position)

    def forget_failed(self, open: Container[TrajectoryId]) -> None:
        """Forget the failed groups without an open answer; those are all that no ForgetGroups comes for."""
        ended = [g for g in self._failed if not any(t in open for t in self.trajectories.siblings(g))]
        self.trajectories.forget(ended)
        self._failed.difference_update(ended)

    def close(self, *, trains: bool) -> None:
        """Start no more work and, unless `trains`, send no more waves."""
        self._takes_work = False
        self._trains = self._trains and trains

    def awaited_calls(self) -> list[asyncio.Task[None]]:
        """Return the calls under way for which a clean stop waits."""
        return [task for task, trajectory in self.calls.items() if self.episodes.is_awaited(trajectory)]

    # -- work: a task that emits one event ----------------------------------------------------------------------------

    def _begin(self, order: cmd.Command, *, after: int = 0) -> asyncio.Task[None] | None:
        if not self._takes_work:
            return None
        return self.tasks.background(self._effect(order, after=after), name=type(order).__name__)

    async def _effect(self, order: cmd.Command, *, after: int) -> None:
        await self.commits.durable(after)
        await self.inbox.emit(await self.effects[type(order)](order))

    def _start(self, order: cmd.Command, position: int) -> None:
        self._begin(order)

    def _start_durable(self, order: cmd.Command, position: int) -> None:
        self._begin(order, after=position)

    def _record(self, trajectory: TrajectoryId) -> TrajectoryRecord:
        """Return a record; that of an evaluation sample is created when the sample begins."""
        if trajectory < 0:
            eval_set, index = self.evaluations.locate(trajectory)
            self.trajectories.open(trajectory, eval_set.prompts[index])
        return self.trajectories.records[trajectory]

    def _generate(self, order: cmd.Generate, position: int) -> None:
        record = self._record(order.trajectory)
        follows_call = bool(record.observed) and record.turn_start == len(record.tokens)
        task = self._begin(order, after=position if follows_call else 0)
        if task is not None:
            self.in_flight.begin(order.trajectory, task)

    def _grade(self, order: cmd.GradeTrajectory, position: int) -> None:
        self.episodes.close([order.trajectory])
        self._begin(order)

    def _call(self, order: cmd.CallEnvironment, position: int) -> None:
        self._record(order.trajectory)
        task = self._begin(order, after=position)
        if task is not None:
            self.calls[task] = order.trajectory
            task.add_done_callback(self.calls.pop)

    # -- commands that take effect at once ----------------------------------------------------------------------------

    def _train(self, order: cmd.TrainMicroBatch, position: int) -> None:
        if self._trains:
            self.train(order, position=position)

    def _restart(self, order: cmd.RestartTrainer, position: int) -> None:
        assert self.restart is not None, "only a trainer can be lost"
        if self._trains:
            self.restart(order)

    def _stop(self, order: cmd.StopRequest, position: int) -> None:
        request = self.in_flight.request(order.trajectory)
        if request is not None:  # else it has ended, and its event says so
            self.tasks.background(self._stop_request(order, request), name="stop-request")

    async def _stop_request(self, order: cmd.StopRequest, request: asyncio.Task[None]) -> None:
        for pause_s in STOP_AGAIN_S:
            await self.stop(order)
            await asyncio.wait({request}, timeout=pause_s)
            if request.done():
                return

    def _condemn(self, order: cmd.CondemnInstance, position: int) -> None:
        self.fleet.condemn(order.instance, incarnation=order.incarnation, reason=order.reason)

    def _forget(self, order: cmd.ForgetGroups, position: int) -> None:
        self.trajectories.forget(order.groups)

    def _drop(self, order: cmd.DropGroup, position: int) -> None:
        self.episodes.close(self.trajectories.siblings(order.group))
        if order.outcome is GroupPhase.FILTERED:  # siblings of other dropped groups may still be running
            self.trajectories.forget([order.group])
        elif order.outcome is GroupPhase.FAILED:
            self._failed.add(order.group)

    def _admit(self, order: cmd.AdmitGroup, position: int) -> None:
        self.trajectories.admit(order.group)

    def _release(self, order: cmd.ReleaseVersion, position: int) -> None:
        self.copies.release(order, position=position)

    def _drop_checkpoint(self, order: cmd.DropCheckpoint, position: int) -> None:
        self.copies.drop_checkpoint(order, position=position)

    def _report(self, order: cmd.ReportEvaluation, position: int) -> None:
        self.observer.on_evaluation(order.version, position=position)
        for trajectory in self.evaluations.ids(order.version):
            self.trajectories.records.pop(trajectory, None)

    def _note(self, order: cmd.Command, position: int) -> None:
        """Do nothing: the command is journaled, and the end of the run is handled by the controller."""


_CARRY_OUT: Final[dict[type[cmd.Command], Callable[[Orders, Any, int], None]]] = {
    cmd.FetchPrompts: Orders._start,
    cmd.Generate: Orders._generate,
    cmd.GradeTrajectory: Orders._grade,
    cmd.CallEnvironment: Orders._call,
    cmd.PushWeights: Orders._start_durable,
    cmd.UnloadVersion: Orders._start_durable,
    cmd.TrainMicroBatch: Orders._train,
    cmd.RestartTrainer: Orders._restart,
    cmd.CondemnInstance: Orders._condemn,
    cmd.DismissInstance: Orders._start,
    cmd.RefuseRequest: Orders._note,
    cmd.StopRequest: Orders._stop,
    cmd.ForgetGroups: Orders._forget,
    cmd.ReleaseVersion: Orders._release,
    cmd.DropCheckpoint: Orders._drop_checkpoint,
    cmd.ReportEvaluation: Orders._report,
    cmd.StopRun: Orders._note,
    cmd.FinishRun: Orders._note,
    cmd.FailRun: Orders._note,
    cmd.AdmitGroup: Orders._admit,
    cmd.CommitGroup: Orders._note,
    cmd.DropGroup: Orders._drop,
    cmd.CloseStep: Orders._note,
}
