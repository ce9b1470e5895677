"""`ControllerState.handle(event) -> commands`: the only mutator of the decision core.

Invariant: the state is the fold of its events; the same events give the same commands, in any process. The
controller, the simulator, replay and audit all drive this object. One handler per fact (`_on_<event>`): look up, update
the tables; then `_settle` (decisions.py) brings them to rest. One class in six files, each a base of the next: the data
(tables.py), moves.py, interrupts.py, decisions.py, the handlers that concern answers (answers.py), the others here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from dora.core import events as ev
from dora.core.answers import Answers
from dora.core.commands import Command, ForgetGroups
from dora.core.groups import GroupPhase, TrajectoryPhase
from dora.core.ids import TrajectoryId
from dora.core.instances import PUSH_BACKOFF_S, Instance, InstancePhase
from dora.core.tables import NOTICEABLE_WAIT, WINDOW_GROW, WINDOW_SHRINK


class ControllerState(Answers):
    """The decision core of one run."""

    def handle(self, event: ev.Event) -> list[Command]:
        """Take in one fact; return what is to be done now, in order."""
        if self.stalled and isinstance(event, ev.ControllerRestarted):
            self.finished = self.stalled = False
        if self.finished:
            return []
        out = self._out = []
        self.now = event.at
        self._at_rest = False
        _HANDLERS[type(event)](self, event)
        if not self._at_rest:
            self._settle()
        return out

    # -- instances ----------------------------------------------------------------------------------------------------

    def _on_instance_up(self, event: ev.InstanceUp) -> None:
        instance = self.instances.setdefault(event.instance, Instance(event.instance))
        if instance.phase is not InstancePhase.LOST or event.incarnation <= instance.incarnation:
            self.counters.late_completions += 1
            return
        instance.move(InstancePhase.LOADING)
        instance.incarnation = event.incarnation
        instance.slots = event.slots
        instance.kv_tokens = event.kv_tokens
        instance.failures = 0
        instance.retry_at = 0.0
        if not instance.barred:
            self._count(instance)
            self.vacant[instance.id] = instance
            self._place_due = True

    def _on_instance_lost(self, event: ev.InstanceLost) -> None:
        instance = self.instances.get(event.instance)
        if instance is None or instance.incarnation != event.incarnation or instance.phase is InstancePhase.LOST:
            self.counters.late_completions += 1
            return
        self._drop_instance(instance, event.num_tokens)

    def _on_instance_removed(self, event: ev.InstanceRemoved) -> None:
        instance = self.instances.pop(event.instance, None)
        if instance is None:
            self.counters.late_completions += 1
            return
        if instance.phase is not InstancePhase.LOST:
            self._drop_instance(instance, {})
        self.barred.pop(instance.id, None)
        self.leaving.pop(instance.id, None)

    def _drop_instance(self, instance: Instance, num_tokens: dict[TrajectoryId, int]) -> None:
        """Everything on it goes on elsewhere, from the tokens already streamed."""
        for trajectory in list(instance.reserved.values()):
            self._unreserve(trajectory)  # still on its source; it will wait when it comes
        residents = list(instance.residents.values())
        for trajectory in residents:
            known = max(trajectory.num_tokens, instance.reported.get(trajectory.id, 0))
            self._take_count(trajectory, num_tokens.get(trajectory.id, known))
            self._unreserve(trajectory)
            self._end(trajectory)
        if instance.pushing is not None:
            self._push_ended(instance)
        self._leave_serving(instance)
        instance.move(InstancePhase.LOST)
        if not instance.barred:
            self._count(instance, sign=-1)
        instance.reported = {}
        instance.condemned = instance.pressed = False
        self.vacant.pop(instance.id, None)
        for trajectory in residents:
            trajectory.attempt += 1  # what the lost request may still say is void
            self.counters.recovered += 1
            self._go_on(trajectory)
        self._place_due = True

    def _on_progress_reported(self, event: ev.ProgressReported) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        self._at_rest = True
        instance.reported = event.num_tokens  # taken in by _look

    def _on_kv_pressure_reported(self, event: ev.KvPressureReported) -> None:
        instance = self.instances.get(event.instance)
        if instance is None or instance.phase is InstancePhase.LOST or instance.pressed == event.pressed:
            return
        instance.pressed = event.pressed
        if event.pressed:
            self._relieve(instance)
        else:
            self._freed(instance)

    def _push_ended(self, instance: Instance) -> None:
        assert instance.pushing is not None
        self.entry(instance.pushing).loading -= 1
        instance.pushing = None
        self.pushes -= 1
        self._place_due = self._release_due = True
        if self.settings.rules.batched and not self.pushes:
            self._admissions_changed()  # a block waits until no push is in flight

    def _on_weight_push_finished(self, event: ev.WeightPushFinished) -> None:
        instance = self.instances.get(event.instance)
        if instance is None or instance.attempt != event.attempt or instance.pushing is None:
            self.counters.late_completions += 1
            return
        if instance.pushing != event.version:
            reason = f"it was given version {instance.pushing} and reads back {event.version}"
            self._on_weight_push_failed(ev.WeightPushFailed(event.at, event.instance, event.attempt, reason))
            return
        self._push_ended(instance)
        instance.move(InstancePhase.SERVING)
        instance.version = event.version
        instance.failures = 0
        instance.room_key = math.inf
        if instance.barred:
            instance.move(InstancePhase.DRAINING)  # it was drained meanwhile
        else:
            self._serve(instance)
        self._resumed(instance)
        self._freed(instance)
        self._moves_due = True

    def _on_weight_push_failed(self, event: ev.WeightPushFailed) -> None:
        instance = self.instances.get(event.instance)
        if instance is None or instance.attempt != event.attempt or instance.pushing is None:
            self.counters.late_completions += 1
            return
        self._push_ended(instance)
        if instance.phase is not InstancePhase.QUARANTINED:
            instance.move(InstancePhase.QUARANTINED)
        if instance.failures >= len(PUSH_BACKOFF_S):
            self._condemn(instance, f"{instance.failures + 1} pushes failed: {event.reason}")
            return
        instance.retry_at = self.now + PUSH_BACKOFF_S[instance.failures]
        instance.failures += 1
        self._resumed(instance)
        self._freed(instance)

    # -- training -----------------------------------------------------------------------------------------------------

    def _on_trainer_ready(self, event: ev.TrainerReady) -> None:
        if event.step > self.formation.step:
            self._fail(f"the trainer starts at step {event.step}, but only {self.formation.step} steps are closed")
            return
        while self.feed.trained < event.step:
            self._step_trained(self.feed.trained)  # its news was lost with the controller that it was meant for
        self.feed.restart(event.step)
        self._feed_due = True
        self.feed.idle_since = self.now

    def _on_micro_batch_trained(self, event: ev.MicroBatchTrained) -> None:
        feed = self.feed
        if event.step != feed.open_step or event.index != feed.waves_done:
            self.counters.late_completions += 1
            return
        step = feed.step(event.step)
        feed.uneven_s += step.slack[feed.waves_done] * (self.now - feed.busy_since)
        feed.busy_since = self.now
        feed.waves_done += 1
        self._feed_due = True
        self.progress_at = self.now
        if feed.waves_done == step.sent and not step.waves[-1].last:
            feed.idle_since = self.now

    def _on_step_trained(self, event: ev.StepTrained) -> None:
        feed = self.feed
        if event.step != feed.open_step:
            self.counters.late_completions += 1
            return
        feed.open_step = event.step + 1
        feed.waves_done = 0
        self.progress_at = self.now
        feed.idle_since = self.now
        self._feed_due = True
        if event.step == feed.trained:  # else a replay: its groups are trained already
            self._step_trained(event.step)

    def _step_trained(self, step: int) -> None:
        """Its groups leave the ledger, once."""
        self.feed.trained = step + 1
        groups = self.feed.step(step).groups
        for group in groups:
            self.ledger.move(group, GroupPhase.TRAINED)
            self.entry(group.current).groups -= 1
        self._out.append(ForgetGroups(tuple(g.id for g in groups)))
        self._adapt_window()
        self._release_due = True
        self._admissions_changed()

    def _adapt_window(self) -> None:
        """W grows when the trainer waited noticeably, else shrinks slowly (system.md §5.7).

        Ranks that wait for the fullest one of a small micro-batch count: the trainer got it because there was no more.
        """
        duration, lost_s = self.now - self.step_trained_at, self.feed.idle_s + self.feed.uneven_s
        self.feed.idle_s = self.feed.uneven_s = 0.0
        self.step_trained_at = self.now
        if not self.adapts_window:
            return
        factor = WINDOW_SHRINK
        if lost_s > NOTICEABLE_WAIT * duration:
            least, most = WINDOW_GROW
            factor = min(max(least, 1 + lost_s / duration), most)
        size = min(factor * self.window_size, self.window_limit)
        self.window_size = max(self.settings.groups_per_step, size)

    def _on_version_published(self, event: ev.VersionPublished) -> None:
        if self.window.newest is not None and event.version <= self.window.newest:
            return  # a replayed step: the store kept the bytes that were published first
        self.window.publish(event.version)
        if self.settings.rules.in_flight is not None:
            self._carry_over(event.version)
        if self.evaluation.wants(event.version, is_last=event.version == self.settings.steps):
            self.evaluation.due = True
        self._release_due = True
        self._admissions_changed()

    def _on_checkpoint_saved(self, event: ev.CheckpointSaved) -> None:
        self.feed.checkpointed(event.step)

    # -- the run ------------------------------------------------------------------------------------------------------

    def _on_ticked(self, event: ev.Ticked) -> None:
        self._moves_due = True
        self._place_due = True
        for instance in self.instances.values():
            if self.now >= instance.look_at and instance.pushing is None:
                self._look(instance)
        for instance in self.barred.values():
            self._evacuate(instance)
        outstanding = self.formation.num_unconsumed or self.feed.trained < self.formation.step
        if self.now - self.progress_at > self.settings.no_progress_s and outstanding:
            self.stalled = True
            self._fail(f"no progress for {self.now - self.progress_at:.0f} s: {self._culprit()}")

    def _culprit(self) -> str:
        """Which group holds up the step, where, since when."""
        waves = self.feed.steps.get(self.feed.open_step) if self.feed.open_step is not None else None
        if self.feed.open_step is None:
            return "the trainer has not reported ready"
        if waves is not None and waves.sent > self.feed.waves_done:
            return f"the trainer works on micro-batch {self.feed.waves_done} of step {self.feed.open_step}"
        groups = [g for g in self.ledger.groups.values() if g.phase in (GroupPhase.GENERATING, GroupPhase.GRADING)]
        if not groups:
            return f"step {self.formation.step} waits, and every admitted group is complete"
        group = min(groups, key=lambda g: (g.deadline, g.id))
        open_ones = [t for t in group.trajectories if t.phase is not TrajectoryPhase.GRADED]
        where = ", ".join(
            f"trajectory {t.id} {t.phase.value}" + (f" on instance {t.instance.id}" if t.instance is not None else "")
            for t in open_ones[:4]
        )
        age = self.now - group.admitted_at
        return (
            f"group {group.id} of version {group.version}, admitted {age:.0f} s ago, "
            f"holds up step {self.formation.step}: {where}"
        )

    def _on_controller_restarted(self, event: ev.ControllerRestarted) -> None:
        for instance in self.instances.values():
            if instance.phase is not InstancePhase.LOST:
                self._drop_instance(instance, event.num_tokens)
        for instance in list(self.barred.values()):
            self._unbar(instance)  # whoever asked for it has to ask the new controller
        for trajectory in list(self.trajectories.values()):
            if trajectory.phase is TrajectoryPhase.WAITING:
                self._take_count(trajectory, event.num_tokens.get(trajectory.id, trajectory.num_tokens))
            elif trajectory.phase is TrajectoryPhase.GRADING:
                self._grade(trajectory)
        self.feed.open_step = None
        self.prompts.clear()
        self.source_dry = False
        self.fetching = False
        self.progress_at = self.step_trained_at = self.now


_HANDLERS: Final[dict[type[ev.Event], Callable[[ControllerState, Any], None]]] = {
    ev.InstanceUp: ControllerState._on_instance_up,
    ev.InstanceLost: ControllerState._on_instance_lost,
    ev.ProgressReported: ControllerState._on_progress_reported,
    ev.PrefillReported: ControllerState._on_prefill_reported,
    ev.InstanceDrainRequested: ControllerState._on_instance_drain_requested,
    ev.InstanceRecalled: ControllerState._on_instance_recalled,
    ev.InstanceRemoved: ControllerState._on_instance_removed,
    ev.KvPressureReported: ControllerState._on_kv_pressure_reported,
    ev.WeightPushFinished: ControllerState._on_weight_push_finished,
    ev.WeightPushFailed: ControllerState._on_weight_push_failed,
    ev.PromptsArrived: ControllerState._on_prompts_arrived,
    ev.GenerationFinished: ControllerState._on_generation_finished,
    ev.GenerationStopped: ControllerState._on_generation_stopped,
    ev.GenerationFailed: ControllerState._on_generation_failed,
    ev.TrajectoryGraded: ControllerState._on_trajectory_graded,
    ev.TrainerReady: ControllerState._on_trainer_ready,
    ev.MicroBatchTrained: ControllerState._on_micro_batch_trained,
    ev.StepTrained: ControllerState._on_step_trained,
    ev.VersionPublished: ControllerState._on_version_published,
    ev.CheckpointSaved: ControllerState._on_checkpoint_saved,
    ev.Ticked: ControllerState._on_ticked,
    ev.ControllerRestarted: ControllerState._on_controller_restarted,
}
