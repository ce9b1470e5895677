"""What the models that judge answers cost.

Invariant: folded from events alone, so that a resume gets the same from the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dora.core import events as ev
from dora.observe.figures import Metric


@dataclass(slots=True, kw_only=True)
class JudgeRow:
    """The judges of a run."""

    answers: Annotated[int, Metric("judged_answers_total", "Answers that judges were asked about.")] = 0
    failed: Annotated[int, Metric("judged_failed_total", "Answers that were judged, but could not be graded.")] = 0
    requests: Annotated[int, Metric("judge_requests_total", "Requests to judges, repeated ones included.")] = 0
    prompt_tokens: Annotated[int, Metric("judge_prompt_tokens_total", "Tokens that judges read, as they report.")] = 0
    sampled_tokens: Annotated[
        int, Metric("judge_sampled_tokens_total", "Tokens that judges wrote, as they report.")
    ] = 0

    @property
    def text(self) -> str:
        """The figures in one line."""
        repeated = self.requests - self.answers
        parts = [f"{self.answers:,} answers", f"{self.prompt_tokens:,} tokens read and {self.sampled_tokens:,} written"]
        parts += [f"{repeated:,} requests more than answers"] * (repeated > 0)
        return ", ".join([*parts, f"{self.failed:,} not graded"] if self.failed else parts)

    def note(self, event: ev.Event) -> None:
        """Take in an event."""
        if isinstance(event, ev.TrajectoryGraded) and event.judged is not None:
            self.answers += 1
            self.failed += event.reward is None
            self.requests += event.judged.requests
            self.prompt_tokens += event.judged.prompt_tokens
            self.sampled_tokens += event.judged.sampled_tokens
