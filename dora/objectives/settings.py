"""The section `[objective]` of the configuration. Rules that span its keys are in `dora/objectives/rules.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from dora.objectives.loss_settings import LossSettings
from dora.objectives.losses.ppo import Ppo
from dora.objectives.presets import PRESETS
from dora.objectives.table import PolicyLoss, settings_type
from dora.section import Section

Advantage = Literal["grpo", "dr_grpo", "rloo", "maxrl"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "longcat"]
Truncated = Literal["train", "mask", "fail"]
Level = Literal["none", "token", "sequence", "geometric"]
#: Names of advantages that a user may look for -> the reason why DORA does not have them.
_REFUSED = {
    "reinforce_pp": "whitens advantages over the whole batch, which is never complete when a group is trained; "
    "objective.advantage: use grpo or rloo",
    "gae": "needs the values of a critic, which DORA does not train; objective.advantage: use grpo or rloo",
}


def _refuse(name: Any) -> Any:
    if isinstance(name, str) and name in _REFUSED:
        raise ValueError(f"'{name}' {_REFUSED[name]}")
    return name


class ObjectiveConfig(Section):
    """What training minimizes. docs/OBJECTIVES.md has the formulas and papers, and what each preset sets."""

    preset: Literal["none", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "dppo", "reinforce", "longcat"] = "none"
    """A known algorithm: defaults for the other keys of this section; keys that are given take precedence."""
    advantage: Annotated[Advantage, BeforeValidator(_refuse)] = "dr_grpo"
    """How advantages are computed. `dr_grpo`: reward minus the mean of the group. `grpo`: the same, divided by the
    standard deviation of the group. `rloo`: reward minus the mean of the other siblings. `maxrl`: reward minus the mean
    of the group, divided by that mean; rewards must not be negative."""
    aggregation: Aggregation = "seq_mean_token_sum_norm"
    """How tokens are averaged. `token_mean`: over all tokens of the update, so that long answers weigh more.
    `seq_mean_token_mean`: over the tokens of each sequence, then over sequences. `seq_mean_token_sum_norm`: the sum of
    each sequence divided by rollout.max_new_tokens, then the mean over sequences. `longcat`: the sum of each group
    divided by its size and rollout.max_new_tokens, then the mean over groups. With `gspo`, the default is
    `seq_mean_token_mean`."""
    turn_rewards: Literal["sum", "reward_to_go"] = "sum"
    """How the rewards of an episode with several turns are used. `sum`: all tokens of the episode have the same
    advantage, computed from the sum of its rewards. `reward_to_go`: the tokens of turn t have an advantage computed
    from the sum of the rewards of turn t and all later turns. It is compared with the same sum of each sibling; a
    sibling with fewer turns counts with the reward of its last turn."""
    truncated: Truncated = "train"
    """How answers are used that a budget ended: the token budget, environment.max_turns or
    environment.episode_timeout_s. `train`: like any other answer. `mask`: they count in the statistics of their group,
    but none of their tokens is trained. `fail`: they get no reward, and their siblings are trained without them."""
    loss: PolicyLoss = Ppo()
    """The policy loss."""
    weight: Literal["none", "tis", "tis_sequence", "tis_geometric", "icepop"] = "tis"
    """Weight of each token that corrects for the difference between π_o or π and the policy μ that sampled the token;
    the key `on` chooses the ratio from which it is made. `tis`: the ratio of the token. `tis_sequence`: the product of
    the ratios of its sequence. `tis_geometric`: their geometric mean. These three are clipped to `weight_low` ...
    `weight_high`. `icepop`: the ratio of the token, or 0 if it is outside `weight_low` ... `weight_high`. The default
    is `tis_geometric` with `gspo`, and `none` if the loss is over k = π/μ."""
    weight_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Smallest weight. Unset: 0, or 0.5 for `icepop`."""
    weight_high: float | None = Field(default=None, ge=1.0)
    """Largest weight. Unset: 2, or 5 for `icepop`. 1e9 or more truncates nothing."""
    on: Literal["rho", "k"] = "rho"
    """The ratio from which `weight`, `mis` and `veto` are made. `rho`: π_o/μ, which contains the effects of staleness
    and of the engine. `k`: π/μ, which also contains the updates of this step; it is the default with `dppo_tv`, `ipo`
    and `reinforce`."""
    normalized: bool = False
    """Divide the weights by their mean over the update."""
    mis: Level = "none"
    """Rejects tokens or whole sequences whose ratio is outside `mis_low` ... `mis_high`: the ratio of the token, the
    product of the ratios of the sequence, or their geometric mean (whose band is narrow, such as 0.999 ... 1.001)."""
    mis_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Smallest ratio that `mis` keeps."""
    mis_high: Annotated[float, Field(ge=1.0)] = 2.0
    """Largest ratio that `mis` keeps."""
    veto: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Rejects a sequence if the ratio of any of its tokens is below this, such as 1e-4; 0 is off."""
    opsm: float | None = Field(default=None, ge=0.0)
    """Rejects a sequence with A < 0 if the mean of log μ - log π over its tokens is above this. Unset: off."""
    vcpo: bool = False
    """Multiply the learning rate of an update by the square root of its effective sample size, (Σ w)² / (B Σ w²). B is
    the number of its sequences, and w is the product of the ratios of a sequence (the key `on` chooses the ratio)."""
    router_replay: Literal["off", "r3"] = "off"
    """Mixture-of-experts models: which experts the trainer sends each token to. `off`: those that it chooses itself.
    `r3`: those that the engine chose when it sampled the token (R3, arXiv 2510.11370); the router's scores are the
    trainer's, so the router is still trained."""
    proximal: Literal["copy", "approximate"] = "copy"
    """How π_o, the policy at the start of the step, is computed in updates after the first. `copy`: a copy of its
    weights is kept. `approximate`: log π_o is interpolated between log μ and log π by their versions (A-3PO)."""
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the divergence from the reference policy."""
    kl_reference: str = ""
    """The reference policy, given as `model.path` is, and of the same architecture. Empty: version 0."""
    kl_revision: str = ""
    """Branch, tag or commit of `kl_reference`, as `model.revision` is of `model.path`."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """Per token, with d = log reference - log π: `k1`: -d; `k2`: d²/2; `k3`: e^d - d - 1; `k3_weighted`: `k3` times
    k = π/μ, whose gradient is on average that of KL(π, reference), also off-policy."""
    entropy_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the entropy of softmax(logits / temperature), which is maximized."""

    @property
    def weight_band(self) -> tuple[float, float]:
        """The smallest and the largest weight."""
        low, high = (0.5, 5.0) if self.weight == "icepop" else (0.0, 2.0)
        return (
            low if self.weight_low is None else self.weight_low,
            high if self.weight_high is None else self.weight_high,
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Add what the preset says, and what follows from the loss."""
        if not isinstance(given, dict):
            return given
        name = given.get("preset")
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        filled = {**preset, **given, "loss": _loss_table(given.get("loss", {}), preset.get("loss", {"kind": "ppo"}))}
        loss = filled["loss"]
        kind = settings_type(loss)
        options = loss.model_dump() if isinstance(loss, LossSettings) else loss
        return {**(kind.implied(options) if kind is not None else {}), **filled}


def _loss_table(given: Any, base: dict[str, Any]) -> Any:
    """Return the given options of a loss, over those of the preset if they are for the same loss."""
    if not isinstance(given, dict) or given.get("kind", base["kind"]) != base["kind"]:
        return given
    return {**base, **given}


assert set(get_args(ObjectiveConfig.model_fields["preset"].annotation)) == {"none", *PRESETS}
