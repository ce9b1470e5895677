"""Group-relative advantages from the rewards of all siblings of a group.

`grpo`: GRPO (arXiv 2402.03300); `dr_grpo`: Dr. GRPO (arXiv 2503.20783), without the division by the deviation; `rloo`:
leave-one-out baseline (arXiv 2402.14740). A sibling that is grading_failed has reward NaN and is left out of the
statistics; it does not count as reward 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6  # keeps the advantage of a group without variance at 0 instead of 0/0


def group_advantages(
    rewards_n: NDArray[np.floating], group_rewards_nG: NDArray[np.floating], *, kind: str
) -> NDArray[np.float64]:
    """Return one advantage per trajectory; row i of `group_rewards_nG` holds the rewards of its whole group."""
    rewards = rewards_n.astype(np.float64)
    siblings = group_rewards_nG.astype(np.float64)
    graded = ~np.isnan(siblings)
    count = graded.sum(axis=1)
    if np.isnan(rewards).any() or (count < 2).any():
        raise ValueError(
            "a trajectory without a reward or a group with fewer than two graded siblings cannot be trained"
        )
    mean = np.where(graded, siblings, 0.0).sum(axis=1) / count
    centered: NDArray[np.float64] = rewards - mean
    match kind:
        case "dr_grpo":
            pass
        case "rloo":
            centered = centered * count / (count - 1)
        case "grpo":
            squares = np.where(graded, (siblings - mean[:, None]) ** 2, 0.0).sum(axis=1)
            centered = centered / (np.sqrt(squares / (count - 1)) + EPSILON)
        case _:
            raise ValueError(f"unknown advantage '{kind}'")
    return centered
