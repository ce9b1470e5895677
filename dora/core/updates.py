"""Updates in flight: which version each instance is given, even while requests run there.

Invariant: an evaluation keeps its version. An instance is updated only while no evaluation sample holds a slot there or
moves there (C1); and the last instance with the version under evaluation, only if training has no other instance.
Training waits only for samples that are being decoded on this last instance.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from dora.core.ids import VersionId
from dora.core.moves import vacate
from dora.core.phases import DECODING, PUSHING, WeightsPhase
from dora.core.pushes import push
from dora.core.state import State
from dora.core.tables import Server

#: Phases in which an instance cannot be updated.
_NOT_NOW: Final = PUSHING | {WeightsPhase.LOST}


def update_fleet(state: State, newest: VersionId, *, is_wanted: bool) -> None:
    """Push the newest version to all instances at once, if there is work for it.

    `is_wanted` says whether another group would be admitted under it.
    """
    training = state.entry(newest)
    is_busy = is_wanted or training.unfinished > 0
    if not (is_busy or state.evaluation.waiting):
        return
    for instance in state.instances.values():
        holding = instance.full
        may = holding.phase not in _NOT_NOW and instance.is_member and not instance.condemned
        if may and holding.retry_at <= state.now:
            version = _version_due(state, instance, newest=newest, is_busy=is_busy)
            if version != holding.version:
                push(state, instance, holding, version)
    if (is_wanted or training.num_waiting) and not _has_instance(state, newest):
        _make_way(state, newest)


def _version_due(state: State, instance: Server, *, newest: VersionId, is_busy: bool) -> VersionId:
    """Return the version for an instance: the newest, unless the evaluation needs the instance.

    The evaluation needs an instance that has its samples, and the last one that holds its version. If no instance holds
    its version, it gets an empty instance, provided that training has another one or nothing to do.
    """
    evaluation, holding = state.evaluation, instance.full
    if holding.version is not None and _has_samples(instance):
        return holding.version
    is_unfinished = evaluation.waiting or evaluation.away
    if evaluation.version is None or not is_unfinished or holding.phase is WeightsPhase.DRAINING:
        return newest
    if holding.version == evaluation.version and len(state.entry(evaluation.version).serving) == 1:
        return evaluation.version
    is_late = bool(evaluation.waiting) and not _has_instance(state, evaluation.version)
    is_free = instance.is_empty and not instance.pressed
    may_take = not is_busy or _has_another(state, newest, besides=instance)
    return evaluation.version if is_late and is_free and may_take else newest


def _has_samples(instance: Server) -> bool:
    """Whether evaluation samples are being decoded here, keep a slot here during a call, or are moving here."""
    return len(instance.residents) > instance.num_training or any(t.group is None for t in instance.reserved.values())


def _has_instance(state: State, version: VersionId) -> bool:
    """Whether an instance serves or loads this version."""
    entry = state.entry(version)
    return bool(entry.serving or entry.loading)


def _has_another(state: State, version: VersionId, *, besides: Server) -> bool:
    """Whether another instance serves this version or, if this one does not serve it, loads it."""
    if besides.full.version == version:
        return len(state.entry(version).serving) > 1
    return _has_instance(state, version)


def _make_way(state: State, newest: VersionId) -> None:
    """Free the instance with the fewest evaluation samples for training; the samples are queued with their tokens.

    If the instance is the last one of their version, samples that are being decoded there end first.
    """
    evaluated = state.evaluation.version
    if evaluated is None or state.num_draining:
        return
    holders = [i for i in state.entry(evaluated).serving.values() if not i.condemned]
    instance = min(holders, key=lambda i: (len(i.residents) - i.num_training, i.id), default=None)
    if instance is None or (len(holders) == 1 and _decodes_samples(instance)):
        return
    vacate(state, instance)
    if not _has_samples(instance):
        push(state, instance, instance.full, newest)


def _decodes_samples(instance: Server) -> bool:
    here = chain(instance.residents.values(), instance.reserved.values())
    return any(t.group is None and t.phase in DECODING for t in here)
