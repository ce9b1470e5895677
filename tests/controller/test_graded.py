"""The rewards of all graded groups of a job, against the same from its journal."""

from __future__ import annotations

import pytest

from dora.controller.graded import GradedGroups, RewardShares
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from tests.core.world import Faults, World, settings


def test_every_graded_group_counts_once_whether_it_is_trained_or_filtered() -> None:
    world = World(settings(group_size=4), seed=3, faults=Faults(zero_variance=0.4, grading_fails=0.1))
    graded = GradedGroups(world.state)
    world.sink = graded.on_event
    world.run()
    rewards: dict[int, dict[TrajectoryId, float | None]] = {}
    for event, _ in world.journal:
        if isinstance(event, ev.TrajectoryGraded):
            rewards.setdefault(event.trajectory // 4, {}).setdefault(event.trajectory, event.reward)
    whole = [[r for r in group.values() if r is not None] for group in rewards.values() if len(group) == 4]
    whole = [group for group in whole if group]
    found = graded.take()
    assert found.groups == len(whole) > 32, "more than are trained"
    assert found.shares()["reward_all_mean"] == pytest.approx(sum(map(sum, whole)) / sum(map(len, whole)))
    assert found.mixed == sum(min(group) < max(group) for group in whole) > 0
    assert graded.take() == RewardShares()


def test_shares_of_rewards_that_are_not_0_or_1() -> None:
    shares = RewardShares()
    for rewards in ([1.0, 1.0], [0.0, -1.0], [0.5, 0.5], [0.2, 1.5]):
        shares.add(rewards)
    assert shares.shares() == {
        "reward_all_mean": pytest.approx(3.7 / 8), "all_right": 0.25, "all_wrong": 0.25, "mixed": 0.5,
    }  # fmt: skip
    assert RewardShares().shares() == {}
