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
from dora.core.tables import Holding, Server

#: Delays before a failed push is repeated, in seconds; if the push after the last delay fails, a condemnation follows.
PUSH_BACKOFF_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


def on_instance_up(state: State, event: ev.InstanceUp) -> None:
    if event.instance in state.removed:
        state.counters.late_completions += 1
        return
    instance = state.instances.get(event.instance) or Server(event.instance)
    if not instance.is_lost or event.incarnation <= instance.incarnation:
        state.counters.late_completions += 1
        return
    state.instances[instance.id] = instance
    instance.incarnation = event.incarnation
    instance.slots = event.slots
    instance.kv_tokens = event.kv_tokens
    for holding in instance.holdings:
        holding.failures = 0
        holding.retry_at = 0.0
    if instance.is_member:
        count_in_fleet(state, instance)
    entry = state.window.entries.get(event.version) if event.version is not None else None
    if entry is not None and entry.digest == event.digest:
        confirmed(state, instance, instance.full, entry.number)
        state.given_away.pop(entry.number, None)
    else:
        for holding in instance.holdings:
            holding.move(WeightsPhase.BLANK, state.cause, instance=instance)
    freed(state, instance)


def on_instance_lost(state: State, event: ev.InstanceLost) -> None:
    instance = state.instances.get(event.instance)
    if instance is None or instance.incarnation != event.incarnation or instance.is_lost:
        state.counters.late_completions += 1
        return
    drop_instance(state, instance, event.num_tokens)


def on_instance_removed(state: State, event: ev.InstanceRemoved) -> None:
    instance = state.instances.pop(event.instance, None)
    if instance is None:
        state.counters.late_completions += 1
        return
    if not instance.is_lost:
        drop_instance(state, instance, {})
    state.drained.pop(instance.id, None)
    state.leaving.pop(instance.id, None)
    state.removed.add(instance.id)


def drop_instance(state: State, instance: Server, num_tokens: dict[TrajectoryId, int]) -> None:
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
    for holding in instance.holdings:
        if holding.pushing is not None:
            push_ended(state, holding)
        leave_serving(state, instance, holding)
        holding.move(WeightsPhase.LOST, state.cause, instance=instance)
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
    if instance is None or instance.is_lost or instance.pressed == event.pressed:
        return
    instance.pressed = event.pressed
    if event.pressed:
        relieve(state, instance)
    else:
        freed(state, instance)


def _pushed(state: State, event: ev.WeightPushFinished | ev.WeightPushFailed) -> tuple[Server, Holding] | None:
    """Return where the push was, or None if its completion is late."""
    instance = state.instances.get(event.instance)
    if instance is not None:
        for holding in instance.holdings:
            if holding.attempt == event.attempt and holding.pushing is not None:
                return instance, holding
    state.counters.late_completions += 1
    return None


def on_weight_push_finished(state: State, event: ev.WeightPushFinished) -> None:
    if (found := _pushed(state, event)) is None:
        return
    instance, holding = found
    if holding.pushing != event.version:
        reason = f"it was given version {holding.pushing} and reads back {event.version}"
        _quarantine(state, instance, holding, reason)
        return
    timed(state, holding)
    push_ended(state, holding)
    confirmed(state, instance, holding, event.version)
    holding.failures = 0
    resumed(state, instance)
    freed(state, instance)


def on_weight_push_failed(state: State, event: ev.WeightPushFailed) -> None:
    if (found := _pushed(state, event)) is not None:
        _quarantine(state, *found, event.reason)


def _quarantine(state: State, instance: Server, holding: Holding, reason: str) -> None:
    """Note that a push has failed, and that what the holding has is unknown."""
    failed(state, holding)
    push_ended(state, holding)
    holding.move(WeightsPhase.QUARANTINED, state.cause, instance=instance)
    if holding.failures >= len(PUSH_BACKOFF_S):
        condemn(state, instance, f"{holding.failures + 1} pushes failed: {reason}")
        return
    holding.retry_at = state.now + PUSH_BACKOFF_S[holding.failures]
    holding.failures += 1
    resumed(state, instance)
    freed(state, instance)
