"""What a step's episodes came to, from their records and the events of the core."""

from __future__ import annotations

import pytest

from dora.controller.trajectories import TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, InstanceId, StepId, TrajectoryId, VersionId
from dora.core.phases import GroupPhase
from dora.observe.episodes import TimedEpisodes
from tests.controller.fakes import prompt

ONE, TWO = TrajectoryId(1), TrajectoryId(2)


def generate(trajectory: TrajectoryId) -> cmd.Generate:
    return cmd.Generate(trajectory, 1, InstanceId(0), VersionId(0), 0)


def episode(*, tokens: int, observed: list[tuple[int, int]], rewards: list[float]) -> TrajectoryRecord:
    record = TrajectoryRecord(prompt(0))
    record.tokens.extend(range(tokens))
    record.observed = observed
    record.turn_rewards = rewards
    return record


@pytest.fixture
def turns() -> TimedEpisodes:
    """The first episode has two turns and calls, of 3 s and 1 s in 10 s; the second one turn that was cut."""
    turns = TimedEpisodes()
    turns.apply(ev.Ticked(1.0), [generate(ONE), generate(TWO)], group_size=1)
    turns.apply(ev.CallStarted(4.0, ONE, 1, 5, ()), [cmd.CallEnvironment(ONE, 2)], group_size=1)
    turns.apply(ev.CallFinished(7.0, ONE, 2, 8), [generate(ONE)], group_size=1)
    turns.apply(ev.CallStarted(10.0, ONE, 3, 12, ()), [cmd.CallEnvironment(ONE, 4)], group_size=1)
    turns.apply(ev.CallFinished(11.0, ONE, 4, 12, ended=True), [], group_size=1)
    turns.apply(ev.GenerationFinished(7.0, TWO, 1, 30, True, ()), [], group_size=1)
    return turns


def test_an_episode_is_counted_by_turns_calls_tokens_rewards_and_time(turns: TimedEpisodes) -> None:
    cut = episode(tokens=30, observed=[], rewards=[])
    cut.truncated = "tokens"
    whole = episode(tokens=12, observed=[(5, 8)], rewards=[0.5, 1.0])
    cut.metrics, whole.metrics = (("moves", 2.0),), (("moves", 4.0), ("wins", 1.0))
    stats = turns.stats({ONE: whole, TWO: cut})
    assert stats is not None
    assert stats.metrics == {"moves": 3.0, "wins": 1.0}
    assert (stats.count, stats.turns_mean, stats.turns_max, stats.calls_mean, stats.calls_max) == (2, 1.5, 2, 1.0, 2)
    assert (stats.sampled_tokens_mean, stats.observation_tokens_mean) == ((9 + 30) / 2, 1.5)
    assert stats.turn_rewards == (0.5, 1.0)
    assert (stats.call_s_mean, stats.call_s_p90, stats.call_share) == (2.0, 3.0, 4.0 / 16.0)
    assert stats.truncated == {"tokens": 1}
    assert turns.calls_s(ONE) == (3.0, 1.0)


def test_calls_of_an_earlier_controller_have_no_time(turns: TimedEpisodes) -> None:
    stats = turns.stats({TrajectoryId(9): episode(tokens=12, observed=[(5, 8)], rewards=[0.5, 1.0])})
    assert stats is not None
    assert (stats.calls_mean, stats.call_s_mean, stats.call_s_p90, stats.call_share) == (2.0, None, None, None)
    assert turns.stats({}) is None


def test_times_are_kept_until_the_group_is_forgotten(turns: TimedEpisodes) -> None:
    turns.apply(ev.StepTrained(12.0, StepId(0), ""), [cmd.ForgetGroups((GroupId(1),))], group_size=1)
    assert list(turns.times) == [TWO]


@pytest.mark.parametrize("outcome", [GroupPhase.FILTERED, GroupPhase.FAILED])
def test_times_of_a_dropped_group_are_there_until_the_next_event(turns: TimedEpisodes, outcome: GroupPhase) -> None:
    """No ForgetGroups comes for it; what describes it asks for its times at this event."""
    turns.apply(ev.Ticked(12.0), [cmd.DropGroup(GroupId(1), outcome, "why", (0.0,))], group_size=1)
    assert ONE in turns.times
    turns.apply(ev.Ticked(13.0), [], group_size=1)
    assert list(turns.times) == [TWO]


def test_the_call_for_a_prompt_of_its_own_is_no_turn() -> None:
    times = TimedEpisodes()
    times.apply(ev.Ticked(1.0), [cmd.CallEnvironment(ONE, 1)], group_size=1)
    times.apply(ev.CallFinished(3.0, ONE, 1, 4), [generate(ONE)], group_size=1)
    times.apply(ev.CallStarted(4.0, ONE, 2, 7, ()), [cmd.CallEnvironment(ONE, 3)], group_size=1)
    times.apply(ev.CallFinished(6.0, ONE, 3, 9), [generate(ONE)], group_size=1)
    times.apply(ev.CallStarted(8.0, ONE, 4, 14, ()), [cmd.CallEnvironment(ONE, 5)], group_size=1)
    times.apply(ev.CallFinished(9.0, ONE, 5, 14, ended=True), [], group_size=1)
    stats = times.stats({ONE: episode(tokens=14, observed=[(0, 4), (7, 9)], rewards=[0.5, 1.0])})
    assert stats is not None
    assert (stats.turns_mean, stats.calls_mean, stats.turn_rewards) == (2.0, 2.0, (0.5, 1.0))
    assert (stats.sampled_tokens_mean, stats.observation_tokens_mean) == (8.0, 2.0)
    assert times.calls_s(ONE) == (2.0, 1.0)
    assert stats.call_share == 3.0 / 6.0
