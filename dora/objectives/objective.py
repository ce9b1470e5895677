"""The objective of a run: from the log-probs of a pass to a sum to be differentiated, and the sums that divide it.

The loss of an update is Σ l / D over all its tokens on all ranks. D is only known when the update closes, so a pass
returns its Σ l and its share of D's parts, and `divisor` makes D of the totals: the result does not depend on how an
update is cut into passes, or on which rank gets which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dora.objectives.losses import ppo
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.tokens import Tokens, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

#: Sums of an update, over its passes and ranks.
SUMS: Final = ("denominator",)
#: What a term may mark or measure of a token, without gradient: name -> (unit, formula of its mean over tokens).
MARKS: Final = {
    "clip_low": ("fraction", "mean of [the loss is clipped because the ratio is too low]"),
    "clip_high": ("fraction", "mean of [the loss is clipped because the ratio is too high]"),
    "tis_capped": ("fraction", "mean of [ρ > tis_cap]"),
}


@dataclass(frozen=True, slots=True)
class Terms:
    """The objective of the tokens of one pass."""

    loss_P: Tensor  # with gradient; its sum is differentiated
    sums: dict[str, Tensor]  # scalars, float64: the share of every name in SUMS
    marks: dict[str, Tensor] = field(default_factory=dict)  # [P] for some of the names in MARKS


class Objective:
    """The objective that the settings describe."""

    def __init__(self, settings: ObjectiveConfig, *, longest: int) -> None:
        """`longest`: the token budget of an answer."""
        self.settings = settings
        self._longest = longest

    def __call__(self, tokens: Tokens) -> Terms:
        """Return the terms of one pass."""
        proximal_P = tokens.current_P.detach() if tokens.proximal_P is None else tokens.proximal_P
        rho_P = log_ratio(proximal_P, tokens.behavior_P).exp()
        of_loss = ppo.loss(replace(tokens, proximal_P=proximal_P), self.settings.loss)
        loss_P = rho_P.clamp(max=self.settings.tis_cap) * of_loss.loss_P
        count = loss_P.detach().double().new_tensor(float(len(loss_P)))
        return Terms(loss_P, {"denominator": count}, {**of_loss.marks, "tis_capped": rho_P > self.settings.tis_cap})

    def divisor(self, sums: Mapping[str, float]) -> float:
        """Return D from the totals of an update; 0 if there is nothing to train."""
        return sums["denominator"]
