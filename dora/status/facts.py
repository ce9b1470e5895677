"""What the shell knows of a run and the decision core does not: rewards, tokens, evaluations, lags, addresses.

Invariant: plain data. The controller's observer fills it as things happen and `snapshot.py` reads it; times are seconds
on the clock of events (since the run began).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from dora.core.ids import InstanceId

#: Steps shown, and averaged for rates and the time left.
RECENT_STEPS = 20
#: Event-loop lags kept for the quantiles: two minutes at ten a second.
RECENT_LAGS = 1200
#: Span over which generated tokens per second are measured, seconds.
RATE_SPAN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One trained step."""

    step: int
    reward_mean: float  #: over the trajectories trained
    num_groups: int
    num_tokens: int  #: response tokens trained
    staleness_mean: float  #: over its groups
    duration_s: float  #: since the step before was trained
    idle_s: float  #: of it, while the trainer had nothing to do
    waited_for: str  #: what it last waited for (`snapshot.trainer_waits_for`); "" if it never did


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one version scored on one held-out set."""

    name: str  #: of the set
    version: int
    mean: float  #: mean@n
    pass_at_n: float
    num_samples: int  #: graded


class Rate:
    """Speed of a growing total over the last RATE_SPAN_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, total: int, *, at: float) -> None:
        """The total now; call about once a second."""
        self._samples.append((at, total))
        while len(self._samples) > 2 and at - self._samples[1][0] >= RATE_SPAN_S:
            self._samples.popleft()

    @property
    def per_s(self) -> float:
        """Growth per second; 0 until there are two samples."""
        if len(self._samples) < 2:
            return 0.0
        (start, before), (end, total) = self._samples[0], self._samples[-1]
        return (total - before) / (end - start) if end > start else 0.0


@dataclass(slots=True, kw_only=True)
class ShellFacts:
    """Filled by the controller's observer."""

    run_id: str
    strategy: str
    phase: Literal["starting", "running", "finished", "interrupted", "failed"] = "starting"
    reason: str = ""  #: why it ended
    num_tokens: int = 0  #: sampled since the start, evaluation included
    num_trained_tokens: int = 0  #: response tokens trained since the start
    tokens: Rate = field(default_factory=Rate)  #: of num_tokens
    steps: deque[StepFacts] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    scores: list[Score] = field(default_factory=list)  #: in the order of evaluation
    urls: dict[InstanceId, str] = field(default_factory=dict)  #: of the instances that are up
    lags_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LAGS))  #: event-loop lag, latest samples
    max_lag_s: float = 0.0  #: since the start

    def note_lag(self, lag_s: float) -> None:
        """One measurement of the event loop's lag."""
        self.lags_s.append(lag_s)
        self.max_lag_s = max(self.max_lag_s, lag_s)
