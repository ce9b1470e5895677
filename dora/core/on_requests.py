"""Handlers of events about prompts, requests and grades.

Invariant (C2): a request that is stopped for any reason is queued to continue from all its tokens. Events of an old
attempt change nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dora.core import events as ev
from dora.core.commands import DropReason, ReportEvaluation
from dora.core.endings import (
    abandon,
    abandon_siblings,
    drop,
    finish,
    forget_discarded,
    go_on,
    grade,
    is_abandoned,
    leave_unfinished,
)
from dora.core.ids import TrajectoryId
from dora.core.occupancy import begin, condemn, end, footprint_of, take_count, unreserve
from dora.core.phases import DECODING, GIVEN_UP, GroupPhase, TrajectoryPhase
from dora.core.state import State, admissions_changed, episode_left, fail
from dora.core.tables import Trajectory

_GRADING: Final = TrajectoryPhase.GRADING  # globals: see tables.py
_GRADED: Final = TrajectoryPhase.GRADED


def on_prompts_arrived(state: State, event: ev.PromptsArrived) -> None:
    state.fetching = False
    if event.first != state.next_group + len(state.prompts):
        state.counters.late_completions += 1
        return
    state.prompts.extend(event.num_prompt_tokens)
    state.source_dry = event.dry
    if event.dry:
        state.agenda.form = True  # an incomplete step may now be the last one
    admissions_changed(state)


def decoding(state: State, id: TrajectoryId, attempt: int) -> Trajectory | None:
    """Return the trajectory of a completion, or None if the completion is late."""
    trajectory = state.trajectories.get(id)
    if trajectory is None or trajectory.attempt != attempt or trajectory.phase not in DECODING:
        state.counters.late_completions += 1
        return None
    return trajectory


def check_spans(state: State, trajectory: Trajectory, spans: tuple[ev.Span, ...]) -> None:
    """C1: the versions reported by the server must equal the tag.

    With updates in flight, a span may name any later version; `on_generation_finished` counts these answers.
    """
    group = trajectory.group
    tag, last = trajectory.version, trajectory.version
    if group is not None and state.settings.rules.in_flight is not None:
        tag = group.version
    for version, _, _ in spans:
        if tag < version <= last:
            trajectory.is_mixed = True
        elif version != tag:
            state.counters.version_conflicts += 1
            where = trajectory.instance.id if trajectory.instance is not None else "?"
            fail(
                state,
                f"C1: instance {where} reports version {version} for trajectory {trajectory.id}, "
                f"whose tag is {tag}; spans {spans}",
            )


def on_generation_finished(state: State, event: ev.GenerationFinished) -> None:
    trajectory = decoding(state, event.trajectory, event.attempt)
    if trajectory is None:
        return
    check_spans(state, trajectory, event.spans)
    take_count(state, trajectory, event.num_tokens)
    if trajectory.target is not None:
        unreserve(state, trajectory)
    end(state, trajectory).progress_at = state.now
    if is_abandoned(trajectory):
        go_on(state, trajectory)
    else:
        trajectory.truncated = "tokens" if event.length_capped else ""
        finish(state, trajectory)
        grade(state, trajectory)


def on_generation_stopped(state: State, event: ev.GenerationStopped) -> None:
    trajectory = decoding(state, event.trajectory, event.attempt)
    if trajectory is None:
        return
    check_spans(state, trajectory, event.spans)
    take_count(state, trajectory, event.num_tokens)
    target = unreserve(state, trajectory)
    trajectory.left = end(state, trajectory).id
    can_move = target is not None and target.takes_work(trajectory.version)
    if target is not None and can_move and not is_abandoned(trajectory):
        footprint = footprint_of(state, trajectory.num_prompt_tokens, trajectory.num_tokens)
        begin(state, trajectory, target, footprint=footprint)
    else:
        go_on(state, trajectory)


def on_generation_failed(state: State, event: ev.GenerationFailed) -> None:
    trajectory = decoding(state, event.trajectory, event.attempt)
    if trajectory is None:
        return
    take_count(state, trajectory, event.num_tokens)
    unreserve(state, trajectory)
    instance = end(state, trajectory)
    if event.server_gone:
        condemn(state, instance, event.reason)
        state.counters.recovered += 1
    else:
        trajectory.failures += 1
    is_over = event.final or trajectory.failures >= state.settings.max_attempts
    if is_over and not is_abandoned(trajectory):
        _give_up(state, trajectory, event.reason)
    else:
        go_on(state, trajectory)


def _give_up(state: State, trajectory: Trajectory, reason: str) -> None:
    """Fail the group of a trajectory that cannot be generated; an evaluation sample counts as not graded."""
    group = trajectory.group
    if group is None:
        trajectory.move(_GRADING, state.cause)
        graded(state, trajectory, None)
        return
    drop(state, group, GroupPhase.FAILED, f"{DropReason.GENERATION}: {reason}")
    abandon_siblings(state, group)
    leave_unfinished(state, trajectory)
    abandon(state, trajectory)


def on_trajectory_graded(state: State, event: ev.TrajectoryGraded) -> None:
    trajectory = state.trajectories.get(event.trajectory)
    if trajectory is None or trajectory.attempt != event.attempt or trajectory.phase is not _GRADING:
        state.counters.late_completions += 1
        return
    graded(state, trajectory, event.reward)
    group = trajectory.group
    if group is not None and group.ungraded and group.phase not in GIVEN_UP:
        state.agenda.at_rest = True


def graded(state: State, trajectory: Trajectory, reward: float | None) -> None:
    """Give a trajectory its reward: `reward`, from grading, plus its turns' rewards; None if `reward` is None.

    The sibling that is graded last decides what becomes of the group.
    """
    trajectory.move(_GRADED, state.cause)
    trajectory.reward = reward if reward is None else sum(trajectory.turn_rewards, reward)
    del state.trajectories[trajectory.id]
    group = trajectory.group
    if group is None:
        _evaluation_graded(state)
        return
    if group.phase in GIVEN_UP:
        forget_discarded(state, group)
        return
    group.ungraded -= 1
    if group.ungraded:
        return
    verdict = advantage_free(group.rewards, filter_zero_variance=state.settings.filter_zero_variance)
    if verdict is not None:
        drop(state, group, *verdict)
        return
    state.ledger.move(group, GroupPhase.COMPLETE, state.cause)
    state.complete.setdefault(group.deadline, deque()).append(group)
    state.agenda.form = True


def _evaluation_graded(state: State) -> None:
    evaluation = state.evaluation
    evaluation.ungraded -= 1
    if state.settings.rules.in_flight is not None or not state.settings.steps:
        state.progress_at = state.now  # training may wait for the sample (`updates`)
    episode_left(state)
    if evaluation.ungraded:
        return
    version = evaluation.finish()
    state.evaluated = version
    state.entry(version).evaluating = False
    state.out.append(ReportEvaluation(version))
    state.agenda.place = True
    state.agenda.release = True


def advantage_free(
    rewards: tuple[float | None, ...], *, filter_zero_variance: bool
) -> tuple[GroupPhase, DropReason] | None:
    """Return (outcome, reason) if a graded group cannot be trained, else None.

    Only graded siblings count; fewer than two of them are a failure of grading, not a lack of variance.
    """
    graded = [r for r in rewards if r is not None]
    if len(graded) < 2:
        return GroupPhase.FAILED, DropReason.GRADING
    if filter_zero_variance and max(graded) == min(graded):
        return GroupPhase.FILTERED, DropReason.ZERO_VARIANCE
    return None
