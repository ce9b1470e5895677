"""What a step trained, and what was graded since the step before.

Invariant: folded from events alone, so that a replay gives the same. A group counts once, when its last answer is
graded, and in exactly one of the shares, which add up to 1; answers without a reward are left out. Only rewards of 0
and 1 are called right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import StepId, TrajectoryId, group_of
from dora.core.phases import GroupPhase
from dora.core.state import State
from dora.observe.activities import trainer_waits_for
from dora.observe.calls import CallsUnderWay
from dora.observe.episodes import EpisodeStats
from dora.observe.figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One trained step; the fields that may be None are left out of its row if they are."""

    step: Annotated[StepId, Figure("", "the step that was trained, from 0", "steps_trained_total")]
    reward_mean: Annotated[float, Figure("reward", "mean over the answers trained", "reward_mean")]
    num_groups: Annotated[int, Figure("groups", "groups trained")]
    num_tokens: Annotated[int, Figure("tokens", "of the trained answers, with observations", "trained_tokens_total")]
    staleness_mean: Annotated[float, Figure("steps", "mean over the groups trained")]
    duration_s: Annotated[float, Figure("s", "since the previous step was trained", "step_duration_seconds")]
    idle_s: Annotated[
        float, Figure("s", "the part of `duration_s` in which the trainer had nothing to do", "trainer_idle_share")
    ]
    waited_for: Annotated[str, Figure("text", "what the trainer last waited for; empty if it never did")]
    reward_all_mean: Annotated[
        float | None, Figure("reward", "mean over all answers of the groups graded since the last row")
    ] = None
    all_right: Annotated[float | None, Figure("fraction", "of these groups: every reward is 1")] = None
    all_wrong: Annotated[float | None, Figure("fraction", "of these groups: every reward is 0")] = None
    all_same: Annotated[
        float | None, Figure("fraction", "of these groups: every reward is the same number, other than 0 and 1")
    ] = None
    mixed: Annotated[float | None, Figure("fraction", "of these groups: the rewards are not all equal")] = None
    response_len_mean: Annotated[float | None, Figure("tokens", "of a trained answer, with observations, mean")] = None
    response_len_p90: Annotated[float | None, Figure("tokens", "the same: nine of ten answers are at most as long")] = (
        None
    )
    response_len_max: Annotated[float | None, Figure("tokens", "the same, maximum")] = None
    episodes: EpisodeStats | None = None  #: None without an environment


@dataclass(slots=True)
class GradedGroups:
    """Groups by their rewards."""

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

    def shares(self) -> dict[str, Any]:
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


_GRADED: Final = (ev.TrajectoryGraded, ev.CallFinished)
#: Events by which the last answer of a group may end.
_LAST: Final = (*_GRADED, ev.ControllerRestarted)


@dataclass(slots=True)
class Steps:
    """What has happened since the last step was trained."""

    began_at: float = 0.0  #: when the last step was trained
    waited_for: str = ""  #: what the trainer last waited for
    graded: GradedGroups = field(default_factory=GradedGroups)
    num_filtered: int = 0  #: groups filtered since the last step
    next_step: int = 0  #: the first step that was never trained
    calls: CallsUnderWay = field(default_factory=CallsUnderWay)

    def apply(self, state: State, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Take in an event; `state` is the state after it."""
        if isinstance(event, _GRADED) and event.trajectory >= 0:
            self._grade(state, event.trajectory)
        lost = self.calls.note(event, commands)
        for trajectory in {group_of(t, group_size=state.settings.group_size): t for t in lost}.values():
            self._grade(state, trajectory)
        for command in commands:
            if isinstance(command, cmd.DropGroup):
                self.num_filtered += command.outcome is GroupPhase.FILTERED
                if command.outcome is not GroupPhase.DISCARDED and isinstance(event, _LAST):
                    self._add(command.rewards)
        self.waited_for = trainer_waits_for(state) or self.waited_for

    def _grade(self, state: State, trajectory: TrajectoryId) -> None:
        group = state.ledger.groups.get(group_of(trajectory, group_size=state.settings.group_size))
        if group is not None and not group.ungraded and trajectory not in state.trajectories:
            self._add(group.rewards)

    def _add(self, rewards: Sequence[float | None]) -> None:
        if known := [reward for reward in rewards if reward is not None]:
            self.graded.add(known)

    def take(self, state: State, step: StepId) -> StepFacts:
        """Return the facts of a step that is trained next, without those of episodes, and begin with the next one.

        `state`: before its StepTrained. A step that is trained again has no shares: its groups were graded before.
        """
        groups = state.feed.groups(step)
        answers = [t for g in groups for t in g.trajectories if t.reward is not None]
        rewards = [t.reward for t in answers if t.reward is not None]
        duration_s = state.now - self.began_at
        facts = StepFacts(
            step=step,
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            num_groups=len(groups),
            num_tokens=sum(t.num_tokens for t in answers),
            staleness_mean=sum(step - g.version for g in groups) / len(groups) if groups else 0.0,
            duration_s=duration_s,
            idle_s=min(state.feed.idle_s, duration_s),
            waited_for=self.waited_for,
        )
        facts = replace(facts, **_lengths([t.num_tokens for t in answers]))
        self.began_at, self.waited_for = state.now, ""
        if step >= self.next_step:
            facts = replace(facts, **self.graded.shares())
            self.graded, self.next_step = GradedGroups(), step + 1
        return facts

    def take_zero_variance(self, state: State, step: StepId) -> int:
        """Return the number of groups with equal rewards: filtered since the last step, or trained in this one.

        Call it before `take`. A step that is trained again has no row: what was filtered belongs to the next one.
        """
        if step < self.next_step:
            return 0
        filtered, self.num_filtered = self.num_filtered, 0
        equal = [{reward for reward in g.rewards if reward is not None} for g in state.feed.groups(step)]
        return filtered + sum(len(rewards) == 1 for rewards in equal)


def _lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the fields of StepFacts; none without an answer."""
    if not lengths:
        return {}
    return {
        "response_len_mean": sum(lengths) / len(lengths),
        "response_len_p90": sorted(lengths)[-(-9 * len(lengths) // 10) - 1],
        "response_len_max": max(lengths),
    }
