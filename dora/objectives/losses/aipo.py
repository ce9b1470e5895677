"""AIPO of LlamaRL: one truncated weight against the behavior policy. arXiv 2505.24034."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import UNWEIGHTED_ON_K, Anchor, LossSettings
from dora.objectives.tokens import TokenLoss, Tokens, log_ratio


class Aipo(LossSettings):
    """-sg(min(k, cap)) A log π per token, k = π/μ."""

    IMPLIED = UNWEIGHTED_ON_K

    kind: Literal["aipo"] = "aipo"
    """Name of the loss."""
    cap: Annotated[float, Field(gt=0.0)] = 2.0
    """k is at most this."""

    @property
    def anchor(self) -> Anchor:
        """μ."""
        return "behavior"


def loss(tokens: Tokens, settings: Aipo) -> TokenLoss:
    """Return -sg(min(k, cap)) A log π."""
    ratio_P = log_ratio(tokens.current_P.detach(), tokens.behavior_P).exp()
    loss_P = -ratio_P.clamp(max=settings.cap) * tokens.advantage_P * tokens.current_P
    return TokenLoss(loss_P, {"clip_high": ratio_P > settings.cap})
