"""The metrics of a step, against values worked out by hand; one process plays all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from dora.objectives.objective import SUMS, Terms
from dora.objectives.tokens import Tokens
from dora.trainer.metrics import LAGGED, MEASURED, METRICS, StepSums


@pytest.fixture(autouse=True)
def _single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step_sums(*, max_staleness: int) -> StepSums:
    return StepSums(max_staleness=max_staleness, device=torch.device("cpu"))


def tokens_of(log_ratio_P: torch.Tensor, *, staleness: int = 0) -> Tokens:
    """One sequence with these log k and behavior log-probs of -1."""
    behavior_P = torch.full_like(log_ratio_P, -1.0)
    return Tokens(
        current_P=behavior_P + log_ratio_P,
        behavior_P=behavior_P,
        advantage_P=torch.ones_like(log_ratio_P),
        sequence_P=torch.zeros(len(log_ratio_P), dtype=torch.long),
        lengths_n=torch.tensor([len(log_ratio_P)]),
        siblings_n=torch.tensor([2]),
        staleness_n=torch.tensor([staleness]),
        entropy_P=torch.ones_like(log_ratio_P),
    )


def terms_of(tokens: Tokens, **marks: torch.Tensor) -> Terms:
    count = torch.tensor(float(len(tokens.current_P)), dtype=torch.float64)
    return Terms(loss_P=torch.zeros_like(tokens.current_P), sums=dict.fromkeys(SUMS, count), marks=marks)


def test_golden_metrics():
    """Three tokens, against values worked out by hand; the ratio is k."""
    sums = step_sums(max_staleness=1)
    tokens = Tokens(
        current_P=torch.tensor([-0.7, -2.2, -0.9]),
        behavior_P=torch.tensor([-1.0, -2.0, -0.5]),
        advantage_P=torch.tensor([1.0, 2.0, 3.0]),
        sequence_P=torch.tensor([0, 0, 1]),
        lengths_n=torch.tensor([2, 1]),
        siblings_n=torch.tensor([2, 2]),
        staleness_n=torch.tensor([1, 1]),
        entropy_P=torch.ones(3),
    )
    terms = Terms(
        loss_P=torch.tensor([1.0, torch.nan, 1.0]),
        sums=dict.fromkeys(SUMS, torch.tensor(3.0, dtype=torch.float64)),
        marks={"tis_capped": torch.tensor([True, False, False]), "clip_low": torch.tensor([True, True, False])},
    )
    sums.add_tokens(tokens, terms)
    sums.add_trajectories(lag=torch.tensor([1, 0]), reward=torch.tensor([1.0, 0.0]), truncated=torch.tensor([2, 0]))
    assert sums.reduce_update() == dict.fromkeys(SUMS, 3)
    assert sums.reduce_update() == dict.fromkeys(SUMS, 0), "the next update begins anew"
    metrics = sums.reduce().metrics(denominator=3)
    expected = {
        "mismatch_k1": 0.1, "mismatch_k3": 0.0463, "log_ratio_mean": -0.1, "log_ratio_abs_mean": 0.3,
        "log_ratio_abs_max": 0.4, "log_ratio_min": -0.4, "log_ratio_max": 0.3, "ratio_p99": math.exp(15 * 20 / 1024),
        "ess": 0.9132, "chi2": -0.0194, "ppl_ratio": 1.1052, "tis_capped_frac": 1 / 3,
        "clip_low_frac": 2 / 3, "clip_high_frac": 0, "dual_clip_frac": 0, "masked_token_frac": 0, "masked_seq_frac": 0,
        "veto_frac": 0, "entropy": 1.0, "adv_mean": 2.0,
        "adv_std": (2 / 3) ** 0.5, "tokens": 3, "sequences": 1, "reward_mean": 1.0, "response_len_mean": 3,
        "truncated_frac": 1, "truncated_tokens_frac": 0, "truncated_turns_frac": 1, "truncated_time_frac": 0,
    }  # fmt: skip
    got = {name.removeprefix("lag=1/"): value for name, value in metrics.items() if name.startswith("lag=1/")}
    assert got == pytest.approx(expected, abs=5e-5)
    assert metrics["all/sequences"] == 2
    assert metrics["all/reward_mean"] == 0.5
    assert metrics["nonfinite_count"] == 1
    assert not any(name.startswith("lag=0/") for name in metrics), "a lag without tokens is absent, not 0"


def test_the_99th_percentile_is_within_one_percent_and_the_extremes_are_exact():
    log_ratio_P = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 1.5
    sums = step_sums(max_staleness=0)
    for part in log_ratio_P.split(3_000):
        sums.add_tokens(tokens := tokens_of(part), terms_of(tokens))
    metrics = sums.reduce().metrics(denominator=1)
    behavior = torch.full_like(log_ratio_P, -1.0)
    exact = (behavior + log_ratio_P) - behavior
    assert metrics["all/ratio_p99"] == pytest.approx(float(exact.exp().quantile(0.99)), rel=0.01)
    assert metrics["lag=0/log_ratio_min"] == pytest.approx(float(exact.min()), rel=1e-6)
    assert metrics["lag=0/log_ratio_max"] == pytest.approx(float(exact.max()), rel=1e-6)


def test_on_policy_the_percentile_of_the_ratio_is_exactly_one():
    sums = step_sums(max_staleness=0)
    sums.add_tokens(tokens := tokens_of(torch.zeros(10)), terms_of(tokens))
    assert sums.reduce().metrics(denominator=1)["all/ratio_p99"] == 1.0


def test_ratios_beyond_the_clamp_and_nan_are_counted():
    sums = step_sums(max_staleness=0)
    sums.add_tokens(tokens := tokens_of(torch.tensor([99.0, -99.0, torch.nan])), terms_of(tokens))
    assert sums.reduce().metrics(denominator=1)["all/ratio_p99"] == pytest.approx(math.exp(20))


def test_a_step_without_tokens_has_every_metric_at_0():
    metrics = step_sums(max_staleness=2).reduce().metrics(denominator=0)
    assert {f"all/{name}" for name in LAGGED} <= metrics.keys() <= METRICS.keys()
    assert {name for name, value in metrics.items() if value} == {"all/ppl_ratio"}


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_not_measured_is_absent(name):
    sums, without = step_sums(max_staleness=1), step_sums(max_staleness=1)
    tokens = tokens_of(torch.zeros(4), staleness=1)
    sums.add_tokens(tokens, terms_of(tokens, **{name: torch.tensor([0.1, 0.2, 0.3, 0.4])}))
    assert sums.reduce().metrics(denominator=4)[f"lag=1/{name}"] == pytest.approx(0.25)
    without.add_tokens(tokens, terms_of(tokens))
    assert not any(key.endswith(name) for key in without.reduce().metrics(denominator=4))
