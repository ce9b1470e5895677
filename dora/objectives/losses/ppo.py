"""PPO's clipped surrogate: arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476.

`decoupled`, with π_o apart from μ: arXiv 2110.00641, AReaL (arXiv 2505.24298). Dual clip: arXiv 1912.09729.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import RatioLoss
from dora.objectives.tokens import TokenLoss, Tokens


class Ppo(RatioLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token."""

    kind: Literal["ppo"] = "ppo"
    """Name of the loss."""
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """c: where A < 0, the loss of a token is at most -c A. Unset: no limit."""


def loss(tokens: Tokens, settings: Ppo) -> TokenLoss:
    """Return -min(x A, clip(x) A) for x = r or k; with dual clip, at most -c A where A < 0."""
    ratio_P, advantage_P = settings.log_ratio(tokens).exp(), tokens.advantage_P
    clipped_P = ratio_P.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_P = -(ratio_P * advantage_P).minimum(clipped_P * advantage_P)
    marks = {
        "clip_low": (ratio_P < 1 - settings.clip_low) & (advantage_P < 0),
        "clip_high": (ratio_P > 1 + settings.clip_high) & (advantage_P > 0),
    }
    if settings.dual_clip is not None:
        most_P = -settings.dual_clip * advantage_P
        marks["dual_clip"] = (advantage_P < 0) & (loss_P > most_P)
        loss_P = loss_P.where(~marks["dual_clip"], most_P)
    return TokenLoss(loss_P, marks)
