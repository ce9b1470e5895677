"""Corrections of off-policy tokens: weights, which leave the denominator as it is, and masks, which shrink it.

Truncated and masked importance sampling at the levels of token, sequence and geometric mean, and the veto, are those of
verl (github.com/volcengine/verl). IcePop: arXiv 2510.18855. OPSM (off-policy sequence masking): DeepSeek-V3.2, arXiv
2512.02556. None of them has a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dora.objectives.settings import ObjectiveConfig
from dora.objectives.tokens import MAX_LOG_RATIO, Tokens, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

#: `objective.weight` -> level of its ratio.
LEVELS: Final = {"tis": "token", "tis_sequence": "sequence", "tis_geometric": "geometric"}


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights and masks of the tokens of one pass, as the settings say."""

    marks: dict[str, Tensor]
    weight_P: Tensor | None = None  # None: 1
    rejected_P: Tensor | None = None  # bool; None: no token


def correct(tokens: Tokens, settings: ObjectiveConfig) -> Correction:
    """Return weights and masks; `tokens.proximal_P` must be given."""
    log_P = log_ratio_of(tokens, settings.on)
    marks: dict[str, Tensor] = {}
    weight_P = _weight(tokens, log_P, settings, marks)
    rejected_P = _rejected(tokens, log_P, settings, marks)
    if rejected_P is not None:
        marks["masked_token"] = rejected_P | marks["masked_token"] if "masked_token" in marks else rejected_P
    return Correction(marks, weight_P, rejected_P)


def log_ratio_of(tokens: Tokens, on: str) -> Tensor:
    """Return [P] log ρ or log k."""
    policy_P = tokens.current_P if on == "k" else tokens.proximal_P
    assert policy_P is not None
    return log_ratio(policy_P.detach(), tokens.behavior_P)


def sequence_ratio(tokens: Tokens, log_P: Tensor) -> Tensor:
    """Return [n] the product of the ratios of each sequence."""
    return tokens.sum_by_sequence(log_P).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_at(level: str, tokens: Tokens, log_P: Tensor) -> Tensor:
    """Return [P] the ratio of each token, or the product or geometric mean of the ratios of its sequence."""
    match level:
        case "sequence":
            return tokens.spread(sequence_ratio(tokens, log_P))
        case "geometric":
            return tokens.spread(tokens.mean_by_sequence(log_P).exp())
    return log_P.exp()


def _weight(tokens: Tokens, log_P: Tensor, settings: ObjectiveConfig, marks: dict[str, Tensor]) -> Tensor | None:
    if settings.weight == "none":
        return None
    low, high = settings.weight_band
    if settings.weight == "icepop":
        ratio_P = log_P.exp()
        marks["masked_token"] = (ratio_P < low) | (ratio_P > high)
        return ratio_P.masked_fill(marks["masked_token"], 0.0)
    ratio_P = ratio_at(LEVELS[settings.weight], tokens, log_P)
    marks["tis_capped"] = ratio_P > high
    return ratio_P.clamp(low, high)


def _rejected(tokens: Tokens, log_P: Tensor, settings: ObjectiveConfig, marks: dict[str, Tensor]) -> Tensor | None:
    """Return which tokens `mis`, `veto` and `opsm` reject together."""
    of_token: list[Tensor] = []
    of_sequence: list[Tensor] = []
    if settings.mis != "none":
        ratio_P = ratio_at(settings.mis, tokens, log_P)
        outside_P = (ratio_P < settings.mis_low) | (ratio_P > settings.mis_high)
        (of_token if settings.mis == "token" else of_sequence).append(outside_P)
    if settings.veto:
        low_P = (log_P < math.log(settings.veto)).double()
        marks["veto"] = tokens.spread(tokens.sum_by_sequence(low_P) > 0)
        of_sequence.append(marks["veto"])
    if settings.opsm is not None:
        drift_n = tokens.mean_by_sequence(-log_ratio_of(tokens, "k"))
        of_sequence.append((tokens.advantage_P < 0) & tokens.spread(drift_n > settings.opsm))
    if of_sequence:
        marks["masked_seq"] = _any(of_sequence)
        of_token.append(marks["masked_seq"])
    return _any(of_token) if of_token else None


def _any(masks: list[Tensor]) -> Tensor:
    found, *others = masks
    for other in others:
        found = found | other
    return found
