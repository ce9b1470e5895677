"""How the losses of tokens are averaged: a factor for each token, and the share of the denominator D.

    token_mean                Σ l / number of tokens                                   DAPO, arXiv 2503.14476
    seq_mean_token_mean       Σ_i (Σ_t l / n_i) / number of sequences                  GRPO, arXiv 2402.03300
    seq_mean_token_sum_norm   Σ_i (Σ_t l / T) / number of sequences                    Dr. GRPO, arXiv 2503.20783
    longcat                   Σ_g (Σ_i Σ_t l / (G_g T)) / number of groups             arXiv 2509.18883

Numerator and D are sums over sequences, and a sequence is never cut, so the sums of passes and ranks add up. With
`longcat` a sequence adds 1/G_g to D, so its group adds 1 in all, wherever its siblings are. Sequences without tokens
add nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora.objectives.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor


def aggregate(tokens: Tokens, lengths_n: Tensor, *, kind: str, longest: int) -> tuple[Tensor | float, Tensor]:
    """Return the factors [P] of the losses of this pass (or one factor for all), and its share of D.

    `lengths_n`: the number of tokens of each sequence that count; `longest`: T, the token budget of an answer.
    """
    has_tokens_n = (lengths_n > 0).double()
    match kind:
        case "token_mean":
            return 1.0, lengths_n.double().sum()
        case "seq_mean_token_mean":
            return tokens.spread(1.0 / lengths_n.double().clamp(min=1)), has_tokens_n.sum()
        case "seq_mean_token_sum_norm":
            return 1.0 / longest, has_tokens_n.sum()
        case "longcat":
            share_n = 1.0 / tokens.siblings_n.double()
            return tokens.spread(share_n) / longest, (share_n * has_tokens_n).sum()
    raise ValueError(f"unknown aggregation '{kind}'")
