"""M2PO (arXiv 2510.01161) with its mask computed in each sequence.

The paper's mask bounds the mean of (log ratio)² over the whole batch, for which all ratios must be sorted before the
first gradient exists. That cannot be streamed, so here the bound holds in every sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import RatioLoss
from dora.objectives.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from torch import Tensor


class M2poPerSequence(RatioLoss):
    """-keep x A per token, not clipped. As few tokens as possible, those with the largest (log x)², are not kept, so
    that the mean of (log x)² over the kept tokens of each sequence is at most `threshold`."""

    IS_OF_SEQUENCES = True

    kind: Literal["m2po_per_sequence"] = "m2po_per_sequence"
    """Name of the loss."""
    ratio: Literal["decoupled", "bypass"] = "bypass"
    """`bypass`: x is k = π/μ. `decoupled`: x is r = π/π_o."""
    threshold: Annotated[float, Field(gt=0.0)] = 0.04
    """Largest mean of (log x)² over the kept tokens of a sequence."""


def loss(tokens: Tokens, settings: M2poPerSequence) -> TokenLoss:
    """Return -keep x A for x = r or k."""
    log_ratio_P = settings.log_ratio(tokens)
    dropped_P = ~within_second_moment(tokens, log_ratio_P.detach(), bound=settings.threshold)
    loss_P = -(tokens.advantage_P * log_ratio_P.exp()).masked_fill(dropped_P, 0.0)
    return TokenLoss(loss_P, {"masked_token": dropped_P})


def within_second_moment(tokens: Tokens, log_ratio_P: Tensor, *, bound: float) -> Tensor:
    """Return which tokens are kept: as many as possible, smallest squares first, so that the mean of the squares is
    within the bound."""
    square_P = log_ratio_P.double().square()
    order = square_P.argsort(stable=True)
    order = order[tokens.sequence_P[order].argsort(stable=True)]  # sequence by sequence, squares ascending
    sequence_P = tokens.sequence_P[order]
    ends_n = tokens.lengths_n.cumsum(0)
    sums_P = square_P[order].cumsum(0)
    # Sum and number of the tokens of earlier sequences.
    before_n = tokens.sum_by_sequence(square_P).cumsum(0) - tokens.sum_by_sequence(square_P)
    place_P = ends_n.new_ones(len(order)).cumsum(0) - (ends_n - tokens.lengths_n)[sequence_P]
    kept_P = (sums_P - before_n[sequence_P]) / place_P <= bound
    return kept_P.new_empty(kept_P.shape).index_copy(0, order, kept_P)
