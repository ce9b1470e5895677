"""Handlers of events about instances."""

from __future__ import annotations

from typing import Final

from dora.core import events as ev
from dora.core.endings import go_on
from dora.core.ids import TrajectoryId
from dora.core.moves import move_call, relieve
from dora.core.occupancy import (
    condemn,
    count_in_fleet,
    end,
    freed,
    leave_serving,
    take_count,
    unreserve,
)
from dora.core.phases import TrajectoryPhase, WeightsPhase
from dora.core.pushes import confirmed, failed, push_ended, resumed, timed
from dora.core.state import State
from dora.core.tables import Instance

#: Delays before a failed push is repeated, in seconds; if the push after the last delay fails, a condemnation follows.
PUSH_BACKOFF_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


def on_instance_up(state: State, event: ev.InstanceUp) -> None:
    if event.instance in state.removed:
        state.counters.late_completions += 1
        return
    instance = state.instances.get(event.instance) or Instance(event.instance)
    if instance.weights is not WeightsPhase.LOST or event.incarnation <= instance.incarnation:
        state.counters.late_completions += 1
        return
    state.instances[instance.id] = instance
    instance.incarnation = event.incarnation
    instance.slots = event.slots
    instance.kv_tokens = event.kv_tokens
    instance.failures = 0
    instance.retry_at = 0.0
    if instance.is_member:
        count_in_fleet(state, instance)
    entry = state.window.entries.get(event.version) if event.version is not None else None
    if entry is not None and entry.digest == event.digest:
        confirmed(state, instance, entry.number)
        state.given_away.pop(entry.number, None)
    else:
        instance.move(WeightsPhase.BLANK, state.cause)
    freed(state, instance)


def on_instance_lost(state: State, event: ev.InstanceLost) -> None:
    instance = state.instances.get(event.instance)
    if instance is None or instance.incarnation != event.incarnation or instance.weights is WeightsPhase.LOST:
        state.counters.late_completions += 1
        return
    drop_instance(state, instance, event.num_tokens)


def on_instance_removed(state: State, event: ev.InstanceRemoved) -> None:
    instance = state.instances.pop(event.instance, None)
    if instance is None:
        state.counters.late_completions += 1
        return
    if instance.weights is not WeightsPhase.LOST:
        drop_instance(state, instance, {})
    state.drained.pop(instance.id, None)
    state.leaving.pop(instance.id, None)
    state.removed.add(instance.id)


def drop_instance(state: State, instance: Instance, num_tokens: dict[TrajectoryId, int]) -> None:
    """Mark an instance as lost; its residents continue elsewhere from the tokens already streamed."""
    for trajectory in list(instance.reserved.values()):
        unreserve(state, trajectory)  # it is still on its source, and is queued once it stops there
    for trajectory in list(instance.residents.values()):
        if trajectory.phase is TrajectoryPhase.CALLING:
            move_call(state, trajectory, None)  # it is queued when its call has ended
    residents = list(instance.residents.values())
    for trajectory in residents:
        known = max(trajectory.num_tokens, instance.reported.get(trajectory.id, 0))
        take_count(state, trajectory, num_tokens.get(trajectory.id, known))
        unreserve(state, trajectory)
        end(state, trajectory)
    if instance.pushing is not None:
        push_ended(state, instance)
    leave_serving(state, instance)
    instance.move(WeightsPhase.LOST, state.cause)
    if instance.is_member:
        count_in_fleet(state, instance, sign=-1)
    instance.reported = {}
    instance.condemned = instance.pressed = False
    state.vacant.pop(instance.id, None)
    for trajectory in residents:
        trajectory.attempt += 1  # later events of the lost request are ignored
        state.counters.recovered += 1
        go_on(state, trajectory)
    state.agenda.place = True


def on_progress_reported(state: State, event: ev.ProgressReported) -> None:
    instance = state.instances.get(event.instance)
    if instance is None:
        return
    state.agenda.at_rest = True
    instance.reported = event.num_tokens  # processed by `moves.check_progress`


def on_prefill_reported(state: State, event: ev.PrefillReported) -> None:
    instance = state.instances.get(event.instance)
    if instance is not None:
        instance.progress_at = state.now
        for trajectory in instance.residents.values():
            trajectory.seen_at = state.now  # the report does not say whose prompt it is
    state.agenda.at_rest = True


def on_kv_pressure_reported(state: State, event: ev.KvPressureReported) -> None:
    instance = state.instances.get(event.instance)
    if instance is None or instance.weights is WeightsPhase.LOST or instance.pressed == event.pressed:
        return
    instance.pressed = event.pressed
    if event.pressed:
        relieve(state, instance)
    else:
        freed(state, instance)


def on_weight_push_finished(state: State, event: ev.WeightPushFinished) -> None:
    instance = state.instances.get(event.instance)
    if instance is None or instance.attempt != event.attempt or instance.pushing is None:
        state.counters.late_completions += 1
        return
    if instance.pushing != event.version:
        reason = f"it was given version {instance.pushing} and reads back {event.version}"
        on_weight_push_failed(state, ev.WeightPushFailed(event.at, event.instance, event.attempt, reason))
        return
    timed(state, instance)
    push_ended(state, instance)
    confirmed(state, instance, event.version)
    instance.failures = 0
    resumed(state, instance)
    freed(state, instance)


def on_weight_push_failed(state: State, event: ev.WeightPushFailed) -> None:
    instance = state.instances.get(event.instance)
    if instance is None or instance.attempt != event.attempt or instance.pushing is None:
        state.counters.late_completions += 1
        return
    failed(state, instance)
    push_ended(state, instance)
    instance.move(WeightsPhase.QUARANTINED, state.cause)
    if instance.failures >= len(PUSH_BACKOFF_S):
        condemn(state, instance, f"{instance.failures + 1} pushes failed: {event.reason}")
        return
    instance.retry_at = state.now + PUSH_BACKOFF_S[instance.failures]
    instance.failures += 1
    resumed(state, instance)
    freed(state, instance)
