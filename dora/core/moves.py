"""What leaves an instance, and why: people drain it, its KV is nearly full, it is silent, or evaluation makes room.

Invariant: nothing is stopped that cannot go on from all its tokens. A drained instance gets neither work nor weights,
and does not count as a server of the version that it holds, until it is recalled.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import DismissInstance, RefuseRequest
from dora.core.ids import InstanceId
from dora.core.occupancy import condemn, count_in_fleet, freed, outgrow, peer_for, reserve, serve, stop
from dora.core.phases import Membership, TrajectoryPhase, WeightsPhase
from dora.core.state import State
from dora.core.strategies import SILENCE
from dora.core.tables import Instance, Trajectory

#: Seconds between two looks at what an instance reports of its residents: it reports more often than that matters.
LOOK_PAUSE_S: Final = 10.0


def drain(state: State, instance: Instance) -> None:
    """Give it nothing more; what runs on it moves where there is room, and otherwise ends there (C2)."""
    if instance.weights is not WeightsPhase.LOST:
        count_in_fleet(state, instance, sign=-1)
    if instance.weights is WeightsPhase.DRAINING:
        instance.move(WeightsPhase.SERVING)
        state.num_draining -= 1
    instance.change(Membership.DRAINED)
    state.drained[instance.id] = instance
    state.vacant.pop(instance.id, None)
    entry = state.window.entries.get(instance.version) if instance.version is not None else None
    if entry is not None:
        entry.serving.pop(instance.id, None)
    evacuate(state, instance)


def recall(state: State, instance: Instance) -> None:
    """It takes part again, with the version that it holds."""
    instance.change(Membership.MEMBER)
    del state.drained[instance.id]
    state.leaving.pop(instance.id, None)
    if instance.weights is WeightsPhase.LOST:
        return
    count_in_fleet(state, instance)
    if instance.weights is WeightsPhase.SERVING:
        serve(state, instance)
    freed(state, instance)


def evacuate(state: State, instance: Instance) -> None:
    """Move its residents to peers of their version, longest first, as long as one has room."""
    for trajectory in sorted(instance.residents.values(), key=lambda t: (-t.footprint, t.id)):
        if trajectory.phase is TrajectoryPhase.RESIDENT:
            target = peer_for(state, trajectory)
            if target is not None:
                reserve(state, trajectory, target)


def relieve(state: State, instance: Instance) -> None:
    """KV pressure asks for a move: the smallest resident goes to the least loaded peer, if one has room."""
    movable = [t for t in instance.residents.values() if t.phase is TrajectoryPhase.RESIDENT]
    if len(movable) < 2:
        return
    smallest = min(movable, key=lambda t: (t.footprint, t.id))
    target = peer_for(state, smallest)
    if target is not None:
        reserve(state, smallest, target)


def vacate(state: State, instance: Instance) -> None:
    """Evaluation makes room: its samples wait, with their tokens, for another instance of their version."""
    if instance.weights is not WeightsPhase.SERVING:
        return
    instance.move(WeightsPhase.DRAINING)
    state.num_draining += 1
    for trajectory in instance.residents.values():
        if trajectory.phase is TrajectoryPhase.RESIDENT:
            stop(state, trajectory)


def undrain(state: State, instance: Instance) -> None:
    """No version needs the instance after all: it serves its own again."""
    if instance.weights is WeightsPhase.DRAINING and instance.is_empty and instance.version is not None:
        instance.move(WeightsPhase.SERVING)
        state.num_draining -= 1
        state.agenda.fill(instance.version)
        if instance.version in state.window.entries:
            state.entry(instance.version).offer(instance)


def dismiss(state: State) -> None:
    """Ask those that were to leave, and are empty, to leave."""
    for instance in list(state.leaving.values()):
        if instance.is_empty and instance.pushing is None:
            del state.leaving[instance.id]
            instance.change(Membership.DISMISSED)
            state.out.append(DismissInstance(instance.id))


def look(state: State, instance: Instance) -> None:
    """Take in what its residents have produced; if none of them got a token for too long, it counts as lost."""
    now, watchdog_s = state.now, state.settings.watchdog_s
    instance.look_at = now + min(LOOK_PAUSE_S, watchdog_s / 8)
    silent, silent_since = [], now - SILENCE * watchdog_s
    for id, trajectory in instance.residents.items():
        num_tokens = instance.reported.get(id, 0)
        if num_tokens > trajectory.num_tokens:
            trajectory.num_tokens = num_tokens
            trajectory.seen_at = instance.progress_at = now
            outgrow(state, trajectory, instance)
        elif trajectory.seen_at < silent_since:
            silent.append(trajectory)
    if instance.residents and now > instance.progress_at + watchdog_s:
        condemn(state, instance, f"none of its {len(instance.residents)} requests got a token for {watchdog_s:g} s")
        return
    for trajectory in silent:
        _start_again(state, trajectory, instance)


def _start_again(state: State, trajectory: Trajectory, instance: Instance) -> None:
    """It got no token for too long, although others here did: continue it elsewhere, or else in a new request."""
    if trajectory.phase is TrajectoryPhase.STOPPING:
        limit_s = SILENCE * state.settings.watchdog_s
        condemn(state, instance, f"the request of trajectory {trajectory.id} did not stop within {limit_s:g} s")
        return
    trajectory.seen_at = state.now  # it has as long again to stop
    target = peer_for(state, trajectory)
    if target is not None:
        reserve(state, trajectory, target)
    else:
        stop(state, trajectory)


def refuse(state: State, instance: InstanceId, reason: str) -> None:
    """Turn a request of people down."""
    state.out.append(RefuseRequest(instance, f"instance {instance}: {reason}"))
    state.agenda.rest()
