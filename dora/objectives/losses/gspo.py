"""GSPO: one clipped ratio per sequence. arXiv 2507.18071."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.loss_settings import OF_SEQUENCES, RatioLoss
from dora.objectives.tokens import TokenLoss, Tokens


class Gspo(RatioLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) per sequence, s = exp(mean of log r over its tokens)."""

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
    """Return for each token the loss of its sequence, so that the mean over its tokens is that loss."""
    ratio_n = tokens.mean_by_sequence(settings.log_ratio(tokens)).exp()
    advantage_n = tokens.mean_by_sequence(tokens.advantage_P.to(ratio_n))
    clipped_n = ratio_n.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_n = -(ratio_n * advantage_n).minimum(clipped_n * advantage_n)
    marks = {
        "clip_low": (ratio_n < 1 - settings.clip_low) & (advantage_n < 0),
        "clip_high": (ratio_n > 1 + settings.clip_high) & (advantage_n > 0),
    }
    return TokenLoss(tokens.spread(loss_n), {name: tokens.spread(mark_n) for name, mark_n in marks.items()})
