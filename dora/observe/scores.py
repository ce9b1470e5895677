"""The scores of versions on held-out sets: the rows of kind `evaluation`, and what is shown of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dora.core.ids import VersionId
from dora.observe.figures import Figure, figures


@dataclass(frozen=True, slots=True)
class SetScore:
    """The score of a version on one set."""

    name: Annotated[str, Figure("text", "the held-out set")]
    #: None if nothing was graded
    mean: Annotated[float | None, Figure("reward", "mean@n: over all its answers", "heldout_mean")]
    #: as far as prompts have k graded samples
    pass_at: Annotated[dict[int, float], Figure("fraction", "pass@k for k = 1, 2, 4, ... n (arXiv 2107.03374)")]
    num_samples: Annotated[int, Figure("answers", "that were graded")]
    num_failed: Annotated[int, Figure("answers", "left out, as their generation, grading or environment failed")]
    mean_tokens: Annotated[float, Figure("tokens", "length of an answer, with observations, mean")]
    max_tokens: Annotated[int, Figure("tokens", "the same, maximum")]
    median_tokens: Annotated[int, Figure("tokens", "the same, median")]
    is_accuracy: Annotated[bool, Figure("true/false", "every reward was 0 or 1: the mean is a share of right answers")]

    @property
    def pass_at_n(self) -> float | None:
        """Share of prompts with at least one sample of reward >= 1; None if nothing was graded."""
        return self.pass_at[max(self.pass_at)] if self.pass_at else None


#: What a row has besides its score.
HEAD = {
    "at": Figure("s", "time since the run began"),
    "version": Figure("", "the policy version evaluated", "heldout_version"),
}
#: What is computed from a score.
PASS_AT_N = Figure("fraction", "prompts with at least one right answer of n")


def row_figures() -> dict[str, Figure]:
    """Return the figures of a row of kind `evaluation`."""
    return {**HEAD, **figures(SetScore), "pass_at_n": PASS_AT_N}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one version on one held-out set."""

    name: str  #: of the set
    version: VersionId
    mean: float | None  #: mean@n; None if nothing was graded
    pass_at_n: float | None
    num_samples: int  #: graded
    num_failed: int = 0  #: left out, as their generation, grading or environment failed
    is_accuracy: bool = False  #: every reward is 0 or 1, so that the mean is a share of right answers
