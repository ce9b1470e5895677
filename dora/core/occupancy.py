"""Occupancy of slots and KV, and which instance serves which version. No choice is made here.

Invariant: only `seat` and `end` give a trajectory a slot or take it, and only `hold` and `unhold` count trajectories
without a slot during a call, so that the counters of instance, version and evaluation agree.
"""

from __future__ import annotations

import math
from typing import Final

from dora.core.commands import CallEnvironment, CondemnInstance, Generate, StopRequest
from dora.core.phases import TrajectoryPhase, WeightsPhase
from dora.core.state import State, fail
from dora.core.tables import Holding, Server, Trajectory

#: The expected length of an answer longer than the mean, as a multiple of its tokens.
GROWTH: Final = 1.25

_RESIDENT: Final = TrajectoryPhase.RESIDENT  # globals: see tables.py
_STOPPING: Final = TrajectoryPhase.STOPPING
_WAITING: Final = TrajectoryPhase.WAITING
_CALLING: Final = TrajectoryPhase.CALLING


def footprint_of(state: State, num_prompt_tokens: int, num_tokens: int) -> int:
    """Return the KV tokens to account for: the prompt, the tokens produced, and a share of those expected."""
    if not num_tokens:
        return num_prompt_tokens + int(state.kv_reserve * state.mean_length)
    expected = min(max(state.mean_length, int(num_tokens * GROWTH)), state.settings.max_new_tokens)
    return num_prompt_tokens + num_tokens + int(state.kv_reserve * (expected - num_tokens))


def begin(state: State, trajectory: Trajectory, instance: Server, *, footprint: int) -> None:
    """Make a trajectory resident on an instance of its version, and order its request.

    If it has no prompt yet, order the call that returns it; the trajectory keeps the slot.
    """
    if state.settings.own_prompts and not trajectory.num_tokens:
        call(state, trajectory)
        seat(state, trajectory, instance, footprint=footprint)
        return
    trajectory.attempt += 1
    trajectory.move(_RESIDENT, state.cause)
    trajectory.seen_at = state.now
    if trajectory.left is not None:
        state.counters.migrations += trajectory.left != instance.id
        trajectory.left = None
    seat(state, trajectory, instance, footprint=footprint)
    state.out.append(
        Generate(trajectory.id, trajectory.attempt, instance.id, trajectory.version, trajectory.num_tokens)
    )


def call(state: State, trajectory: Trajectory) -> None:
    """Order a call of a trajectory's environment."""
    trajectory.move(_CALLING, state.cause)
    trajectory.attempt += 1
    state.called_at = state.now
    state.out.append(CallEnvironment(trajectory.id, trajectory.attempt))


def seat(state: State, trajectory: Trajectory, instance: Server, *, footprint: int) -> None:
    """Give a trajectory a slot and KV on an instance of its version."""
    trajectory.instance = instance
    trajectory.footprint = footprint
    instance.add(trajectory)
    entry = state.window.entries[trajectory.version]
    entry.kv_load += footprint
    if trajectory.group is None:
        state.evaluation.num_resident += 1
        if len(instance.residents) == 1:
            instance.progress_at = state.now
    else:
        trajectory.group.home = instance
        if instance.num_training == 1:
            state.vacant.pop(instance.id, None)
            instance.progress_at = state.now


def end(state: State, trajectory: Trajectory) -> Server:
    """Remove a trajectory from its instance, and return the instance."""
    instance = trajectory.instance
    assert instance is not None
    instance.remove(trajectory)
    trajectory.instance = None
    state.window.entries[trajectory.version].kv_load -= trajectory.footprint
    if trajectory.group is None:
        state.evaluation.num_resident -= 1
    freed(state, instance)
    return instance


def hold(state: State, trajectory: Trajectory, instance: Server | None) -> None:
    """Give a calling trajectory a slot and KV on `instance`, unless that is None or does not serve its version."""
    if instance is not None and instance.serves(trajectory.version):
        footprint = footprint_of(state, trajectory.num_prompt_tokens, trajectory.num_tokens)
        seat(state, trajectory, instance, footprint=footprint)
    else:
        trajectory.footprint = trajectory.num_prompt_tokens + trajectory.num_tokens
        _count_away(state, trajectory, 1)


def unhold(state: State, trajectory: Trajectory) -> Server | None:
    """Take its slot and KV from a calling trajectory; return their instance, or None if it had no slot."""
    if trajectory.instance is not None:
        return end(state, trajectory)
    _count_away(state, trajectory, -1)
    return None


def _count_away(state: State, trajectory: Trajectory, count: int) -> None:
    if trajectory.group is None:
        state.evaluation.away += count
        state.agenda.fill(trajectory.version)  # the evaluation's share of the slots may have room
    else:
        entry = state.window.entries[trajectory.version]
        entry.away += count
        entry.away_tokens += count * trajectory.footprint
        if entry.away == entry.unfinished:
            entry.quiet_since = state.now


