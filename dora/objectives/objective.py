"""The objective of a run: from the log-probs of a pass to a sum to be differentiated, and the sums that divide it.

The loss of an update is Σ l / D over all its tokens on all ranks. D is only known when the update closes. So a pass
returns its Σ l and its share of the sums that make up D, and `divisor` computes D from the totals. The result does not
depend on how an update is cut into passes, or on which rank gets which.

    l = factor [kept] (weight · policy loss + β · divergence from the reference - η · entropy)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dora.objectives.aggregation import aggregate
from dora.objectives.corrections import LEVELS, Correction, correct, log_ratio_of, sequence_ratio
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.table import loss_of
from dora.objectives.tokens import Tokens, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

#: Sums of an update, over its passes and ranks: D; with `normalized`, Σ w and the number of weights; with `vcpo`, Σ w
#: and Σ w² over sequences, and the number B of sequences.
SUMS: Final = ("denominator", "weights", "weighted", "sequence_weights", "sequence_weights_squared", "sequences")


@dataclass(frozen=True, slots=True)
class Terms:
    """The objective of the tokens of one pass."""

    loss_P: Tensor  # with gradient; its sum is differentiated
    sums: dict[str, Tensor]  # scalars, float64: the share of every name in SUMS
    marks: dict[str, Tensor] = field(default_factory=dict)  # [P] for some of the names in MARKS


class Objective:
    """The objective that the settings describe."""

    def __init__(self, settings: ObjectiveConfig, *, longest: int) -> None:
        """`longest`: the token budget of an answer. ConfigError if a loss of the user's own cannot be imported."""
        self.settings = settings
        self._longest = longest
        self._loss = loss_of(settings.loss)

    # ---- what the trainer must provide ------------------------------------------------------------------------------

    def needs_copy(self, updates: int) -> bool:
        """Return whether the weights at the start of a step must be kept, if a step has this number of updates."""
        return updates > 1 and self.settings.proximal == "copy" and uses_proximal(self.settings)

    @property
    def needs_reference(self) -> bool:
        """Whether `Tokens.reference_P` must be given."""
        return self.settings.kl_coefficient > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether `Tokens.entropy_P` must have a gradient."""
        return self.settings.entropy_coefficient > 0

    # ---- one pass ---------------------------------------------------------------------------------------------------

    def __call__(self, tokens: Tokens) -> Terms:
        """Return the terms of one pass."""
        tokens = replace(tokens, proximal_P=self._proximal(tokens))
        of_loss = self._loss(tokens)
        correction = correct(tokens, self.settings)
        marks = {**of_loss.marks, **correction.marks}
        if "masked_token" in of_loss.marks and "masked_token" in correction.marks:
            marks["masked_token"] = of_loss.marks["masked_token"] | correction.marks["masked_token"]
        loss_P = of_loss.loss_P if correction.weight_P is None else correction.weight_P * of_loss.loss_P
        loss_P = self._with_entropy(tokens, self._with_reference(tokens, loss_P, marks))
        lengths_n = tokens.lengths_n
        if correction.rejected_P is not None:
            loss_P = loss_P.masked_fill(correction.rejected_P, 0.0)
            lengths_n = tokens.sum_by_sequence((~correction.rejected_P).long())
        factor_P, denominator = aggregate(tokens, lengths_n, kind=self.settings.aggregation, longest=self._longest)
        sums = {name: denominator.new_zeros(()) for name in SUMS} | {"denominator": denominator}
        sums |= self._weight_sums(tokens, correction) | self._sequence_sums(tokens)
        return Terms(loss_P * factor_P, sums, marks)

    def _proximal(self, tokens: Tokens) -> Tensor:
        """Return log π_o, without gradient. In the first update of a step it is log π.

        Afterwards, without a copy of the weights (A-3PO, arXiv 2512.06547), π_o is interpolated in log space: it is of
        version s, μ of version v and π of version s + progress.
        """
        if tokens.proximal_P is not None:
            return tokens.proximal_P.detach()
        current_P = tokens.current_P.detach()
        if self.settings.proximal == "copy":
            assert not tokens.progress or not uses_proximal(self.settings), "proximal_P is missing"
            return current_P
        if not tokens.progress:
            return current_P
        staleness_P = tokens.spread(tokens.staleness_n).to(current_P)
        alpha_P = staleness_P / (staleness_P + tokens.progress)
        return tokens.behavior_P + alpha_P * (current_P - tokens.behavior_P)

    def _with_reference(self, tokens: Tokens, loss_P: Tensor, marks: dict[str, Tensor]) -> Tensor:
        """Add the divergence from the reference (http://joschu.net/blog/kl-approx.html), and mark its k3."""
        if tokens.reference_P is None:
            return loss_P
        d_P = log_ratio(tokens.reference_P, tokens.current_P)
        k3_P = d_P.exp() - d_P - 1
        marks["kl_reference"] = k3_P.detach()
        if not self.settings.kl_coefficient:
            return loss_P
        estimator = self.settings.kl_estimator
        divergence_P = {"k1": -d_P, "k2": 0.5 * d_P.square()}.get(estimator, k3_P)
        if estimator == "k3_weighted":
            divergence_P = divergence_P * log_ratio(tokens.current_P, tokens.behavior_P).exp()
        return loss_P + self.settings.kl_coefficient * divergence_P

    def _with_entropy(self, tokens: Tokens, loss_P: Tensor) -> Tensor:
        if not self.settings.entropy_coefficient:
            return loss_P
        assert tokens.entropy_P is not None
        return loss_P - self.settings.entropy_coefficient * tokens.entropy_P

    def _weight_sums(self, tokens: Tokens, correction: Correction) -> dict[str, Tensor]:
        """Return Σ w and the number of weights: one per token, or one per sequence if all its tokens share a weight."""
        if not self.settings.normalized or correction.weight_P is None:
            return {}
        weight_P = correction.weight_P.double()
        counted_P = weight_P.new_ones(weight_P.shape)
        if correction.rejected_P is not None:
            counted_P = counted_P.masked_fill(correction.rejected_P, 0.0)
        if LEVELS.get(self.settings.weight, "token") != "token":
            counted_P = counted_P / tokens.spread(tokens.sum_by_sequence(counted_P).clamp(min=1))
        return {"weights": (weight_P * counted_P).sum(), "weighted": counted_P.sum()}

    def _sequence_sums(self, tokens: Tokens) -> dict[str, Tensor]:
        if not self.settings.vcpo:
            return {}
        ratio_n = sequence_ratio(tokens, log_ratio_of(tokens, self.settings.on)).double()[tokens.lengths_n > 0]
        squares = ratio_n.square().sum()
        count = squares.new_tensor(float(len(ratio_n)))
        return {"sequence_weights": ratio_n.sum(), "sequence_weights_squared": squares, "sequences": count}

    # ---- an update --------------------------------------------------------------------------------------------------

    def divisor(self, sums: Mapping[str, float]) -> float:
        """Return D from the totals of an update; 0 if there is nothing to train."""
        if not self.settings.normalized:
            return sums["denominator"]
        return sums["denominator"] * sums["weights"] / max(sums["weighted"], 1.0)

    def rate_factor(self, sums: Mapping[str, float]) -> float:
        """Return the factor of the learning rate of an update: √((Σ w)² / (B Σ w²)) with `vcpo`, else 1.

        VCPO: arXiv 2602.17616.
        """
        if not self.settings.vcpo or not sums["sequence_weights_squared"]:
            return 1.0
        return sums["sequence_weights"] / math.sqrt(sums["sequences"] * sums["sequence_weights_squared"])


def compares_sequences(settings: ObjectiveConfig) -> bool:
    """Return whether a token's loss or its share of D depends on other tokens of its sequence.

    If so, a sequence must be in one pass as a whole. If not, each row of a forked episode is a sequence of its own.
    """
    return (
        settings.aggregation != "token_mean"
        or LEVELS.get(settings.weight, "token") != "token"
        or settings.mis in ("sequence", "geometric")
        or settings.veto > 0
        or settings.opsm is not None
        or settings.vcpo
        or settings.loss.IS_OF_SEQUENCES
    )


def uses_proximal(settings: ObjectiveConfig) -> bool:
    """Return whether the objective depends on π_o."""
    corrects = settings.weight != "none" or settings.mis != "none" or settings.veto > 0 or settings.vcpo
    return settings.loss.anchor == "proximal" or (settings.on == "rho" and corrects)
