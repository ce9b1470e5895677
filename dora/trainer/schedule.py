"""The learning rate of a step: a warm-up, then a constant rate or a decay to a share of the peak."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, schedule: Schedule, peak: float, min_share: float, warmup_steps: int, steps: int
) -> float:
    """Return the rate of all updates of `step`, the first of which is 0.

    It rises linearly from peak / warmup_steps to the peak in the last step of the warm-up. With `linear`, or `cosine`
    (half a wave, arXiv 1608.03983), it then falls to min_share * peak, which it would reach in step number `steps`, one
    after the last step. So the last step still trains, even with a share of 0. `steps` is the current T of the job:
    after a resume that raises T, steps follow the schedule of the new T, at a higher rate than before.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / (steps - warmup_steps)
    left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (min_share + (1 - min_share) * left)
