"""Who is given which weights: pushes to empty servers, and, where a strategy allows it, to live requests.

Invariant: where weights reach live requests, everything that is not trained belongs to the newest version
(`Group.current`), while the tag stays what it was: staleness counts from it, and an answer with a span of another
version counts as a conflict. An evaluation keeps its version all the same: an instance that decodes samples of one is
updated when they have ended.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import PushWeights
from dora.core.ids import VersionId
from dora.core.occupancy import leave_serving, stop
from dora.core.phases import TrajectoryPhase, WeightsPhase
from dora.core.state import State, admissions_changed
from dora.core.tables import Instance

_RESIDENT: Final = TrajectoryPhase.RESIDENT
#: Phases in which an instance may be given weights while requests run on it.
_UPDATABLE: Final = frozenset({WeightsPhase.BLANK, WeightsPhase.SERVING, WeightsPhase.QUARANTINED})


def push(state: State, instance: Instance, version: VersionId) -> None:
    """Order a push; the instance serves nothing until it is confirmed."""
    state.vacant.pop(instance.id, None)
    leave_serving(state, instance)
    instance.move(WeightsPhase.LOADING if instance.weights is WeightsPhase.BLANK else WeightsPhase.UPDATING)
    instance.pushing = version
    instance.attempt += 1
    state.pushes += 1
    state.entry(version).loading += 1
    state.out.append(PushWeights(instance.id, instance.attempt, version))


def push_ended(state: State, instance: Instance) -> None:
    """It was confirmed, it failed, or the instance is lost."""
    assert instance.pushing is not None
    state.entry(instance.pushing).loading -= 1
    instance.pushing = None
    state.pushes -= 1
    state.agenda.place()
    state.agenda.release()
    if state.settings.rules.batched and not state.pushes:
        admissions_changed(state)  # a block waits until no push is in flight


def resumed(state: State, instance: Instance) -> None:
    """A push is over: residents that stood still have their time again. Where it failed they stop, since the weights
    that they would go on under are unknown."""
    instance.progress_at = state.now
    for trajectory in instance.residents.values():
        trajectory.seen_at = state.now
        if instance.weights is WeightsPhase.QUARANTINED and trajectory.phase is _RESIDENT:
            stop(state, trajectory)


def carry_over(state: State, version: VersionId) -> None:
    """A version is published: everything that is not trained goes on under it."""
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


def update_fleet(state: State, newest: VersionId, *, is_wanted: bool) -> None:
    """Push the newest version to every instance at once, if anything is to run under it."""
    evaluation = state.evaluation
    if not (is_wanted or state.entry(newest).unfinished or evaluation.waiting):
        return
    for instance in state.instances.values():
        may = instance.weights in _UPDATABLE and instance.is_member and not instance.condemned
        if may and instance.retry_at <= state.now:
            version = _version_due(state, instance, newest=newest)
            if version != instance.version:
                push(state, instance, version)


def _version_due(state: State, instance: Instance, *, newest: VersionId) -> VersionId:
    """The newest, unless an evaluation runs here, or needs a server and this one is empty."""
    evaluation = state.evaluation
    if instance.version is not None and len(instance.residents) > instance.num_training:
        return instance.version
    if evaluation.version is None or not evaluation.waiting:
        return newest
    servers = state.entry(evaluation.version)
    if not servers.serving and not servers.loading and instance.is_empty:
        return evaluation.version
    return newest
