"""Policy losses per token: pure functions of tensors, to be minimized; the caller sums them.

Symbols: current = log π, proximal = log π_o (start of the step), behavior = log μ (engine), all of the sampled token;
r = π/π_o, ρ = π_o/μ, k = π/μ. Log differences are computed in at least float32 and clamped to ±20 before exp. PPO:
arXiv 1707.06347; clip-higher: DAPO (arXiv 2503.14476); decoupled PPO: AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator/denominator) of two log-probs, clamped."""
    wide = torch.promote_types(numerator.dtype, torch.float32)
    return (numerator.to(wide) - denominator.to(wide)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio A, clip(ratio) A): PPO with clip-higher."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def bypass_ppo(current: Tensor, *, behavior: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO on k, that is, with π_o := μ: a trust region around the behavior policy."""
    ratio = log_ratio(current, behavior).exp()
    return clipped_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)


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
    """-sg(min(ρ, C)) min(r A, clip(r) A): decoupled PPO with truncated importance sampling per token; C = inf turns the
    truncation off."""
    weight = log_ratio(proximal, behavior).exp().clamp(max=tis_cap).detach()
    ratio = log_ratio(current, proximal.detach()).exp()
    return weight * clipped_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
