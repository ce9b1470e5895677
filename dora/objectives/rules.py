"""Rules that span the keys of `[objective]`: what is illegal, and what would have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dora.objectives.loss_settings import LossSettings, RatioLoss
from dora.objectives.objective import uses_proximal
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.tokens import MAX_LOG_RATIO
from dora.section import Section

#: Losses whose weight contains k = π/μ already.
_OWN_WEIGHT = {"dppo_tv", "ipo"}


def problems(objective: ObjectiveConfig, *, updates: int, group_size: int) -> Iterator[str]:
    """Yield one line for each problem. A key has no effect only if its value is not the default or the preset's."""
    base = ObjectiveConfig.model_validate({"preset": objective.preset, "loss": {"kind": objective.loss.kind}})
    if group_size < 2:
        yield (
            f"rollout.group_size: {group_size} answer per prompt has no siblings to be compared with, but advantage "
            f"'{objective.advantage}' is group-relative; use at least 2"
        )
    yield from _loss_problems(objective, base, updates=updates)
    yield from _turn_problems(objective)
    yield from _weight_problems(objective, base)
    yield from _mask_problems(objective, base)
    yield from _other_problems(objective, base, updates=updates)


def _changed(section: Section, base: Section, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(section, name) != getattr(base, name)]


def _options(loss: LossSettings) -> list[str]:
    return [name for name in type(loss).model_fields if name not in ("kind", "ratio")]


def _loss_problems(objective: ObjectiveConfig, base: ObjectiveConfig, *, updates: int) -> Iterator[str]:
    loss = objective.loss
    if updates == 1 and isinstance(loss, RatioLoss) and loss.ratio == "decoupled":
        for name in _changed(loss, base.loss, _options(loss)):
            yield (
                f"objective.loss.{name}: has no effect: with one update per step (trainer.updates = 1) the policy "
                "ratio is always 1 and is never clipped; remove the key, or set objective.loss.ratio = bypass"
            )


def _turn_problems(objective: ObjectiveConfig) -> Iterator[str]:
    if objective.turn_rewards == "sum":
        return
    if objective.opsm is not None:
        yield (
            "objective.opsm: rejects sequences by the sign of their advantage, which differs between turns with "
            "objective.turn_rewards = reward_to_go; unset one of them"
        )


def _weight_problems(objective: ObjectiveConfig, base: ObjectiveConfig) -> Iterator[str]:
    loss = objective.loss
    if objective.weight != "none" and loss.kind in _OWN_WEIGHT:
        yield f"objective.weight: {loss.kind} contains k = π/μ, which a weight would count twice; use none"
    elif objective.weight != "none" and loss.anchor == "behavior" and objective.on == "rho":
        yield (
            f"objective.weight: {objective.weight} on rho corrects for what the ratio of objective.loss.ratio = bypass "
            "contains; use none, or objective.on = k"
        )
    if objective.weight == "none" and objective.normalized:
        yield "objective.normalized: has no effect without a weight; set objective.weight or remove the key"
    for name in _changed(objective, base, ["weight_low", "weight_high"]) if objective.weight == "none" else ():
        yield f"objective.{name}: has no effect with objective.weight = none; remove the key"


def _mask_problems(objective: ObjectiveConfig, base: ObjectiveConfig) -> Iterator[str]:
    if objective.mis == "none":
        for name in _changed(objective, base, ["mis_low", "mis_high"]):
            yield f"objective.{name}: has no effect with objective.mis = none; remove the key"
    if 0 < objective.veto <= math.exp(-MAX_LOG_RATIO):
        yield (
            f"objective.veto: log ratios are cut to ± {MAX_LOG_RATIO:g}, so none is below {objective.veto:g}; "
            "raise it, or set it to 0"
        )
    corrects = objective.weight != "none" or objective.mis != "none" or objective.veto > 0 or objective.vcpo
    if not corrects and _changed(objective, base, ["on"]):
        yield "objective.on: has no effect without objective.weight, mis, veto or vcpo; remove the key"


def _other_problems(objective: ObjectiveConfig, base: ObjectiveConfig, *, updates: int) -> Iterator[str]:
    if objective.proximal == "approximate" and updates == 1:
        yield (
            "objective.proximal: has no effect: with one update per step (trainer.updates = 1) π_o is the policy being "
            "trained; remove the key"
        )
    elif objective.proximal == "approximate" and not uses_proximal(objective):
        yield f"objective.proximal: has no effect: {objective.loss.kind} as configured does not use π_o; remove the key"
    if not objective.kl_coefficient:
        for name in _changed(objective, base, ["kl_reference", "kl_revision", "kl_estimator"]):
            yield f"objective.{name}: has no effect with objective.kl_coefficient = 0; remove the key"
    elif objective.kl_revision and not objective.kl_reference:
        yield "objective.kl_revision: has no effect without objective.kl_reference; remove the key"
