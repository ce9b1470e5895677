"""Sampling noise as a function of (seed, position), and the tokens drawn with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dora.embedded.sampling import SamplingTensors, sample, uniform


def settings(
    seeds: list[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 1000,
    min_p: float = 0.0,
    greedy: bool = False,
    filtered: bool = False,
) -> SamplingTensors:
    rows = len(seeds)
    return SamplingTensors(
        temperature_B1=torch.full((rows, 1), temperature),
        greedy_B=torch.full((rows,), greedy),
        top_p_B1=torch.full((rows, 1), top_p),
        top_k_B1=torch.full((rows, 1), top_k),
        min_p_B1=torch.full((rows, 1), min_p),
        seed_B=torch.tensor(seeds),
        any_greedy=greedy,
        any_filter=filtered,
    )


def drawn(logits: Tensor, count: int, *, seed: int = 7, **given: float) -> Tensor:
    """Tokens sampled from one distribution at `count` positions."""
    tokens, _ = sample(logits.expand(count, -1), settings([seed] * count, **given), torch.arange(count))
    return tokens


def test_the_noise_stream_never_changes() -> None:
    seeds, positions = torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 1, 2, 100_000])
    expected = [
        0.28176129772258207,
        0.36818951565166813,
        0.7408050620013817,
        0.7633512117192645,
    ]  # from the formula in exact integers
    assert uniform(seeds, positions).tolist() == expected


def test_noise_is_uniform_and_differs_between_neighboring_seeds_and_positions() -> None:
    count = 20_000
    by_position = uniform(torch.full((count,), 3), torch.arange(count))
    by_seed = uniform(torch.arange(count), torch.full((count,), 3))
    for noise in (by_position, by_seed):
        assert noise.min() >= 0
        assert noise.max() < 1
        share = torch.histc(noise.float(), bins=20, min=0, max=1) / count
        assert (share - 0.05).abs().max() < 0.01
        lagged = torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]
        assert abs(lagged) < 0.03


def test_tokens_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])
    for temperature in (0.5, 1.0, 2.0):
        tokens = drawn(logits, 40_000, temperature=temperature)
        share = torch.bincount(tokens, minlength=5) / 40_000
        assert (share - (logits / temperature).softmax(0)).abs().max() < 0.01


def test_a_row_samples_the_same_in_every_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6)
    together, _ = sample(logits, settings([1, 2, 3, 4, 5, 6]), positions)
    with_filters, _ = sample(logits, settings([1, 2, 3, 4, 5, 6], filtered=True), positions)
    alone = [int(sample(logits[i : i + 1], settings([i + 1]), positions[i : i + 1])[0]) for i in range(6)]
    assert together.tolist() == alone == with_filters.tolist()


def test_logprobs_are_those_of_the_tempered_softmax_without_renormalization_over_a_filter() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    _, logprob = sample(logits, settings([1], temperature=0.5, top_k=1, filtered=True), torch.tensor([0]))
    assert float(logprob) == pytest.approx(float((logits / 0.5).log_softmax(1)[0, 0]), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.7}, {1, 3}),
        ({"min_p": 0.3}, {1, 3}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.1}, {1, 2, 3}),
    ],
)
def test_a_filter_keeps_exactly_the_expected_tokens(given: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([0.05, 0.25, 0.1, 0.6]).log()
    assert set(drawn(logits, 4000, filtered=True, **given).tolist()) == kept


def test_the_kept_tokens_keep_their_proportions() -> None:
    logits = torch.tensor([0.05, 0.25, 0.1, 0.6]).log()
    tokens = drawn(logits, 40_000, top_k=2, filtered=True)
    assert float((tokens == 3).float().mean()) == pytest.approx(0.6 / 0.85, abs=0.01)


def test_greedy_takes_the_maximum_and_reports_its_plain_logprob() -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0]])
    token, logprob = sample(logits, settings([1], greedy=True), torch.tensor([0]))
    assert int(token) == 1
    assert float(logprob) == pytest.approx(4 - math.log(1 + math.e**4 + math.e), abs=1e-6)
