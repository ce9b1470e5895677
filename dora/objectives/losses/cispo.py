"""CISPO of MiniMax-M1: the weight is clipped, and no token loses its gradient. arXiv 2506.13585."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import RatioLoss
from dora.objectives.tokens import TokenLoss, Tokens


class Cispo(RatioLoss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π per token."""

    kind: Literal["cispo"] = "cispo"
    """Name of the loss."""
    clip_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """The weight is at least 1 - clip_low. Unset: no lower limit."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """The weight is at most 1 + clip_high."""


def loss(tokens: Tokens, settings: Cispo) -> TokenLoss:
    """Return -sg(clip(x)) A log π for x = r or k; a clipped weight is marked whatever the sign of A."""
    ratio_P = settings.log_ratio(tokens).detach().exp()
    least = 0.0 if settings.clip_low is None else 1 - settings.clip_low
    weight_P = ratio_P.clamp(least, 1 + settings.clip_high)
    marks = {"clip_low": ratio_P < least, "clip_high": ratio_P > 1 + settings.clip_high}
    return TokenLoss(-weight_P * tokens.advantage_P * tokens.current_P, marks)
