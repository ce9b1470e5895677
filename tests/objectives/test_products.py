"""What holds for every loss with every aggregation and correction: gradients, streaming, and the on-policy identity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import AGGREGATIONS, CORRECTIONS, LOSSES, objectives
from golden_tokens import loss_and_gradient, objective_of

from dora.app.loss_check import LENGTHS, gradient_error, part_of, random_tokens
from dora.objectives.objective import SUMS, Objective
from dora.objectives.tokens import TokenLoss, Tokens

OBJECTIVES = objectives()
#: Passes into which the three sequences of a draw are cut.
SPLITS = ([[0, 1, 2]], [[2], [1], [0]], [[0], [], [2, 1]])


def test_most_combinations_are_legal():
    names = {name.split(", ")[0] for name, _ in OBJECTIVES}
    assert names == set(LOSSES)
    assert {name.split(", ")[1] for name, _ in OBJECTIVES} == set(AGGREGATIONS)
    assert {name.split(", ")[2] for name, _ in OBJECTIVES} == set(CORRECTIONS)
    assert len(OBJECTIVES) > 400


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_equal_finite_differences_away_from_kinks(seed):
    tokens = random_tokens(seed)
    directions_dP = torch.randn(2, sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for name, objective in OBJECTIVES:
        error = gradient_error(
            lambda tokens, objective=objective: TokenLoss(objective(tokens).loss_P), tokens, directions_dP=directions_dP
        )
        assert error < 1e-7, name


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_weighted"])
def test_the_gradient_of_each_divergence_equals_finite_differences(estimator):
    objective = objective_of(kl_coefficient=0.7, kl_estimator=estimator)
    assert gradient_error(lambda tokens: TokenLoss(objective(tokens).loss_P), random_tokens(3)) < 1e-7


def streamed(objective: Objective, tokens: Tokens, passes: list[list[int]]):
    """Σ l / D, its gradient, and the factor of the rate, from passes over parts of the tokens."""
    totals = dict.fromkeys(SUMS, 0.0)
    loss, gradient_P = 0.0, torch.zeros_like(tokens.current_P)
    for sequences in passes:
        if sequences:
            part = part_of(tokens, sequences)
            at_P = torch.cat([(tokens.sequence_P == sequence).nonzero()[:, 0] for sequence in sequences])
        else:
            at_P = torch.zeros(0, dtype=torch.int64)
            part = empty(tokens)
        leaf = part.current_P.detach().requires_grad_()
        terms = objective(replace(part, current_P=leaf))
        (slope,) = torch.autograd.grad(terms.loss_P.sum(), leaf)
        gradient_P[at_P] += slope
        loss += float(terms.loss_P.detach().sum())
        totals = {name: totals[name] + float(terms.sums[name]) for name in SUMS}
    divisor = objective.divisor(totals)
    scale = 1 / divisor if divisor else 0.0
    return torch.cat([gradient_P * scale, torch.tensor([loss * scale, divisor, objective.rate_factor(totals)])])


def empty(tokens: Tokens) -> Tokens:
    """No sequence, and no token."""
    whole = torch.zeros(0, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.float64)
    return Tokens(
        current_P=none, behavior_P=none, advantage_P=none, sequence_P=whole, lengths_n=whole, siblings_n=whole,
        staleness_n=whole, progress=tokens.progress, proximal_P=none, reference_P=none, entropy_P=none,
    )  # fmt: skip


def test_every_split_and_order_of_passes_gives_the_same_loss_and_gradient():
    tokens = random_tokens(0)
    for name, objective in OBJECTIVES:
        whole = streamed(objective, tokens, SPLITS[0])
        assert whole.isfinite().all(), name
        for passes in SPLITS[1:]:
            found = streamed(objective, tokens, passes)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_a_sequence_may_come_without_trained_tokens_in_any_pass():
    tokens = random_tokens(0)
    longer = replace(
        tokens,
        lengths_n=torch.tensor([*LENGTHS, 0]),
        siblings_n=torch.full((4,), 4),
        staleness_n=torch.zeros(4, dtype=torch.int64),
    )
    for name, objective in OBJECTIVES:
        found = [loss_and_gradient(objective, one) for one in (tokens, longer)]
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-14), name
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-14)


def test_on_policy_every_loss_has_the_reinforce_gradient_no_mask_and_weights_of_one():
    tokens = random_tokens(1)
    here = tokens.current_P.detach()
    tokens = replace(tokens, behavior_P=here, proximal_P=here, reference_P=here)
    for name, objective in OBJECTIVES:
        plain = objective_of(loss={"kind": "reinforce"}, weight="none", aggregation=objective.settings.aggregation)
        plain._longest = objective._longest
        _, expected = loss_and_gradient(plain, tokens)
        _, gradient = loss_and_gradient(objective, tokens)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14, msg=name)
        terms = objective(tokens)
        for mark, marked_P in terms.marks.items():
            assert not marked_P.any(), f"{name}: {mark}"
        sums = {total: float(terms.sums[total]) for total in SUMS}
        assert objective.rate_factor(sums) == pytest.approx(1.0)
        assert objective.divisor(sums) == pytest.approx(sums["denominator"])
