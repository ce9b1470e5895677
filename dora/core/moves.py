"""Moves of requests off an instance that is drained, short of KV, without progress, or in use by an evaluation.

Invariant: a stopped request can always continue from all its tokens. Until it is recalled, a drained instance gets
neither work nor weights, and does not count as serving its version.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import DismissInstance
from dora.core.occupancy import (
    condemn,
    count_in_fleet,
    freed,
    hold,
    outgrow,
    peer_for,
    reserve,
    serve,
    stop,
    takes_less,
    unhold,
    unlist,
)
from dora.core.phases import Membership, TrajectoryPhase, WeightsPhase
from dora.core.state import State
from dora.core.strategies import SILENCE
from dora.core.tables import Server, Trajectory

_CALLING: Final = TrajectoryPhase.CALLING

#: Seconds between two evaluations of an instance's progress reports, which arrive more often.
PROGRESS_CHECK_S: Final = 10.0


def drain(state: State, instance: Server) -> None:
    """Give an instance no more work; its residents move where there is room, and otherwise finish there (C2)."""
    if not instance.is_lost:
        count_in_fleet(state, instance, sign=-1)
    for holding in instance.holdings:
        if holding.phase is WeightsPhase.DRAINING:
            holding.move(WeightsPhase.SERVING, state.cause, instance=instance)
            state.num_draining -= 1
        unlist(state, instance, holding)
    instance.change(Membership.DRAINED, state.cause)
    state.drained[instance.id] = instance
    state.vacant.pop(instance.id, None)
    takes_less(state, instance)
    evacuate(state, instance)


def recall(state: State, instance: Server) -> None:
    """Let an instance take part again, with the version that it holds."""
    instance.change(Membership.MEMBER, state.cause)
    del state.drained[instance.id]
    state.leaving.pop(instance.id, None)
    if instance.is_lost:
        return
    count_in_fleet(state, instance)
    for holding in instance.holdings:
        if holding.phase is WeightsPhase.SERVING:
            serve(state, instance, holding)
    state.agenda.place = state.agenda.place or instance.is_shared
    freed(state, instance)


def evacuate(state: State, instance: Server) -> None:
    """Move residents to peers of their version that have room, longest first."""
    for trajectory in sorted(instance.residents.values(), key=lambda t: (-t.footprint, t.id)):
        if trajectory.phase is TrajectoryPhase.RESIDENT:
            target = peer_for(state, trajectory)
            if target is not None:
                reserve(state, trajectory, target)
        elif trajectory.phase is _CALLING:
            move_call(state, trajectory, peer_for(state, trajectory))


def move_call(state: State, trajectory: Trajectory, target: Server | None) -> None:
    """Move a calling trajectory's slot to a peer, at once, because none of its requests runs; without a peer, free the
    slot."""
    unhold(state, trajectory)
    hold(state, trajectory, target)


def relieve(state: State, instance: Server) -> None:
    """Move the smallest resident of an instance under KV pressure to the least loaded peer, if that has room."""
    movable = [t for t in instance.residents.values() if t.phase is TrajectoryPhase.RESIDENT]
    if len(movable) < 2:
        return
    smallest = min(movable, key=lambda t: (t.footprint, t.id))
    target = peer_for(state, smallest)
    if target is not None:
        reserve(state, smallest, target)


def vacate(state: State, instance: Server) -> None:
    """Drain an instance of its evaluation samples; they keep their tokens and wait for another of its version."""
    holding = instance.full
    if holding.phase is WeightsPhase.SERVING:
        holding.move(WeightsPhase.DRAINING, state.cause, instance=instance)
        state.num_draining += 1
    elif holding.phase is not WeightsPhase.DRAINING:
        return
    for trajectory in [t for t in instance.residents.values() if t.group is None]:
        if trajectory.phase is TrajectoryPhase.RESIDENT:
            stop(state, trajectory)
        elif trajectory.phase is _CALLING:
            move_call(state, trajectory, None)


def undrain(state: State, instance: Server) -> None:
    """Let a draining instance that no other version needs serve its own version again."""
    holding = instance.full
    if holding.phase is WeightsPhase.DRAINING and instance.is_empty and holding.version is not None:
        holding.move(WeightsPhase.SERVING, state.cause, instance=instance)
        state.num_draining -= 1
        state.agenda.fill(holding.version)
        if holding.version in state.window.entries:
            state.entry(holding.version).offer(instance, holding)


def dismiss(state: State) -> None:
    """Dismiss the leaving instances that are empty."""
    for instance in list(state.leaving.values()):
        if instance.is_empty and not instance.has_orders:
            del state.leaving[instance.id]
            instance.change(Membership.DISMISSED, state.cause)
            state.out.append(DismissInstance(instance.id))


def check_progress(state: State, instance: Server) -> None:
    """Process an instance's progress reports; condemn it if none of its residents got a token for too long.

    A resident that is calling expects no token.
    """
    now, watchdog_s = state.now, state.settings.watchdog_s
    instance.check_at = now + min(PROGRESS_CHECK_S, watchdog_s / 8)
    silent, silent_since, num_calling = [], now - SILENCE * watchdog_s, 0
    for id, trajectory in instance.residents.items():
        num_tokens = instance.reported.get(id, 0)
        if num_tokens > trajectory.num_tokens:
            trajectory.num_tokens = num_tokens
            trajectory.seen_at = instance.progress_at = now
            outgrow(state, trajectory, instance)
        elif trajectory.phase is _CALLING:
            num_calling += 1
        elif trajectory.seen_at < silent_since:
            silent.append(trajectory)
    if num_calling and num_calling == len(instance.residents):
        instance.progress_at = now
    elif instance.residents and now > instance.progress_at + watchdog_s:
        condemn(state, instance, f"none of its {len(instance.residents)} requests got a token for {watchdog_s:g} s")
        return
    for trajectory in silent:
        _start_again(state, trajectory, instance)


def _start_again(state: State, trajectory: Trajectory, instance: Server) -> None:
    """Move a trajectory whose request gets no tokens, unlike others, to a peer; without a peer, request it again."""
    if trajectory.phase is TrajectoryPhase.STOPPING:
        limit_s = SILENCE * state.settings.watchdog_s
        condemn(state, instance, f"the request of trajectory {trajectory.id} did not stop within {limit_s:g} s")
        return
    trajectory.seen_at = state.now  # the request gets as much time to stop
    target = peer_for(state, trajectory)
    if target is not None:
        reserve(state, trajectory, target)
    else:
        stop(state, trajectory)
