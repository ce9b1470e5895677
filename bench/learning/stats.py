"""Means over seeds with 95 % intervals (Student's t), paired where runs share their seed.

A difference is shown where its interval excludes 0, a ratio where its interval excludes 1. Of many comparisons some are
shown by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Final

#: Two values may be equal by chance: their interval then excludes whatever it should contain.
MIN_SEEDS: Final = 3
#: 97.5 % quantiles of Student's t, by degrees of freedom.
T: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval; NaN with fewer than three seeds."""

    mean: float
    half: float
    count: int

    @property
    def is_shown(self) -> bool:
        """Return whether the interval excludes 0."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        if not self.count:
            return "not run"
        error = "" if math.isnan(self.half) else f" ± {self.half:.3f}"
        return f"{self.mean:+.3f}{error}"

    @property
    def ratio(self) -> str:
        """Of logarithms of ratios: the geometric mean and its interval."""
        if not self.count:
            return "not run"
        if math.isnan(self.half):
            return f"{math.exp(self.mean):.2f}"
        low, high = math.exp(self.mean - self.half), math.exp(self.mean + self.half)
        return f"{math.exp(self.mean):.2f} ({low:.2f}-{high:.2f})"


def interval(values: Iterable[float]) -> Interval:
    """Return the mean of some values and its interval."""
    found = list(values)
    mean = fmean(found) if found else math.nan
    half = T[len(found) - 1] * stdev(found) / math.sqrt(len(found)) if len(found) >= MIN_SEEDS else math.nan
    return Interval(mean, half, len(found))


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> Interval:
    """Return left - right over the seeds that both have."""
    return interval(left[seed] - right[seed] for seed in sorted(left.keys() & right.keys()))


def paired_ratio(left: Mapping[int, float], right: Mapping[int, float]) -> Interval:
    """Return the logarithm of left / right over the seeds that both have."""
    return interval(math.log(left[seed] / right[seed]) for seed in sorted(left.keys() & right.keys()))


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the first value, then the mean of each one and its neighbours."""
    return [*values[:1], *(fmean(values[i - 1 : i + 2]) for i in range(1, len(values)))]


def crossing(points: Sequence[tuple[float, float]], level: float) -> float:
    """Return where the line through these points first reaches a level; infinity if it does not."""
    for (a, low), (b, high) in pairwise(points):
        if low >= level:
            return a
        if high >= level:
            return a + (b - a) * (level - low) / (high - low)
    return points[-1][0] if points[-1][1] >= level else math.inf
