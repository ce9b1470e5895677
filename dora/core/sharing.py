"""Adapters: every server holds every version that is needed, and no other, so that none is emptied for a new one.

Invariant: an adapter is unloaded only when no trajectory of its version is unfinished, so no request can need it; and
a version is released only when no server has or may have its adapter.
"""

from __future__ import annotations

from dora.core.ids import VersionId
from dora.core.phases import Membership, WeightsPhase
from dora.core.pushes import push, unload
from dora.core.state import State
from dora.core.tables import Holding, Server


def share(state: State) -> None:
    """Order the loads that are due, then the unloads."""
    if state.finished:
        return
    wanted = _wanted(state)
    entries = state.window.entries
    lacking = [v for v in wanted if len(entries[v].serving) + entries[v].loading < state.num_up]
    if lacking:
        _load(state, lacking)
    if lacking or any(entry.held for version, entry in entries.items() if version not in wanted):
        _unload(state, wanted)


def _wanted(state: State) -> list[VersionId]:
    """Return the versions that every server is to hold: those that trajectories wait for although no instance has them,
    earliest deadline first, then the newest, then the others.

    They are those with unfinished trajectories, the one under evaluation, and the one that new groups belong to. The
    newest is loaded before anything is admitted under it, as a load costs little.
    """
    settings, entries = state.settings, state.window.entries
    may_admit = bool(state.prompts) or not state.source_dry
    newest = state.window.newest if may_admit and (state.window.newest or 0) < settings.steps else None
    wanted = [
        v
        for v, e in entries.items()
        if e.unfinished or v in (newest, state.evaluation.version) or (may_admit and v == state.admission_version())
    ]
    return sorted(wanted, key=lambda v: (0 if _lacks_instance(state, v) else 1 if v == newest else 2, v))


def _lacks_instance(state: State, version: VersionId) -> bool:
    """Whether trajectories wait although no instance has their version or loads it."""
    entry = state.entry(version)
    return entry.num_waiting > 0 and not entry.serving and not entry.loading


def _load(state: State, lacking: list[VersionId]) -> None:
    """Push the versions to the servers without them, the least loaded server first."""
    servers = [i for i in state.instances.values() if i.is_member and not i.is_lost and not i.condemned]
    servers.sort(key=lambda i: (i.load(), i.id))
    for version in lacking:
        entry = state.entry(version)
        for instance in servers:
            has_instance = bool(entry.serving or entry.loading)
            if state.pushes >= state.push_limit.limit and has_instance:
                break  # the end of the next push makes `place` due again
            holding = _free_holding(instance, version)
            if holding is not None:
                push(state, instance, holding, version)


def _free_holding(instance: Server, version: VersionId) -> Holding | None:
    """Return an empty holding, unless the server has or may have the version already.

    The one with the most failures comes first: a server on which every load fails is then condemned.
    """
    if any(holding.adapter == version for holding in instance.holdings):
        return None
    blank = [holding for holding in instance.holdings if holding.phase is WeightsPhase.BLANK]
    return max(blank, key=lambda holding: holding.failures, default=None)


def _unload(state: State, wanted: list[VersionId]) -> None:
    """Unload what is not wanted, unless its evaluation is due, and what a failed load or unload has left in doubt."""
    for instance in state.instances.values():
        if instance.is_lost or instance.condemned or instance.membership is Membership.DISMISSED:
            continue
        for holding in instance.holdings:
            version = holding.adapter
            if version is None or holding.retry_at > state.now:
                continue
            is_kept = version in wanted or state.entry(version).evaluating
            is_unused = holding.phase is WeightsPhase.SERVING and not is_kept
            if is_unused or holding.phase is WeightsPhase.QUARANTINED:
                unload(state, instance, holding)
