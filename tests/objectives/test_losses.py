"""Every loss against values computed by hand: three tokens, with the gradient of their mean."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cases import LOSSES as CASES
from golden_tokens import BEHAVIOR, CURRENT, NO_CAP, golden, objective_of, tokens_of

from dora.objectives import losses
from dora.objectives.losses.m2po_per_sequence import within_second_moment
from dora.objectives.losses.ppo import Ppo, loss
from dora.objectives.table import LOSSES
from dora.objectives.tokens import Tokens

PPO = {"kind": "ppo", "clip_high": 0.28}
BYPASS = {**PPO, "ratio": "bypass"}
TRAP = {"loss": PPO, "weight": "none"}  # r alone: ignores staleness
DECOUPLED = {"loss": PPO, "weight_high": NO_CAP}
MIS = {**TRAP, "mis": "token", "mis_low": 0.8, "mis_high": 1.2}
ICEPOP = {"loss": PPO, "weight": "icepop", "weight_low": 0.8, "weight_high": 1.2}
GSPO = {"loss": {"kind": "gspo"}, "weight": "none"}
CISPO = {"loss": {"kind": "cispo"}, "weight": "none"}
AIPO = {"loss": {"kind": "cispo", "ratio": "bypass", "clip_high": 0.2}}  # min(k, 1.2)
DPPO = {"loss": {"kind": "dppo_tv", "threshold": 0.15}}

# (settings, A, loss, gradient)
GOLDEN = [
    ({"loss": BYPASS}, 1.2, -1.10762, [0, -0.32749, -0.26813]),
    ({"loss": BYPASS}, -1.2, 1.187436, [0.53994, 0.32749, 0]),
    (TRAP, 1.2, -1.198757, [-0.48856, -0.44207, -0.26813]),
    (TRAP, -1.2, 1.250629, [0.48856, 0.44207, 0]),
    (DECOUPLED, 1.2, -1.135564, [-0.53994, -0.32749, -0.26813]),
    (DECOUPLED, -1.2, 1.187436, [0.53994, 0.32749, 0]),
    ({"loss": PPO, "weight_high": 1.05}, 1.2, -1.108609, [-0.51299, -0.32749, -0.26813]),
    ({"loss": PPO, "weight_high": 1.05}, -1.2, 1.160481, [0.51299, 0.32749, 0]),
    (MIS, 1.2, -1.135034, [-0.73284, 0, -0.40219]),
    (MIS, -1.2, 1.212842, [0.73284, 0, 0]),
    (ICEPOP, 1.2, -0.808072, [-0.53994, 0, -0.26813]),
    (ICEPOP, -1.2, 0.859944, [0.53994, 0, 0]),
    (GSPO, 1.2, -1.160659, [-0.38689] * 3),
    (GSPO, -1.2, 1.19964, [0.0] * 3),
    (CISPO, 1.2, 1.555858, [-0.48856, -0.44207, -0.26813]),
    (CISPO, -1.2, -1.555858, [0.48856, 0.44207, 0.26813]),
    (AIPO, 1.2, 1.297798, [-0.48, -0.32749, -0.26813]),
    (AIPO, -1.2, -1.297798, [0.48, 0.32749, 0.26813]),
    (DPPO, 1.2, -1.135467, [-0.53974, -0.32763, -0.26839]),
    (DPPO, -1.2, 0.867532, [0.54014, 0.32736, -0.00027]),
]


@pytest.mark.parametrize(("settings", "advantage", "value", "gradient"), GOLDEN)
def test_golden_losses_and_gradients(settings, advantage, value, gradient):
    got, slope = golden(objective_of(**settings), advantage)
    assert got == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(slope, torch.tensor(gradient, dtype=torch.float64), atol=6e-6, rtol=0)


@pytest.mark.parametrize(("advantage", "dropped"), [(1.2, 0), (-1.2, 0)])
def test_ipo_drops_on_both_sides_where_dppo_looks_at_the_sign(advantage, dropped):
    """π - μ of the three tokens is 0.129, -0.025 and -0.200."""
    _, both = golden(objective_of(loss={"kind": "ipo", "threshold": 0.1, "pull": 0}), advantage)
    assert both[dropped] == 0
    assert both[2] == 0
    assert both[1] == pytest.approx(-advantage * math.exp(-0.2) / 3)
    _, one = golden(objective_of(loss={"kind": "dppo_tv", "threshold": 0.1, "pull": 0}), advantage)
    assert [bool(slope == 0) for slope in one] == ([True, False, False] if advantage > 0 else [False, False, True])


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [(-2.0, 2.0, 4.0, 2.0), (-2.0, 5.0, 6.0, 0.0), (2.0, 1.0, -2.0, -2.0), (2.0, 5.0, -2.4, 0.0)],
)
def test_dual_clip_limits_the_loss_where_the_advantage_is_negative(advantage, ratio, value, slope):
    leaf = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(leaf, advantage=advantage, proximal_P=torch.zeros(1, dtype=torch.float64))
    of_loss = loss(tokens, Ppo(dual_clip=3.0))
    (gradient,) = torch.autograd.grad(of_loss.loss_P.sum(), leaf)
    assert of_loss.loss_P.item() == pytest.approx(value)
    assert float(gradient) / ratio == pytest.approx(slope)  # of the ratio
    assert bool(of_loss.marks["dual_clip"]) == (slope == 0 and advantage < 0)


@pytest.mark.parametrize("c", [1.5, 3.0, 10.0])
def test_dual_clip_never_changes_a_token_with_a_positive_advantage(c):
    value, gradient = golden(objective_of(loss={"kind": "ppo", "dual_clip": c}), 1.2)
    plain, expected = golden(objective_of(), 1.2)
    assert value == plain
    assert torch.equal(gradient, expected)


def second_moments(log_ratios, lengths, *, bound=0.04):
    log_ratio_P = torch.tensor(log_ratios, dtype=torch.float64)
    tokens = tokens_of(log_ratio_P, advantage=1.0, lengths=lengths, behavior_P=torch.zeros_like(log_ratio_P))
    return within_second_moment(tokens, log_ratio_P, bound=bound)


def test_golden_second_moment_mask():
    assert second_moments([0.1, -0.2, 0.5, -0.05, 0.3], [5]).tolist() == [True, True, False, True, True]


def test_the_second_moment_is_bounded_in_each_sequence_with_the_fewest_tokens_dropped():
    torch.manual_seed(0)
    lengths = [1, 7, 3, 0, 12]
    log_ratio_P = (0.3 * torch.randn(sum(lengths), dtype=torch.float64)).tolist()
    kept = second_moments(log_ratio_P, lengths).split(lengths)
    assert 0 < sum(int(one.sum()) for one in kept) < len(log_ratio_P)
    for squares, mask in zip(torch.tensor(log_ratio_P).square().split(lengths), kept, strict=True):
        ordered = squares.sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
        assert int(mask.sum()) == int((means <= 0.04).sum())
        assert squares[mask].sum() <= 0.04 * mask.sum() + 1e-9
        if mask.any() and (~mask).any():
            assert squares[mask].max() <= squares[~mask].min()


@pytest.mark.parametrize("shift", [-500.0, 500.0])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("weight", ["none", "tis", "tis_sequence", "tis_geometric", "icepop"])
def test_a_huge_log_ratio_stays_finite(kind, weight, shift):
    value, gradient = golden(objective_of(loss={"kind": kind}, weight=weight), -1.0, behavior_P=BEHAVIOR + shift)
    assert math.isfinite(value)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", LOSSES)
def test_a_pass_without_tokens_adds_nothing(kind):
    objective = objective_of(loss={"kind": kind}, mis="token", veto=1e-4, opsm=0.1, vcpo=True, normalized=True)
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    whole = torch.zeros(0, dtype=torch.int64)
    columns = {"sequence_P": whole, "lengths_n": whole, "siblings_n": whole, "staleness_n": whole}
    terms = objective(Tokens(current_P=empty, behavior_P=empty.detach(), advantage_P=empty.detach(), **columns))
    terms.loss_P.sum().backward()
    assert {name: float(total) for name, total in terms.sums.items()} == dict.fromkeys(terms.sums, 0.0)
    assert objective.divisor({name: float(total) for name, total in terms.sums.items()}) == 0
    assert objective.rate_factor({name: float(total) for name, total in terms.sums.items()}) == 1


def test_every_module_of_the_folder_is_a_loss_with_its_name():
    files = {path.stem for path in Path(losses.__path__[0]).glob("*.py")} - {"__init__"}
    assert set(LOSSES) == files
    assert {entry.settings().kind for entry in LOSSES.values()} == files
    assert files <= {case["kind"] for case in CASES.values()}, "tested with every aggregation and correction"


def test_a_missing_copy_is_found_and_the_first_update_needs_none():
    objective = objective_of()
    assert objective(tokens_of(CURRENT, advantage=1.0)).loss_P.isfinite().all()
    with pytest.raises(AssertionError, match="proximal_P is missing"):
        objective(tokens_of(CURRENT, advantage=1.0, progress=0.5))


def test_what_the_trainer_must_provide_follows_from_the_settings():
    def needs(updates=4, **settings):
        objective = objective_of(**settings)
        return objective.needs_copy(updates), objective.needs_reference, objective.needs_entropy_gradient

    assert needs() == (True, False, False)
    assert needs(updates=1) == (False, False, False)
    assert needs(proximal="approximate") == (False, False, False)
    assert needs(loss={"kind": "ppo", "ratio": "bypass"}) == (False, False, False)
    assert needs(loss={"kind": "ppo", "ratio": "bypass"}, veto=1e-4) == (True, False, False)
    assert needs(loss={"kind": "ppo", "ratio": "bypass"}, veto=1e-4, on="k") == (False, False, False)
    assert needs(loss={"kind": "reinforce"}, vcpo=True) == (False, False, False)
    assert needs(loss={"kind": "dppo_tv"}, kl_coefficient=0.1, entropy_coefficient=0.01) == (False, True, True)
