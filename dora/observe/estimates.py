"""Intervals around mean scores, for answers to prompts that stand for all prompts of their kind.

Invariant: pure; the same answers give the same interval, as resampling draws from a fixed seed. Prompts are what was
sampled, so the answers to one prompt are drawn together (arXiv 2411.00640, sections 2 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np

#: Quantile of the normal distribution for an interval of 95 %.
Z_95: Final = 1.959963984540054
RESAMPLES: Final = 2_000

Method = Literal["Wilson", "bootstrap over prompts"]


class Interval(msgspec.Struct, frozen=True):
    """An interval that contains the mean over all prompts in 95 of 100 cases."""

    low: float
    high: float
    method: Method


def interval(rewards: Sequence[Sequence[float]]) -> Interval | None:
    """Return the interval of the mean over all answers, given the rewards of each prompt; None without a prompt.

    Wilson's interval if there is one right or wrong answer to each prompt: it is valid near 0 and 1 too.
    """
    known = [one for one in rewards if one]
    if not known:
        return None
    if all(len(one) == 1 and one[0] in (0.0, 1.0) for one in known):
        return wilson(round(sum(one[0] for one in known)), len(known))
    return _bootstrap(np.array([sum(one) for one in known]), np.array([len(one) for one in known]))


def difference(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> tuple[float, Interval] | None:
    """Return the mean difference of two scores on the same prompts, and its interval; None without a common prompt.

    Each prompt is compared with itself, so that how hard it is does not add to the uncertainty.
    """
    found = [sum(b) / len(b) - sum(a) / len(a) for a, b in zip(before, after, strict=True) if a and b]
    if not found:
        return None
    return math.fsum(found) / len(found), _bootstrap(np.array(found), np.ones(len(found)))


def wilson(right: int, total: int) -> Interval:
    """Return Wilson's score interval of a share."""
    share, weight = right / total, Z_95**2 / total
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return Interval(max(0.0, middle - half), min(1.0, middle + half), "Wilson")


def _bootstrap(sums: np.ndarray, counts: np.ndarray) -> Interval:
    """Return the 95 % of resampled means in the middle: prompts are drawn with replacement."""
    random, size = np.random.Generator(np.random.Philox(key=0)), len(sums)
    means = []
    for _ in range(RESAMPLES):
        drawn = random.integers(0, size, size)
        means.append(sums[drawn].sum() / counts[drawn].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(low), float(high), "bootstrap over prompts")
