"""All combinations of loss, aggregation and correction that a configuration may ask for."""

from __future__ import annotations

from typing import Any

from golden_tokens import NO_CAP

from dora.objectives.objective import Objective
from dora.objectives.rules import problems
from dora.objectives.settings import ObjectiveConfig

LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"kind": "ppo"},
    "ppo bypass": {"kind": "ppo", "ratio": "bypass"},
    "dual clip": {"kind": "ppo", "dual_clip": 1.1},
    "gspo": {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "gspo bypass": {"kind": "gspo", "ratio": "bypass", "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.1},
    "cispo bypass": {"kind": "cispo", "ratio": "bypass"},
    "dppo_tv": {"kind": "dppo_tv", "threshold": 0.02},
    "ipo": {"kind": "ipo", "threshold": 0.02},
    "reinforce": {"kind": "reinforce"},
    "m2po_per_sequence": {"kind": "m2po_per_sequence", "threshold": 0.01},
}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "longcat")
CORRECTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"weight": "none"},
    "tis": {"weight": "tis", "weight_high": 1.1, "weight_low": 0.9},
    "tis on k": {"weight": "tis", "on": "k", "weight_high": NO_CAP},
    "tis sequence": {"weight": "tis_sequence", "weight_high": 1.2},
    "tis geometric": {"weight": "tis_geometric", "weight_high": 1.02},
    "normalized": {"weight": "tis", "normalized": True},
    "normalized sequence": {"weight": "tis_sequence", "normalized": True},
    "icepop": {"weight": "icepop", "weight_low": 0.9, "weight_high": 1.1},
    "mis": {"mis": "token", "mis_low": 0.9, "mis_high": 1.1},
    "mis sequence": {"mis": "sequence", "mis_low": 0.7, "mis_high": 1.1},
    "mis geometric": {"mis": "geometric", "mis_low": 0.99, "mis_high": 1.02},
    "veto": {"veto": 0.85},
    "opsm": {"opsm": 0.0},
    "vcpo": {"vcpo": True},
    "everything": {"mis": "token", "mis_low": 0.8, "mis_high": 1.3, "veto": 0.7, "opsm": 0.1, "vcpo": True}
    | {"kl_coefficient": 0.3, "kl_estimator": "k3_weighted", "entropy_coefficient": 0.1},
}


def settings_of(loss: str, aggregation: str, correction: str) -> ObjectiveConfig | None:
    """The settings, or None if they are refused."""
    given = {"loss": LOSSES[loss], "aggregation": aggregation, **CORRECTIONS[correction]}
    settings = ObjectiveConfig.model_validate(given)
    return None if list(problems(settings, updates=4, group_size=8)) else settings


def objectives() -> list[tuple[str, Objective]]:
    """Name and objective of every combination that is not refused."""
    found = []
    for loss in LOSSES:
        for aggregation in AGGREGATIONS:
            for correction in CORRECTIONS:
                if (settings := settings_of(loss, aggregation, correction)) is not None:
                    found.append((f"{loss}, {aggregation}, {correction}", Objective(settings, longest=9)))
    return found
