"""Bugs that the state machine, the sweep or reading has found, each as the shortest list of events that shows it."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.admission import Refusal, why_not_admitted
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.orchestration import Orchestration
from dora.core.phases import GroupPhase
from dora.errors import InvariantViolation
from dora.journal.audit import audit_entries
from tests.core.builders import PROMPT, Core, admit, commit, generate, push, started, stop


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
    assert core.stopped(1, tokens=0)[-1:] == [cmd.FinishRun("the only step is trained")]


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
    assert cmd.DropGroup(0, GroupPhase.FAILED, "grading", (None, 1.0)) in core.tell(call)  # type: ignore[arg-type]


def test_an_episode_that_its_environment_grades_frees_its_slot_for_what_waits() -> None:
    keep = Orchestration(calls="keep")
    core = started(instances=1, slots=1, groups_per_step=1, max_staleness=0, steps=2, orchestration=keep)
    core.called(0)
    call = ev.CallFinished(core.now, TrajectoryId(0), 2, 2, ended=True, reward=1.0, graded=True)
    assert core.tell(call) == [generate(1, on=0, version=0)]


# -- updates in flight, and an evaluation -----------------------------------------------------------------------------


def baseline(*, instances: int, samples: int = 1, **changes: object) -> Core:
    """Version 0 is evaluated; a step is a group, and every version is evaluated."""
    options: dict[str, object] = {"slots": 8, "steps": 4, "groups_per_step": 1, "eval_every": 1, **changes}
    prompts = (PROMPT,) * samples
    core = started("partial", instances=instances, eval_prompt_tokens=prompts, **options)  # type: ignore[arg-type]
    for t in range(-1, -1 - samples, -1):
        core.finished(t)
        core.graded(t, 1.0)
    return core


def evaluating(*, instances: int, **changes: object) -> Core:
    """The sample of version 1 (-2) runs on instance 0; version 2 will be published once group 1 is complete."""
    core = baseline(instances=instances, **changes)
    core.answer(0)
    core.train(0)
    core.publish(1)
    for instance in range(instances):
        core.pushed(instance, 1)
    return core


def complete_and_publish_2(core: Core) -> list[cmd.PushWeights]:
    """What is pushed as version 2 is published."""
    core.answer(1)
    core.train(1)
    return [order for order in core.publish(2) if isinstance(order, cmd.PushWeights)]


def pushes_of(core: Core, *, rounds: int) -> list[cmd.PushWeights]:
    """What is pushed, while a second passes each round and every push succeeds."""
    before = len(core.of(cmd.PushWeights))
    for _ in range(rounds):
        core.tick(1.0)
        for instance in core.state.instances.values():
            if instance.full.pushing is not None:
                core.pushed(instance.id, instance.full.pushing)
    return core.of(cmd.PushWeights)[before:]


def test_an_update_leaves_out_the_instance_that_an_evaluation_sample_moves_to() -> None:
    core = evaluating(instances=2)
    assert stop(-2, on=0) in core.drain(0)
    assert complete_and_publish_2(core) == []
    assert core.stopped(-2, tokens=4)[0] == generate(-2, on=1, version=1, attempt=2, tokens=4)


def test_a_trajectory_does_not_move_to_an_instance_that_an_evaluation_keeps_at_an_older_version() -> None:
    core = baseline(instances=2, max_staleness=2)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    for instance in (0, 1):
        core.pushed(instance, 1)
    assert stop(4, on=1) in core.drain(1)  # it moves to instance 0, where the sample runs
    core.train(1)
    core.publish(2)
    assert core.state.trajectories[TrajectoryId(4)].version == 2
    assert core.stopped(4, tokens=6) == []


@pytest.mark.parametrize("calls", ["keep", "pinned", "release"])
def test_training_on_the_only_instance_does_not_wait_for_the_call_of_an_evaluation_sample(calls: str) -> None:
    core = evaluating(instances=1, orchestration=Orchestration(calls=calls))  # type: ignore[arg-type]
    core.called(-2)
    assert complete_and_publish_2(core) == [push(0, version=2, attempt=3)]
    assert core.of(cmd.StopRequest) == []  # training goes on there
    core.pushed(0, 2)
    assert core.result(-2) == []
    assert pushes_of(core, rounds=5) == []


def test_training_on_the_only_instance_waits_for_an_evaluation_sample_that_is_decoded() -> None:
    core = evaluating(instances=1, no_progress_s=100.0)
    core.now += 90.0
    assert complete_and_publish_2(core) == []
    core.finished(-2)
    core.now += 90.0
    assert push(0, version=2, attempt=3) in core.graded(-2, 1.0)
    core.pushed(0, 2)
    assert core.tick(90.0) == []  # the sample was progress


def test_an_evaluation_on_the_only_instance_goes_on_when_there_is_nothing_to_train() -> None:
    core = evaluating(instances=1)
    core.called(-2)
    complete_and_publish_2(core)
    core.pushed(0, 2)
    core.result(-2)
    core.answer(2)
    assert push(0, version=1, attempt=4) in core.answer(3)  # the last group
    assert core.pushed(0, 1) == [generate(-2, on=0, version=1, attempt=3, tokens=2)]


def test_an_evaluation_is_not_given_the_only_instance_while_training_calls() -> None:
    core = evaluating(instances=1)
    core.called(-2)
    complete_and_publish_2(core)
    core.pushed(0, 2)
    for t in (4, 5, 6, 7):
        core.called(t)
    core.result(-2)
    assert core.state.instances[InstanceId(0)].is_empty
    assert pushes_of(core, rounds=5) == []
    assert core.result(4) == [generate(4, on=0, version=2, attempt=3, tokens=2)]


def test_an_evaluation_is_not_given_the_only_instance_that_is_confirmed_to_hold_the_newest_version() -> None:
    core = started("partial", instances=2, slots=8, steps=4, groups_per_step=1, eval_prompt_tokens=(3,), eval_every=2)
    core.finished(-1)
    for step in (0, 1, 2):
        core.answer(step)
        core.train(step)
        core.publish(step + 1)
        if step < 2:
            pushes_of(core, rounds=1)
    core.graded(-1, 1.0)  # the evaluation of version 2 begins
    busy, empty = sorted(core.state.instances.values(), key=lambda i: i.is_empty)
    assert [(i.full.pushing, len(i.residents)) for i in (busy, empty)] == [(3, 2), (3, 0)]
    assert core.pushed(empty.id, 3) == []  # the other push may fail
    assert core.pushed(busy.id, 3) == [push(empty.id, version=2, attempt=5)]


def test_where_samples_are_decoded_everywhere_those_of_one_instance_make_way_for_training() -> None:
    core = evaluating(instances=2, samples=3)
    samples = {i.id: [t for t in i.residents if t < 0] for i in core.state.instances.values()}
    assert samples == {0: [-4, -6], 1: [-5]}
    assert complete_and_publish_2(core) == []
    assert core.orders[-1] == stop(-5, on=1)
    assert core.stopped(-5, tokens=7) == [push(1, version=2, attempt=3)]
    core.finished(-4)
    core.finished(-6)
    assert core.of(cmd.Generate)[-1] == generate(-5, on=0, version=1, attempt=2, tokens=7)


def test_the_instance_kept_for_an_evaluation_is_not_pushed_again_and_again_under_kv_pressure() -> None:
    core = evaluating(instances=2)
    core.called(-2)
    core.tick(1.0)  # the sample holds no slot any more
    assert complete_and_publish_2(core) == [push(0, version=2, attempt=3)]
    core.pushed(0, 2)
    core.pressed(1)
    core.result(-2)
    assert pushes_of(core, rounds=5) == []
    assert core.relieved(1) == [generate(-2, on=1, version=1, attempt=3, tokens=2)]


def test_an_evaluation_is_not_given_an_instance_under_kv_pressure() -> None:
    core = evaluating(instances=3)
    complete_and_publish_2(core)
    for instance in (1, 2):
        core.pushed(instance, 2)
    core.answer(3)
    core.pressed(2)  # nothing runs there
    core.lost(0, {-2: 2})
    assert pushes_of(core, rounds=5) == []
    assert core.relieved(2) == [push(2, version=1, attempt=4)]


def test_nor_while_the_hosts_of_the_environment_are_full() -> None:
    core = baseline(instances=2, max_staleness=2, max_episodes=2)
    for group in (0, 1):
        core.answer(group)
    for t in (4, 5):  # they take the room of the sample of version 1
        core.called(t)
    core.tick(1.0)
    core.train(0)
    core.publish(1)
    assert pushes_of(core, rounds=1) == []
    core.train(1)
    assert push(0, version=2, attempt=3) in core.publish(2)
    assert pushes_of(core, rounds=5) == []
    core.result(4)
    core.finished(4, tokens=3)
    assert core.of(cmd.Generate)[-1] == generate(-2, on=1, version=1)


# -- resumes with other settings --------------------------------------------------------------------------------------


def resumed(core: Core, **changes: int) -> None:
    """A new controller, with a trainer and an instance."""
    core.restarted(dict.fromkeys(core.state.trajectories, 0), **changes)
    core.ready()
    core.up(0)
    core.pushed(0, 0)


def test_a_job_without_a_bound_that_is_made_longer_trains_its_groups_until_the_new_end() -> None:
    core = started("partial", steps=1, groups_per_step=1)
    before = core.state.settings
    resumed(core, steps=3)
    core.answer(1)  # it overtakes group 0, which was due at step 0
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    core.answer(0)
    assert core.of(cmd.CommitGroup) == [commit(1, version=0, step=0), commit(0, version=0, step=1)]
    assert audit_entries(before, core.journal).violations == ()


def test_so_are_its_groups_that_were_complete() -> None:
    core = started("partial_sync", steps=1, groups_per_step=2)
    before = core.state.settings
    core.answer(0)  # the step is formed when two are complete
    resumed(core, steps=3)
    core.answer(1)
    assert core.of(cmd.CommitGroup) == [commit(0, version=0, step=0), commit(1, version=0, step=0)]
    assert audit_entries(before, core.journal).violations == ()


def test_more_episodes_may_be_unfinished_than_there_is_room_for_after_a_resume_with_smaller_hosts() -> None:
    core = started(slots=8, max_episodes=8, groups_per_step=4)
    before = core.state.settings
    resumed(core, max_episodes=3)
    assert len(core.state.trajectories) == 8
    assert why_not_admitted(core.state) is Refusal.HOSTS
    assert audit_entries(before, core.journal).violations == ()
    for group in range(3):
        core.answer(group)
    assert core.of(cmd.AdmitGroup)[4:] == [], "two are unfinished"
    core.finished(6)
    assert len(core.of(cmd.AdmitGroup)) == 5
