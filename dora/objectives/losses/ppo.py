"""PPO's clipped surrogate, with the policy ratio against π_o and the engine's policy μ corrected for apart.

PPO: arXiv 1707.06347; clip-higher: DAPO (arXiv 2503.14476); decoupled: arXiv 2110.00641, AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.tokens import TokenLoss, Tokens, log_ratio
from dora.section import Section


class Ppo(Section):
    """min(r A, clip(r) A) per token."""

    kind: Literal["ppo"] = "ppo"
    """Name of the loss."""
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """r is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """r is clipped above 1 + clip_high."""


def loss(tokens: Tokens, settings: Ppo) -> TokenLoss:
    """Return -min(r A, clip(r) A), r = π/π_o."""
    assert tokens.proximal_P is not None
    ratio_P = log_ratio(tokens.current_P, tokens.proximal_P.detach()).exp()
    advantage_P = tokens.advantage_P
    clipped_P = ratio_P.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    marks = {
        "clip_low": (ratio_P < 1 - settings.clip_low) & (advantage_P < 0),
        "clip_high": (ratio_P > 1 + settings.clip_high) & (advantage_P > 0),
    }
    return TokenLoss(-(ratio_P * advantage_P).minimum(clipped_P * advantage_P), marks)
