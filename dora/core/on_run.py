"""Handlers of clock ticks and of a new controller."""

from __future__ import annotations

from typing import Final

import msgspec

from dora.core import events as ev
from dora.core.endings import grade_again
from dora.core.moves import check_progress, evacuate, recall
from dora.core.occupancy import take_count
from dora.core.on_calls import let_slots_go, restart_call
from dora.core.on_instances import drop_instance
from dora.core.phases import GroupPhase, TrajectoryPhase
from dora.core.state import State, fail

_CALLING: Final = TrajectoryPhase.CALLING


def on_ticked(state: State, event: ev.Ticked) -> None:
    state.agenda.repack = True
    state.agenda.place = True
    for instance in state.instances.values():
        if state.now >= instance.check_at and not instance.is_updating:
            check_progress(state, instance)
    let_slots_go(state)
    for instance in state.drained.values():
        evacuate(state, instance)
    outstanding = state.formation.num_unconsumed or state.feed.trained < state.formation.step
    outstanding = outstanding or (not state.settings.steps and state.evaluation.version is not None)
    silent_s = state.now - state.progress_at
    if silent_s > state.settings.no_progress_s and outstanding and silent_s > _no_progress_s(state):
        state.stalled = True
        fail(state, f"no progress for {state.now - state.progress_at:.0f} s: {culprit(state)}")


def _no_progress_s(state: State) -> float:
    """Return the time without progress after which the run fails. Calls extend it once, by the time limit of a call."""
    settings = state.settings
    has_called = state.called_at > state.progress_at or any(t.phase is _CALLING for t in state.trajectories.values())
    return settings.no_progress_s + (settings.call_limit_s if has_called else 0.0)


def culprit(state: State) -> str:
    """Describe what holds up the step: a group, with its trajectories and age, or the trainer."""
    if not state.settings.steps:
        return f"{state.evaluation.ungraded} answers of the evaluation are not graded"
    waves = state.feed.steps.get(state.feed.open_step) if state.feed.open_step is not None else None
    if state.feed.open_step is None:
        return "the trainer has not reported ready"
    if waves is not None and waves.sent > state.feed.waves_done:
        return f"the trainer works on micro-batch {state.feed.waves_done} of step {state.feed.open_step + 1}"
    groups = [g for g in state.ledger.groups.values() if g.phase in (GroupPhase.GENERATING, GroupPhase.GRADING)]
    if not groups:
        return f"step {state.formation.step + 1} waits, and every admitted group is complete"
    group = min(groups, key=lambda g: (g.deadline, g.id))
    open_ones = [t for t in group.trajectories if t.phase is not TrajectoryPhase.GRADED]
    where = ", ".join(
        f"trajectory {t.id} {t.phase.value}" + (f" on instance {t.instance.id}" if t.instance is not None else "")
        for t in open_ones[:4]
    )
    waited_s = state.now - group.admitted_at
    return (
        f"group {group.id} of version {group.version}, admitted {waited_s:.0f} s ago, "
        f"holds up step {state.formation.step + 1}: {where}"
    )


def _renew_deadlines(state: State) -> None:
    """If K does not bound staleness, all groups are due at the end of the job, which is later now."""
    if state.settings.rules.bounded:
        return
    last = state.settings.steps - 1
    for group in state.ledger.groups.values():
        group.deadline = last
    for earlier in list(state.complete):
        state.complete[last] = state.complete.pop(earlier)


def on_controller_restarted(state: State, event: ev.ControllerRestarted) -> None:
    if event.max_episodes != state.settings.max_episodes:
        state.settings = msgspec.structs.replace(state.settings, max_episodes=event.max_episodes)
    if event.limits is not None:
        state.settings = msgspec.structs.replace(state.settings, **msgspec.structs.asdict(event.limits))
    if event.steps > state.settings.steps:
        state.settings = msgspec.structs.replace(state.settings, steps=event.steps)
        state.formation.extend(state.settings)
        _renew_deadlines(state)
    recovered = state.counters.recovered
    for instance in state.instances.values():
        if not instance.is_lost:
            drop_instance(state, instance, event.num_tokens)
    state.counters.recovered = recovered  # nothing was lost: a new controller continues the run
    for instance in list(state.drained.values()):
        recall(state, instance)  # users have to repeat drain requests to the new controller
    state.removed.clear()
    for trajectory in list(state.trajectories.values()):
        if trajectory.phase is TrajectoryPhase.WAITING:
            take_count(state, trajectory, event.num_tokens.get(trajectory.id, trajectory.num_tokens))
        elif trajectory.phase is TrajectoryPhase.GRADING:
            grade_again(state, trajectory)
        elif trajectory.phase is _CALLING:
            restart_call(state, trajectory, replayable=trajectory.id in event.replayable)
    state.stopping = False
    state.missing = set(event.missing)
    state.feed.open_step = None
    state.feed.idle_s = state.feed.uneven_s = 0.0  # counted anew, like the time since `step_trained_at`
    state.feed.incarnation = state.feed.losses = 0
    state.prompts.clear()
    state.source_dry = False
    state.fetching = False
    state.progress_at = state.step_trained_at = state.now
