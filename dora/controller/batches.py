"""Conversion of a planned wave and its records into the arrays of `MicroBatch` (dora/transport/messages.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dora.controller.trajectories import TrajectoryRecord
from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, TrajectoryId, group_of
from dora.core.tables import Group
from dora.transport.messages import MicroBatch


def build_wave(
    order: TrainMicroBatch,
    *,
    records: Mapping[TrajectoryId, TrajectoryRecord],
    groups: Mapping[GroupId, Group],
    group_size: int,
) -> list[MicroBatch]:
    """Return one MicroBatch per rank; `groups` are those committed to the step, by id."""
    return [
        _build(order, trajectories, records=records, groups=groups, group_size=group_size)
        for trajectories in order.ranks
    ]


def _build(
    order: TrainMicroBatch,
    trajectories: Sequence[TrajectoryId],
    *,
    records: Mapping[TrajectoryId, TrajectoryRecord],
    groups: Mapping[GroupId, Group],
    group_size: int,
) -> MicroBatch:
    chosen = [records[t] for t in trajectories]
    owners = [groups[group_of(t, group_size=group_size)] for t in trajectories]
    lengths = [len(r.prompt.tokens) + len(r.tokens) for r in chosen]
    total = sum(lengths)
    tokens = np.empty(total, np.int32)
    loss_mask = np.zeros(total, np.uint8)
    behavior_logprobs = np.zeros(total, np.float32)
    start = 0
    for record, length in zip(chosen, lengths, strict=True):
        sampled = start + len(record.prompt.tokens)
        end = start + length
        tokens[start:sampled] = record.prompt.tokens
        tokens[sampled:end] = record.tokens
        loss_mask[sampled:end] = record.loss_mask()  # 1 for stop tokens, too
        behavior_logprobs[sampled:end] = record.logprobs
        start = end
    rewards = [[math.nan if r is None else r for r in g.rewards] for g in owners]
    return MicroBatch(
        step=order.step,
        index=order.index,
        last=order.last,
        update=order.update,
        closes=order.closes,
        tokens=tokens,
        loss_mask=loss_mask,
        behavior_logprobs=behavior_logprobs,
        lengths=np.array(lengths, np.int32),
        trajectories=np.array(trajectories, np.int64),
        groups=np.array([g.id for g in owners], np.int64),
        versions=np.array([g.version for g in owners], np.int32),
        rewards=np.array([row[t % group_size] for row, t in zip(rewards, trajectories, strict=True)], np.float32),
        group_rewards=np.array(rewards, np.float32).reshape(len(trajectories), group_size),
        truncated=np.array([r.length_capped for r in chosen], np.uint8),
        sources=np.array([r.prompt.source_index for r in chosen], np.uint8),
    )
