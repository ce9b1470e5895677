"""Conversion of a planned wave and its records into the arrays of `MicroBatch` (dora/transport/messages.py).

A wave has as many parts as the run had groups of ranks when it began, so that its lineage never depends on the ranks.
A group is one rank, or the ranks that divide sequences or matrices. A resume may have fewer groups, which then train
several parts each, or more, of which some then get nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora.controller.trajectories import TrajectoryRecord
from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, TrajectoryId, group_of
from dora.core.tables import Group
from dora.journal.rows import EpisodeRow
from dora.routing import RoutingShape
from dora.transport.messages import NO_EXPERTS, NO_TURNS, NOT_ROUTED, TRUNCATIONS, MicroBatch


def build_wave(
    order: TrainMicroBatch,
    *,
    records: Mapping[TrajectoryId, TrajectoryRecord],
    groups: Mapping[GroupId, Group],
    group_size: int,
    routing: RoutingShape | None = None,
) -> list[MicroBatch]:
    """Return the parts of a wave; `groups` are those committed to the step, by id. `routing`: of the choices of experts
    that records keep; None: they keep none."""
    return [
        _build(order, trajectories, records=records, groups=groups, group_size=group_size, routing=routing)
        for trajectories in order.ranks
    ]


def spread(wave: Sequence[MicroBatch], *, num_ranks: int, ranks_per_part: int = 1) -> list[MicroBatch]:
    """Return one MicroBatch for each of `num_ranks` ranks, of which `ranks_per_part` consecutive ones get the same."""
    groups = num_ranks // ranks_per_part
    parts = wave
    if len(wave) != groups:
        parts = [_merge(wave[group::groups] or [_emptied(wave[0])]) for group in range(groups)]
    return [part for part in parts for _ in range(ranks_per_part)]


def _merge(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Return one MicroBatch with the sequences of several."""
    turns = max(_turns(part) for part in parts)
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _arrays(parts[0])}
    arrays["rewards_to_go"] = np.concatenate([_padded(part, turns) for part in parts]) if turns else NO_TURNS
    return msgspec.structs.replace(parts[0], **arrays)


def _emptied(part: MicroBatch) -> MicroBatch:
    nothing = {name: getattr(part, name)[:0] for name in _arrays(part)}
    return msgspec.structs.replace(part, **nothing, rewards_to_go=NO_TURNS)


def _arrays(part: MicroBatch) -> list[str]:
    """Return the names of the fields with an entry for each sequence or token, without `rewards_to_go`."""
    fields = (name for name in part.__struct_fields__ if isinstance(getattr(part, name), np.ndarray))
    return [name for name in fields if name != "rewards_to_go"]


def _turns(part: MicroBatch) -> int:
    """Return the length of the last axis of `rewards_to_go`; 0 if no sibling had several turns."""
    return part.rewards_to_go.shape[-1] if len(part.rewards_to_go) else 0


def _padded(part: MicroBatch, turns: int) -> NDArray[np.float32]:
    """Return `rewards_to_go` with this many turns: after a sibling's last turn, the value of that one."""
    own = part.rewards_to_go if _turns(part) else part.group_rewards[:, :, None]
    return np.concatenate([own, np.repeat(own[:, :, -1:], turns - own.shape[-1], axis=-1)], axis=-1)


def _build(
    order: TrainMicroBatch,
    trajectories: Sequence[TrajectoryId],
    *,
    records: Mapping[TrajectoryId, TrajectoryRecord],
    groups: Mapping[GroupId, Group],
    group_size: int,
    routing: RoutingShape | None,
) -> MicroBatch:
    chosen: list[tuple[TrajectoryId, EpisodeRow]] = [(t, row) for t in trajectories for row in records[t].rows()]
    experts, routed = _choices([records[t] for t in trajectories], routing)
    owners = [groups[group_of(t, group_size=group_size)] for t, _ in chosen]
    rewards = [[math.nan if r is None else r for r in g.rewards] for g in owners]
    return MicroBatch(
        step=order.step,
        index=order.index,
        last=order.last,
        update=order.update,
        closes=order.closes,
        tokens=_joined([row.ids for _, row in chosen], np.int32),
        loss_mask=_joined([row.mask for _, row in chosen], np.uint8),  # 1 for stop tokens, too
        behavior_logprobs=_joined([row.logprobs for _, row in chosen], np.float32),
        lengths=np.array([len(row.ids) for _, row in chosen], np.int32),
        trajectories=np.array([t for t, _ in chosen], np.int64),
        groups=np.array([g.id for g in owners], np.int64),
        versions=np.array([g.version for g in owners], np.int32),
        rewards=np.array([row[t % group_size] for row, (t, _) in zip(rewards, chosen, strict=True)], np.float32),
        group_rewards=np.array(rewards, np.float32).reshape(len(chosen), group_size),
        truncated=np.array([TRUNCATIONS.index(records[t].truncated) for t, _ in chosen], np.uint8),
        sources=np.array([records[t].prompt.source_index for t, _ in chosen], np.uint8),
        rewards_to_go=_rewards_to_go(owners, records),
        experts=experts,
        routed=routed,
    )


def _choices(
    records: Sequence[TrajectoryRecord], routing: RoutingShape | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return MicroBatch.experts and .routed of all rows of trajectories."""
    if routing is None:
        return NO_EXPERTS, NOT_ROUTED
    experts, routed = [np.zeros((0, routing.row_bytes), np.uint8)], [NOT_ROUTED]
    for record in records:
        assert record.choices is not None, "all records of a run keep choices, or none"
        for places in record.row_places():
            experts.append(record.choices.experts(places))
            routed.append(record.choices.marks(places))
    shape = (-1, len(routing.layers), routing.top_k * routing.dtype.itemsize)
    return np.concatenate(experts).reshape(shape), np.concatenate(routed)


def _rewards_to_go(owners: Sequence[Group], records: Mapping[TrajectoryId, TrajectoryRecord]) -> NDArray[np.float32]:
    """Return MicroBatch.rewards_to_go."""
    by_group: dict[GroupId, list[list[float]]] = {}
    for group in owners:
        if group.id not in by_group:
            by_group[group.id] = [records[t.id].rewards_to_go(t.reward) for t in group.trajectories]
    most = max((len(of_turns) for siblings in by_group.values() for of_turns in siblings), default=0)
    if most < 2:
        return NO_TURNS
    padded = {
        group: [of_turns + of_turns[-1:] * (most - len(of_turns)) for of_turns in siblings]
        for group, siblings in by_group.items()
    }
    return np.array([padded[group.id] for group in owners], np.float32)


def _joined(columns: Sequence[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.frombuffer(column, dtype) for column in columns)])
