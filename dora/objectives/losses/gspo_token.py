"""GSPO-token: the ratio of a sequence, the advantage of a token. arXiv 2507.18071."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import OF_SEQUENCES, RatioLoss
from dora.objectives.tokens import TokenLoss, Tokens


class GspoToken(RatioLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) per token, s = sg(s of the sequence) π/sg(π)."""

    IMPLIED = OF_SEQUENCES
    IS_OF_SEQUENCES = True
    CLIPS_MANY = True

    kind: Literal["gspo_token"] = "gspo_token"
    """Name of the loss."""
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 3e-4
    """s is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 4e-4
    """s is clipped above 1 + clip_high."""


def loss(tokens: Tokens, settings: GspoToken) -> TokenLoss:
    """Return -min(s A, clip(s) A), with the gradient of each token its own."""
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
