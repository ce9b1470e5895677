"""C1, C2, C3, conservation, and every counter recomputed from scratch. Pure; used by every test run and the audit.

`check(state)` raises InvariantViolation with the first thing that is wrong. It is O(state), so the controller itself
runs it only at the end of a run.
"""

from __future__ import annotations

from collections import Counter

from dora.core.feasibility import fits
from dora.core.groups import UNCONSUMED, GroupPhase, TrajectoryPhase
from dora.core.instances import InstancePhase
from dora.core.state import ControllerState
from dora.errors import InvariantViolation

_DECODING = (TrajectoryPhase.RESIDENT, TrajectoryPhase.STOPPING)
_UNFINISHED = (TrajectoryPhase.WAITING, *_DECODING)
_HOLDS_VERSION = (InstancePhase.SERVING, InstancePhase.DRAINING)


def check(state: ControllerState) -> None:
    """Raise InvariantViolation if anything does not add up."""
    for rule in (_one_version, _conservation, _staleness, _liveness, _instances, _versions, _evaluation, _feed):
        rule(state)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)


def _one_version(state: ControllerState) -> None:
    """C1: whatever is resident carries the version its instance has confirmed; siblings share the group's tag."""
    for i in state.instances.values():
        for t in i.residents.values():
            _require(
                i.phase in _HOLDS_VERSION, f"C1: instance {i.id} is {i.phase.value} with trajectory {t.id} resident"
            )
            _require(i.version == t.version, f"C1: instance {i.id} holds {i.version}, trajectory {t.id} is {t.version}")
        if i.pushing is not None:
            _require(i.is_empty, f"C1: instance {i.id} is pushed while not empty")
    for g in state.ledger.groups.values():
        _require(all(t.version == g.version for t in g.trajectories), f"C1: siblings of group {g.id} differ in version")
    _require(state.counters.version_conflicts == 0, "C1: version conflicts")


def _conservation(state: ControllerState) -> None:
    """C2: every admitted group is somewhere, once, with all its siblings; nothing was thrown away."""
    counts = state.ledger.counts
    _require(sum(counts.values()) == state.ledger.admitted, "C2: admitted groups do not add up")
    found = Counter(g.phase for g in state.ledger.groups.values())
    for phase in GroupPhase:
        if phase not in (GroupPhase.TRAINED, GroupPhase.FILTERED, GroupPhase.FAILED):
            _require(
                counts[phase] == found[phase], f"C2: {counts[phase]} groups counted {phase.value}, {found[phase]} found"
            )
    for g in state.ledger.groups.values():
        _require(len(g.trajectories) == state.settings.group_size, f"C2: group {g.id} has lost a sibling")
        unfinished = sum(t.phase in _UNFINISHED for t in g.trajectories)
        _require(unfinished == g.unfinished, f"C2: group {g.id} counts {g.unfinished} unfinished, has {unfinished}")
        ungraded = sum(t.phase is not TrajectoryPhase.GRADED for t in g.trajectories)
        _require(ungraded == g.ungraded, f"C2: group {g.id} counts {g.ungraded} ungraded, has {ungraded}")
        waiting = {t.id for t in g.trajectories if t.phase is TrajectoryPhase.WAITING}
        _require(sorted(waiting) == sorted(t.id for t in g.waiting), f"C2: waiting siblings of group {g.id}")
        _require((g.unfinished == 0) == (g.phase is not GroupPhase.GENERATING), f"C2: phase of group {g.id}")
    _require(state.counters.scheduling_aborts == 0, "C2: scheduling aborts")


def _staleness(state: ControllerState) -> None:
    """C3 and rule F, with its counters recomputed."""
    formation = state.formation
    due = [0] * (state.settings.rules.max_staleness + 1)
    for g in state.ledger.groups.values():
        if g.phase in UNCONSUMED:
            _require(g.deadline >= formation.step, f"C3: group {g.id} is due at {g.deadline}, forming {formation.step}")
            due[g.deadline - formation.step] += 1
        elif g.step is not None:
            _require(formation.staleness_allowed(g.version, step=g.step), f"C3: group {g.id} in step {g.step}")
    _require(due == formation.due, f"F: counters {formation.due}, recomputed {due}")
    _require(
        fits(due, committed=formation.committed, step_size=formation.step_size),
        f"F is broken: {due}, {formation.committed}",
    )
    complete = sum(len(q) for q in state.complete.values())
    _require(complete == state.ledger.counts[GroupPhase.COMPLETE], "complete groups do not add up")
    _require(state.counters.staleness_violations == 0, "C3: staleness violations")


def _liveness(state: ControllerState) -> None:
    """At most K + 1 live versions; everything that is needed is still in the window."""
    live = state.window.live()
    _require(len(live) <= state.settings.rules.max_staleness + 1, f"too many live versions: {live}")
    for t in state.trajectories.values():
        if t.phase in _UNFINISHED:
            _require(t.version in state.window.entries, f"version {t.version} is gone, trajectory {t.id} needs it")


