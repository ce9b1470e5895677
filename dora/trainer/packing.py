"""Conversion of a micro-batch message into one packed row of tensors, with checks of all that the trainer relies on.

Invariant: only positions that predict a trained token reach the loss, so that values at masked positions (NaN included)
have no effect. C3 is asserted for every group, independently of the controller.
Legend: T tokens of the row, P trained tokens, n trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dora.errors import InvariantViolation, ProtocolError
from dora.trainer.advantage import group_advantages
from dora.transport.messages import MicroBatch


@dataclass(frozen=True, slots=True)
class Row:
    """Segments in one row; attention never crosses from one to another."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in every segment
    lengths: tuple[int, ...]  # of the segments
    predictors_P: Tensor  # int64: positions whose logits predict a trained token
    targets_P: Tensor  # int64: these tokens


@dataclass(frozen=True, slots=True)
class Targets:
    """Inputs of the loss besides the row, one entry per trained token."""

    behavior_P: Tensor  # float32 log μ
    advantage_P: Tensor  # float32
    lag_P: Tensor  # int64, step - version


def make_row(tokens: np.ndarray, *, lengths: np.ndarray, trained: np.ndarray, device: torch.device) -> Row:
    """Return the row in which the tokens at positions `trained` are predicted.

    An empty micro-batch becomes a row of one token that is not trained, so that its rank takes part in the collectives
    of the others.
    """
    if len(tokens) == 0:
        tokens, lengths = np.zeros(1, np.int64), np.ones(1, np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens_T = torch.from_numpy(tokens.astype(np.int64))
    targets = torch.from_numpy(trained.astype(np.int64))
    return Row(
        tokens_T=tokens_T.to(device),
        positions_T=torch.from_numpy(np.arange(len(tokens), dtype=np.int64) - starts).to(device),
        lengths=tuple(int(length) for length in lengths),
        predictors_P=(targets - 1).to(device),
        targets_P=tokens_T[targets].to(device),
    )


def pack(batch: MicroBatch, *, advantage: str, device: torch.device) -> tuple[Row, Targets]:
    """Return the row and the loss inputs of a checked micro-batch."""
    trained = np.flatnonzero(batch.loss_mask)
    owner_P = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[trained]
    advantages_n = group_advantages(batch.rewards, batch.group_rewards, kind=advantage)
    targets = Targets(
        behavior_P=torch.from_numpy(batch.behavior_logprobs[trained]).to(device),
        advantage_P=torch.from_numpy(advantages_n[owner_P].astype(np.float32)).to(device),
        lag_P=torch.from_numpy((batch.step - batch.versions[owner_P]).astype(np.int64)).to(device),
    )
    return make_row(batch.tokens, lengths=batch.lengths, trained=trained, device=device), targets


def check(batch: MicroBatch, *, max_staleness: int, vocab_size: int) -> None:
    """Raise InvariantViolation if a group breaks C3, and ProtocolError if the fields contradict each other."""
    for group, version in zip(batch.groups, batch.versions, strict=True):
        if not 0 <= batch.step - version <= max_staleness:
            raise InvariantViolation(
                f"C3: group {group} of version {version} was committed to step {batch.step} (K = {max_staleness})"
            )
    n, total = len(batch.lengths), len(batch.tokens)
    per_trajectory = (batch.trajectories, batch.groups, batch.rewards, batch.group_rewards, batch.truncated)
    if any(len(column) != n for column in per_trajectory):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: columns of different length for {n} trajectories")
    if any(len(column) != total for column in (batch.loss_mask, batch.behavior_logprobs)):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: columns of different length for {total} tokens")
    if (batch.lengths < 1).any() or batch.lengths.sum() != total:
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: lengths do not add up to {total} tokens")
    if total and (batch.tokens.min() < 0 or batch.tokens.max() >= vocab_size):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: a token outside the vocabulary of {vocab_size}")
    if batch.loss_mask[np.cumsum(batch.lengths) - batch.lengths].any():
        raise ProtocolError(
            f"micro-batch {batch.step}/{batch.index}: the first token of a trajectory cannot be trained"
        )
    bad = ~np.isfinite(batch.behavior_logprobs[batch.loss_mask != 0])
    if bad.any():
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: {bad.sum()} trained tokens without a log-prob")
