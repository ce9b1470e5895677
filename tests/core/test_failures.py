"""What the core does when something fails: nothing is lost or sampled twice, and errors name the cause."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import GroupId, InstanceId, TrajectoryId
from dora.core.on_instances import PUSH_BACKOFF_S
from dora.core.phases import GroupPhase, WeightsPhase
from dora.core.state import State
from tests.core.builders import PROMPT, Core, admit, commit, generate, grade, push, started, stop
from tests.core.world import Faults, run, settings

# -- pushes -----------------------------------------------------------------------------------------------------------


def test_the_back_off_of_pushes_doubles_from_one_second_to_sixty() -> None:
    assert PUSH_BACKOFF_S == (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


def test_a_failed_push_is_retried_after_its_back_off_and_then_the_instance_counts_as_lost() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    for attempt, pause_s in enumerate(PUSH_BACKOFF_S, start=2):
        assert core.push_failed(0) == []
        assert core.state.instances[InstanceId(0)].full.phase is WeightsPhase.QUARANTINED
        assert core.tick(pause_s - 0.5) == []
        assert core.tick(0.5) == [push(0, version=0, attempt=attempt)]
    assert core.push_failed(0) == [cmd.CondemnInstance(InstanceId(0), 1, "8 pushes failed: refused")]
    assert core.tick(100.0) == []
    core.lost(0)
    assert core.up(0) == [push(0, version=0, attempt=9)]
    assert core.push_failed(0) == [], "a server that has come up again has all its attempts before it"


def test_a_confirmed_push_forgets_the_failures_before_it() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    core.push_failed(0)
    core.tick(1.0)
    core.push_failed(0)
    core.tick(2.0)
    core.pushed(0, 0)
    assert core.state.instances[InstanceId(0)].full.failures == 0


def test_a_quarantined_instance_gets_no_work() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    core.push_failed(0)
    core.tick(0.5)
    assert core.of(cmd.Generate) == []


def test_no_more_pushes_run_at_once_than_allowed() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    assert [core.up(i) for i in range(5)] == [*([push(i, version=0, attempt=1)] for i in range(4)), []]
    assert push(4, version=0, attempt=1) in core.pushed(0, 0)


# -- instances --------------------------------------------------------------------------------------------------------


def test_residents_of_a_lost_instance_continue_on_a_peer_from_the_tokens_streamed() -> None:
    core = started(instances=2, source=2)  # all of it on instance 0
    assert core.lost(0, {0: 7, 1: 3, 2: 9, 3: 1}) == [
        generate(1, on=1, version=0, attempt=3, tokens=3),
        generate(0, on=1, version=0, attempt=3, tokens=7),
        generate(3, on=1, version=0, attempt=3, tokens=1),
        generate(2, on=1, version=0, attempt=3, tokens=9),
    ]
    assert core.finished(0, tokens=9, attempt=1) == []  # of the request that was lost
    assert (core.state.counters.recovered, core.state.counters.migrations) == (4, 0)


def test_a_resumed_trajectory_with_fewer_tokens_than_were_reported_fails_the_run() -> None:
    core = started()
    core.progress(0, {0: 9})
    core.tick(20.0)
    with_loss = handle(core.state, ev.InstanceLost(core.now, InstanceId(0), 1, {TrajectoryId(0): 4}, "gone"))
    assert cmd.FailRun("C2: trajectory 0 had 9 tokens and goes on from 4") in with_loss
    assert core.state.counters.scheduling_aborts == 1


def test_a_broken_connection_condemns_the_instance_and_keeps_the_tokens() -> None:
    core = started()
    assert core.broken(0, tokens=6) == [cmd.CondemnInstance(InstanceId(0), 1, "connection reset")]
    assert core.broken(1, tokens=5) == []
    core.lost(0, {2: 0, 3: 0})
    core.up(0)
    resumed = [(o.trajectory, o.num_tokens) for o in core.pushed(0, 0) if isinstance(o, cmd.Generate)]
    assert sorted(resumed) == [(0, 6), (1, 5), (2, 0), (3, 0)]


def test_an_answer_that_names_another_version_fails_the_run() -> None:
    core = started()
    event = ev.GenerationFinished(core.now, TrajectoryId(0), 1, 5, False, ((0, 0, 2), (1, 2, 5)))
    assert handle(core.state, event)[0] == cmd.FailRun(
        "C1: instance 0 reports version 1 for trajectory 0, whose tag is 0; spans ((0, 0, 2), (1, 2, 5))"
    )
    assert core.state.counters.version_conflicts == 1


# -- late completions -------------------------------------------------------------------------------------------------


def test_completions_of_an_old_attempt_are_counted_and_ignored() -> None:
    core = started()
    core.failed(0, tokens=3)
    assert core.attempts[cmd.Generate, 0] == 2
    before = core.state.counters.late_completions
    assert core.finished(0, tokens=9, attempt=1) == []
    assert core.stopped(0, tokens=9, attempt=1) == []
    assert core.state.counters.late_completions == before + 2
    assert core.finished(0, tokens=9)[0] == grade(0, attempt=3)


def test_a_completion_that_comes_twice_counts_once() -> None:
    core = started()
    assert core.finished(0, tokens=9) == [grade(0), admit(2, version=0, deadline=1), generate(4, on=0, version=0)]
    assert core.finished(0, tokens=9, attempt=1) == []
    core.graded(0, 1.0)
    assert core.graded(0, 0.0) == []
    assert core.state.ledger.groups[GroupId(0)].rewards == (1.0, None)
    assert core.state.counters.late_completions == 2


def test_events_of_the_trainer_that_are_not_its_next_are_counted_and_ignored() -> None:
    core = started(groups_per_step=2)
    core.answer(0)
    assert core.tell(ev.MicroBatchTrained(0.0, 0, 1)) == []
    assert core.tell(ev.StepTrained(0.0, 1)) == []
    assert core.state.counters.late_completions == 2


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_failed_request_is_tried_again_with_its_tokens() -> None:
    core = started()
    assert core.failed(0, tokens=4) == [generate(0, on=0, version=0, attempt=2, tokens=4)]
    assert core.failed(0, tokens=6) == [generate(0, on=0, version=0, attempt=3, tokens=6)]


def test_a_trajectory_that_fails_max_attempts_times_fails_its_group_and_only_that() -> None:
    core = started(slots=3, max_attempts=2)
    core.failed(2)
    dropped = cmd.DropGroup(GroupId(1), GroupPhase.FAILED, "generation: refused", (None, None))
    assert core.failed(2) == [dropped, admit(2, version=0, deadline=1), generate(4, on=0, version=0)]
    assert core.state.ledger.counts[GroupPhase.FAILED] == 1
    assert 3 not in core.state.trajectories  # its sibling waited for a slot, and waits no longer
    assert core.finished(0)[0] == grade(0)


def test_a_request_that_every_server_would_refuse_fails_its_group_at_once() -> None:
    core = started(slots=3, max_attempts=8)
    dropped = cmd.DropGroup(GroupId(1), GroupPhase.FAILED, "generation: refused", (None, None))
    assert core.failed(2, final=True) == [dropped, admit(2, version=0, deadline=1), generate(4, on=0, version=0)]


def test_a_sample_of_an_evaluation_that_every_server_would_refuse_counts_as_not_graded() -> None:
    core = started(slots=8, max_attempts=8, eval_prompt_tokens=(3, 3), eval_every=1)
    core.failed(-1, final=True)
    assert cmd.ReportEvaluation(0) not in core.orders
    core.finished(-2)
    core.graded(-2, 1.0)
    assert cmd.ReportEvaluation(0) in core.orders


def test_resident_siblings_of_a_failed_group_are_stopped_and_not_graded() -> None:
    core = started(max_attempts=1)
    assert stop(1, on=0) in core.failed(0)
    assert grade(1) not in core.finished(1)
    assert TrajectoryId(1) not in core.state.trajectories


def test_a_lost_instance_is_not_a_failed_attempt() -> None:
    core = started(max_attempts=1)
    core.lost(0, {0: 1, 1: 1, 2: 1, 3: 1})
    core.up(0)
    core.pushed(0, 0)
    core.broken(0, tokens=2)
    assert core.state.ledger.counts[GroupPhase.FAILED] == 0


# -- grading and top-ups ----------------------------------------------------------------------------------------------


def test_failed_grading_is_not_reward_0() -> None:
    core = started(group_size=3, groups_per_step=1, slots=3)
    orders = core.answer(0, rewards=(None, 0.0, 1.0))
    assert commit(0, version=0, step=0) in orders
    waves = [o for o in orders if isinstance(o, cmd.TrainMicroBatch)]
    assert sorted(t for w in waves for rank in w.ranks for t in rank) == [1, 2]


def test_a_group_without_advantage_is_replaced_by_a_new_one() -> None:
    core = started(groups_per_step=2, slots=6)
    assert core.answer(0, rewards=(0.5, 0.5))[-4:] == [
        cmd.DropGroup(GroupId(0), GroupPhase.FILTERED, "zero variance", (0.5, 0.5)),
        admit(3, version=0, deadline=1),
        generate(6, on=0, version=0),
        generate(7, on=0, version=0),
    ]


def test_more_top_ups_than_allowed_stop_the_job_and_show_the_rewards() -> None:
    core = started(groups_per_step=2, slots=6, max_top_up=1.0)
    core.answer(0, rewards=(0.0, 0.0))
    core.answer(1, rewards=(1.0, 1.0))
    assert core.answer(2, rewards=(0.0, 0.0))[-1] == cmd.FailRun(
        "step 1 had to top up 3 groups (rollout.max_top_up is 1 x 2); the last one left as filtered: zero variance; "
        "their siblings' rewards: 0 x 4, 1 x 2; bring prompts that are neither always nor never solved"
    )
    assert core.tick(1.0) == []


def test_top_ups_of_groups_that_failed_are_no_reason_to_change_the_prompts() -> None:
    core = started(groups_per_step=2, slots=6, max_top_up=1.0)
    core.answer(0, rewards=(None, 0.0))
    core.answer(1, rewards=(None, None))
    assert core.answer(2, rewards=(None, None))[-1] == cmd.FailRun(
        "step 1 had to top up 3 groups (rollout.max_top_up is 1 x 2); the last one left as failed: grading; "
        "their siblings' rewards: none x 5, 0 x 1; most have none, because something failed: log.jsonl and the status "
        "say what"
    )


def test_top_ups_are_counted_per_step() -> None:
    core = started(groups_per_step=2, slots=8, max_top_up=0.5, max_staleness=0)
    for step in range(3):
        filtered, kept = core.state.ledger.groups
        core.answer(filtered, rewards=(0.0, 0.0))
        core.answer(kept)
        core.answer(max(core.state.ledger.groups))
        core.train(step)
        core.publish(step + 1)
        core.pushed(0, step + 1)
    assert core.state.ledger.counts[GroupPhase.FILTERED] == 3
    assert core.of(cmd.FailRun) == []


def test_groups_that_failed_in_one_way_count_under_one_reason() -> None:
    """What servers say has numbers, and every row of metrics has all reasons since the start."""
    core = started(groups_per_step=2, slots=6, max_top_up=1.0)
    ids = ("5f1e9a3b", "550e8400-e29b-41d4-a716-446655440000", "0x7ffe1a2b")
    for t, tokens, id in zip((0, 2, 4), (17, 23, 29), ids, strict=True):
        reason = f"http://engine:30000: {id} was cut to {tokens} of 128 tokens"
        event = ev.GenerationFailed(0.0, TrajectoryId(t), core.attempts[cmd.Generate, t], 0, False, reason, final=True)
        core.tell(event)
    assert core.state.ledger.reasons == {"failed: generation: http://engine:30000: … was cut to … of … tokens": 3}
    [end] = core.of(cmd.FailRun)
    assert "left as failed: generation: http://engine:30000: 0x7ffe1a2b was cut to 29 of 128 tokens" in end.reason


# -- no progress ------------------------------------------------------------------------------------------------------


def test_no_progress_names_the_group_that_holds_up_the_step_its_instance_and_age() -> None:
    core = started(groups_per_step=2, no_progress_s=100.0, watchdog_s=1e6)
    core.finished(0)
    core.graded(0, 1.0)
    assert core.tick(100.0) == []
    assert core.tick(1.0) == [
        cmd.FailRun(
            "no progress for 101 s: group 0 of version 0, admitted 101 s ago, holds up step 1: "
            "trajectory 1 resident on instance 0"
        )
    ]


def test_a_new_controller_continues_a_run_that_failed_for_lack_of_progress() -> None:
    core = started(groups_per_step=2, no_progress_s=100.0, watchdog_s=1e6)
    core.finished(0)
    core.graded(0, 1.0)
    assert [type(order) for order in core.tick(101.0)] == [cmd.FailRun]
    assert core.finished(1) == [], "until then it is over"
    core.restarted({1: 3})
    assert core.tick(100.0) == []
    core.up(0)
    resumed = [(o.trajectory, o.num_tokens) for o in core.pushed(0, 0) if isinstance(o, cmd.Generate)]
    assert (1, 3) in resumed


def test_a_new_controller_may_wait_longer() -> None:
    core = started(groups_per_step=2, no_progress_s=100.0, watchdog_s=1e6)
    assert [type(order) for order in core.tick(101.0)] == [cmd.FailRun]
    core.restarted(limits=ev.TimeLimits(watchdog_s=1e6, no_progress_s=300.0, call_limit_s=0.0))
    assert core.tick(300.0) == []
    assert [type(order) for order in core.tick(1.0)] == [cmd.FailRun]
    core.restarted()
    assert core.tick(300.0) == [], "limits stay if none are given, as by controllers before there were any"


def test_any_other_failure_is_permanent() -> None:
    core = Core()
    core.publish(0)
    assert [type(order) for order in core.tell(ev.TrainerReady(core.now, 5))] == [cmd.FailRun]
    assert core.restarted() == []


def test_no_progress_names_a_trainer_that_hangs() -> None:
    core = started(groups_per_step=2, no_progress_s=100.0, watchdog_s=1e6)
    core.answer(0)
    assert core.tick(101.0) == [cmd.FailRun("no progress for 101 s: the trainer works on micro-batch 0 of step 1")]


def test_no_progress_names_a_trainer_that_never_became_ready() -> None:
    core = Core(no_progress_s=100.0, watchdog_s=1e6)
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    assert core.tick(101.0) == [cmd.FailRun("no progress for 101 s: the trainer has not reported ready")]


def test_a_commit_is_progress_and_having_nothing_outstanding_is_no_lack_of_it() -> None:
    core = started(groups_per_step=1, no_progress_s=100.0, watchdog_s=1e6, max_staleness=0)
    core.now = 90.0
    core.answer(0)
    assert core.tick(90.0) == []
    core.train(0)
    assert core.tick(1000.0) == []


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_trainer_that_reports_a_micro_batch_it_was_never_given_fails_the_run() -> None:
    core = started()
    core.ready()
    reason = "the trainer says that it trained micro-batch 0 of step 1: it has none"
    assert core.tell(ev.MicroBatchTrained(core.now, 0, 0)) == [cmd.FailRun(reason)]


def test_a_restarted_trainer_gets_the_same_waves_again_and_its_steps_are_not_counted_twice() -> None:
    core = started(groups_per_step=2, max_staleness=2)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.answer(2)
    sent = core.of(cmd.TrainMicroBatch)
    trained = core.state.ledger.counts[GroupPhase.TRAINED]
    assert core.ready(0) == [w for w in sent if w.step == 0]
    assert core.train(0) == [w for w in sent if w.step == 1]
    assert core.publish(1) == []
    assert core.state.ledger.counts[GroupPhase.TRAINED] == trained


def test_a_trainer_that_restarts_beyond_the_last_event_is_accepted() -> None:
    core = started(groups_per_step=2, max_staleness=2)
    for group in (0, 1):
        core.answer(group)
    core.restarted()  # StepTrained came while nobody listened
    assert core.ready(1) == [cmd.ForgetGroups((GroupId(0), GroupId(1)))]
    assert core.state.ledger.counts[GroupPhase.TRAINED] == 2


def test_the_trainers_idle_time_is_counted_from_a_restart_on_like_the_steps_duration() -> None:
    core = started(groups_per_step=1, filter_zero_variance=False, max_staleness=2)
    core.now += 5.0
    core.answer(0)
    assert core.state.feed.idle_s >= 5.0
    core.restarted()
    assert (core.state.feed.idle_s, core.state.step_trained_at) == (0.0, core.now)


def test_a_trainer_that_starts_at_a_step_which_is_not_closed_fails_the_run() -> None:
    core = started(groups_per_step=2)
    assert core.ready(1) == [cmd.FailRun("the trainer starts at step 2, but only 0 steps are closed")]


def test_waves_are_kept_back_to_the_oldest_checkpoint_that_is_kept() -> None:
    core = started(groups_per_step=2, max_staleness=2)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    assert core.tell(ev.CheckpointSaved(core.now, 1, "checkpoints/1")) == []
    assert 0 in core.state.feed.steps  # a start from the model is still possible
    core.publish(1)
    assert core.tell(ev.CheckpointSaved(core.now, 2, "checkpoints/2")) == []
    assert 0 not in core.state.feed.steps
    assert core.tell(ev.CheckpointSaved(core.now, 3, "checkpoints/3")) == [cmd.DropCheckpoint(1, "checkpoints/1")]


def test_a_trainer_that_starts_before_the_waves_that_are_kept_fails_the_run() -> None:
    core = started(groups_per_step=2, max_staleness=2)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.tell(ev.CheckpointSaved(core.now, 1, "checkpoints/1"))
    core.tell(ev.CheckpointSaved(core.now, 2, "checkpoints/2"))
    core.restarted()
    assert core.ready(0) == [
        cmd.FailRun("the trainer starts at step 1, but what it would train again is kept from step 2 on")
    ]


def test_a_run_killed_in_its_last_evaluation_ends_once_its_trainer_is_ready() -> None:
    """Else it could end before the checkpoint of its last step is written."""
    core = started(groups_per_step=2, steps=1, eval_prompt_tokens=(PROMPT,))
    core.finished(-1)
    core.graded(-1, 1.0)
    core.answer(0)
    core.answer(1)
    core.train(0)
    core.publish(1)
    core.restarted()
    core.ready(0)
    core.up(0)
    core.pushed(0, 1)
    core.finished(-2)
    assert core.graded(-2, 1.0) == [cmd.ReportEvaluation(1)]
    assert core.train(0)[-1] == cmd.FinishRun("the only step is trained")


def test_a_finished_run_goes_on_when_a_restart_adds_steps() -> None:
    core = started(groups_per_step=2, steps=1)
    core.answer(0)
    core.answer(1)
    core.train(0)
    assert cmd.FinishRun("the only step is trained") in core.publish(1)
    assert handle(core.state, ev.ControllerRestarted(core.now, 1, {}, steps=1)) == []
    assert handle(core.state, ev.ControllerRestarted(core.now, 2, {}, steps=3)) == [
        cmd.FetchPrompts(core.state.next_group, 4)
    ]
    assert core.state.formation.deadline(1) == 2


def test_a_restarted_controller_resumes_unfinished_answers_from_the_tokens_on_disk() -> None:
    core = started()
    core.progress(0, {0: 5, 1: 5, 2: 5, 3: 5})
    assert core.restarted({0: 9, 1: 8, 2: 7, 3: 6}) == []
    assert core.up(0) == [push(0, version=0, attempt=2)]
    assert core.finished(0, tokens=9, attempt=1) == []  # what the old controller's request may still say
    resumed = [(o.trajectory, o.num_tokens) for o in core.pushed(0, 0) if isinstance(o, cmd.Generate)]
    assert sorted(resumed) == [(0, 9), (1, 8), (2, 7), (3, 6)]


def test_a_restarted_controller_grades_again_what_was_being_graded() -> None:
    core = started()
    core.finished(0)
    core.finished(1)
    core.graded(1, 1.0)
    assert core.restarted() == [grade(0, attempt=3)]
    assert core.graded(0, 0.5, attempt=2) == []
    assert core.graded(0, 0.5) == [commit(0, version=0, step=0)]


def test_a_restarted_controller_resends_the_same_waves() -> None:
    core = started(groups_per_step=2)
    core.answer(0)
    core.answer(1)
    sent = core.of(cmd.TrainMicroBatch)
    assert core.restarted() == []
    assert core.ready(0) == sent


def test_a_restarted_controller_reads_on_where_it_admitted_last() -> None:
    state = started().state
    assert state.next_group == 2
    assert handle(state, ev.ControllerRestarted(0.0, 1, {})) == [cmd.FetchPrompts(state.next_group, 8)]
    assert handle(state, ev.ControllerRestarted(0.0, 2, {})) == [cmd.FetchPrompts(state.next_group, 8)]  # not answered


def test_prompts_that_were_read_by_the_old_controller_are_ignored() -> None:
    state = State(settings())
    first = handle(state, ev.TrainerReady(0.0, 0))
    assert first == [cmd.FetchPrompts(state.next_group, 8)]
    handle(state, ev.PromptsArrived(0.0, state.next_group, (3,) * 8, False))
    handle(state, ev.PromptsArrived(0.0, state.next_group, (3,) * 8, False))
    assert len(state.prompts) == 8
    assert state.counters.late_completions == 1


@pytest.mark.parametrize("strategy", ["sync", "periodic", "one_step_off", "dora"])
def test_with_every_fault_at_once_each_group_is_trained_once_and_no_token_is_lost(strategy: str) -> None:
    faults = Faults(
        push_fails=0.2,
        request_fails=0.1,
        instance_dies=0.05,
        grading_fails=0.02,
        zero_variance=0.2,
        controller_restarts=0.03,
        trainer_dies=0.05,
        late_completion=0.2,
    )
    for seed in range(3):
        world = run(strategy, seed=seed, faults=faults)
        assert isinstance(world.outcome, cmd.FinishRun)
        counts = world.state.ledger.counts
        assert counts[GroupPhase.TRAINED] == 8 * 4
        assert sum(counts.values()) == world.state.ledger.admitted
        assert world.state.counters.scheduling_aborts == 0
