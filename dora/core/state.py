"""`ControllerState.handle(event) -> commands`: the only mutator of the decision core.

Invariant: the state is the fold of its events; the same events give the same commands, in any process. The
controller, the simulator, replay and audit all drive this object. One handler per fact (`_on_<event>`): look up, update
the tables; then `_settle` (decisions.py) brings them to rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from dora.core import events as ev
from dora.core.commands import Command, DropGroup, ForgetGroups, GradeTrajectory, ReportEvaluation
from dora.core.decisions import Decisions
from dora.core.groups import Group, GroupPhase, Trajectory, TrajectoryPhase, advantage_free
from dora.core.ids import TrajectoryId
from dora.core.instances import PUSH_BACKOFF_S, Instance, InstancePhase
from dora.core.tables import NOTICEABLE_WAIT, WINDOW_GROW, WINDOW_SHRINK

_WAITING: Final = TrajectoryPhase.WAITING
_GRADING: Final = TrajectoryPhase.GRADING
_GRADED: Final = TrajectoryPhase.GRADED
_FAILED: Final = GroupPhase.FAILED
_DECODING: Final = (TrajectoryPhase.RESIDENT, TrajectoryPhase.STOPPING)


class ControllerState(Decisions):
    """The decision core of one run."""

    def handle(self, event: ev.Event) -> list[Command]:
        """Take in one fact; return what is to be done now, in order."""
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
        if not instance.barred:
            self.vacant[instance.id] = instance

    # -- trajectories -------------------------------------------------------------------------------------------------

    def _on_prompts_arrived(self, event: ev.PromptsArrived) -> None:
        self.fetching = False
        if event.first != self.next_group + len(self.prompts):
            self.counters.late_completions += 1
            return
        self.prompts.extend(event.num_prompt_tokens)
        self.source_dry = event.dry
        self._form_due = event.dry  # a batch may have become the last one
        self._admissions_changed()

    def _decoding(self, id: TrajectoryId, attempt: int) -> Trajectory | None:
        """The trajectory this completion is about, or None if it is late."""
        trajectory = self.trajectories.get(id)
        if trajectory is None or trajectory.attempt != attempt or trajectory.phase not in _DECODING:
            self.counters.late_completions += 1
            return None
        return trajectory

    def _take_count(self, trajectory: Trajectory, num_tokens: int) -> None:
        """Note how many tokens an answer has; fewer than before means that some were thrown away (C2)."""
        instance = trajectory.instance
        reported = instance.reported.get(trajectory.id, 0) if instance is not None else 0
        if num_tokens < reported or num_tokens < trajectory.num_tokens:
            known = max(reported, trajectory.num_tokens)
            self.counters.scheduling_aborts += 1
            self._fail(f"C2: trajectory {trajectory.id} had {known} tokens and goes on from {num_tokens}")
        trajectory.num_tokens = num_tokens

    def _check_spans(self, trajectory: Trajectory, spans: tuple[ev.Span, ...]) -> None:
        """C1: the server's own account of the versions must be the tag."""
        for version, _, _ in spans:
            if version != trajectory.version:
                self.counters.version_conflicts += 1
                where = trajectory.instance.id if trajectory.instance is not None else "?"
                self._fail(
                    f"C1: instance {where} reports version {version} for trajectory {trajectory.id}, "
                    f"whose tag is {trajectory.version}; spans {spans}"
                )

    def _on_generation_finished(self, event: ev.GenerationFinished) -> None:
        trajectory = self._decoding(event.trajectory, event.attempt)
        if trajectory is None:
            return
        self._check_spans(trajectory, event.spans)
        self._take_count(trajectory, event.num_tokens)
        if trajectory.target is not None:
            self._unreserve(trajectory)
        self._end(trajectory).progress_at = self.now
        group = trajectory.group
        if group is not None:
            self._leave_unfinished(trajectory)
            if group.phase is _FAILED:
                self._abandon(trajectory)
                return
            self.length_sum += event.num_tokens
            self.length_count += 1
            self.mean_length = self.length_sum // self.length_count
            if not group.unfinished:
                self.ledger.move(group, GroupPhase.GRADING)
            elif group.waiting:
                self.entry(group.version).reprioritize(group)
        self._grade(trajectory)

    def _leave_unfinished(self, trajectory: Trajectory) -> None:
        assert trajectory.group is not None
        trajectory.group.unfinished -= 1
        entry = self.window.entries[trajectory.version]
        entry.unfinished -= 1
        if not entry.unfinished:
            self._place_due = self._release_due = True

    def _grade(self, trajectory: Trajectory) -> None:
        trajectory.phase = _GRADING
        trajectory.attempt += 1
        self._out.append(GradeTrajectory(trajectory.id, trajectory.attempt))

    def _on_generation_stopped(self, event: ev.GenerationStopped) -> None:
        trajectory = self._decoding(event.trajectory, event.attempt)
        if trajectory is None:
            return
        self._check_spans(trajectory, event.spans)
        self._take_count(trajectory, event.num_tokens)
        target = self._unreserve(trajectory)
        self._end(trajectory)
        if target is not None and target.takes_work and not self._is_abandoned(trajectory):
            self.counters.migrations += 1
            footprint = self._footprint(trajectory.num_prompt_tokens, trajectory.num_tokens)
            self._begin(trajectory, target, footprint=footprint)
        else:
            self._go_on(trajectory)

    def _on_generation_failed(self, event: ev.GenerationFailed) -> None:
        trajectory = self._decoding(event.trajectory, event.attempt)
        if trajectory is None:
            return
        self._take_count(trajectory, event.num_tokens)
        self._unreserve(trajectory)
        instance = self._end(trajectory)
        if event.server_gone:
            self._condemn(instance, event.reason)
            self.counters.recovered += 1
        else:
            trajectory.failures += 1
        if trajectory.failures >= self.settings.max_attempts and not self._is_abandoned(trajectory):
            self._give_up(trajectory, event.reason)
        else:
            self._go_on(trajectory)

    def _is_abandoned(self, trajectory: Trajectory) -> bool:
        return trajectory.group is not None and trajectory.group.phase is GroupPhase.FAILED

    def _go_on(self, trajectory: Trajectory) -> None:
        """An ended request's trajectory waits for its next instance, unless its group has failed."""
        if self._is_abandoned(trajectory):
            self._leave_unfinished(trajectory)
            self._abandon(trajectory)
        else:
            self._wait(trajectory)

    def _give_up(self, trajectory: Trajectory, reason: str) -> None:
        """Too many failed requests: the group fails; a sample of an evaluation counts as not graded."""
        group = trajectory.group
        if group is None:
            trajectory.phase = TrajectoryPhase.GRADING
            self._graded(trajectory, None)
            return
        self._drop(group, outcome="failed", reason=f"generation: {reason}")
        self.entry(group.version).forget_waiting(group)
        for sibling in group.trajectories:
            if sibling.phase is TrajectoryPhase.WAITING:
                self._leave_unfinished(sibling)
                self._abandon(sibling)
            elif sibling.phase is TrajectoryPhase.RESIDENT and sibling is not trajectory:
                self._stop(sibling)
        self._leave_unfinished(trajectory)
        self._abandon(trajectory)

    def _abandon(self, trajectory: Trajectory) -> None:
        trajectory.phase = TrajectoryPhase.ABANDONED
        del self.trajectories[trajectory.id]

    def _on_trajectory_graded(self, event: ev.TrajectoryGraded) -> None:
        trajectory = self.trajectories.get(event.trajectory)
        if trajectory is None or trajectory.attempt != event.attempt or trajectory.phase is not _GRADING:
            self.counters.late_completions += 1
            return
        self._graded(trajectory, event.reward)

    def _graded(self, trajectory: Trajectory, reward: float | None) -> None:
        trajectory.phase = _GRADED
        trajectory.reward = reward
        del self.trajectories[trajectory.id]
        group = trajectory.group
        if group is None:
            self._evaluation_graded()
            return
        if group.phase is _FAILED:
            return
        group.ungraded -= 1
        if group.ungraded:
            self._at_rest = True
            return
        verdict = advantage_free(group.rewards, filter_zero_variance=self.settings.filter_zero_variance)
        if verdict is not None:
            outcome, reason = verdict
            self._drop(group, outcome=outcome, reason=reason)
            return
        self.ledger.move(group, GroupPhase.COMPLETE)
        self.complete.setdefault(group.deadline, deque()).append(group)
        self._form_due = True

    def _evaluation_graded(self) -> None:
        evaluation = self.evaluation
        evaluation.ungraded -= 1
        if evaluation.ungraded:
            return
        version = evaluation.finish()
        self.evaluated = version
        self.entry(version).evaluating = False
        self._out.append(ReportEvaluation(version))
        self._place_due = self._release_due = True

    def _drop(self, group: Group, *, outcome: str, reason: str) -> None:
        """A group leaves U without being trained; its place is refilled by admission."""
        self._out.append(DropGroup(group.id, outcome, reason, group.rewards))
        self.ledger.move(group, GroupPhase.FILTERED if outcome == "filtered" else GroupPhase.FAILED)
        key = f"{outcome}: {reason}"
        self.ledger.reasons[key] = self.ledger.reasons.get(key, 0) + 1
        self.formation.drop(group.deadline)
        self.entry(group.version).groups -= 1
        if self.settings.rules.batched:
            self.block_left += 1
        self.top_ups += 1
        for reward in group.rewards:
            self.top_up_rewards[reward] = self.top_up_rewards.get(reward, 0) + 1
        if self.top_ups > self.settings.max_top_up * self.settings.groups_per_step:
            common = sorted(self.top_up_rewards.items(), key=lambda item: -item[1])[:5]
            rewards = ", ".join(f"{'none' if reward is None else f'{reward:g}'} x {n}" for reward, n in common)
            self._fail(
                f"step {self.formation.step} had to top up {self.top_ups} groups (max_top_up is "
                f"{self.settings.max_top_up:g} x {self.settings.groups_per_step}); the last one left as {key}; "
                f"their siblings' rewards: {rewards}"
            )
        self._release_due = self._form_due = True
        self._admissions_changed()

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
        feed.waves_done += 1
        self._feed_due = True
        self.progress_at = self.now
        step = feed.step(event.step)
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
            self.entry(group.version).groups -= 1
        self._out.append(ForgetGroups(tuple(g.id for g in groups)))
        self._adapt_window()
        self._release_due = True
        self._admissions_changed()

    def _adapt_window(self) -> None:
        """W grows when the trainer waited noticeably, else shrinks slowly (system.md §5.7)."""
        n = self.settings.groups_per_step
        duration = self.now - self.step_trained_at
        waited = self.feed.idle_s > NOTICEABLE_WAIT * duration
        self.feed.idle_s = 0.0
        self.step_trained_at = self.now
        if self.settings.rules.batched:
            return
        most = (self.settings.rules.max_staleness + 1) * n
        self.window_size = max(
            n, min(WINDOW_GROW * self.window_size, most) if waited else WINDOW_SHRINK * self.window_size
        )

    def _on_version_published(self, event: ev.VersionPublished) -> None:
        if self.window.newest is not None and event.version <= self.window.newest:
            return  # a replayed step: the store kept the bytes that were published first
        self.window.publish(event.version)
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
            if self.now >= instance.look_at:
                self._look(instance)
        for instance in self.barred.values():
            self._evacuate(instance)
        outstanding = self.formation.num_unconsumed or self.feed.trained < self.formation.step
        if self.now - self.progress_at > self.settings.no_progress_s and outstanding:
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
