"""Weights, masks and the terms beside the policy loss, against values computed by hand.

Of the three tokens, log ρ is .1, -.3, 0 (product .818731, geometric mean .935507), and log k is .3, -.2, -.4.
"""

from __future__ import annotations

import math

import pytest
import torch
from golden_tokens import BEHAVIOR, CURRENT, NO_CAP, PROXIMAL, golden, objective_of, tokens_of

RHO = (PROXIMAL - BEHAVIOR).exp()
REINFORCE = {"loss": {"kind": "reinforce"}, "on": "rho"}


def terms(advantage=1.2, lengths=None, **settings):
    return objective_of(**settings)(tokens_of(CURRENT, advantage=advantage, lengths=lengths, proximal_P=PROXIMAL))


def weights(**settings):
    """The weight of each token: that of -A log π."""
    return terms(**REINFORCE | settings).loss_P / (-1.2 * CURRENT)


def expect(got, wanted):
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"weight": "none"}, [1, 1, 1]),
        ({"weight": "tis", "weight_high": NO_CAP}, [1.105171, 0.740818, 1]),
        ({"weight": "tis", "weight_high": 1.05}, [1.05, 0.740818, 1]),
        ({"weight": "tis", "weight_high": 1.05, "weight_low": 0.9}, [1.05, 0.9, 1]),
        ({"weight": "tis", "weight_high": NO_CAP, "on": "k"}, [1.349859, 0.818731, 0.670320]),
        ({"weight": "tis_sequence"}, [0.818731] * 3),
        ({"weight": "tis_geometric"}, [0.935507] * 3),
        ({"weight": "icepop", "weight_low": 0.8, "weight_high": 1.2}, [1.105171, 0, 1]),
    ],
)
def test_golden_weights(settings, wanted):
    expect(weights(**settings), wanted)


def test_a_weight_never_changes_the_denominator():
    for weight in ("none", "tis", "tis_sequence", "tis_geometric", "icepop"):
        assert float(terms(weight=weight, weight_low=1.0, weight_high=1.0).sums["denominator"]) == 3


@pytest.mark.parametrize(("weight", "mean"), [("tis", float(RHO.mean())), ("tis_sequence", 0.909365)])
def test_normalized_weights_are_divided_by_their_mean(weight, mean):
    """Of the tokens or, where they share a weight, of the sequences [.1, -.3] and [0]: (e^-.2 + 1) / 2 is 0.909365."""
    settings = {"weight": weight, "weight_high": NO_CAP}
    plain, normalized = (
        golden(objective_of(**settings, normalized=on), 1.2, lengths=[2, 1])[1] for on in (False, True)
    )
    torch.testing.assert_close(normalized, plain / mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("settings", "kept", "marks"),
    [
        ({"mis": "token", "mis_low": 0.8, "mis_high": 1.2}, [1, 0, 1], {"masked_token": 1 / 3}),
        ({"mis": "token", "mis_low": 0.8, "mis_high": 1.05}, [0, 0, 1], {"masked_token": 2 / 3}),
        ({"mis": "sequence", "mis_low": 0.81, "mis_high": 1.0}, [1, 1, 1], {"masked_seq": 0, "masked_token": 0}),
        (
            {"mis": "sequence", "mis_low": 0.82, "mis_high": 1.0},
            [0, 0, 1],
            {"masked_seq": 2 / 3, "masked_token": 2 / 3},
        ),
        ({"mis": "geometric", "mis_low": 0.91, "mis_high": 1.0}, [0, 0, 1], {"masked_seq": 2 / 3}),
        ({"mis": "geometric", "mis_low": 0.9, "mis_high": 1.0}, [1, 1, 1], {"masked_seq": 0}),
        ({"veto": 0.74}, [1, 1, 1], {"veto": 0}),
        ({"veto": 0.75}, [0, 0, 1], {"veto": 2 / 3, "masked_seq": 2 / 3}),
        ({"opsm": 0.39}, [1, 1, 0], {"masked_seq": 1 / 3}),
        ({"opsm": 0.41}, [1, 1, 1], {"masked_seq": 0}),
        ({"mis": "token", "mis_low": 0.8, "opsm": 0.39}, [1, 0, 0], {"masked_seq": 1 / 3, "masked_token": 2 / 3}),
    ],
)
def test_golden_masks_of_the_sequences_of_two_and_one_tokens(settings, kept, marks):
    """The sequences have products e^-.2 = .818731 and 1, and geometric means .904837 and 1; A < 0."""
    found = terms(advantage=-1.2, lengths=[2, 1], **settings)
    assert (found.loss_P != 0).tolist() == [bool(keep) for keep in kept]
    for name, fraction in marks.items():
        assert float(found.marks[name].double().mean()) == pytest.approx(fraction), name
    assert float(found.sums["denominator"]) == sum(kept)


