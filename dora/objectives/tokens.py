"""The trained tokens of one forward pass, and what a loss returns for them.

Legend: P trained tokens, in the order of their sequences; n sequences. A sequence is always whole: its tokens are in
one pass. All ratios are formed in log space, in at least float32, and log differences are clamped to ±20 before exp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO: Final = 20.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of every loss. Log-probs are those of the sampled tokens at the sampling temperature."""

    current_P: Tensor  # log π of the weights being trained, with gradient
    behavior_P: Tensor  # log μ of the engine, under the version that sampled
    advantage_P: Tensor
    sequence_P: Tensor  # int64: 0 ... n - 1
    lengths_n: Tensor  # int64: trained tokens of each sequence; 0 if none
    siblings_n: Tensor  # int64: graded answers of each sequence's group, itself included
    staleness_n: Tensor  # int64: step - version
    progress: float = 0.0  # share of the step's updates that were made before this update: j / M
    proximal_P: Tensor | None = None  # log π_o of the weights at the start of the step; None: computed by `proximal`
    reference_P: Tensor | None = None  # log-probs of the reference policy, if the objective needs them
    entropy_P: Tensor | None = None  # of softmax(logits / temperature); with gradient if the objective needs it

    def sum_by_sequence(self, values_P: Tensor) -> Tensor:
        """Return [n] sums over the tokens of each sequence."""
        return values_P.new_zeros(len(self.lengths_n)).index_add(0, self.sequence_P, values_P)

    def mean_by_sequence(self, values_P: Tensor) -> Tensor:
        """Return [n] means over the tokens of each sequence; 0 for a sequence without tokens."""
        return self.sum_by_sequence(values_P) / self.lengths_n.clamp(min=1)

    def spread(self, values_n: Tensor) -> Tensor:
        """Return [P] for each token the value of its sequence."""
        return values_n[self.sequence_P]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Result of a policy loss."""

    loss_P: Tensor  # with gradient
    #: Tokens on which the loss acted, by name (see `marks.MARKS`): bool [P], without gradient.
    marks: dict[str, Tensor] = field(default_factory=dict)


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return log(numerator/denominator) of two log-probs, clamped."""
    difference = numerator - denominator
    wide = difference if difference.element_size() >= 4 else difference.float()
    return wide.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
