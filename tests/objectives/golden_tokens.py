"""Tokens whose losses were computed by hand, and how a loss and its gradient are read."""

from __future__ import annotations

from typing import Any

import torch

from dora.objectives.objective import Objective
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.tokens import Tokens

BEHAVIOR = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
PROXIMAL = torch.tensor([-0.9, -2.3, -0.5], dtype=torch.float64)
CURRENT = torch.tensor([-0.7, -2.2, -0.9], dtype=torch.float64)
#: Truncates nothing: log-ratios are clamped to 20.
NO_CAP = 1e30


def tokens_of(current, *, advantage, lengths=None, **changes: Any) -> Tokens:
    """Sequences of the given lengths; by default all tokens in one, under BEHAVIOR."""
    lengths_n = torch.tensor(lengths or [len(current)])
    advantage_P = torch.as_tensor(advantage, dtype=current.dtype).expand(len(current))
    columns = {
        "behavior_P": BEHAVIOR,
        "sequence_P": torch.arange(len(lengths_n)).repeat_interleave(lengths_n),
        "siblings_n": torch.full_like(lengths_n, 8),
        "staleness_n": torch.ones_like(lengths_n),
    }
    return Tokens(current_P=current, advantage_P=advantage_P, lengths_n=lengths_n, **columns | changes)


def objective_of(**settings: Any) -> Objective:
    """Return an objective that averages over tokens, unless the settings or the loss say otherwise."""
    averages = {} if settings.get("loss", {}).get("kind") == "gspo" else {"aggregation": "token_mean"}
    return Objective(ObjectiveConfig.model_validate(averages | settings), longest=8)


def loss_and_gradient(objective: Objective, tokens: Tokens) -> tuple[float, torch.Tensor]:
    """Return Σ l / D of one pass, and its gradient with respect to `current_P`."""
    terms = objective(tokens)
    divisor = objective.divisor({name: float(total) for name, total in terms.sums.items()})
    (gradient,) = torch.autograd.grad(terms.loss_P.sum() / (divisor or 1.0), tokens.current_P)
    return float(terms.loss_P.detach().sum()) / (divisor or 1.0), gradient


def golden(objective: Objective, advantage: float, **changes: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the three tokens."""
    leaf = CURRENT.clone().requires_grad_()
    return loss_and_gradient(objective, tokens_of(leaf, advantage=advantage, **{"proximal_P": PROXIMAL} | changes))