def _instances(state: ControllerState) -> None:
    """Counters of every instance."""
    for i in state.instances.values():
        held = [*i.residents.values(), *i.reserved.values()]
        _require(len(held) == i.num_requests, f"instance {i.id}: num_requests")
        _require(sum(t.footprint for t in held) == i.kv_load, f"instance {i.id}: kv_load")
        _require(
            sum(t.group is not None for t in i.residents.values()) == i.num_training, f"instance {i.id}: num_training"
        )
        _require(len(held) <= i.slots or not held, f"instance {i.id} is over its slots")
        for t in i.residents.values():
            _require(t.instance is i and t.phase in _DECODING, f"trajectory {t.id} on instance {i.id}: {t.phase.value}")
        for t in i.reserved.values():
            _require(t.target is i and t.phase is TrajectoryPhase.STOPPING, f"move of trajectory {t.id} to {i.id}")
        if i.phase is InstancePhase.LOST:
            _require(not held and i.version is None and i.pushing is None, f"instance {i.id} is lost but not empty")
        vacant = i.phase is not InstancePhase.LOST and not (
            i.num_training or i.reserved or i.condemned or i.pushing is not None or i.barred
        )
        _require(
            (i.id in state.vacant) == vacant, f"instance {i.id}: vacant is {i.id in state.vacant}, should be {vacant}"
        )
        _require(not (i.barred and i.takes_work), f"instance {i.id} takes work although it was drained")
        _require(i.barred or not i.leaving, f"instance {i.id} is to leave and not drained")
    barred = {i.id for i in state.instances.values() if i.barred}
    _require(barred == set(state.barred), f"drained instances {sorted(state.barred)}, should be {sorted(barred)}")
    _require(set(state.leaving) <= {id for id in barred if state.instances[id].leaving}, "leaving instances")
    up = [i for i in state.instances.values() if i.phase is not InstancePhase.LOST and not i.barred]
    _require(len(up) == state.num_up, "instances that are up do not add up")
    _require(sum(i.slots for i in up) == state.num_slots, "slots do not add up")
    _require(sum(i.kv_tokens for i in up) == state.num_kv_tokens, "KV room does not add up")
    draining = sum(i.phase is InstancePhase.DRAINING and not i.barred for i in state.instances.values())
    _require(draining == state.num_draining, "draining instances do not add up")


def _versions(state: ControllerState) -> None:
    """Counters of every version."""
    groups = Counter(g.version for g in state.ledger.groups.values())
    training = [t for t in state.trajectories.values() if t.group is not None]
    unfinished = Counter(t.version for t in training if t.phase in _UNFINISHED)
    waiting = Counter(t.version for t in training if t.phase is TrajectoryPhase.WAITING)
    loading = Counter(i.pushing for i in state.instances.values() if i.pushing is not None)
    _require(sum(loading.values()) == state.pushes, "pushes in flight do not add up")
    for v, e in state.window.entries.items():
        _require(e.groups == groups[v], f"version {v}: {e.groups} groups counted, {groups[v]} found")
        _require(
            e.unfinished == unfinished[v], f"version {v}: {e.unfinished} unfinished counted, {unfinished[v]} found"
        )
        _require(e.num_waiting == waiting[v], f"version {v}: {e.num_waiting} waiting counted, {waiting[v]} found")
        _require(e.loading == loading[v], f"version {v}: pushes")
        holders = {i.id: i for i in state.instances.values() if i.phase in _HOLDS_VERSION and i.version == v}
        serving = {id for id, i in holders.items() if not i.barred}
        _require(set(e.serving) == serving, f"version {v}: serving {sorted(e.serving)}, should be {sorted(serving)}")
        kv_load = sum(t.footprint for i in state.instances.values() if i.version == v for t in i.residents.values())
        _require(e.kv_load == kv_load, f"version {v}: kv_load")


def _evaluation(state: ControllerState) -> None:
    """Samples under evaluation are somewhere, once."""
    evaluation = state.evaluation
    resident = sum(t.phase in _DECODING for t in evaluation.trajectories.values())
    waiting = sum(t.phase is TrajectoryPhase.WAITING for t in evaluation.trajectories.values())
    _require(resident == evaluation.num_resident, "evaluation: residents do not add up")
    _require(waiting == len(evaluation.waiting), "evaluation: waiting samples do not add up")


def _feed(state: ControllerState) -> None:
    """Every graded trajectory of a committed group is in exactly one wave, or pending."""
    for number, feed in state.feed.steps.items():
        _require(sum(size for _, size in feed.pending) == feed.num_tokens, f"step {number}: pending tokens")
        sent = [t for wave in feed.waves for rank in wave.ranks for t in rank]
        planned = sorted([*sent, *(t for t, _ in feed.pending)])
        expected = sorted(t.id for g in feed.groups for t in g.trajectories if t.reward is not None)
        _require(planned == expected, f"step {number}: micro-batches do not hold each trajectory once")
        _require(all(len(w.ranks) == state.feed.num_ranks for w in feed.waves), f"step {number}: unequal micro-batches")