def test_opsm_is_for_negative_advantages_only():
    """The mean of log μ - log π over the three tokens is .1."""
    assert not terms(advantage=-1.2, opsm=0.0999).loss_P.any()
    assert terms(advantage=-1.2, opsm=0.1001).loss_P.all()
    assert terms(advantage=1.2, opsm=0.0).loss_P.all()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "longcat"])
def test_rejected_tokens_leave_the_denominator(aggregation):
    """The first sequence keeps one of two tokens, the second is rejected."""
    found = terms(
        advantage=-1.2, lengths=[2, 1], aggregation=aggregation, weight="none", mis="token", mis_low=0.8, opsm=0.39
    )
    loss = found.loss_P.sum() / found.sums["denominator"]
    kept = 1.2 * math.exp(0.2)
    assert float(loss) == pytest.approx(kept / {"token_mean": 1, "seq_mean_token_mean": 1}.get(aggregation, 8))


@pytest.mark.parametrize("normalized", [False, True])
def test_if_all_is_rejected_the_loss_is_zero(normalized):
    objective = objective_of(mis="token", mis_low=1.0, mis_high=1.0, veto=0.999, normalized=normalized)
    value, gradient = golden(objective, 1.2)
    assert value == 0
    assert torch.equal(gradient, torch.zeros(3, dtype=torch.float64))


def test_the_rate_follows_the_effective_sample_size_of_the_sequences():
    found = terms(lengths=[2, 1], vcpo=True, weight="none")
    a, b = math.exp(-0.2), 1.0
    sums = {name: float(total) for name, total in found.sums.items()}
    assert objective_of(vcpo=True).rate_factor(sums) == pytest.approx((a + b) / math.sqrt(2 * (a * a + b * b)))
    assert objective_of().rate_factor(sums) == 1


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"kl_estimator": "k1"}, [0.3, -0.2, -0.4]),
        ({"kl_estimator": "k2"}, [0.045, 0.02, 0.08]),
        ({"kl_estimator": "k3"}, [0.040818, 0.021403, 0.091825]),
        ({"kl_estimator": "k3_weighted"}, [0.040818 * 1.349859, 0.021403 * 0.818731, 0.091825 * 0.670320]),
    ],
)
def test_golden_divergences(settings, value):
    """The reference is μ: d = log reference - log π is -.3, .2, .4."""
    objective = objective_of(kl_coefficient=0.5, **settings)
    tokens = tokens_of(CURRENT, advantage=0.0, proximal_P=PROXIMAL, reference_P=BEHAVIOR)
    found = objective(tokens)
    expect(found.loss_P, [0.5 * x for x in value])
    expect(found.marks["kl_reference"], [0.040818, 0.021403, 0.091825])


def test_a_divergence_that_has_no_coefficient_is_measured_but_not_minimized():
    found = objective_of()(tokens_of(CURRENT, advantage=1.0, reference_P=BEHAVIOR))
    assert torch.equal(found.loss_P, objective_of()(tokens_of(CURRENT, advantage=1.0)).loss_P)
    expect(found.marks["kl_reference"], [0.040818, 0.021403, 0.091825])


def test_the_entropy_is_maximized():
    entropy_P = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(CURRENT, advantage=0.0, entropy_P=entropy_P)
    objective_of(entropy_coefficient=0.1)(tokens).loss_P.sum().backward()
    expect(entropy_P.grad, [-0.1] * 3)


def test_a_rejected_token_has_neither_divergence_nor_entropy():
    found = objective_of(mis="token", mis_low=0.8, kl_coefficient=1.0, entropy_coefficient=1.0)(
        tokens_of(CURRENT, advantage=1.0, proximal_P=PROXIMAL, reference_P=BEHAVIOR, entropy_P=torch.ones(3))
    )
    assert (found.loss_P != 0).tolist() == [True, False, True]
