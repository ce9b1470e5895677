"""The fits of measured servers: exact on times of their own model, close on noisy ones, and sound on poor ones."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dora.core.decode_time import DecodeTime
from dora.sim.fitting import (
    Arrivals,
    DecodePoint,
    PushFit,
    TimedPush,
    fit_decode,
    fit_prefill,
    fit_pushes,
    nonnegative_fit,
    steady_step,
)

BATCHES = (1, 2, 4, 8, 16, 24)
CONTEXTS = (100.0, 3_000.0)


def curve(decode: DecodeTime, *, noise: float = 0.0, seed: int = 0) -> list[DecodePoint]:
    draw = random.Random(seed)
    return [
        DecodePoint(b, c, decode.step_s(num_requests=b, num_tokens=int(b * c)) * (1 + draw.uniform(-noise, noise)))
        for c, b in itertools.product(CONTEXTS, BATCHES)
    ]


@pytest.mark.parametrize(
    "decode",
    [
        DecodeTime(base_s=8e-3, per_request_s=4e-5, per_token_s=5.6e-8),
        DecodeTime(base_s=4e-3, per_request_s=0.0, per_token_s=8e-7),
        DecodeTime(base_s=0.0, per_request_s=3e-4, per_token_s=0.0),
        DecodeTime(base_s=5e-3, per_request_s=0.0, per_token_s=0.0),
    ],
)
def test_the_times_of_a_model_give_that_model(decode: DecodeTime) -> None:
    fit = fit_decode(curve(decode))
    assert fit.largest_error < 1e-9
    for name in DecodeTime.__struct_fields__:
        assert getattr(fit.decode, name) == pytest.approx(getattr(decode, name), rel=1e-6, abs=1e-15), name
    assert fit.step_s(batch=3, context=50.0) == pytest.approx(decode.step_s(num_requests=3, num_tokens=150))


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_some_percent_is_an_error_of_some_percent(seed: int) -> None:
    decode = DecodeTime(base_s=8e-3, per_request_s=4e-5, per_token_s=5.6e-8)
    fit = fit_decode(curve(decode, noise=0.05, seed=seed))
    assert fit.largest_error < 0.1
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        true_s = decode.step_s(num_requests=batch, num_tokens=int(batch * context))
        assert fit.step_s(batch=batch, context=context) == pytest.approx(true_s, rel=0.05)


def test_no_rate_is_below_zero_where_larger_batches_are_faster() -> None:
    fit = fit_decode([DecodePoint(1, 10.0, 4e-3), DecodePoint(8, 10.0, 3e-3), DecodePoint(8, 500.0, 3.1e-3)])
    assert min(fit.decode.base_s, fit.decode.per_request_s, fit.decode.per_token_s) >= 0
    assert fit.decode.base_s == pytest.approx(3.5e-3, rel=0.1)


def test_of_terms_that_cannot_be_told_apart_the_fewest_are_used() -> None:
    assert fit_decode([DecodePoint(4, 100.0, 2e-3)]).decode == DecodeTime(
        base_s=pytest.approx(2e-3), per_request_s=0.0, per_token_s=0.0
    )
    alike = fit_decode([DecodePoint(b, 100.0, 1e-3 + 1e-4 * b) for b in BATCHES])
    assert alike.largest_error < 1e-9
    assert sum(x > 0 for x in (alike.decode.per_request_s, alike.decode.per_token_s)) == 1


def test_short_times_count_as_much_as_long_ones() -> None:
    [found] = nonnegative_fit(np.array([[1.0], [1.0]]), np.array([1.0, 3.0]))
    # minimizes (x - 1)^2 + (x / 3 - 1)^2; the least squares of the times themselves would be 2
    assert found == pytest.approx(1.2)


def test_without_measurements_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="no decoding step"):
        fit_decode([])
    with pytest.raises(ValueError, match="no prefill"):
        fit_prefill([])
    with pytest.raises(ValueError, match="no push was measured alone"):
        fit_pushes([TimedPush(4, 1.0, 0.1)], num_bytes=8)


def test_a_prefill_is_a_rate_and_a_rest() -> None:
    assert fit_prefill([(16, 0.0516), (2_000, 0.25)]) == (pytest.approx(1e-4), pytest.approx(0.05))
    assert fit_prefill([(16, 0.02), (2_000, 0.01)])[0] == 0.0  # a longer prompt that was faster: only noise


def test_pushes_that_slow_each_other_share_what_they_get_together() -> None:
    alone = [TimedPush(1, 2.0, 0.5), TimedPush(1, 2.2, 0.4), TimedPush(1, 1.8, 0.6)]
    assert fit_pushes(alone, num_bytes=10**10) == PushFit(0.5, 5e9, 0.0)
    unhindered = [*alone, *[TimedPush(4, 2.1, 0.5)] * 4]
    assert fit_pushes(unhindered, num_bytes=10**10) == PushFit(0.5, 5e9, 0.0)
    crowded = [*alone, *[TimedPush(4, 5.0, 0.7)] * 4]
    assert fit_pushes(crowded, num_bytes=10**10) == PushFit(0.5, 5e9, 8e9)


def test_a_step_is_measured_while_all_requests_run() -> None:
    first = Arrivals([1.0, 1.1, 1.2, 1.3], [1, 11, 21, 31])
    late = Arrivals([1.1, 1.2, 1.3, 1.4], [1, 11, 21, 31])
    # from 1.1, the late one's first token, to 1.3, the first one's end: 20 tokens of each
    step_s, held = steady_step([first, late]) or (0.0, 0.0)
    assert step_s == pytest.approx(0.01)
    assert held == pytest.approx((21 + 11) / 2)


def test_a_batch_that_never_runs_together_has_no_step() -> None:
    assert steady_step([]) is None
    assert steady_step([Arrivals([], [])]) is None
    assert steady_step([Arrivals([1.0], [5])]) is None
    assert steady_step([Arrivals([1.0, 2.0], [1, 2]), Arrivals([3.0, 4.0], [1, 2])]) is None
    assert steady_step([Arrivals([1.0, 1.0], [1, 2])]) is None  # no time has passed
