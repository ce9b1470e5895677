"""Handlers of events about instances."""

from __future__ import annotations

from typing import Final

from dora.core import events as ev
from dora.core.endings import go_on
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.moves import move_call, relieve
from dora.core.occupancy import (
    condemn,
    count_in_fleet,
    end,
    freed,
    leave_serving,
    take_count,
    takes_less,
    unreserve,
)
from dora.core.phases import IN_FLIGHT, TrajectoryPhase, WeightsPhase
from dora.core.pushes import confirmed, failed, let_adapter_go, push_ended, resumed, timed
from dora.core.state import State
from dora.core.tables import Holding, Server

#: Delays in seconds before a failed push is repeated or, of an adapter, an unload follows; if one fails after the last
#: delay, a condemnation follows.
PUSH_BACKOFF_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


def on_instance_up(state: State, event: ev.InstanceUp) -> None:
    if event.instance in state.removed:
        state.counters.late_completions += 1
        return
    instance = state.instances.get(event.instance) or _new(state, event.instance)
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
    if entry is not None and entry.digest == event.digest and not instance.is_shared:
        confirmed(state, instance, instance.full, entry.number)
        state.given_away.pop(entry.number, None)
    else:
        for holding in instance.holdings:
            holding.move(WeightsPhase.BLANK, state.cause, instance=instance)
        state.agenda.place = state.agenda.place or instance.is_shared
    freed(state, instance)


def _new(state: State, id: InstanceId) -> Server:
    return Server(id, [Holding(number=number) for number in range(state.settings.num_holdings)])


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
        let_adapter_go(state, holding)
        holding.move(WeightsPhase.LOST, state.cause, instance=instance)
    if instance.is_member:
        count_in_fleet(state, instance, sign=-1)
    instance.reported = {}
    instance.condemned = instance.pressed = False
    state.vacant.pop(instance.id, None)
    takes_less(state, instance)
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
        takes_less(state, instance)
    else:
        freed(state, instance)


def _answered(
    state: State, event: ev.WeightPushFinished | ev.WeightPushFailed | ev.VersionUnloaded | ev.VersionUnloadFailed
) -> tuple[Server, Holding] | None:
    """Return the instance and the holding of the push or unload that an event answers, or None if the event is late."""
    instance = state.instances.get(event.instance)
    if instance is not None:
        for holding in instance.holdings:
            if holding.attempt == event.attempt and holding.phase in IN_FLIGHT:
                return instance, holding
    state.counters.late_completions += 1
    return None


def on_weight_push_finished(state: State, event: ev.WeightPushFinished) -> None:
    if (found := _answered(state, event)) is None:
        return
    instance, holding = found
    if holding.pushing != event.version:
        reason = f"it was given version {holding.pushing} and reads back {event.version}"
        _push_failed(state, instance, holding, reason)
        return
    timed(state, holding)
    push_ended(state, holding)
    confirmed(state, instance, holding, event.version)
    holding.failures = 0
    resumed(state, instance)
    freed(state, instance)


def on_weight_push_failed(state: State, event: ev.WeightPushFailed) -> None:
    if (found := _answered(state, event)) is not None:
        _push_failed(state, *found, event.reason)


def _push_failed(state: State, instance: Server, holding: Holding, reason: str) -> None:
    failed(state, holding)
    push_ended(state, holding)
    if _quarantine(state, instance, holding, f"pushes failed: {reason}"):
        resumed(state, instance)
        freed(state, instance)


def on_version_unloaded(state: State, event: ev.VersionUnloaded) -> None:
    if (found := _answered(state, event)) is not None:
        instance, holding = found
        let_adapter_go(state, holding)
        holding.move(WeightsPhase.BLANK, state.cause, instance=instance)


def on_version_unload_failed(state: State, event: ev.VersionUnloadFailed) -> None:
    if (found := _answered(state, event)) is not None:
        _quarantine(state, *found, f"pushes and unloads failed: {event.reason}")


def _quarantine(state: State, instance: Server, holding: Holding, reason: str) -> bool:
    """Note that it is not known what a holding has. After many failures condemn the instance, and return False."""
    holding.move(WeightsPhase.QUARANTINED, state.cause, instance=instance)
    if holding.failures >= len(PUSH_BACKOFF_S):
        condemn(state, instance, f"{holding.failures + 1} {reason}")
        return False
    holding.retry_at = state.now + PUSH_BACKOFF_S[holding.failures]
    holding.failures += 1
    return True
