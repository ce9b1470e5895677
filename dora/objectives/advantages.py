"""Group-relative advantages from the rewards of all siblings of a group.

`grpo`: GRPO (arXiv 2402.03300); `dr_grpo`: Dr. GRPO (arXiv 2503.20783), without the division by the deviation; `rloo`:
leave-one-out baseline (arXiv 2402.14740); `maxrl`: divided by the mean of the group. A sibling that is grading_failed
has reward NaN and is left out of the statistics; it does not count as reward 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dora.errors import ConfigError

EPSILON = 1e-6  # keeps the advantage of a group without variance at 0 instead of 0/0

Rewards = NDArray[np.float64]


def group_advantages(
    rewards_n: NDArray[np.floating], group_rewards_nG: NDArray[np.floating], *, kind: str | Sequence[str]
) -> Rewards:
    """Return one advantage per trajectory; row i of `group_rewards_nG` holds the rewards of its whole group.

    `kind`: a name of KINDS for all trajectories, or one for each. ConfigError if `maxrl` meets a negative reward.
    """
    rewards = rewards_n.astype(np.float64)
    siblings = group_rewards_nG.astype(np.float64)
    graded = ~np.isnan(siblings)
    if np.isnan(rewards).any() or (graded.sum(axis=1) < 2).any():
        raise ValueError(
            "a trajectory without a reward or a group with fewer than two graded siblings cannot be trained"
        )
    kinds_n = np.broadcast_to(np.array(kind, dtype=np.str_), rewards.shape)
    advantages = np.empty_like(rewards)
    for one in sorted(set(kinds_n.tolist())):
        if one not in KINDS:
            raise ValueError(f"unknown advantage '{one}'")
        chosen = kinds_n == one
        advantages[chosen] = KINDS[one](rewards[chosen], siblings[chosen])
    return advantages


def _dr_grpo(rewards: Rewards, siblings: Rewards) -> Rewards:
    """R - mean."""
    centered: Rewards = rewards - np.nanmean(siblings, axis=1)
    return centered


def _grpo(rewards: Rewards, siblings: Rewards) -> Rewards:
    """(R - mean) / (standard deviation, unbiased)."""
    deviation: Rewards = np.nanstd(siblings, axis=1, ddof=1) + EPSILON
    return _dr_grpo(rewards, siblings) / deviation


def _rloo(rewards: Rewards, siblings: Rewards) -> Rewards:
    """R - mean of the others = n/(n - 1) (R - mean)."""
    count = (~np.isnan(siblings)).sum(axis=1)
    factor: Rewards = count / (count - 1)
    return _dr_grpo(rewards, siblings) * factor


def _maxrl(rewards: Rewards, siblings: Rewards) -> Rewards:
    """(R - mean) / mean; 0 if the mean is 0."""
    if (least := np.nanmin(siblings, initial=0.0)) < 0:
        raise ConfigError(f"objective.advantage: maxrl needs rewards of at least 0, got {least:g}; use grpo or rloo")
    mean = np.nanmean(siblings, axis=1)
    return _dr_grpo(rewards, siblings) / np.where(mean > 0, mean, 1.0)


KINDS: Final[dict[str, Callable[[Rewards, Rewards], Rewards]]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "maxrl": _maxrl,
}
