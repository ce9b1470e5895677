"""REINFORCE (Williams 1992), as used for language models in arXiv 2402.14740."""

from __future__ import annotations

from typing import Literal

from dora.objectives.loss_settings import ON_K, LossSettings
from dora.objectives.tokens import TokenLoss, Tokens


class Reinforce(LossSettings):
    """-A log π per token."""

    IMPLIED = ON_K

    kind: Literal["reinforce"] = "reinforce"
    """Name of the loss."""


def loss(tokens: Tokens, settings: Reinforce) -> TokenLoss:
    """Return -A log π; staleness is corrected by `objective.weight` alone."""
    return TokenLoss(-tokens.advantage_P * tokens.current_P)
