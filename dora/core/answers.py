"""What becomes of answers: prompts arrive, requests end or fail, answers are graded, groups are complete or dropped.

Invariant (C2): an answer that has ended was ended by itself; whatever else stops a request, it waits to go on from all
its tokens. A fact about an attempt that is over changes nothing. Inherited by state.py, which dispatches facts to it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dora.core import events as ev
from dora.core.commands import GradeTrajectory, ReportEvaluation
from dora.core.decisions import Decisions
from dora.core.groups import GIVEN_UP, Group, GroupPhase, Trajectory, TrajectoryPhase, advantage_free
from dora.core.ids import TrajectoryId

_WAITING: Final = TrajectoryPhase.WAITING
_GRADING: Final = TrajectoryPhase.GRADING
_GRADED: Final = TrajectoryPhase.GRADED
_DECODING: Final = (TrajectoryPhase.RESIDENT, TrajectoryPhase.STOPPING)


class Answers(Decisions):
    """Handlers of facts about trajectories and groups."""

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
        """C1: the server's own account of the versions must be the tag.

        Where updates reach live requests, a span may name any version since; `_on_generation_finished` counts it.
        """
        group = trajectory.group
        tag, last = trajectory.version, trajectory.version
        if group is not None and self.settings.rules.in_flight is not None:
            tag, last = group.version, group.current
        for version, _, _ in spans:
            if tag < version <= last:
                trajectory.is_mixed = True
            elif version != tag:
                self.counters.version_conflicts += 1
                where = trajectory.instance.id if trajectory.instance is not None else "?"
                self._fail(
                    f"C1: instance {where} reports version {version} for trajectory {trajectory.id}, "
                    f"whose tag is {tag}; spans {spans}"
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
            if group.phase in GIVEN_UP:
                self._abandon(trajectory)
                self._forget_discarded(group)
                return
            self.counters.version_conflicts += trajectory.is_mixed
            self.length_sum += event.num_tokens
            self.length_count += 1
            self.mean_length = self.length_sum // self.length_count
            if not group.unfinished:
                self.ledger.move(group, GroupPhase.GRADING)
            elif group.waiting:
                self.entry(group.current).reprioritize(group)
        self._grade(trajectory)

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

    def _go_on(self, trajectory: Trajectory) -> None:
        """An ended request's trajectory waits for its next instance, unless its group is given up."""
        if self._is_abandoned(trajectory):
            assert trajectory.group is not None
            self._leave_unfinished(trajectory)
            self._abandon(trajectory)
            self._forget_discarded(trajectory.group)
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
        self._abandon_siblings(group)
        self._leave_unfinished(trajectory)
        self._abandon(trajectory)

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
        if group.phase in GIVEN_UP:
            self._forget_discarded(group)
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
        key = self._remove(group, outcome=outcome, reason=reason)
        if self.settings.rules.batched:
            self.block_left += 1
        self.top_ups += 1
        for reward in group.rewards:
            self.top_up_rewards[reward] = self.top_up_rewards.get(reward, 0) + 1
        if self.top_ups > self.settings.max_top_up * self.settings.groups_per_step:
            common = sorted(self.top_up_rewards.items(), key=lambda item: -item[1])[:5]
            rewards = ", ".join(f"{'none' if reward is None else f'{reward:g}'} x {n}" for reward, n in common)
            self._fail(
                f"step {self.formation.step} had to top up {self.top_ups} groups (rollout.max_top_up is "
                f"{self.settings.max_top_up:g} x {self.settings.groups_per_step}); the last one left as {key}; "
                f"their siblings' rewards: {rewards}; bring prompts that are neither always nor never solved"
            )
        if not group.ungraded:
            group.let_go()
        self._form_due = True
        self._admissions_changed()
