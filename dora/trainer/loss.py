"""The policy loss per token: a pure function of tensors, to be minimized; the caller sums it.

Symbols: current = log π, proximal = log π_o (start of the step), behavior = log μ (engine), all of the sampled token;
r = π/π_o, ρ = π_o/μ. Log differences are computed in at least float32 and clamped to ±20 before exp. PPO:
arXiv 1707.06347; clip-higher: DAPO (arXiv 2503.14476); decoupled PPO: AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return log(numerator/denominator) of two log-probs, clamped."""
    wide = torch.promote_types(numerator.dtype, torch.float32)
    return (numerator.to(wide) - denominator.to(wide)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def decoupled_ppo(
    current: Tensor,
    *,
    proximal: Tensor,
    behavior: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
) -> Tensor:
    """Return -sg(min(ρ, C)) min(r A, clip(r) A): decoupled PPO with truncated importance sampling per token.

    C is `tis_cap`; inf turns the truncation off. clip(r) limits r to [1 - clip_low, 1 + clip_high] (clip-higher).
    """
    weight = log_ratio(proximal, behavior).exp().clamp(max=tis_cap).detach()
    ratio = log_ratio(current, proximal.detach()).exp()
    return -weight * torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
