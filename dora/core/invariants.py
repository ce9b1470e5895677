"""Checks of C1, C2, C3, conservation and all counters, recomputed from scratch.

`check(state)` takes time proportional to the state, so the controller calls it only at the end of a run. The simulator
calls it every 10,000 events with up to a million trajectories, so the loops over trajectories are comprehensions, and
messages are formatted only for a violation.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain, groupby

from dora.core.feasibility import CapacityGate, fits
from dora.core.phases import (
    DECODING,
    GIVEN_UP,
    GROUP,
    HOLDS_VERSION,
    PUSHING,
    UNCONSUMED,
    UNFINISHED,
    GroupPhase,
    Membership,
    TrajectoryPhase,
    WeightsPhase,
)
from dora.core.state import State
from dora.core.tables import Server, Trajectory
from dora.errors import InvariantViolation

_WAITING = TrajectoryPhase.WAITING
_RESIDENT = TrajectoryPhase.RESIDENT
_STOPPING = TrajectoryPhase.STOPPING
_CALLING = TrajectoryPhase.CALLING
_GRADED = TrajectoryPhase.GRADED
_SEATED = DECODING | {_CALLING}
#: Phases of a server's only holding, and of several holdings.
_OF_FULL_WEIGHTS = frozenset(WeightsPhase) - {WeightsPhase.UNLOADING}
_OF_ADAPTERS = frozenset(WeightsPhase) - {WeightsPhase.DRAINING, WeightsPhase.UPDATING}


def check(state: State) -> None:
    """Raise InvariantViolation for the first invariant that does not hold."""
    for rule in (_one_version, _conservation, _staleness, _liveness, _instances, _versions, _evaluation, _feed):
        rule(state)


def _require(condition: object, message: str, *parts: object) -> None:
    if not condition:
        raise InvariantViolation(message.format(*parts) if parts else message)


def _one_version(state: State) -> None:
    """C1: residents have the confirmed version of their instance, and siblings the tag of their group.

    With updates in flight this applies to evaluations only; everything else continues under the newest version.
    """
    in_flight = state.settings.rules.in_flight is not None
    for i in state.instances.values():
        versions = {t.version for t in i.residents.values() if t.group is None or not in_flight}
        if versions:
            held = {h.version for h in i.holdings}
            _require(versions <= held, "C1: instance {} holds {}, its residents {}", i.id, held, versions)
        if i.is_updating:
            _require(i.is_empty or in_flight, f"C1: instance {i.id} is pushed while not empty")
    for g in state.ledger.groups.values():
        versions = {t.version for t in g.trajectories if not in_flight or t.phase in UNFINISHED}
        current = state.window.newest if in_flight else g.version
        _require(versions <= {g.current} == {current}, "C1: siblings of group {} differ in version", g.id)
    _require(state.counters.version_conflicts == 0 or in_flight, "C1: version conflicts")


def _conservation(state: State) -> None:
    """C2: every admitted group is in one phase, with all its siblings, and nothing was dropped."""
    counts = state.ledger.counts
    _require(sum(counts.values()) == state.ledger.admitted, "C2: admitted groups do not add up")
    found = Counter(g.phase for g in state.ledger.groups.values())
    for phase in GroupPhase:
        if GROUP[phase]:
            _require(
                counts[phase] == found[phase], f"C2: {counts[phase]} groups counted {phase.value}, {found[phase]} found"
            )
    group_size, generating = state.settings.group_size, GroupPhase.GENERATING
    for g in state.ledger.groups.values():
        phases = [t.phase for t in g.trajectories]
        waiting = phases.count(_WAITING)
        unfinished = waiting + phases.count(_RESIDENT) + phases.count(_STOPPING) + phases.count(_CALLING)
        ungraded = len(phases) - phases.count(_GRADED)
        _require(len(phases) == group_size, "C2: group {} has lost a sibling", g.id)
        _require(
            unfinished == g.unfinished, "C2: group {} counts {} unfinished, has {}", g.id, g.unfinished, unfinished
        )
        _require(ungraded == g.ungraded, "C2: group {} counts {} ungraded, has {}", g.id, g.ungraded, ungraded)
        waits = {t.id for t in g.waiting if t.group is g and t.phase is _WAITING}
        _require(len(waits) == len(g.waiting) == waiting, "C2: waiting siblings of group {}", g.id)
        _require((unfinished == 0) == (g.phase is not generating), "C2: phase of group {}", g.id)
    discards = state.settings.rules.discards
    _require(state.counters.scheduling_aborts == 0 or discards, "C2: scheduling aborts")
    _require(counts[GroupPhase.DISCARDED] == 0 or discards, "C2: discarded groups")


def _staleness(state: State) -> None:
    """C3 and rule F, with its counters recomputed."""
    formation, step = state.formation, state.formation.step
    due = [0] * len(formation.due)
    for g in state.ledger.groups.values():
        if g.phase in UNCONSUMED:
            _require(g.deadline >= step, "C3: group {} is due at {}, forming {}", g.id, g.deadline, step)
            due[0 if isinstance(formation, CapacityGate) else g.deadline - step] += 1
        elif g.step is not None:
            _require(formation.staleness_allowed(g.version, step=g.step), "C3: group {} in step {}", g.id, g.step)
    _require(due == formation.due, f"F: counters {formation.due}, recomputed {due}")
    _require(
        isinstance(formation, CapacityGate) or fits(due, committed=formation.committed, step_size=formation.step_size),
        f"F is broken: {due}, {formation.committed}",
    )
    misfiled = [g.id for deadline, queue in state.complete.items() for g in queue if g.deadline != deadline]
    _require(not misfiled, f"complete groups {misfiled} are queued under another deadline than theirs")
    complete = sum(len(q) for q in state.complete.values())
    _require(complete == state.ledger.counts[GroupPhase.COMPLETE], "complete groups do not add up")
    _require(state.counters.staleness_violations == 0, "C3: staleness violations")


def _liveness(state: State) -> None:
    """At most K + 1 versions are live, and every version that is needed is in the window."""
    live = state.window.live()
    _require(len(live) <= state.settings.rules.max_staleness + 1, f"too many live versions: {live}")
    entries = state.window.entries
    unfinished = [t for t in state.trajectories.values() if t.phase in UNFINISHED and not _is_given_up(t)]
    gone = {t.version for t in unfinished if t.version not in entries}
    _require(not gone, f"versions {sorted(gone)} are gone, unfinished trajectories need them")


def _instances(state: State) -> None:
    """Check the counters of every instance and of the fleet."""
    for i in state.instances.values():
        held = [*i.residents.values(), *i.reserved.values()]
        _require(len(held) == i.num_requests, "instance {}: num_requests", i.id)
        _require(sum([t.footprint for t in held]) == i.kv_load, "instance {}: kv_load", i.id)
        evaluated = [t.group for t in i.residents.values()].count(None)
        _require(len(i.residents) - evaluated == i.num_training, "instance {}: num_training", i.id)
        _require(len(held) <= i.slots or not held, "instance {} is over its slots", i.id)
        astray = [t.id for t in i.residents.values() if t.instance is not i or t.phase not in _SEATED]
        _require(not astray, "instance {}: trajectories {} are not decoded there", i.id, astray)
        astray = [t.id for t in i.reserved.values() if t.target is not i or t.phase is not _STOPPING]
        _require(not astray, "instance {}: trajectories {} do not move there", i.id, astray)
        _require(not (held and i.is_lost), "instance {} is lost but not empty", i.id)
        busy = i.num_training or i.reserved or i.condemned or i.is_shared or i.full.pushing is not None
        vacant = not (busy or i.is_lost or not i.is_member)
        _require((i.id in state.vacant) == vacant, "instance {}: vacant should be {}", i.id, vacant)
        _holdings(i)
        _require(len(i.holdings) == state.settings.num_holdings, "instance {}: {} holdings", i.id, len(i.holdings))
    drained = {i.id for i in state.instances.values() if not i.is_member}
    _require(drained == set(state.drained), "drained instances {}, should be {}", set(state.drained), drained)
    leaving = {i.id for i in state.instances.values() if i.membership is Membership.LEAVING}
    _require(leaving == set(state.leaving), "leaving instances {}, should be {}", set(state.leaving), leaving)
    up = [i for i in state.instances.values() if not i.is_lost and i.is_member]
    _require(len(up) == state.num_up, "instances that are up do not add up")
    _require(sum(i.slots for i in up) == state.num_slots, "slots do not add up")
    _require(sum(i.kv_tokens for i in up) == state.num_kv_tokens, "KV room does not add up")
    draining = sum(h.phase is WeightsPhase.DRAINING for i in state.instances.values() for h in i.holdings)
    _require(draining == state.num_draining, "draining instances do not add up")


def _holdings(i: Server) -> None:
    """Check the holdings of an instance: each adapter is in one of them."""
    for h in i.holdings:
        _require((h.phase is WeightsPhase.LOST) == i.is_lost, "instance {}: lost, but not all of it", i.id)
        _require((h.version is not None) == (h.phase in HOLDS_VERSION), "instance {}: {} with a version", i.id, h)
        _require((h.pushing is not None) == (h.phase in PUSHING), "instance {}: {} without a push", i.id, h)
        _require(i.is_member or h.phase is not WeightsPhase.DRAINING, "instance {} drains for nothing", i.id)
        _require(h.phase in (_OF_ADAPTERS if i.is_shared else _OF_FULL_WEIGHTS), "instance {}: {}", i.id, h)
        has_adapter = i.is_shared and h.phase not in (WeightsPhase.BLANK, WeightsPhase.LOST)
        _require((h.adapter is not None) == has_adapter, "instance {}: {} with adapter {}", i.id, h, h.adapter)
        known = {h.version, h.pushing, h.adapter} - {None}
        _require(len(known) <= 1, "instance {}: {} with adapter {}", i.id, h, h.adapter)
    adapters = [h.adapter for h in i.holdings if h.adapter is not None]
    _require(len(adapters) == len(set(adapters)), "instance {} has an adapter twice: {}", i.id, adapters)


def _versions(state: State) -> None:
    """Check the counters of every version."""
    groups = Counter(g.current for g in state.ledger.groups.values())
    training = [t for t in state.trajectories.values() if t.group is not None]
    unfinished = Counter([t.version for t in training if t.phase in UNFINISHED and not _is_given_up(t)])
    all_away = [t for t in training if t.phase is _CALLING and t.instance is None and not _is_given_up(t)]
    away = Counter([t.version for t in all_away])
    away_tokens: Counter[int] = Counter()
    for t in all_away:
        away_tokens[t.version] += t.num_prompt_tokens + t.num_tokens
    waiting = Counter([t.version for t in training if t.phase is _WAITING])
    kv_load: Counter[int] = Counter()
    for t in chain.from_iterable([i.residents.values() for i in state.instances.values()]):
        kv_load[t.version] += t.footprint
    holdings = [(i, h) for i in state.instances.values() for h in i.holdings]
    loading = Counter(h.pushing for _, h in holdings if h.pushing is not None)
    held = Counter(h.adapter for _, h in holdings if h.adapter is not None)
    _require(sum(loading.values()) == state.pushes, "pushes in flight do not add up")
    _require(held.keys() <= state.window.entries.keys(), "released, but on servers: {}", held.keys())
    for v, e in state.window.entries.items():
        _require(e.groups == groups[v], "version {}: {} groups counted, {} found", v, e.groups, groups[v])
        _require(e.unfinished == unfinished[v], "version {}: {} unfinished, {} found", v, e.unfinished, unfinished[v])
        _require(e.away == away[v], "version {}: {} away counted, {} found", v, e.away, away[v])
        _require(e.away_tokens == away_tokens[v], "version {}: tokens away", v)
        _require(e.num_waiting == waiting[v], "version {}: {} waiting counted, {} found", v, e.num_waiting, waiting[v])
        _require(e.loading == loading[v], "version {}: pushes", v)
        _require(e.held == held[v], "version {}: {} adapters counted, {} found", v, e.held, held[v])
        serving = {i.id for i, h in holdings if h.version == v and h.phase in HOLDS_VERSION and i.is_member}
        _require(e.serving.keys() == serving, "version {}: serving {}, should be {}", v, e.serving.keys(), serving)
        _require(e.kv_load == kv_load[v], "version {}: kv_load", v)


def _evaluation(state: State) -> None:
    """Check the counters of the evaluation in progress."""
    evaluation = state.evaluation
    resident = sum(t.instance is not None for t in evaluation.trajectories.values())
    away = sum(t.phase is _CALLING and t.instance is None for t in evaluation.trajectories.values())
    waiting = sum(t.phase is TrajectoryPhase.WAITING for t in evaluation.trajectories.values())
    _require(resident == evaluation.num_resident, "evaluation: residents do not add up")
    _require(away == evaluation.away, "evaluation: samples that are away do not add up")
    _require(waiting == len(evaluation.waiting), "evaluation: waiting samples do not add up")
    new = sum(not t.attempt for t in evaluation.trajectories.values())
    _require(new == evaluation.num_new, "evaluation: samples without a request do not add up")


def _is_given_up(trajectory: Trajectory) -> bool:
    """Whether the trajectory only waits for the end of a call, after which it is abandoned."""
    return trajectory.phase is _CALLING and trajectory.group is not None and trajectory.group.phase in GIVEN_UP


def _feed(state: State) -> None:
    """Every graded trajectory of a committed group is pending or in exactly one wave, of the update of its group."""
    size = state.settings.groups_per_update
    for number, feed in state.feed.steps.items():
        for pending in feed.pending.values():
            runs = [next(answers) for _, answers in groupby(pending.answers, key=lambda a: a.group)]
            tokens = sum(a.num_tokens for a in pending.answers) + sum(a.shared for a in runs)
            _require(tokens == pending.num_tokens, f"step {number}: pending tokens")
        fed = [(wave.update, t) for wave in feed.waves for rank in wave.ranks for t in rank]
        planned = sorted(fed + [(u, a.trajectory) for u, pending in feed.pending.items() for a in pending.answers])
        graded = [(i // size, t.id) for i, g in enumerate(feed.groups) for t in g.trajectories if t.reward is not None]
        _require(planned == sorted(graded), f"step {number}: micro-batches do not hold each trajectory once")
        _require(all(len(w.ranks) == state.feed.num_ranks for w in feed.waves), f"step {number}: unequal micro-batches")
        ended = list(accumulate((w.closes for w in feed.waves), initial=0))
        _require([w.update for w in feed.waves] == ended[:-1], f"step {number}: an update does not end with one wave")
        _require(feed.update == ended[-1], f"step {number}: waves are cut for another update")
