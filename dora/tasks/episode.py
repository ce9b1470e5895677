"""The token record of one trajectory: what the controller stores and ships to the trainer.

Invariant: one mask entry per token, and tokens are only ever appended, never encoded again from text (a template
may render past turns differently). One prompt and one answer today; further turns are further appends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Episode:
    """Tokens in the order in which the model saw or sampled them."""

    tokens: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()  # 1: sampled by the policy and trained; 0: prompt or tool text

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.loss_mask):
            raise ValueError(f"{len(self.tokens)} tokens need as many mask entries, got {len(self.loss_mask)}")


def extend(episode: Episode, tokens: Sequence[int], *, sampled: bool) -> Episode:
    """`episode` with `tokens` appended; `sampled` says that the policy chose them."""
    return Episode(episode.tokens + tuple(tokens), episode.loss_mask + (int(sampled),) * len(tokens))
