"""The account of sampled tokens: what became of each.

Invariant: sampled = trained + the sum of `dropped` + in flight, at any time and across resumes; evaluation tokens are
counted separately. The account is made from events, the commands they led to, and counts of tokens as they arrive, so
that a resume gets the same account from the journal and the token store. Tokens of observations were not sampled and
are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, StepId, TrajectoryId, group_of
from dora.core.phases import GroupPhase
from dora.observe.calls import CallsUnderWay

#: Outcome of an answer without a reward whose group was trained with its other answers.
UNGRADED: Final = "failed: not graded"


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Sampled tokens since the start of the run, without those of observations."""

    sampled: int = 0  #: for training; the sum of the next three
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  #: by `DropGroup.why`
    in_flight: int = 0  #: of groups that are neither trained nor dropped
    evaluation: int = 0  #: sampled for evaluation; in none of the other counts

    @property
    def num_tokens(self) -> int:
        """All tokens sampled, those of evaluations included."""
        return self.sampled + self.evaluation


class TokenLedger:
    """The account of one run."""

    def __init__(self, *, group_size: int, is_replay: bool = False) -> None:
        """`is_replay`: all events come first, and then the counts of tokens, by `restore`."""
        self._group_size = group_size
        self._is_replay = is_replay
        self._sampled = self._trained = self._evaluation = 0
        self._dropped: defaultdict[str, int] = defaultdict(int)
        self._open: dict[TrajectoryId, int] = {}  # tokens of trajectories in flight
        self._committed: dict[StepId, list[GroupId]] = {}
        self._ungraded: set[TrajectoryId] = set()
        self._calls = CallsUnderWay()
        self._outcomes: dict[GroupId, str] = {}  # dropped groups whose answers may run; replay: all

    def append(self, trajectory: TrajectoryId, num_tokens: int) -> None:
        """Count tokens as they arrive."""
        if trajectory < 0:
            self._evaluation += num_tokens
            return
        self._sampled += num_tokens
        outcome = self._outcomes.get(self._group_of(trajectory))
        if outcome is None:
            self._open[trajectory] = self._open.get(trajectory, 0) + num_tokens
        else:
            self._put(trajectory, outcome, num_tokens)

    def note(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Note what became of groups and answers."""
        self._ungraded.update(self._calls.note(event, commands))
        if (isinstance(event, ev.TrajectoryGraded) and event.reward is None) or (
            isinstance(event, ev.CallFinished) and event.failed
        ):
            self._ungraded.add(event.trajectory)
        elif isinstance(event, ev.StepTrained):
            self.train(event.step)
        elif isinstance(event, ev.TrainerReady):
            for step in [step for step in self._committed if step < event.step]:
                self.train(step)
        for command in commands:
            if isinstance(command, cmd.DropGroup):
                self._end(command.group, command.why, is_over=command.outcome is GroupPhase.FILTERED)
            elif isinstance(command, cmd.CommitGroup):
                self._committed.setdefault(command.step, []).append(command.group)
            elif isinstance(command, cmd.ForgetGroups) and not self._is_replay:
                for group in command.groups:
                    self._outcomes.pop(group, None)

    def train(self, step: StepId) -> None:
        """Count the groups of a step as trained, once."""
        for group in self._committed.pop(step, ()):
            self._end(group, "", is_over=True)

    def restore(self, sampled: Mapping[TrajectoryId, int]) -> None:
        """Count the tokens of all trajectories after a replay."""
        for trajectory, num_tokens in sampled.items():
            self.append(trajectory, num_tokens)
        self._is_replay = False
        self._outcomes.clear()  # no request has survived

    @property
    def account(self) -> TokenAccount:
        """The account now."""
        return TokenAccount(
            sampled=self._sampled,
            trained=self._trained,
            dropped=dict(self._dropped),
            in_flight=sum(self._open.values()),
            evaluation=self._evaluation,
        )

    def _end(self, group: GroupId, outcome: str, *, is_over: bool) -> None:
        """Count what a group has sampled. `outcome`: "" if it was trained; `is_over`: all of its answers have ended."""
        if self._is_replay or not is_over:
            self._outcomes[group] = outcome
        for trajectory in range(group * self._group_size, (group + 1) * self._group_size):
            self._put(TrajectoryId(trajectory), outcome, self._open.pop(TrajectoryId(trajectory), 0))

    def _put(self, trajectory: TrajectoryId, outcome: str, num_tokens: int) -> None:
        if not outcome and trajectory not in self._ungraded:
            self._trained += num_tokens
        elif num_tokens:
            self._dropped[outcome or UNGRADED] += num_tokens
        if not self._is_replay:
            self._ungraded.discard(trajectory)

    def _group_of(self, trajectory: TrajectoryId) -> GroupId:
        return group_of(trajectory, group_size=self._group_size)
