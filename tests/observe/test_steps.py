"""The rewards of all graded groups of a job, compared with those computed from its journal."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import StepId, TrajectoryId
from dora.observe.steps import GradedGroups, Steps
from tests.core.world import Faults, World, settings


def test_every_graded_group_counts_once_whether_it_is_trained_or_filtered() -> None:
    world = World(settings(group_size=4), seed=3, faults=Faults(zero_variance=0.4, grading_fails=0.1))
    steps = Steps()
    world.sink = lambda event, orders: steps.apply(world.state, event, orders)
    world.run()
    rewards: dict[int, dict[TrajectoryId, float | None]] = {}
    for event, _ in world.journal:
        if isinstance(event, ev.TrajectoryGraded):
            rewards.setdefault(event.trajectory // 4, {}).setdefault(event.trajectory, event.reward)
    whole = [[r for r in group.values() if r is not None] for group in rewards.values() if len(group) == 4]
    whole = [group for group in whole if group]
    found = steps.graded
    assert found.groups == len(whole) > 32, "more than are trained"
    assert found.shares()["reward_all_mean"] == pytest.approx(sum(map(sum, whole)) / sum(map(len, whole)))
    assert found.mixed == sum(min(group) < max(group) for group in whole) > 0


def test_a_group_whose_last_calls_a_restart_has_lost_counts_once() -> None:
    faults = Faults(controller_restarts=0.2, zero_variance=0.2, replayable=0.3, call_fails=0.05)
    world = World(settings(group_size=4), seed=2, calls=0.5, faults=faults)
    steps, expected, seen, ended_by = Steps(), GradedGroups(), set[int](), set[type]()

    def take(event: ev.Event, orders: list[cmd.Command]) -> None:
        steps.apply(world.state, event, orders)
        found = {o.group: o.rewards for o in orders if isinstance(o, cmd.DropGroup)}
        found |= {g.id: g.rewards for g in world.state.ledger.groups.values() if not g.ungraded}
        for group, rewards in found.items():
            if group not in seen:
                seen.add(group)
                ended_by.add(type(event))
                expected.add([reward for reward in rewards if reward is not None])

    world.sink = take
    world.run()
    assert steps.graded == expected
    assert ev.ControllerRestarted in ended_by


def test_shares_do_not_overlap_and_only_rewards_of_0_and_1_are_right_or_wrong() -> None:
    shares = GradedGroups()
    for rewards in ([1.0, 1.0], [0.0, -1.0], [1.5, 2.0], [0.0, 0.0], [0.5, 0.5], [-1.0, -1.0], [2.0], [0.2, 1.5]):
        shares.add(rewards)
    found = shares.shares()
    assert found.pop("reward_all_mean") == pytest.approx(7.2 / 15)
    assert found == {"all_right": 1 / 8, "all_wrong": 1 / 8, "all_same": 3 / 8, "mixed": 3 / 8}
    assert GradedGroups().shares() == {}


def test_groups_filtered_before_a_step_that_is_trained_again_belong_to_the_next_row() -> None:
    world = World(settings(), seed=3)
    steps = Steps(num_filtered=2, next_step=1)
    assert steps.take_zero_variance(world.state, StepId(0)) == 0, "it has a row"
    assert steps.take_zero_variance(world.state, StepId(1)) == 2
    assert steps.take_zero_variance(world.state, StepId(1)) == 0
