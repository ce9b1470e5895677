"""How losses and corrections relate to each other, and to the policy gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from golden_tokens import CURRENT, NO_CAP, golden, loss_and_gradient, objective_of, tokens_of

from dora.app.loss_check import LENGTHS, random_tokens
from dora.objectives.tokens import log_ratio

SEEDS = range(5)


def assert_same(one, other, tokens, *, value=True):
    (value_1, gradient_1), (value_2, gradient_2) = (loss_and_gradient(o, tokens) for o in (one, other))
    torch.testing.assert_close(gradient_1, gradient_2, rtol=0, atol=1e-14)
    if value:
        assert value_1 == pytest.approx(value_2, abs=1e-14)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "m2po_per_sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_bypass_is_decoupled_where_the_proximal_policy_is_the_behavior_policy(kind, seed):
    tokens = random_tokens(seed)
    tokens = replace(tokens, proximal_P=tokens.behavior_P)
    one, other = (objective_of(loss={"kind": kind, "ratio": ratio}) for ratio in ("bypass", "decoupled"))
    assert_same(one, other, tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_that_are_not_truncated_are_the_decoupled_loss(seed):
    tokens = random_tokens(seed)
    rho_P = (tokens.proximal_P - tokens.behavior_P).exp()
    plain = objective_of(weight="none")(tokens).loss_P
    torch.testing.assert_close(objective_of(weight_high=NO_CAP)(tokens).loss_P, rho_P * plain, rtol=1e-14, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_with_an_infinite_band_is_no_mask(level, seed):
    assert_same(objective_of(mis=level, mis_low=0, mis_high=NO_CAP), objective_of(), random_tokens(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_icepop_is_a_token_mask_of_the_weighted_surrogate_that_keeps_the_denominator(seed):
    tokens = random_tokens(seed)
    icepop, masked = (
        objective(tokens)
        for objective in (
            objective_of(weight="icepop", weight_low=0.9, weight_high=1.1),
            objective_of(weight_high=NO_CAP, mis="token", mis_low=0.9, mis_high=1.1),
        )
    )
    torch.testing.assert_close(icepop.loss_P, masked.loss_P, rtol=0, atol=1e-14)
    assert torch.equal(icepop.marks["masked_token"], masked.marks["masked_token"])
    assert float(icepop.sums["denominator"]) == len(tokens.current_P) > float(masked.sums["denominator"])


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_of_sequences_of_one_token_is_ppo(seed):
    tokens = random_tokens(seed)
    count = len(tokens.current_P)
    ones = torch.ones(count, dtype=torch.int64)
    tokens = replace(tokens, sequence_P=torch.arange(count), lengths_n=ones, siblings_n=ones, staleness_n=ones)
    band = {"clip_low": 0.1, "clip_high": 0.2}
    one, other = (
        objective_of(loss={"kind": kind, **band}, aggregation="seq_mean_token_mean", weight="none")
        for kind in ("gspo", "ppo")
    )
    assert_same(one, other, tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_has_the_value_and_the_gradient_of_one_clipped_ratio_per_sequence(seed):
    """The mean over sequences of -min(s A, clip(s) A), where the tokens of a sequence have one advantage."""
    tokens = random_tokens(seed)
    value, gradient = loss_and_gradient(
        objective_of(loss={"kind": "gspo", "clip_low": 0.05, "clip_high": 0.1}, weight="none"), tokens
    )
    leaf = tokens.current_P.detach().requires_grad_()
    has_tokens_n = tokens.lengths_n > 0
    ratio_n = tokens.mean_by_sequence(log_ratio(leaf, tokens.proximal_P)).exp()[has_tokens_n]
    advantage_n = tokens.mean_by_sequence(tokens.advantage_P)[has_tokens_n]
    loss = -(ratio_n * advantage_n).minimum(ratio_n.clamp(0.95, 1.1) * advantage_n).mean()
    (expected,) = torch.autograd.grad(loss, leaf)
    assert value == pytest.approx(loss.item(), abs=1e-14)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_has_the_gradient_of_ppo_within_its_band(seed):
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    one, other = (objective_of(loss={"kind": kind, **wide}) for kind in ("cispo", "ppo"))
    assert_same(one, other, random_tokens(seed), value=False)


def test_with_one_update_per_step_the_gradient_is_the_weighted_reinforce_gradient():
    tokens = replace(random_tokens(0), proximal_P=None, progress=0.0)
    weighted = objective_of(loss={"kind": "reinforce"}, on="k", weight_high=1.2)
    assert_same(objective_of(weight_high=1.2), weighted, tokens, value=False)


def test_sequence_weights_that_are_not_truncated_are_unbiased():
    """Two steps of three actions each, sampled by a stale policy: all nine sequences, weighed by their probability."""
    torch.manual_seed(0)
    current = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)  # state: start, or the first action
    stale = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(3, 3, dtype=torch.float64)
    actions = list(product(range(3), repeat=2))
    log_pi = current.log_softmax(-1)
    exact = sum((log_pi[0, a] + log_pi[1 + a, b]).exp() * reward[a, b] for a, b in actions)
    (expected,) = torch.autograd.grad(-exact, current, retain_graph=True)
    behavior_P = torch.stack([x for a, b in actions for x in (stale[0, a], stale[1 + a, b])])
    current_P = torch.stack([x for a, b in actions for x in (log_pi[0, a], log_pi[1 + a, b])])
    advantage_P = torch.stack([reward[a, b] for a, b in actions for _ in range(2)])
    tokens = tokens_of(current_P, advantage=advantage_P, lengths=[2] * 9, behavior_P=behavior_P)

    def gradient_with(cap):
        objective = objective_of(loss={"kind": "reinforce"}, weight="tis_sequence", weight_high=cap)
        loss_n = tokens.sum_by_sequence(objective(tokens).loss_P)
        probability_n = tokens.sum_by_sequence(behavior_P).exp()
        return torch.autograd.grad((loss_n * probability_n).sum(), current, retain_graph=True)[0]

    torch.testing.assert_close(gradient_with(NO_CAP), expected, rtol=0, atol=1e-10)
    assert (gradient_with(1.0) - expected).abs().max() > 1e-2


def test_the_weighted_k3_has_the_gradient_of_the_divergence_whoever_sampled():
    """One token of four, sampled by a stale policy: all four, weighed by their probability."""
    current = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log().requires_grad_()
    stale_P, reference_P = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    current_P = current.log_softmax(-1)
    exact = (current_P.exp() * (current_P - reference_P)).sum()
    tokens = tokens_of(current_P, advantage=0.0, lengths=[1] * 4, behavior_P=stale_P, reference_P=reference_P)

    def expected_with(estimator):
        loss_P = objective_of(kl_coefficient=1.0, kl_estimator=estimator)(tokens).loss_P
        return (loss_P * stale_P.exp()).sum()

    (gradient,) = torch.autograd.grad(exact, current, retain_graph=True)
    weighted = expected_with("k3_weighted")
    torch.testing.assert_close(weighted, exact, rtol=0, atol=1e-10)
    (found,) = torch.autograd.grad(weighted, current, retain_graph=True)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-10)
    for biased in ("k1", "k2", "k3"):
        (found,) = torch.autograd.grad(expected_with(biased), current, retain_graph=True)
        assert (found - gradient).abs().max() > 1e-2, biased


@pytest.mark.parametrize(("staleness", "progress", "alpha"), [(3, 0.0, 1), (0, 0.5, 0), (0, 0.0, 1), (1, 0.5, 2 / 3)])
def test_the_approximate_proximal_policy_is_between_the_behavior_and_the_current_policy(staleness, progress, alpha):
    tokens = tokens_of(CURRENT, advantage=1.2, staleness_n=torch.tensor([staleness]), progress=progress)
    found = objective_of(proximal="approximate")._proximal(tokens)
    torch.testing.assert_close(found, tokens.behavior_P + alpha * (CURRENT - tokens.behavior_P), rtol=0, atol=1e-15)
    assert not found.requires_grad


def test_the_approximation_gives_way_to_the_exact_proximal_policy():
    assert golden(objective_of(proximal="approximate"), 1.2)[0] == golden(objective_of(), 1.2)[0]


def test_random_tokens_reach_both_sides_of_the_clips():
    marks = [objective_of()(random_tokens(seed)).marks for seed in SEEDS]
    assert any(mark["clip_low"].any() for mark in marks)
    assert any(mark["clip_high"].any() for mark in marks)
    assert len(marks[0]["clip_low"]) == sum(LENGTHS)
