"""Facts about a run that the decision core does not have: rewards, tokens, evaluations, lags, addresses.

Invariant: plain data; times are seconds since the run began, as in events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from dora.core.ids import InstanceId, StepId, VersionId
from dora.status.drift import Alarm
from dora.status.durations import Durations
from dora.status.episodes import EpisodeStats

#: Failure reason of a group whose prompt is over the limit; such groups are counted by this reason.
SKIPPED = "the prompt is longer than task.max_prompt_tokens"
#: Failure reason of a group whose environment could not begin.
NOT_BEGUN = "the environment gave no prompt"
#: Number of steps to keep.
RECENT_STEPS = 100
#: Number of problems to show; there could otherwise be one for every answer.
MAX_PROBLEMS = 20
#: Number of event-loop lags to keep for the quantiles: two minutes, at ten per second.
RECENT_LAGS = 1200
#: Span over which generated tokens per second are measured, seconds.
RATE_SPAN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One trained step."""

    step: StepId
    reward_mean: float  #: over the trajectories trained
    num_groups: int
    num_tokens: int  #: response tokens trained
    staleness_mean: float  #: over its groups
    duration_s: float  #: since the previous step was trained
    idle_s: float  #: the part of `duration_s` in which the trainer had nothing to do
    waited_for: str  #: what the trainer last waited for (`snapshot.trainer_waits_for`); "" if it never did
    reward_all_mean: float | None = None  #: over all answers of the groups graded since the last step; None without one
    all_right: float | None = None  #: share of these groups whose rewards are all 1
    all_wrong: float | None = None  #: share of these groups whose rewards are all 0
    all_same: float | None = None  #: share whose rewards are all the same number, other than 0 and 1
    mixed: float | None = None  #: share of these groups whose rewards differ
    response_len_mean: float | None = None  #: tokens of a trained answer; None without one
    response_len_p90: float | None = None  #: nine of ten are at most as long
    response_len_max: float | None = None
    episodes: EpisodeStats | None = None  #: None without an environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one version on one held-out set."""

    name: str  #: of the set
    version: VersionId
    mean: float | None  #: mean@n; None if nothing was graded
    pass_at_n: float | None
    num_samples: int  #: graded
    num_failed: int = 0  #: left out, as their grading or environment failed
    is_accuracy: bool = False  #: every reward is 0 or 1, so that the mean is a share of right answers


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Sampled tokens since the start of the run, without those of observations."""

    sampled: int = 0  #: for training; the sum of the next three
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  #: by "outcome: reason"
    in_flight: int = 0  #: of groups that are neither trained nor dropped
    evaluation: int = 0  #: sampled for evaluation; in none of the other counts


class Rate:
    """The rate at which a total grows, over the last RATE_SPAN_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, total: int, *, at: float) -> None:
        """Record the total; call about once per second."""
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


@dataclass(frozen=True, slots=True)
class Down:
    """A server that is not up."""

    since: float
    reason: str  #: "" until it has come up or failed to for the first time
    then: str  #: what is done about it


@dataclass(slots=True, kw_only=True)
class ShellFacts:
    """The facts about one run."""

    run_id: str
    strategy: str
    task: str = ""  #: what the prompts ask for; "" if the configuration does not say so
    has_environment: bool = False
    num_servers: int = 0  #: servers of the configuration
    num_ranks: int = 0  #: ranks of the trainer
    ranks_ready: int = 0  #: ranks that have loaded the model
    held_out: tuple[str, ...] = ()  #: names of the held-out sets
    phase: Literal["starting", "running", "finished", "interrupted", "failed"] = "starting"
    reason: str = ""  #: why it ended
    num_tokens: int = 0  #: sampled since the start, evaluation included
    num_trained_tokens: int = 0  #: response tokens trained since the start
    tokens: Rate = field(default_factory=Rate)  #: of num_tokens
    account: TokenAccount = TokenAccount()
    rank_s: dict[str, float] = field(default_factory=dict)  #: seconds of all ranks by activity, as far as reported
    instance_s: dict[str, float] = field(default_factory=dict)  #: seconds of all instances by activity
    starting: set[InstanceId] = field(default_factory=set)  #: instances of an earlier controller, not up again yet
    steps: deque[StepFacts] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    rewards: list[float] = field(default_factory=list)  #: `reward_all_mean` of every step that has one
    later_s: float = 0.0  #: duration of all steps but the first, whose duration includes the start of the run
    later_idle_s: float = 0.0  #: the part of it in which the trainer had nothing to do
    trainer_metrics: dict[str, float] = field(default_factory=dict)  #: of the last step
    durations: Durations = field(default_factory=Durations)
    scores: list[Score] = field(default_factory=list)  #: in the order of evaluation
    problems: list[str] = field(default_factory=list)  #: distinct ones, as they came up
    alarms: list[Alarm] = field(default_factory=list)  #: drift alarms, cleared ones included; the latest of each name
    urls: dict[InstanceId, str] = field(default_factory=dict)  #: of the instances that are up
    down: dict[InstanceId, Down] = field(default_factory=dict)  #: the instances that are not up
    lags_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LAGS))  #: event-loop lag, latest samples
    max_lag_s: float = 0.0  #: since the start

    def note_step(self, step: StepFacts) -> None:
        """Add the next trained step."""
        self.steps.append(step)
        if step.reward_all_mean is not None:
            self.rewards.append(step.reward_all_mean)
        if step.step:
            self.later_s += step.duration_s
            self.later_idle_s += step.idle_s

    def note_problem(self, text: str) -> bool:
        """Record a problem that does not stop the run; return False if it is already known or there are too many."""
        if text in self.problems or len(self.problems) > MAX_PROBLEMS:
            return False
        is_last = len(self.problems) == MAX_PROBLEMS
        self.problems.append("more problems: they are in the journal" if is_last else text)
        return True

    def note_lag(self, lag_s: float) -> None:
        """Record one measurement of the event loop's lag."""
        self.lags_s.append(lag_s)
        self.max_lag_s = max(self.max_lag_s, lag_s)
