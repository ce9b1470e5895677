"""Pushes of weights, unloads of adapters, and what changes for the trajectories that they reach.

Invariant: with updates in flight, every untrained group belongs to the newest version (`Group.current`) and keeps its
tag: staleness counts from the tag, and an answer with a span of another version counts as a conflict.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import PushWeights, UnloadVersion
from dora.core.ids import VersionId
from dora.core.occupancy import leave_serving, serve, stop
from dora.core.phases import TrajectoryPhase, WeightsPhase
from dora.core.state import State, admissions_changed
from dora.core.tables import Holding, Server

_RESIDENT: Final = TrajectoryPhase.RESIDENT


def push(state: State, instance: Server, holding: Holding, version: VersionId) -> None:
    """Order a push; until it is confirmed the holding has no version."""
    state.vacant.pop(instance.id, None)
    leave_serving(state, instance, holding)
    is_first = holding.phase is WeightsPhase.BLANK
    holding.move(WeightsPhase.LOADING if is_first else WeightsPhase.UPDATING, state.cause, instance=instance)
    holding.pushing = version
    instance.attempt += 1
    holding.attempt = instance.attempt
    if instance.is_shared:
        holding.adapter, holding.load = version, holding.attempt
        state.entry(version).held += 1
    holding.push_at = state.now
    state.push_limit.reach(state.now, under_way=state.pushes)
    holding.push_area_s = state.push_limit.under_way_s
    state.pushes += 1
    state.given_away.pop(version, None)
    state.entry(version).loading += 1
    state.out.append(PushWeights(instance.id, holding.attempt, version))


def unload(state: State, instance: Server, holding: Holding) -> None:
    """Order that the adapter of a holding be unloaded; no trajectory on the server may need it."""
    assert holding.adapter is not None
    leave_serving(state, instance, holding)
    holding.move(WeightsPhase.UNLOADING, state.cause, instance=instance)
    instance.attempt += 1
    holding.attempt = instance.attempt
    state.out.append(UnloadVersion(instance.id, holding.attempt, holding.adapter, holding.load))


def let_adapter_go(state: State, holding: Holding) -> None:
    """Note that a holding has no adapter any more: its unload is confirmed, or the server is lost."""
    if holding.adapter is not None:
        state.entry(holding.adapter).held -= 1
        holding.adapter = None
        state.agenda.place = True
        state.agenda.release = True


def push_ended(state: State, holding: Holding) -> None:
    """Note that a push was confirmed or failed, or that its instance is lost."""
    assert holding.pushing is not None
    state.push_limit.reach(state.now, under_way=state.pushes)
    state.entry(holding.pushing).loading -= 1
    holding.pushing = None
    state.pushes -= 1
    state.agenda.place = True
    state.agenda.release = True
    if state.settings.rules.spreads and not state.pushes:
        admissions_changed(state)  # a batch starts once no push is in flight


def timed(state: State, holding: Holding) -> None:
    """Take the time of a push that has succeeded and is still counted as under way."""
    took_s = state.now - holding.push_at
    state.num_pushed += 1
    state.push_s += (took_s - state.push_s) / state.num_pushed
    among = _among(state, holding)
    state.push_limit.learn(holding.push_at, state.now, among=among)


def failed(state: State, holding: Holding) -> None:
    """Take the failure of a push that is still counted as under way."""
    state.push_limit.failed(among=_among(state, holding))


def _among(state: State, holding: Holding) -> float:
    """Return how many pushes were under way on average while a holding's was, itself included."""
    state.push_limit.reach(state.now, under_way=state.pushes)
    took_s = state.now - holding.push_at
    return (state.push_limit.under_way_s - holding.push_area_s) / took_s if took_s > 0 else 1.0


def confirmed(state: State, instance: Server, holding: Holding, version: VersionId) -> None:
    """Note that a holding has a version: a push was confirmed, or a server that serves it was taken over."""
    holding.move(WeightsPhase.SERVING, state.cause, instance=instance)
    holding.version = version
    if instance.is_member:  # else it was drained in the meantime
        serve(state, instance, holding)
    state.agenda.repack = True


def resumed(state: State, instance: Server) -> None:
    """Restart the watchdog of residents after an update; if it failed, stop them, as the weights are unknown.

    Nothing changes for them if an adapter was loaded beside theirs.
    """
    if instance.is_shared:
        return
    instance.progress_at = state.now
    for trajectory in instance.residents.values():
        trajectory.seen_at = state.now
        if instance.full.phase is WeightsPhase.QUARANTINED and trajectory.phase is _RESIDENT:
            stop(state, trajectory)


def carry_over(state: State, version: VersionId) -> None:
    """Continue all untrained groups under the version just published."""
    entry = state.entry(version)
    for older in state.window.entries.values():
        if older is not entry:
            entry.inherit(older)
    for group in state.ledger.groups.values():
        group.current = version
    for trajectory in state.trajectories.values():
        if trajectory.group is not None and trajectory.version != version:
            if trajectory.instance is not None:
                state.entry(trajectory.version).kv_load -= trajectory.footprint
                entry.kv_load += trajectory.footprint
            trajectory.version = version
