"""Rates of servers from measured times: decoding, prefill and pushes. Numbers in, numbers out.

All fits minimize relative errors, so that a short time counts as much as a long one, and no rate is below 0.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.decode_time import DecodeTime

#: A further term must lower the sum of squared errors by more than this share; less is rounding.
_GAIN: Final = 1e-6
#: ... or the sum must be above this, which is an exact fit.
_EXACT: Final = 1e-18
#: Pushes at once show what limits them together only if each takes this many times as long as alone.
SLOWED: Final = 1.25


class DecodePoint(NamedTuple):
    """A measured decoding step."""

    batch: int
    context: float  #: tokens in KV of each request, on average while it was measured
    step_s: float


class TimedPush(NamedTuple):
    """One push of a version to one server, in seconds."""

    together: int  #: number of pushes at the same time, itself included
    load_s: float  #: until the server had the bytes
    rest_s: float  #: to drain it before, and to verify it afterwards


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """A decoding model and how well it fits."""

    decode: DecodeTime
    largest_error: float  #: largest relative error of a step time, as a share

    def step_s(self, *, batch: int, context: float) -> float:
        """Return the fitted seconds of a step."""
        decode = self.decode
        return decode.base_s + decode.per_request_s * batch + decode.per_token_s * batch * context


@dataclass(frozen=True, slots=True)
class PushFit:
    """A model of pushes: `fixed_s` plus bytes over `bytes_s`, and what all pushes at the same time get."""

    fixed_s: float
    bytes_s: float
    store_bytes_s: float  #: bytes/s of all pushes together; 0: no limit was seen


def nonnegative_fit(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients x >= 0 that minimize sum(((terms @ x) / seconds - 1) ** 2).

    `terms`: one row per measurement, one column per coefficient, all at least 0. `seconds`: above 0. Every subset of
    the few terms is tried; of equally good ones, the smallest is used, so that the others are 0.
    """
    rows, count = terms.shape
    scaled = terms / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    best, best_error = np.zeros(count), float(rows)
    usable = [column for column in range(count) if norms[column] > 0]
    for size in range(1, len(usable) + 1):
        for chosen in map(list, itertools.combinations(usable, size)):
            found = np.linalg.lstsq(scaled[:, chosen] / norms[chosen], np.ones(rows), rcond=None)[0] / norms[chosen]
            error = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error * (1 - _GAIN) and best_error > _EXACT:
                best, best_error = np.zeros(count), error
                best[chosen] = found
    return best


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    """Fit step = base + per_request · batch + per_token · batch · context; ValueError without points."""
    if not points:
        raise ValueError("no decoding step was measured")
    batch, context, seconds = np.array(points, dtype=np.float64).T
    terms = np.stack([np.ones(len(points)), batch, batch * context], axis=1)
    found = nonnegative_fit(terms, seconds)
    base_s, per_request_s, per_token_s = found.tolist()
    errors = np.abs(terms @ found / seconds - 1)
    return DecodeFit(
        DecodeTime(base_s=base_s, per_request_s=per_request_s, per_token_s=per_token_s), float(errors.max())
    )


def fit_prefill(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the seconds per token, and the rest that does not depend on the length.

    `times`: (tokens of the prompt, seconds until its first token); ValueError without any.
    """
    if not times:
        raise ValueError("no prefill was measured")
    tokens, seconds = np.array(times, dtype=np.float64).T
    per_token_s, rest_s = nonnegative_fit(np.stack([tokens, np.ones(len(times))], axis=1), seconds).tolist()
    return per_token_s, rest_s


def fit_pushes(pushes: Sequence[TimedPush], *, num_bytes: int) -> PushFit:
    """Fit pushes of a version of `num_bytes`; ValueError if none was alone.

    If those at the same time took hardly longer than alone, nothing limits them together.
    """
    alone = [push for push in pushes if push.together == 1]
    if not alone:
        raise ValueError("no push was measured alone")
    load_s = median(push.load_s for push in alone)
    together = max(push.together for push in pushes)
    shared_s = median(push.load_s for push in pushes if push.together == together)
    is_limited = together > 1 and shared_s > SLOWED * load_s
    return PushFit(
        fixed_s=median(push.rest_s for push in alone),
        bytes_s=num_bytes / load_s,
        store_bytes_s=together * num_bytes / shared_s if is_limited else 0.0,
    )


@dataclass(slots=True)
class Arrivals:
    """When the tokens of one request arrived: after `times[i]` seconds, there were `totals[i]`; both ascend."""

    times: list[float]
    totals: list[int]


def steady_step(requests: Sequence[Arrivals]) -> tuple[float, float] | None:
    """Return the seconds of a decoding step while all requests ran, and the mean number of tokens that a request had.

    All ran from the last one's first token until the first one's end. None if that time has no step of some request.
    """
    if not requests or not all(request.times for request in requests):
        return None
    since = max(request.times[0] for request in requests)
    until = min(request.times[-1] for request in requests)
    spans, steps, held = [], [], []
    for request in requests:
        first, last = (bisect_right(request.times, at) - 1 for at in (since, until))
        if last <= first:
            return None
        spans.append(request.times[last] - request.times[first])
        steps.append(request.totals[last] - request.totals[first])
        held.append((request.totals[last] + request.totals[first]) / 2)
    step_s = math.fsum(spans) / sum(steps)
    return (step_s, fmean(held)) if step_s > 0 else None
