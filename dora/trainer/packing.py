"""Rows of sequences: the input of one forward pass.

A packed row has all sequences of a pass one after the other. A padded row has one sequence per line, padded on the
right: for models with layers that carry state from one token to the next, which would not end with a packed sequence.

Invariant: only positions that predict a trained token reach the loss, so that values at masked positions (NaN included)
have no effect.
Legend: B lines of the row (1 if packed), T tokens of a line, P trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Sequences share a padded row while the longest is at most this much longer than the shortest, plus SLACK tokens. So
#: padding is at most a third of a row of long sequences, and short ones do not need many passes.
MAX_STRETCH: Final = 1.5
SLACK: Final = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How the sequences of a micro-batch share forward passes."""

    padded: bool = False
    #: The rotary embedding differs beyond this length: longer and shorter sequences share no pass.
    rope_limit: int | None = None

    def is_long(self, length: int) -> bool:
        """Return whether a sequence is beyond `rope_limit`."""
        return self.rope_limit is not None and length > self.rope_limit


@dataclass(frozen=True, slots=True)
class Row:
    """The sequences of one forward pass; nothing crosses from one to another."""

    tokens_BT: Tensor  # int64; 0 where padded
    positions_BT: Tensor  # int64, from 0 in every sequence
    lengths: tuple[int, ...]  # of the sequences
    predictors_P: Tensor  # int64: indices into B x T, flattened, whose logits predict a trained token
    targets_P: Tensor  # int64: these tokens
    padded: bool = False

    @property
    def num_padding(self) -> int:
        """The number of positions that hold no token."""
        return self.tokens_BT.numel() - sum(self.lengths)


def make_row(
    tokens: NDArray[np.integer],
    *,
    lengths: Sequence[int] | NDArray[np.integer],
    trained: NDArray[np.integer],
    padded: bool = False,
    device: torch.device,
) -> Row:
    """Return the row in which the tokens at positions `trained` are predicted.

    `tokens` has the sequences one after the other. Without any, the row is one token that is not trained, so that its
    rank takes part in the collectives of the others.
    """
    lengths_n = np.asarray(lengths, np.int64)
    if len(tokens) == 0:
        tokens, lengths_n = np.zeros(1, np.int64), np.ones(1, np.int64)
    num_lines, width = (len(lengths_n), int(lengths_n.max())) if padded else (1, len(tokens))
    starts = np.cumsum(lengths_n) - lengths_n
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts, lengths_n)
    at = np.repeat(np.arange(num_lines) * width, lengths_n) + positions if padded else np.arange(len(tokens))
    tokens_BT = np.zeros((num_lines, width), np.int64)
    tokens_BT.flat[at] = tokens
    positions_BT = np.tile(np.arange(width), (num_lines, 1)) if padded else positions[None]
    return Row(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device),
        lengths=tuple(lengths_n.tolist()),
        predictors_P=torch.from_numpy(at[trained] - 1).to(device),
        targets_P=torch.from_numpy(tokens[trained].astype(np.int64)).to(device),
        padded=padded,
    )


def split_passes(lengths: Sequence[int], *, layout: Layout, budget: int) -> list[list[int]]:
    """Return the indices of the sequences of each pass: at most `budget` tokens, padding included, or one sequence."""
    passes: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: (layout.is_long(lengths[n]), layout.padded * lengths[n])):
        if not passes or not _may_join([lengths[m] for m in passes[-1]], lengths[n], layout=layout, budget=budget):
            passes.append([])
        passes[-1].append(n)
    return passes


def _may_join(present: Sequence[int], length: int, *, layout: Layout, budget: int) -> bool:
    """Return whether a sequence, in padded rows not shorter than those present, may join their pass."""
    if layout.is_long(length) != layout.is_long(present[0]):
        return False
    if layout.padded:
        return (len(present) + 1) * length <= budget and length <= MAX_STRETCH * present[0] + SLACK
    return sum(present) + length <= budget
