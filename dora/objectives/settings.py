"""The section `[objective]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.objectives.losses import ppo
from dora.section import Section


class ObjectiveConfig(Section):
    """What training minimizes."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How advantages are computed. `dr_grpo`: reward minus the mean of the group. `grpo`: the same, divided by the
    standard deviation of the group. `rloo`: reward minus the mean of the other siblings."""
    loss: ppo.Ppo = ppo.Ppo()
    tis_cap: Annotated[float, Field(ge=1.0)] = 2.0
    """Cap of truncated importance sampling: the weight of a token is min(rho, tis_cap)."""
