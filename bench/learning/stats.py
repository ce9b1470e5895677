"""Paired differences of runs with the same seed.

A difference is shown where it exceeds two standard errors of its mean; with five seeds that is a weaker claim than the
usual 95 % (t = 2.78), and of many comparisons some exceed it by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of paired differences and twice its standard error; NaN with fewer than two pairs."""

    mean: float
    two_errors: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Return whether it exceeds two standard errors."""
        return abs(self.mean) > self.two_errors

    def __str__(self) -> str:
        if not self.pairs:
            return "not run"
        error = "" if math.isnan(self.two_errors) else f" ± {self.two_errors:.3f}"
        return f"{self.mean:+.3f}{error}"


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> Difference:
    """Return left - right over the seeds that both have."""
    values = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
    mean = fmean(values) if values else math.nan
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Difference(mean, 2 * error, len(values))
