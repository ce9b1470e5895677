"""Re-partition: which version an empty instance serves next, and packing old versions onto fewer instances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from dora.core.admission import num_admissible, why_not
from dora.core.ids import VersionId
from dora.core.moves import move_call, undrain, vacate
from dora.core.occupancy import footprint_of, reserve
from dora.core.patience import make_room, may_be_given_away
from dora.core.phases import TrajectoryPhase, WeightsPhase
from dora.core.placement import allot, allot_by_requests, kv_floor, plan_moves
from dora.core.pushes import push
from dora.core.sharing import share
from dora.core.state import State
from dora.core.tables import Server
from dora.core.updates import update_fleet
from dora.core.versions import Version

#: Seconds between two attempts at packing, which take longer than an ordinary event.
CONSOLIDATION_PAUSE_S: Final = 0.25
#: Instances of a version that packing considers, least loaded first.
PACKING_CANDIDATES: Final = 16


def place(state: State) -> None:
    """Order a push to each vacant instance that a version needs, or the loads and unloads of adapters."""
    newest = state.admission_version()
    if state.settings.adapters:
        share(state)
        return
    if state.settings.rules.in_flight is not None and newest is not None and not state.finished:
        update_fleet(state, newest, is_wanted=why_not(state, newest) is None)
        return
    is_short = state.yielding is not None or state.given_away
    if state.finished or not (state.vacant or is_short):
        return
    needs = [v for v, e in state.window.entries.items() if e.num_waiting and not e.serving and not e.loading]
    if state.vacant:
        _give(state, needs, newest)
    if is_short:
        make_room(state, needs=needs, newest=newest)


def _give(state: State, needs: list[VersionId], newest: VersionId | None) -> None:
    """Order the pushes to vacant instances, and remove from `needs` the versions that get an instance."""
    newest_wants = newest is not None and (why_not(state, newest) is None or state.entry(newest).num_waiting > 0)
    idle = not needs and not newest_wants and not state.evaluation.waiting and not _versions_waiting(state)
    if idle and not state.num_draining:
        return
    for instance in _by_reluctance(state):
        holding = instance.full
        if holding.pushing is not None or holding.retry_at > state.now:
            continue
        version = None
        if not _is_last_of_needed(state, instance, needs=needs, newest=newest):
            version = _version_for(state, instance, needs=needs, newest=newest if newest_wants else None)
        if version is None or version == holding.version:
            undrain(state, instance)
        elif instance.residents:
            if version in needs or not _is_kept_for_evaluation(state, instance):
                vacate(state, instance)
        elif state.pushes >= state.push_limit.limit and _has_instance(state, version):
            return  # the end of the next push makes `place` due again; a version's first instance does not wait for it
        else:
            _leave_version(state, instance)
            push(state, instance, holding, version)
        if version in needs:
            needs.remove(version)


def _by_reluctance(state: State) -> Iterator[Server]:
    """Yield the vacant instances: first empty ones, last those of versions that only wait for calls.

    It is lazy, because mostly the first one is the last that is asked for: pushes are limited, and thousands of
    instances may be vacant at the start of a run.
    """
    quiet = {v for v, e in state.window.entries.items() if e.away == e.unfinished > 0}
    others = []
    for instance in [*state.vacant.values()]:
        if instance.residents or instance.full.version in quiet:
            others.append(instance)
        else:
            yield instance
    yield from sorted(others, key=lambda i: (i.full.version in quiet, len(i.residents) > 0))


def _version_for(
    state: State, instance: Server, *, needs: list[VersionId], newest: VersionId | None
) -> VersionId | None:
    """Return a version in need, else the newest, the version under evaluation, or one with queued trajectories.

    The version under evaluation comes before the newest if it has no instance and the newest has one.
    """
    evaluated = state.evaluation.version
    if needs:
        return needs[0]
    is_late = evaluated is not None and state.evaluation.waiting and not _has_instance(state, evaluated)
    if newest is not None and not (is_late and _has_instance(state, newest)):
        return newest
    if evaluated is not None and state.evaluation.waiting:
        entry = state.entry(evaluated)
        if len(entry.serving) + entry.loading < math.ceil(len(state.evaluation.waiting) / instance.slots):
            return evaluated
    waiting = _versions_waiting(state)
    return waiting[0] if waiting else None


def _has_instance(state: State, version: VersionId) -> bool:
    entry = state.entry(version)
    return bool(entry.serving or entry.loading)


def _is_kept_for_evaluation(state: State, instance: Server) -> bool:
    """Whether an instance is the last one of the version under evaluation, and training has other instances."""
    evaluated = state.evaluation.version
    if evaluated is None or instance.full.version != evaluated:
        return False
    return len(state.entry(evaluated).serving) == 1 and state.num_up > 1


def _versions_waiting(state: State) -> list[VersionId]:
    return [v for v, e in state.window.entries.items() if e.num_waiting]


def _is_last_of_needed(state: State, instance: Server, *, needs: list[VersionId], newest: VersionId | None) -> bool:
    entry = _entry_of(state, instance)
    if entry is None or not entry.needs_instance or len(entry.serving) > 1:
        return False
    return not may_be_given_away(state, entry, needs=needs, newest=newest)


def _entry_of(state: State, instance: Server) -> Version | None:
    """Return the version that an instance holds, if it is needed."""
    version = instance.full.version
    return state.window.entries.get(version) if version is not None else None


def _leave_version(state: State, instance: Server) -> None:
    """If an instance is the last one of a version whose trajectories are all calling, note that it is given away."""
    entry = _entry_of(state, instance)
    if entry is not None and entry.needs_instance and len(entry.serving) == 1:
        state.given_away[entry.number] = None


def consolidate(state: State) -> None:
    """Free an instance of an old version for the newest, by moving its residents to its peers."""
    newest = state.admission_version()
    rules, strategy = state.settings.orchestration, state.settings.rules
    if not rules.consolidation or strategy.batched or strategy.in_flight or newest is None or state.finished:
        return
    if state.settings.adapters:
        return  # no instance has to be freed for the newest version
    if not any(v < newest and len(e.serving) > 1 for v, e in state.window.entries.items()):
        return
    if why_not(state, newest) is not None:
        return
    taker = state.entry(newest)
    roomiest = taker.roomiest()
    if rules.hysteresis and roomiest is not None and roomiest.has_room(footprint_of(state, state.prompts[0], 0)):
        return
    state.agenda.repack_not_before = state.now + CONSOLIDATION_PAUSE_S
    allotted = _allotment(state, newest)
    if len(taker.serving) + taker.loading + state.num_draining >= allotted[newest]:
        return
    for version, entry in state.window.entries.items():
        if version != newest and allotted[version] < len(entry.serving) and _pack(state, entry):
            return


def _allotment(state: State, newest: VersionId) -> dict[VersionId, int]:
    """Return the instances per version, by demand in KV tokens with floors, or by requests."""
    if not state.settings.orchestration.kv_floor:
        requests = {v: e.unfinished - e.away for v, e in state.window.entries.items()}
        requests[newest] += max(1, num_admissible(state, newest)) * state.settings.group_size
        return allot_by_requests(state.num_up, requests=requests)
    slots, kv_tokens = state.num_slots / state.num_up, state.num_kv_tokens / state.num_up
    mean = state.mean_length
    demand: dict[VersionId, float] = {}
    floors: dict[VersionId, int] = {}
    for version, entry in state.window.entries.items():
        demand[version] = entry.kv_load + entry.num_waiting * mean
        floors[version] = kv_floor(
            num_unfinished=entry.unfinished - entry.away, num_tokens=entry.kv_load, slots=slots, kv_tokens=kv_tokens
        )
    demand[newest] += max(1, num_admissible(state, newest)) * state.settings.group_size * mean
    floors[newest] = max(1, floors[newest])
    return allot(state.num_up, demand=demand, floors=floors)


def _pack(state: State, entry: Version) -> bool:
    """Move the residents of the version's least loaded instance to its peers; False if no plan is allowed."""
    candidates = entry.roomiest_few(PACKING_CANDIDATES)
    if len(candidates) < 2:
        return False
    source = min(candidates, key=lambda i: (i.kv_load, i.id))
    if source.reserved or not source.residents:
        return False
    plan = plan_moves(
        source,
        [i for i in candidates if i is not source],
        urgent_deadline=state.formation.step + 1 if state.settings.orchestration.tail_care else -1,
        decode_time=state.settings.decode_time,
    )
    if plan is None:
        return False
    source.full.move(WeightsPhase.DRAINING, state.cause, instance=source)
    state.num_draining += 1
    for trajectory, target in plan:
        if trajectory.phase is TrajectoryPhase.RESIDENT:
            reserve(state, trajectory, target)
        elif trajectory.phase is TrajectoryPhase.CALLING:
            move_call(state, trajectory, target)
    return True
