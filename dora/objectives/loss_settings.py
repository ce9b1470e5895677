"""What the settings of all policy losses have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from dora.objectives.tokens import Tokens, log_ratio
from dora.section import Section

if TYPE_CHECKING:
    from torch import Tensor

#: The policy to which a loss compares π: π_o, μ, or none.
Anchor = Literal["proximal", "behavior", "none"]
#: Defaults of other keys of `[objective]` for some kinds of loss. Losses over k = π/μ have no weight, because k
#: contains ρ.
UNWEIGHTED: Final = {"weight": "none"}
UNWEIGHTED_ON_K: Final = {"weight": "none", "on": "k"}
ON_K: Final = {"on": "k"}
OF_SEQUENCES: Final = {"aggregation": "seq_mean_token_mean", "weight": "tis_geometric"}


class LossSettings(Section):
    """A policy loss and its options."""

    #: Other keys of `[objective]` whose defaults differ with this loss.
    IMPLIED: ClassVar[Mapping[str, str]] = {}
    #: The loss of a token depends on other tokens of its sequence.
    IS_OF_SEQUENCES: ClassVar[bool] = False
    #: Healthy runs clip most tokens too, so that clipping is not a sign of drift.
    CLIPS_MANY: ClassVar[bool] = False

    kind: str

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the defaults of other keys of `[objective]` if the loss has the given options."""
        return cls.IMPLIED

    @property
    def anchor(self) -> Anchor:
        """The policy to which the loss compares π."""
        return "none"


class RatioLoss(LossSettings):
    """A loss over a ratio that may be r = π/π_o or k = π/μ."""

    ratio: Literal["decoupled", "bypass"] = "decoupled"
    """`decoupled`: the loss is over r = π/π_o, and `objective.weight` corrects for staleness separately. `bypass`: the
    loss is over k = π/μ, which includes staleness; `objective.weight` is then `none` unless it is given."""

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the defaults of other keys; with `bypass` they have no weight."""
        ratio = given.get("ratio", cls.model_fields["ratio"].default)
        return {**cls.IMPLIED, **UNWEIGHTED} if ratio == "bypass" else cls.IMPLIED

    @property
    def anchor(self) -> Anchor:
        """π_o or μ."""
        return "behavior" if self.ratio == "bypass" else "proximal"

    def log_ratio(self, tokens: Tokens) -> Tensor:
        """Return [P] log r or log k, with gradient."""
        anchor_P = tokens.behavior_P if self.ratio == "bypass" else tokens.proximal_P
        assert anchor_P is not None
        return log_ratio(tokens.current_P, anchor_P.detach())
