"""Sampling: logits to one token per row, with noise that is a pure function of (seed, position).

The noise of a token depends on its request's seed and on its index in prompt + output, never on the batch, the step or
the server. So a request that continues on another server, from prompt + tokens so far and with the same seed, gets the
same tokens as on this server.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-6  # temperatures under this mean argmax, as in SGLang
_GOLDEN = -0x61C8864680B583EB  # the increment of SplitMix64


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling settings of the live rows, as tensors; the flags tell which work can be skipped."""

    temperature_B1: Tensor  # 1 where the row is greedy, so that its log-probs come from the unscaled logits
    greedy_B: Tensor
    top_p_B1: Tensor
    top_k_B1: Tensor  # vocabulary size where off
    min_p_B1: Tensor
    seed_B: Tensor
    any_greedy: bool
    any_filter: bool

    def repeated(self, times: int) -> SamplingTensors:
        """Return the settings for `times` tokens of each row, row by row."""
        temperature, greedy, top_p, top_k, min_p, seed = (
            each.repeat_interleave(times, dim=0)
            for each in (self.temperature_B1, self.greedy_B, self.top_p_B1, self.top_k_B1, self.min_p_B1, self.seed_B)
        )
        return SamplingTensors(temperature, greedy, top_p, top_k, min_p, seed, self.any_greedy, self.any_filter)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al., 2014) on wrapping int64; masks make `>>` a logical shift."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """float64 in [0, 1) with 48 random bits that depend only on (seed, position)."""
    bits = _mix(_mix(seed_B + _GOLDEN) + position_B * _GOLDEN)
    return ((bits >> 16) & 0xFFFFFFFFFFFF).double() * 2.0**-48


def _filtered(probs_BV: Tensor, settings: SamplingTensors) -> Tensor:
    """`probs_BV` with everything outside top-k, top-p and min-p set to 0; rows without a filter are unchanged."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    drop_BV = (before_BV > settings.top_p_B1) & (settings.top_p_B1 < 1)
    drop_BV |= torch.arange(probs_BV.shape[-1], device=probs_BV.device) >= settings.top_k_B1
    drop_BV |= sorted_BV < settings.min_p_B1 * sorted_BV[:, :1]
    drop_BV[:, 0] = False
    return probs_BV.masked_fill(torch.zeros_like(drop_BV).scatter_(1, order_BV, drop_BV), 0.0)


def sample(logits_BV: Tensor, settings: SamplingTensors, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """(token_B, logprob_B): the log-prob is log-softmax(logits / temperature), not renormalised over a filter.

    Inverse CDF in vocabulary order, so one uniform per row is enough and a filter in one row changes no other row.
    """
    logprobs_BV = (logits_BV.float() / settings.temperature_B1).log_softmax(dim=-1)
    probs_BV = logprobs_BV.exp().double()
    if settings.any_filter:
        probs_BV = _filtered(probs_BV, settings)
    cdf_BV = probs_BV.cumsum(dim=-1)
    point_B1 = uniform(settings.seed_B, position_B)[:, None] * cdf_BV[:, -1:]
    token_B1 = torch.searchsorted(cdf_BV, point_B1, right=True).clamp_(max=cdf_BV.shape[-1] - 1)
    if settings.any_greedy:
        token_B1 = torch.where(settings.greedy_B[:, None], logprobs_BV.argmax(dim=-1, keepdim=True), token_B1)
    return token_B1[:, 0], logprobs_BV.gather(1, token_B1)[:, 0]
