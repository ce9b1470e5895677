"""Bugs that the state machine, the sweep or reading has found, each as the shortest list of events that shows it."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.core.orchestration import Orchestration
from dora.errors import InvariantViolation
from tests.core.builders import Core, admit, generate, started, stop


@pytest.mark.parametrize("end", ["lost", "push_failed"])
def test_a_block_is_admitted_when_the_last_push_in_flight_ends_without_success(end: str) -> None:
    core = Core("one_step_off", groups_per_step=1)
    core.ready()
    core.publish(0)
    core.up(0)
    core.up(1)
    assert core.pushed(0, 0) == []  # the fleet gets the block's version all together
    getattr(core, end)(1)
    assert [order.group for order in core.of(cmd.AdmitGroup)] == [0]


def test_relief_of_kv_pressure_during_a_push_does_not_make_the_instance_vacant() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    core.pressed(0)
    assert core.relieved(0) == []
    assert core.pushed(0, 0)[0] == admit(0, version=0, deadline=1)


def test_the_clock_of_no_progress_starts_when_there_is_something_to_make_progress_with() -> None:
    core = Core(no_progress_s=10.0, max_staleness=1)
    core.now = 1000.0  # the engines were slow to start
    core.ready()
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    core.tick(9.0)
    assert core.of(cmd.FailRun) == []
    core.tick(2.0)
    assert len(core.of(cmd.FailRun)) == 1


def test_the_job_ends_only_when_the_siblings_of_a_failed_group_have_stopped() -> None:
    core = started(steps=1, groups_per_step=1, max_attempts=1)
    assert stop(1, on=0) in core.failed(0)  # and the next prompt replaces the group
    core.answer(1)
    core.train(0)
    core.publish(1)
    assert core.of(cmd.FinishRun) == []
    assert core.stopped(1, tokens=0)[-1:] == [cmd.FinishRun("all 1 steps are trained")]


def test_the_optimizer_update_is_not_idle_time() -> None:
    core = started(groups_per_step=1, filter_zero_variance=False, max_staleness=2)
    core.answer(0)
    wave = core.waves.pop(0)
    core.tell(ev.MicroBatchTrained(core.now, wave.step, wave.index))
    assert core.state.feed.idle_since is None
    core.now += 5.0  # the optimizer's
    core.train(0)
    core.answer(1)
    assert core.state.feed.idle_s == 0.0


def test_reported_tokens_that_are_not_processed_yet_are_kept() -> None:
    core = started()
    core.progress(0, {0: 20})
    with pytest.raises(InvariantViolation, match="C2: scheduling aborts"):
        core.lost(0, {0: 19, 1: 0})


def test_rewards_are_shown_of_the_top_ups_of_the_step_that_had_too_many() -> None:
    core = started(groups_per_step=1, max_top_up=1.0, max_staleness=2)
    core.answer(0, rewards=(7.0, 7.0))
    core.answer(1)
    core.train(0)
    core.answer(2, rewards=(5.0, 5.0))
    core.answer(3, rewards=(5.0, 5.0))
    (failed,) = core.of(cmd.FailRun)
    assert isinstance(failed, cmd.FailRun)
    assert "their siblings' rewards: 5 x 4;" in failed.reason


def test_an_update_may_reach_a_request_of_a_failed_group_before_its_stop_does() -> None:
    core = started("partial", groups_per_step=1, max_staleness=1, steps=3, slots=8)
    core.answer(0)
    core.failed(2, final=True)
    assert stop(3, on=0) in core.orders
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    core.tell(ev.GenerationStopped(core.now, TrajectoryId(3), 1, 4, ((0, 0, 2), (1, 2, 4))))
    assert not core.of(cmd.FailRun)


def test_a_failed_environment_frees_its_slot_for_what_waits() -> None:
    keep = Orchestration(calls="keep")
    core = started(instances=1, slots=1, groups_per_step=1, max_staleness=0, steps=2, orchestration=keep)
    core.called(0)
    assert generate(1, on=0, version=0) in core.result(0, failed="the host died")
    core.called(1)
    call = ev.CallFinished(core.now, TrajectoryId(1), 2, 2, ended=True, reward=1.0, graded=True)
    assert cmd.DropGroup(0, "failed", "grading", (None, 1.0)) in core.tell(call)  # type: ignore[arg-type]


def test_an_episode_that_its_environment_grades_frees_its_slot_for_what_waits() -> None:
    keep = Orchestration(calls="keep")
    core = started(instances=1, slots=1, groups_per_step=1, max_staleness=0, steps=2, orchestration=keep)
    core.called(0)
    call = ev.CallFinished(core.now, TrajectoryId(0), 2, 2, ended=True, reward=1.0, graded=True)
    assert core.tell(call) == [generate(1, on=0, version=0)]
