"""DPPO: a trust region by the change of a token's probability, not by its ratio. arXiv 2602.04879.

The region has one side, which the sign of A chooses: a token that has moved against its advantage is kept, so that it
may come back. `ipo` drops it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import UNWEIGHTED_ON_K, Anchor, LossSettings
from dora.objectives.tokens import TokenLoss, Tokens, log_ratio

if TYPE_CHECKING:
    from torch import Tensor


class DppoTv(LossSettings):
    """-keep A k + pull (log k)² per token, k = π/μ. A token is not kept if A > 0 and π - μ > threshold, or A < 0 and
    π - μ < -threshold."""

    IMPLIED = UNWEIGHTED_ON_K

    kind: Literal["dppo_tv"] = "dppo_tv"
    """Name of the loss."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Largest change of a token's probability in the direction of its advantage."""
    pull: Annotated[float, Field(ge=0.0)] = 1e-3
    """Coefficient of (log k)², which pulls all tokens, kept or not, towards the behavior policy."""

    @property
    def anchor(self) -> Anchor:
        """μ."""
        return "behavior"


def loss(tokens: Tokens, settings: DppoTv) -> TokenLoss:
    """Return -keep A k + pull (log k)²."""
    change_P = change_of_probability(tokens)
    high_P = (tokens.advantage_P > 0) & (change_P > settings.threshold)
    low_P = (tokens.advantage_P < 0) & (change_P < -settings.threshold)
    return kept_and_pulled(tokens, low_P=low_P, high_P=high_P, pull=settings.pull)


def change_of_probability(tokens: Tokens) -> Tensor:
    """Return [P] π - μ of the sampled tokens, without gradient."""
    return tokens.current_P.detach().exp() - tokens.behavior_P.exp()


def kept_and_pulled(tokens: Tokens, *, low_P: Tensor, high_P: Tensor, pull: float) -> TokenLoss:
    """Return -A k, 0 where a token is marked, + pull (log k)²."""
    log_k_P = log_ratio(tokens.current_P, tokens.behavior_P)
    gain_P = (tokens.advantage_P * log_k_P.exp()).masked_fill(low_P | high_P, 0.0)
    return TokenLoss(pull * log_k_P.square() - gain_P, {"clip_low": low_P, "clip_high": high_P})
