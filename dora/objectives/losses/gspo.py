"""GSPO: one ratio per sequence. arXiv 2507.18071.

The form is that of the paper's GSPO-token, which has the value and the gradient of GSPO where the tokens of a sequence
have one advantage, and where they do not gives each its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import OF_SEQUENCES, RatioLoss
from dora.objectives.tokens import TokenLoss, Tokens


class Gspo(RatioLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) per token, s = exp(mean of log r over the tokens of its
    sequence)."""

    IMPLIED = OF_SEQUENCES
    IS_OF_SEQUENCES = True
    CLIPS_MANY = True

    kind: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 3e-4
    """s is clipped below 1 - clip_low. As s is a mean over tokens, its band is hundreds of times narrower than the band
    of a token's ratio."""
    clip_high: Annotated[float, Field(ge=0.0)] = 4e-4
    """s is clipped above 1 + clip_high."""


def loss(tokens: Tokens, settings: Gspo) -> TokenLoss:
    """Return -min(s A, clip(s) A), s = sg(s of the sequence) π/sg(π), so that the gradient of each token is its own."""
    log_ratio_P = settings.log_ratio(tokens)
    of_sequence_P = tokens.spread(tokens.mean_by_sequence(log_ratio_P.detach()))
    ratio_P = (of_sequence_P + tokens.current_P - tokens.current_P.detach()).exp()
    advantage_P = tokens.advantage_P
    clipped_P = ratio_P.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    marks = {
        "clip_low": (ratio_P < 1 - settings.clip_low) & (advantage_P < 0),
        "clip_high": (ratio_P > 1 + settings.clip_high) & (advantage_P > 0),
    }
    return TokenLoss(-(ratio_P * advantage_P).minimum(clipped_P * advantage_P), marks)