def freed(state: State, instance: Server) -> None:
    """Note that an instance has more room than before."""
    for holding in instance.holdings:
        version = holding.version
        if version is not None:
            entry = state.window.entries.get(version)
            if entry is not None:
                entry.offer(instance, holding)
                state.agenda.fill(version)
            if version != state.window.newest:
                state.agenda.repack = True
    if instance.num_training or instance.reserved or instance.condemned or instance.is_shared:
        return
    if instance.full.pushing is None and instance.is_member and not instance.is_lost:
        state.vacant[instance.id] = instance
        state.agenda.place = True


def takes_less(state: State, instance: Server) -> None:
    """Note that an instance takes no more work: what only lacked room there holds up other versions no longer."""
    if instance.is_shared and state.window.newest is not None:
        state.agenda.fill(state.window.newest)


def reserve(state: State, trajectory: Trajectory, target: Server) -> None:
    """Start a move: reserve a slot and KV on the target, then stop the request on the source."""
    trajectory.target = target
    target.reserve(trajectory)
    state.vacant.pop(target.id, None)
    stop(state, trajectory)


def unreserve(state: State, trajectory: Trajectory) -> Server | None:
    """End a trajectory's reservation, if it has one, and return its target."""
    target = trajectory.target
    if target is not None:
        target.unreserve(trajectory)
        trajectory.target = None
        freed(state, target)
    return target


def wait(state: State, trajectory: Trajectory) -> None:
    """Queue a trajectory for a slot on an instance of its version."""
    trajectory.move(_WAITING, state.cause)
    if trajectory.group is None:
        state.evaluation.waiting.append(trajectory)
    else:
        state.window.entries[trajectory.version].enqueue(trajectory.group, [trajectory])
    state.agenda.fill(trajectory.version)
    state.agenda.place = True


def stop(state: State, trajectory: Trajectory) -> None:
    """Stop a trajectory's request; another one will continue from its tokens."""
    assert trajectory.instance is not None
    trajectory.move(_STOPPING, state.cause)
    state.out.append(StopRequest(trajectory.id, trajectory.attempt, trajectory.instance.id))


def outgrow(state: State, trajectory: Trajectory, instance: Server) -> None:
    """Account for the KV of an answer that has grown, on its instance and on its target."""
    grown = footprint_of(state, trajectory.num_prompt_tokens, trajectory.num_tokens) - trajectory.footprint
    if grown <= 0:
        return
    trajectory.footprint += grown
    instance.kv_load += grown
    state.entry(trajectory.version).kv_load += grown
    if trajectory.target is not None:
        trajectory.target.kv_load += grown


def peer_for(state: State, trajectory: Trajectory) -> Server | None:
    """Return the least loaded other instance of the trajectory's version, if it has room."""
    for peer in state.entry(trajectory.version).roomiest_few(2):
        if peer is not trajectory.instance:
            return peer if peer.has_room(trajectory.footprint) else None
    return None


def take_count(state: State, trajectory: Trajectory, num_tokens: int) -> None:
    """Update the number of tokens of an answer; fewer than before means that some were lost (C2)."""
    instance = trajectory.instance
    reported = instance.reported.get(trajectory.id, 0) if instance is not None else 0
    if num_tokens < reported or num_tokens < trajectory.num_tokens:
        known = max(reported, trajectory.num_tokens)
        state.counters.scheduling_aborts += 1
        fail(state, f"C2: trajectory {trajectory.id} had {known} tokens and goes on from {num_tokens}")
    trajectory.num_tokens = num_tokens


def count_in_fleet(state: State, instance: Server, *, sign: int = 1) -> None:
    """Add an instance to the fleet totals, or subtract it (-1)."""
    state.num_up += sign
    state.num_slots += sign * instance.slots
    state.num_kv_tokens += sign * instance.kv_tokens


def serve(state: State, instance: Server, holding: Holding) -> None:
    """List an instance as serving the version of a holding, if the version is still needed."""
    assert holding.version is not None
    holding.room_key = math.inf  # what the heap may have of it is stale
    if holding.version in state.window.entries:
        state.entry(holding.version).serving[instance.id] = instance


def unlist(state: State, instance: Server, holding: Holding) -> None:
    """List an instance no longer as serving the version of a holding."""
    entry = state.window.entries.get(holding.version) if holding.version is not None else None
    if entry is not None:
        entry.serving.pop(instance.id, None)


def leave_serving(state: State, instance: Server, holding: Holding) -> None:
    """Note that a holding no longer has its version."""
    if holding.phase is WeightsPhase.DRAINING:
        state.num_draining -= 1
    unlist(state, instance, holding)
    holding.version = None


def condemn(state: State, instance: Server, reason: str) -> None:
    """Order that an instance be declared lost; until then it gets no work."""
    if not instance.condemned:
        instance.condemned = True
        takes_less(state, instance)
        state.vacant.pop(instance.id, None)
        state.out.append(CondemnInstance(instance.id, instance.incarnation, reason))
