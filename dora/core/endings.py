"""The ways in which a group or a trajectory ends: filtered, failed, discarded, abandoned, graded.

Invariant: a group that is given up leaves the ledger immediately, and once; a sibling ends when its request or call
ends.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import DropGroup, DropReason, ForgetGroups, GradeTrajectory
from dora.core.occupancy import stop, unhold, wait
from dora.core.phases import GIVEN_UP, UNCONSUMED, GroupPhase, TrajectoryPhase
from dora.core.state import State, admissions_changed, episode_left, fail
from dora.core.tables import Group, Trajectory

_RESIDENT: Final = TrajectoryPhase.RESIDENT
_WAITING: Final = TrajectoryPhase.WAITING
_CALLING: Final = TrajectoryPhase.CALLING
_GRADING: Final = TrajectoryPhase.GRADING


def _remove(state: State, group: Group, outcome: GroupPhase, reason: str) -> None:
    """Remove a group from U without training it."""
    order = DropGroup(group.id, outcome, reason, group.rewards)
    state.out.append(order)
    state.ledger.move(group, outcome, state.cause)
    state.ledger.reasons[order.why] = state.ledger.reasons.get(order.why, 0) + 1
    state.formation.drop(group.deadline)
    state.entry(group.current).groups -= 1
    state.agenda.release = True


def drop(state: State, group: Group, outcome: GroupPhase, reason: str) -> None:
    """Remove a group from U without training it; another one is admitted in its place."""
    _remove(state, group, outcome, reason)
    if state.settings.rules.batched:
        state.block_left += 1
    state.top_ups += 1
    for reward in group.rewards:
        state.top_up_rewards[reward] = state.top_up_rewards.get(reward, 0) + 1
    if state.top_ups > state.settings.max_top_up * state.settings.groups_per_step:
        common = sorted(state.top_up_rewards.items(), key=lambda item: -item[1])[:5]
        rewards = ", ".join(f"{'none' if reward is None else f'{reward:g}'} x {n}" for reward, n in common)
        fail(
            state,
            f"step {state.formation.step + 1} had to top up {state.top_ups} groups (rollout.max_top_up is "
            f"{state.settings.max_top_up:g} x {state.settings.groups_per_step}); the last one left as "
            f"{outcome.value}: {reason}; their siblings' rewards: {rewards}; {_advice(state)}",
        )
    if not group.ungraded:
        group.let_go()
    state.agenda.form = True
    admissions_changed(state)


def _advice(state: State) -> str:
    rewards = state.top_up_rewards
    if rewards.get(None, 0) > sum(rewards.values()) / 2:
        return "most have none, because something failed: log.jsonl and the status say what"
    return "bring prompts that are neither always nor never solved"


def discard_surplus(state: State) -> None:
    """Discard the over-sampled groups that the full step did not take (breaks C2 by design; counted)."""
    for group in [g for g in state.ledger.groups.values() if g.phase in UNCONSUMED]:
        if group.phase is GroupPhase.COMPLETE:
            state.complete[group.deadline].remove(group)
            if not state.complete[group.deadline]:
                del state.complete[group.deadline]
        state.counters.scheduling_aborts += group.unfinished
        _remove(state, group, GroupPhase.DISCARDED, DropReason.OVER_SAMPLED)
        abandon_siblings(state, group)
        forget_discarded(state, group)


def abandon_siblings(state: State, group: Group) -> None:
    """Abandon queued siblings, and stop running ones. A sibling that is calling ends when its call ends."""
    state.entry(group.current).forget_waiting(group)
    for sibling in group.trajectories:
        if sibling.phase is _WAITING:
            leave_unfinished(state, sibling)
            abandon(state, sibling)
        elif sibling.phase is _RESIDENT and sibling.instance is not None:
            stop(state, sibling)
        elif sibling.phase is _CALLING:
            unhold(state, sibling)
            leave_unfinished(state, sibling)


def abandon(state: State, trajectory: Trajectory) -> None:
    """End a trajectory whose group is given up and which has no request in flight."""
    trajectory.move(TrajectoryPhase.ABANDONED, state.cause)
    del state.trajectories[trajectory.id]


def leave_unfinished(state: State, trajectory: Trajectory) -> None:
    """Count a trajectory as finished: its version may no longer need an instance."""
    assert trajectory.group is not None
    trajectory.group.unfinished -= 1
    entry = state.window.entries[trajectory.version]
    entry.unfinished -= 1
    episode_left(state)
    if entry.unfinished == entry.away:
        entry.quiet_since = state.now
    if not entry.unfinished:
        state.agenda.place = True
        state.agenda.release = True


def is_abandoned(trajectory: Trajectory) -> bool:
    """Whether the trajectory's group is given up."""
    return trajectory.group is not None and trajectory.group.phase in GIVEN_UP


def forget_discarded(state: State, group: Group) -> None:
    """Drop the tokens of a discarded group once its last sibling has ended."""
    if group.phase is GroupPhase.DISCARDED and not any(t.id in state.trajectories for t in group.trajectories):
        state.out.append(ForgetGroups((group.id,)))


def go_on(state: State, trajectory: Trajectory) -> None:
    """Queue a trajectory whose request has ended, unless its group is given up."""
    if is_abandoned(trajectory):
        assert trajectory.group is not None
        leave_unfinished(state, trajectory)
        abandon(state, trajectory)
        forget_discarded(state, trajectory.group)
    else:
        wait(state, trajectory)


def end_generation(state: State, group: Group, trajectory: Trajectory) -> None:
    """Note that a trajectory of a group is fully generated or will never be."""
    leave_unfinished(state, trajectory)
    if not group.unfinished:
        state.ledger.move(group, GroupPhase.GRADING, state.cause)
    elif group.waiting:
        state.entry(group.current).reprioritize(group)


def finish(state: State, trajectory: Trajectory) -> None:
    """Count a complete answer, which is to be graded."""
    group = trajectory.group
    if group is not None:
        end_generation(state, group, trajectory)
        state.counters.version_conflicts += trajectory.is_mixed
        state.length_sum += trajectory.num_tokens
        state.length_count += 1
        state.mean_length = state.length_sum // state.length_count


def grade(state: State, trajectory: Trajectory) -> None:
    """Order the grading of a trajectory."""
    trajectory.move(_GRADING, state.cause)
    trajectory.attempt += 1
    state.out.append(GradeTrajectory(trajectory.id, trajectory.attempt))


def grade_again(state: State, trajectory: Trajectory) -> None:
    """Order the grading that a new controller gets no result of, unless the group is given up."""
    if is_abandoned(trajectory):
        assert trajectory.group is not None
        abandon(state, trajectory)
        forget_discarded(state, trajectory.group)
    else:
        grade(state, trajectory)
