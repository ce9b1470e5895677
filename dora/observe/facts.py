"""Facts about a run that the decision core does not have: rewards, tokens, evaluations, lags, addresses.

Invariant: plain data; times are seconds since the run began, as in events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from dora.core.ids import InstanceId
from dora.errors import kind_of
from dora.observe.drift import Alarm
from dora.observe.durations import Durations
from dora.observe.judges import JudgeRow
from dora.observe.load import Acceptance, LoopLag, Rate
from dora.observe.requests import RequestRow
from dora.observe.scores import Score
from dora.observe.steps import StepFacts
from dora.observe.tokens import TokenAccount
from dora.observe.visits import Visits

#: Number of steps to keep.
RECENT_STEPS = 100
#: Number of problems to show; there could otherwise be one for every answer.
MAX_PROBLEMS = 20
#: Number of these that may begin with the same words: rows that are skipped leave room for what else goes wrong.
MAX_ALIKE = 10
MORE_PROBLEMS = "more problems: they are in the journal"


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
    num_trained_tokens: int = 0  #: of the answers trained since the start
    rate: Rate = field(default_factory=Rate)  #: of all tokens sampled
    account: TokenAccount = field(default_factory=TokenAccount)
    rank_s: dict[str, float] = field(default_factory=dict)  #: seconds of all ranks by activity, as far as reported
    instance_s: dict[str, float] = field(default_factory=dict)  #: seconds of all instances by activity
    starting: set[InstanceId] = field(default_factory=set)  #: instances of an earlier controller, not up again yet
    steps: deque[StepFacts] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    rewards: list[float] = field(default_factory=list)  #: `reward_all_mean` of every step that has one
    later_s: float = 0.0  #: duration of all steps but the first, whose duration includes the start of the run
    later_idle_s: float = 0.0  #: the part of it in which the trainer had nothing to do
    trainer_metrics: dict[str, float] = field(default_factory=dict)  #: of the last step
    mismatches: dict[InstanceId, float] = field(default_factory=dict)  #: k3 between each instance and the trainer
    durations: Durations = field(default_factory=Durations)
    visits: Visits = field(default_factory=Visits)
    scores: list[Score] = field(default_factory=list)  #: in the order of evaluation
    requests: deque[RequestRow] = field(default_factory=deque)  #: of users, oldest first
    judges: JudgeRow = field(default_factory=JudgeRow)
    problems: list[str] = field(default_factory=list)  #: distinct ones, as they came up
    alarms: list[Alarm] = field(default_factory=list)  #: drift alarms, cleared ones included; the latest of each name
    urls: dict[InstanceId, str] = field(default_factory=dict)  #: of the instances that are up
    down: dict[InstanceId, Down] = field(default_factory=dict)  #: the instances that are not up
    lag: LoopLag = field(default_factory=LoopLag)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def note_step(self, step: StepFacts) -> None:
        """Add the next trained step."""
        self.steps.append(step)
        self.num_trained_tokens += step.num_tokens
        if step.reward_all_mean is not None:
            self.rewards.append(step.reward_all_mean)
        if step.step:
            self.later_s += step.duration_s
            self.later_idle_s += step.idle_s

    def recall_step(self, step: StepFacts) -> None:
        """Replace a step that was noted by its row, which knows more: statistics of episodes are in no event."""
        for index, noted in enumerate(self.steps):
            if noted.step == step.step:
                self.steps[index] = step

    def note_problem(self, text: str, *, is_failure: bool = False) -> bool:
        """Record a problem that does not stop the run; return False if it is already known or there are too many. A
        failure is known if another one of its kind is."""
        if text in self.problems:
            return False
        if is_failure and any(kind_of(text) == kind_of(known) for known in self.problems):
            return False
        has_more = MORE_PROBLEMS in self.problems
        num_alike = sum(known.partition(":")[0] == text.partition(":")[0] for known in self.problems)
        if len(self.problems) - has_more < MAX_PROBLEMS and num_alike < MAX_ALIKE:
            self.problems.append(text)
        elif has_more:
            return False
        else:
            self.problems.insert(0, MORE_PROBLEMS)
        return True
