"""The denominator: sequences of tokens [2, 6] and [1, 1, 1, 5], and a constant length of 8."""

from __future__ import annotations

import pytest
import torch
from golden_tokens import objective_of, tokens_of

from dora.objectives.aggregation import aggregate

LOSSES = torch.tensor([2.0, 6, 1, 1, 1, 5], dtype=torch.float64)
KINDS = {"token_mean": 2.6667, "seq_mean_token_mean": 3.0, "seq_mean_token_sum_norm": 1.0, "longcat": 1.0}


def mean_of(kind, *, lengths=(2, 4), siblings=(2, 2), losses=LOSSES):
    tokens = tokens_of(losses, advantage=1.0, lengths=list(lengths), siblings_n=torch.tensor(siblings))
    factor, denominator = aggregate(tokens, tokens.lengths_n, kind=kind, longest=8)
    return float((losses * factor).sum() / denominator)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_means(kind):
    assert mean_of(kind) == pytest.approx(KINDS[kind], abs=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_tokens_changes_nothing(kind):
    assert mean_of(kind, lengths=(2, 0, 4), siblings=(2, 2, 2)) == pytest.approx(mean_of(kind))


def test_longcat_is_the_mean_over_groups_of_the_sum_over_siblings():
    """A group of one sequence [2, 6] and one of two, [1, 1] and [1, 5]: (8/8 + 8/(2 · 8)) / 2."""
    assert mean_of("longcat", lengths=(2, 2, 2), siblings=(1, 2, 2)) == pytest.approx(0.75)


def test_the_constant_length_is_the_token_budget():
    tokens = tokens_of(torch.zeros(3, dtype=torch.float64), advantage=1.0, behavior_P=torch.zeros(3))
    objective = objective_of(aggregation="seq_mean_token_sum_norm")
    assert float(objective(tokens).loss_P.sum()) == pytest.approx(-3 / 8)
