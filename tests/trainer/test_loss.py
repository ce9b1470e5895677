"""Losses and gradients against values computed by hand, and identities that the loss satisfies."""

from __future__ import annotations

import math

import pytest
import torch

from dora.trainer.loss import decoupled_ppo

BEHAVIOR = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
PROXIMAL = torch.tensor([-0.9, -2.3, -0.5], dtype=torch.float64)
CURRENT = torch.tensor([-0.7, -2.2, -0.9], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def decoupled(tis_cap):
    return lambda current, proximal, behavior, advantage: decoupled_ppo(
        current, proximal=proximal, behavior=behavior, advantage=advantage, tis_cap=tis_cap, **CLIP
    )


def loss_and_gradient(loss, advantage, *, current=CURRENT, proximal=PROXIMAL, behavior=BEHAVIOR):
    leaf = current.clone().requires_grad_()
    value = loss(leaf, proximal, behavior, torch.full_like(leaf, advantage)).sum()
    value.backward()
    return value.item() / 3, leaf.grad


@pytest.mark.parametrize(
    ("loss", "advantage", "value", "gradient"),
    [
        (decoupled(math.inf), 1.2, -1.135564, [-0.53994, -0.32749, -0.26813]),
        (decoupled(math.inf), -1.2, 1.187436, [0.53994, 0.32749, 0]),
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
    leaf = CURRENT.clone().requires_grad_()
    loss = decoupled(1.2)(leaf, leaf.detach(), BEHAVIOR, torch.full_like(leaf, 0.7))
    loss.sum().backward()
    weight = (CURRENT - BEHAVIOR).exp().clamp(max=1.2)
    torch.testing.assert_close(leaf.grad, -0.7 * weight)


@pytest.mark.parametrize("loss", [decoupled(math.inf), decoupled(2.0)])
def test_on_policy_every_loss_is_reinforce(loss):
    _, gradient = loss_and_gradient(loss, 1.5, proximal=CURRENT, behavior=CURRENT)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1.5))


@pytest.mark.parametrize("loss", [decoupled(math.inf), decoupled(2.0)])
def test_a_huge_log_ratio_stays_finite(loss):
    for shift in (-500.0, 500.0):
        value, gradient = loss_and_gradient(loss, -1.0, behavior=BEHAVIOR + shift)
        assert math.isfinite(value)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("advantage", [0.9, -0.9])
@pytest.mark.parametrize("loss", [decoupled(math.inf), decoupled(1.05)])
def test_gradients_equal_finite_differences_away_from_kinks(loss, advantage):
    leaf = CURRENT.clone().requires_grad_()
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: loss(x, PROXIMAL, BEHAVIOR, torch.full_like(x, advantage)) * weight, leaf)
