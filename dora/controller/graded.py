"""The rewards of all groups that are graded, including groups that are filtered and never trained.

Invariant: a group counts once, when its last answer is graded, and in exactly one of the shares, so that the shares add
up to 1; answers without a reward are left out. Only rewards of 0 and 1 are called right or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, TrajectoryId, group_of
from dora.core.state import State


@dataclass(slots=True)
class RewardShares:
    """The groups graded since the last step."""

    groups: int = 0
    answers: int = 0
    reward_sum: float = 0.0
    all_right: int = 0  #: groups whose rewards are all 1
    all_wrong: int = 0  #: groups whose rewards are all 0
    all_same: int = 0  #: groups whose rewards are all the same number, other than 0 and 1
    mixed: int = 0  #: groups whose rewards differ: only these have something to learn from

    def add(self, rewards: Sequence[float]) -> None:
        """Add a group."""
        self.groups += 1
        self.answers += len(rewards)
        self.reward_sum += sum(rewards)
        if min(rewards) < max(rewards):
            self.mixed += 1
        elif rewards[0] == 1:
            self.all_right += 1
        elif rewards[0] == 0:
            self.all_wrong += 1
        else:
            self.all_same += 1

    def shares(self) -> dict[str, float]:
        """Return the fields of StepFacts; none if no group was graded."""
        if not self.groups:
            return {}
        return {
            "reward_all_mean": self.reward_sum / self.answers,
            "all_right": self.all_right / self.groups,
            "all_wrong": self.all_wrong / self.groups,
            "all_same": self.all_same / self.groups,
            "mixed": self.mixed / self.groups,
        }


class GradedGroups:
    """What was graded since the last step."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._now = RewardShares()

    def on_event(self, event: ev.Event, commands: Iterable[cmd.Command]) -> None:
        """Add the group whose grading is complete with this event, if any."""
        if not isinstance(event, ev.TrajectoryGraded | ev.CallFinished) or event.trajectory < 0:
            return
        group = self._state.ledger.groups.get(self._group_of(event.trajectory))
        if group is not None and not group.ungraded and event.trajectory not in self._state.trajectories:
            self._add(group.rewards)
        for command in commands:
            if isinstance(command, cmd.DropGroup) and command.outcome != "discarded":
                self._add(command.rewards)

    def take(self) -> RewardShares:
        """Return what was graded since the last call."""
        taken, self._now = self._now, RewardShares()
        return taken

    def _add(self, rewards: Sequence[float | None]) -> None:
        if known := [reward for reward in rewards if reward is not None]:
            self._now.add(known)

    def _group_of(self, trajectory: TrajectoryId) -> GroupId:
        return group_of(trajectory, group_size=self._state.settings.group_size)
