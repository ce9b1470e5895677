"""PPO against values computed by hand, and identities that it satisfies."""

from __future__ import annotations

import math

import pytest
import torch

from dora.objectives.objective import Objective
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.tokens import Tokens

BEHAVIOR = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
PROXIMAL = torch.tensor([-0.9, -2.3, -0.5], dtype=torch.float64)
CURRENT = torch.tensor([-0.7, -2.2, -0.9], dtype=torch.float64)
NO_CAP = 1e30


def tokens_of(current, *, advantage, proximal=None, behavior=BEHAVIOR):
    """One sequence of the given tokens."""
    return Tokens(
        current_P=current,
        proximal_P=proximal,
        behavior_P=behavior,
        advantage_P=torch.full_like(current.detach(), advantage),
        sequence_P=torch.zeros(len(current), dtype=torch.int64),
        lengths_n=torch.tensor([len(current)]),
        siblings_n=torch.tensor([8]),
        staleness_n=torch.tensor([1]),
    )


def decoupled(tis_cap):
    """PPO with this cap: a function of its tokens that returns the loss of each."""
    objective = Objective(ObjectiveConfig(tis_cap=tis_cap), longest=100)
    return lambda tokens: objective(tokens).loss_P


def loss_and_gradient(loss, advantage, *, current=CURRENT, proximal=PROXIMAL, behavior=BEHAVIOR):
    leaf = current.clone().requires_grad_()
    value = loss(tokens_of(leaf, advantage=advantage, proximal=proximal, behavior=behavior)).sum()
    value.backward()
    return value.item() / 3, leaf.grad


@pytest.mark.parametrize(
    ("loss", "advantage", "value", "gradient"),
    [
        (decoupled(NO_CAP), 1.2, -1.135564, [-0.53994, -0.32749, -0.26813]),
        (decoupled(NO_CAP), -1.2, 1.187436, [0.53994, 0.32749, 0]),
        (decoupled(1.05), 1.2, -1.108609, [-0.51299, -0.32749, -0.26813]),
        (decoupled(1.05), -1.2, 1.160481, [0.51299, 0.32749, 0]),
    ],
)
def test_golden_losses_and_gradients(loss, advantage, value, gradient):
    got, slope = loss_and_gradient(loss, advantage)
    assert got == pytest.approx(value, abs=1e-6)
    # The table's gradient is that of the mean over three tokens.
    torch.testing.assert_close(slope / 3, torch.tensor(gradient, dtype=torch.float64), atol=1e-5, rtol=0)


def test_with_one_update_per_step_the_gradient_is_the_weighted_reinforce_gradient():
    _, gradient = loss_and_gradient(decoupled(1.2), 0.7, proximal=None)
    weight = (CURRENT - BEHAVIOR).exp().clamp(max=1.2)
    torch.testing.assert_close(gradient, -0.7 * weight)


@pytest.mark.parametrize("loss", [decoupled(NO_CAP), decoupled(2.0)])
def test_on_policy_every_loss_is_reinforce(loss):
    _, gradient = loss_and_gradient(loss, 1.5, proximal=CURRENT, behavior=CURRENT)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1.5))


@pytest.mark.parametrize("loss", [decoupled(NO_CAP), decoupled(2.0)])
def test_a_huge_log_ratio_stays_finite(loss):
    for shift in (-500.0, 500.0):
        value, gradient = loss_and_gradient(loss, -1.0, behavior=BEHAVIOR + shift)
        assert math.isfinite(value)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("advantage", [0.9, -0.9])
@pytest.mark.parametrize("loss", [decoupled(NO_CAP), decoupled(1.05)])
def test_gradients_equal_finite_differences_away_from_kinks(loss, advantage):
    leaf = CURRENT.clone().requires_grad_()
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: loss(tokens_of(x, advantage=advantage, proximal=PROXIMAL)) * weight, leaf)
