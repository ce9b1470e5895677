"""IPO of prime-rl (docs.primeintellect.ai/prime-rl/ipo): DPPO (arXiv 2602.04879) with a region on both sides.

It is not `dppo_tv` by another name, and prime-rl has both: a token that has moved against its advantage has a gradient
there, but none here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import UNWEIGHTED_ON_K, Anchor, LossSettings
from dora.objectives.losses.dppo_tv import change_of_probability, kept_and_pulled
from dora.objectives.tokens import TokenLoss, Tokens


class Ipo(LossSettings):
    """-keep A k + pull (log k)² per token, k = π/μ. A token is not kept if |π - μ| > threshold."""

    IMPLIED = UNWEIGHTED_ON_K

    kind: Literal["ipo"] = "ipo"
    """Name of the loss."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Largest change of a token's probability."""
    pull: Annotated[float, Field(ge=0.0)] = 1e-3
    """Coefficient of (log k)²."""

    @property
    def anchor(self) -> Anchor:
        """μ."""
        return "behavior"


def loss(tokens: Tokens, settings: Ipo) -> TokenLoss:
    """Return -keep A k + pull (log k)²."""
    change_P = change_of_probability(tokens)
    low_P, high_P = change_P < -settings.threshold, change_P > settings.threshold
    return kept_and_pulled(tokens, low_P=low_P, high_P=high_P, pull=settings.pull)
