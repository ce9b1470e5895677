"""A record of an episode is filled again with what journal and token store have of it."""

from __future__ import annotations

from dora.app.resume import _fill
from dora.controller.trajectories import TrajectoryRecord
from dora.core.ids import TrajectoryId, VersionId
from dora.core.tables import Trajectory
from dora.journal.tokens import TokenStore
from tests.controller.fakes import prompt


def test_the_limit_of_a_turn_outlives_the_controller() -> None:
    trajectory = Trajectory(TrajectoryId(0), group=None, version=VersionId(0), num_prompt_tokens=0, turn_tokens=7)
    trajectory.turn_rewards = (0.5,)
    record = TrajectoryRecord(prompt(0))
    _fill(record, trajectory, TokenStore())
    assert (record.turn_tokens, record.turn_rewards) == (7, [0.5])
