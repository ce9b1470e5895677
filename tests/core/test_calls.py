"""Calls of environments: what a trajectory holds in the meantime, where it continues, and what becomes of it if it
cannot."""

from __future__ import annotations

from functools import partial

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.admission import Refusal, why_not_admitted
from dora.core.ids import TrajectoryId
from dora.core.orchestration import Orchestration
from dora.core.phases import GroupPhase, TrajectoryPhase, WeightsPhase
from tests.core.builders import PROMPT, Core, admit, call, generate, grade, packing, push, started, stop

KEEP = Orchestration(kv_overcommit=False, calls="keep")
PINNED = Orchestration(kv_overcommit=False, calls="pinned")


def one_group(**changes: object) -> Core:
    """Group 0 alone (trajectories 0 and 1), on instance 0."""
    values: dict[str, object] = {"groups_per_step": 1, "max_staleness": 0, "steps": 2, "orchestration": KEEP}
    return started(**(values | changes))  # type: ignore[arg-type]


def phase_of(core: Core, t: int) -> TrajectoryPhase:
    return core.state.trajectories[t].phase  # type: ignore[index]


def lending(**changes: object) -> Core:
    """Slots are free as soon as a call begins."""
    return started(prefill_s_per_token=0.0, **changes)  # type: ignore[arg-type]


# -- what it holds ----------------------------------------------------------------------------------------------------


def test_with_keep_a_calling_trajectory_keeps_its_slot_and_goes_on_where_it_was() -> None:
    core = one_group(instances=2, slots=2)
    home = core.of(cmd.Generate)[0].instance
    assert core.called(0, tokens=5) == [call(0)]
    assert phase_of(core, 0) is TrajectoryPhase.CALLING
    assert 0 in core.state.instances[home].residents
    assert core.result(0, tokens=9) == [generate(0, on=home, version=0, attempt=3, tokens=9)]
    assert core.finished(0, tokens=12) == [grade(0, attempt=4)]


def test_with_pinned_the_slot_is_free_for_others_during_the_call() -> None:
    core = lending(instances=1, slots=2, groups_per_step=2, max_staleness=0, steps=2, orchestration=PINNED)
    assert core.called(0) == [call(0), admit(1, version=0, deadline=0), generate(2, on=0, version=0)]
    assert core.called(1) == [call(1), generate(3, on=0, version=0)]
    assert core.result(0, tokens=3) == [], "it waits for a slot"
    assert core.finished(2) == [grade(2), generate(0, on=0, version=0, attempt=3, tokens=3)]


def test_a_returned_trajectory_takes_a_slot_before_a_new_group() -> None:
    core = lending(instances=1, slots=4, groups_per_step=4, max_staleness=0, steps=2, orchestration=PINNED)
    admitted = len(core.of(cmd.AdmitGroup))
    core.called(0)
    assert len(core.of(cmd.AdmitGroup)) == admitted + 1, "its slot went to group 2"
    core.result(0)
    orders = core.finished(2)
    assert [o.trajectory for o in orders if isinstance(o, cmd.Generate)] == [0]


def test_a_returned_trajectory_prefers_the_instance_of_its_last_turn_to_that_of_its_siblings() -> None:
    core = lending(instances=2, slots=4, groups_per_step=2, max_staleness=0, steps=2, orchestration=PINNED)
    where = {o.trajectory: o.instance for o in core.of(cmd.Generate)}
    [mine] = {where[t] for t in (0, 1)}
    core.called(0)
    core.drain(mine)
    moved = core.stopped(1, tokens=1)
    assert [o.instance for o in moved if isinstance(o, cmd.Generate)] == [1 - mine], "the group's home moved"
    core.recall(mine)
    assert core.result(0) == [generate(0, on=mine, version=0, attempt=3, tokens=2)]


def test_a_slot_is_kept_for_the_time_that_a_prefill_elsewhere_would_cost_all_slots() -> None:
    changes = {"groups_per_step": 3, "max_staleness": 0, "steps": 2, "prefill_s_per_token": 0.2}
    core = started(instances=2, slots=2, orchestration=PINNED, **changes)
    [home] = {o.instance for o in core.of(cmd.Generate) if o.trajectory < 2}
    core.called(0, tokens=7)
    core.tick(1.9)
    assert 0 in core.state.instances[home].residents, "(3 + 7) tokens x 0.2 s x 2 slots / 2 instances"
    assert generate(4, on=home, version=0) in core.tick(0.1)
    assert core.state.trajectories[0].instance is None  # type: ignore[index]
    core.result(0, tokens=8)
    core.finished(1, tokens=1)
    core.called(0, tokens=9)
    core.result(0, tokens=10)
    core.tick(1.0)
    core.called(0, tokens=11)
    core.tick(2.0)
    assert 0 in core.state.instances[home].residents, "each call has its own time"


def test_with_pinned_a_version_keeps_its_last_instance_while_all_its_trajectories_call() -> None:
    core = packing(orchestration=PINNED, prefill_s_per_token=0.0)
    versions = {i.full.version for i in core.state.instances.values()}
    assert versions == {0}
    for t in (16, 17, 22, 23):
        core.called(t)
    core.tick(1.0)
    given = core.of(cmd.PushWeights)[2:]
    assert [p.version for p in given] == [1], "one instance goes to version 1, the other stays"
    core.pushed(given[0].instance, 1)
    core.tick(1.0)
    kept = 1 - given[0].instance
    assert core.state.instances[kept].full.version == 0
    assert core.result(16) == [generate(16, on=kept, version=0, attempt=3, tokens=2)]


# -- release ----------------------------------------------------------------------------------------------------------

RELEASE = Orchestration(kv_overcommit=False, calls="release")


def all_away(**changes: object) -> tuple[Core, int]:
    """All of version 0 calls; one of its instances was given version 1, which took 4 s, and the other is returned."""
    core = packing(orchestration=RELEASE, prefill_s_per_token=0.0, **changes)
    for t in (16, 17, 22, 23):
        core.called(t)
    [given] = core.of(cmd.PushWeights)[2:]
    core.tick(4.0)
    core.pushed(given.instance, 1)
    return core, 1 - given.instance


def test_with_release_a_version_gives_its_last_instance_away_after_the_patience() -> None:
    core, kept = all_away()
    assert core.state.push_s == pytest.approx(4 / 3), "two pushes took no time"
    assert core.now > 2 * 4 / 3, "it has been quiet for the patience already"
    assert core.of(cmd.PushWeights)[-1] == push(kept, version=1, attempt=2)


def test_a_trajectory_that_comes_back_within_the_patience_keeps_the_instance() -> None:
    core = packing(orchestration=RELEASE, prefill_s_per_token=0.0)
    for t in (16, 17, 22, 23):
        core.called(t)
    [given] = core.of(cmd.PushWeights)[2:]
    core.now += 4.0
    core.result(16)
    core.called(16, tokens=3)
    core.pushed(given.instance, 1)
    core.tick(1.0)
    assert len(core.of(cmd.PushWeights)) == 3, "it has to be quiet again for the patience"
    core.tick(2.0)
    assert core.of(cmd.PushWeights)[-1].instance == 1 - given.instance


def test_a_version_in_need_is_given_the_next_vacant_instance_of_the_newest_which_stops_admitting() -> None:
    core, kept = all_away()
    core.pushed(kept, 1)
    residents = {i: set(one.residents) for i, one in core.state.instances.items()}
    assert all(len(r) == 4 for r in residents.values())
    assert core.result(16) == []
    core.tick(0.1)
    assert core.state.yielding is None, "it may wait for one patience"
    core.tick(10.0)
    yielding = core.state.yielding
    assert yielding is not None
    assert yielding.full.phase is WeightsPhase.DRAINING
    orders = [o for t in sorted(residents[yielding.id]) for o in core.finished(t)]
    assert not [o for o in orders if isinstance(o, cmd.AdmitGroup | cmd.Generate)]
    assert [(o.instance, o.version) for o in orders if isinstance(o, cmd.PushWeights)] == [(yielding.id, 0)]
    assert generate(16, on=yielding.id, version=0, attempt=3, tokens=2) in core.pushed(yielding.id, 0)
    core.tick(1.0)
    assert core.state.yielding is None


def test_an_instance_that_yields_admits_again_when_nothing_is_in_need_any_more() -> None:
    core, kept = all_away()
    core.pushed(kept, 1)
    core.result(16)
    core.tick(10.0)
    assert core.state.yielding is not None
    yielding = core.state.yielding
    for t in (17, 22, 23):
        core.result(t, ended=True)
    core.up(2)
    assert core.of(cmd.PushWeights)[-1] == push(2, version=0, attempt=1)
    assert (core.state.yielding, yielding.full.phase) == (None, WeightsPhase.SERVING)


# -- instances --------------------------------------------------------------------------------------------------------


def test_an_instance_with_calling_residents_is_packed_without_a_stop() -> None:
    core = packing(orchestration=KEEP)
    core.called(16)
    core.called(17)
    core.tick(1.0)
    assert not core.of(cmd.StopRequest), "nothing was running there"
    assert [p.instance for p in core.of(cmd.PushWeights)[2:]] == [0]
    assert set(core.state.instances[1].residents) == {16, 17, 22, 23}
    assert core.result(16) == [generate(16, on=1, version=0, attempt=3, tokens=2)]


def test_a_turn_that_ends_with_a_call_instead_of_the_ordered_stop_has_moved() -> None:
    core = packing(orchestration=KEEP)
    core.tick(1.0)
    assert stop(16, on=0) in core.of(cmd.StopRequest) or stop(22, on=1) in core.of(cmd.StopRequest)
    [source] = {o.instance for o in core.of(cmd.StopRequest)}
    mine = [o.trajectory for o in core.of(cmd.StopRequest)]
    for t in mine:
        assert core.called(t)[0] == call(t)
    assert set(core.state.instances[1 - source].residents) == {16, 17, 22, 23}
    assert core.state.instances[source].full.phase is WeightsPhase.UPDATING
    assert core.result(mine[0]) == [generate(mine[0], on=1 - source, version=0, attempt=3, tokens=2)]


def test_a_drained_instance_is_rid_of_its_calling_residents_at_once() -> None:
    core = one_group(instances=2, slots=2)
    [home] = {o.instance for o in core.of(cmd.Generate)}
    core.called(0)
    core.drain(home)
    assert 0 in core.state.instances[1 - home].residents
    assert core.result(0) == [generate(0, on=1 - home, version=0, attempt=3, tokens=2)]


def test_a_call_survives_the_loss_of_its_instance() -> None:
    core = one_group(instances=2, slots=2)
    [home] = {o.instance for o in core.of(cmd.Generate)}
    core.called(0, tokens=5)
    core.lost(home, tokens={1: 3})
    assert phase_of(core, 0) is TrajectoryPhase.CALLING
    assert core.state.counters.recovered == 1, "only the other one had a request"
    assert core.result(0, tokens=7) == [generate(0, on=1 - home, version=0, attempt=3, tokens=7)]


def test_an_update_in_flight_takes_a_calling_trajectory_along() -> None:
    core = started("partial", groups_per_step=1, max_staleness=1, steps=3, slots=8, orchestration=KEEP)
    core.answer(0)
    core.called(2, tokens=4)
    core.train(0)
    assert push(0, version=1, attempt=2) in core.publish(1)
    core.pushed(0, 1)
    assert core.result(2, tokens=6) == [generate(2, on=0, version=1, attempt=3, tokens=6)]


def test_a_result_that_comes_during_an_update_in_flight_waits_for_its_end() -> None:
    core = started("partial", groups_per_step=1, max_staleness=1, steps=3, slots=8, orchestration=KEEP)
    core.answer(0)
    core.called(2, tokens=4)
    core.train(0)
    core.publish(1)
    assert core.result(2, tokens=6) == []
    assert generate(2, on=0, version=1, attempt=3, tokens=6) in core.pushed(0, 1)


# -- endings ----------------------------------------------------------------------------------------------------------


def test_the_environment_may_end_the_episode() -> None:
    core = one_group()
    core.called(0, tokens=5)
    assert core.result(0, tokens=5, ended=True) == [grade(0, attempt=3)]


def test_a_call_reports_what_rows_repeat_and_the_budget_that_ended_the_episode() -> None:
    core = one_group(instances=2, slots=2)
    for t in (0, 1):
        core.called(t, tokens=3)
    fork = ev.CallFinished(core.now, TrajectoryId(0), core.attempts[cmd.CallEnvironment, 0], 9, repeated=4)
    core.tell(fork)
    assert core.state.trajectories[TrajectoryId(0)].repeated == 4
    core.called(0, tokens=11)
    attempt = core.attempts[cmd.CallEnvironment, 0]
    last = ev.CallFinished(core.now, TrajectoryId(0), attempt, 11, ended=True, truncated="turns", repeated=4)
    assert core.tell(last) == [grade(0, attempt=attempt + 1)]
    trajectory = core.state.trajectories[TrajectoryId(0)]
    assert (trajectory.truncated, trajectory.repeated) == ("turns", 4)


@pytest.mark.parametrize("orchestration", [KEEP, PINNED])
def test_an_environment_that_cannot_go_on_leaves_its_trajectory_without_a_reward(orchestration: Orchestration) -> None:
    core = one_group(group_size=3, orchestration=orchestration)
    core.finished(0)
    core.finished(1)
    core.graded(0, 0.0)
    core.graded(1, 1.0)
    core.called(2, tokens=5)
    orders = core.result(2, tokens=5, failed="the host died")
    assert cmd.CommitGroup(0, 0, 0) in orders  # type: ignore[arg-type]
    assert core.state.counters.environment_failed == {"the host died": 1}
    assert [w.ranks for w in core.of(cmd.TrainMicroBatch)] == [((0,), (1,))]


def test_a_group_with_too_few_environments_left_fails() -> None:
    core = one_group()
    for t in (0, 1):
        core.called(t)
    core.result(0, failed="the host died")
    [dropped] = [o for o in core.result(1, failed="the host died") if isinstance(o, cmd.DropGroup)]
    assert (dropped.outcome, dropped.reason) == (GroupPhase.FAILED, cmd.DropReason.GRADING)


def test_a_calling_trajectory_of_a_failed_group_frees_its_slot_now_and_ends_with_its_call() -> None:
    core = one_group()
    core.called(0)
    orders = core.failed(1, final=True)
    assert [o.group for o in orders if isinstance(o, cmd.AdmitGroup)] == [1], "another group takes the place"
    assert phase_of(core, 0) is TrajectoryPhase.CALLING
    assert core.state.trajectories[0].instance is None  # type: ignore[index]
    assert core.result(0) == []
    assert 0 not in core.state.trajectories


def test_a_late_or_repeated_result_changes_nothing() -> None:
    core = one_group()
    core.called(0)
    core.result(0)
    assert core.result(0, attempt=2) == []
    assert core.result(0, attempt=1) == []
    core.called(0, tokens=3)
    assert core.result(0, attempt=2) == []
    assert phase_of(core, 0) is TrajectoryPhase.CALLING
    assert core.state.counters.late_completions == 3


def test_a_call_of_an_old_attempt_is_not_made() -> None:
    core = one_group(instances=2, slots=2)
    [home] = {o.instance for o in core.of(cmd.Generate)}
    core.lost(home)
    core.attempts[cmd.Generate, 0] = 1
    assert core.called(0) == []
    assert core.state.counters.late_completions == 1


# -- a new controller -------------------------------------------------------------------------------------------------


def test_a_call_without_a_result_fails_with_the_controller_unless_it_can_be_repeated() -> None:
    core = one_group(group_size=3)
    for t in (0, 1):
        core.called(t, tokens=4)
    assert core.restarted({2: 3}, replayable=(1,)) == [call(1, attempt=3)]
    assert phase_of(core, 1) is TrajectoryPhase.CALLING
    assert 0 not in core.state.trajectories
    assert core.state.counters.environment_failed == {"restart": 1}
    assert core.result(1, attempt=2) == [], "of the earlier controller"
    assert core.result(1, tokens=6) == []
    core.ready()
    core.up(0)
    resumed = core.pushed(0, 0)
    assert generate(1, on=0, version=0, attempt=4, tokens=6) in resumed
    assert core.state.ledger.groups[0].phase is GroupPhase.GENERATING  # type: ignore[index]


# -- room in the hosts of the environment ------------------------------------------------------------------------------


def test_groups_are_admitted_while_the_hosts_have_room_for_all_unfinished_episodes() -> None:
    core = started(instances=2, slots=8, max_episodes=5, group_size=2, groups_per_step=4)
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0, 1]
    assert why_not_admitted(core.state) is Refusal.HOSTS
    assert core.called(0) == [call(0)]
    core.result(0, ended=True)
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0, 1, 2], "an episode has left its host"


def test_a_new_controller_may_have_other_hosts() -> None:
    core = started(instances=2, slots=8, max_episodes=4, group_size=2, groups_per_step=4)
    core.restarted(dict.fromkeys(range(4), 0), max_episodes=6)
    core.ready()
    for instance in (0, 1):
        core.up(instance)
        core.pushed(instance, 0)
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0, 1, 2]


def test_evaluation_samples_take_the_first_room_in_the_hosts() -> None:
    core = started(slots=8, max_episodes=2, group_size=2, eval_prompt_tokens=(PROMPT,) * 3)
    assert [o.trajectory for o in core.of(cmd.Generate)] == [-1, -2]
    core.finished(-1)
    core.graded(-1, 1.0)
    assert [o.trajectory for o in core.of(cmd.Generate)] == [-1, -2, -3]
    for sample in (-2, -3):
        assert not core.of(cmd.AdmitGroup)
        core.finished(sample)
        core.graded(sample, 1.0)
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0]


# -- silence ----------------------------------------------------------------------------------------------------------


def test_an_instance_whose_residents_all_call_is_not_silent() -> None:
    core = one_group(watchdog_s=30.0, no_progress_s=1e6)
    core.called(0)
    core.called(1)
    for _ in range(50):
        core.tick(10.0)
    assert not core.of(cmd.CondemnInstance)
    core.result(0)
    for _ in range(3):
        core.tick(10.0)
    assert not core.of(cmd.CondemnInstance), "its time begins with the next turn"
    for _ in range(2):
        core.tick(10.0)
    assert len(core.of(cmd.CondemnInstance)) == 1


def test_a_silent_request_beside_calls_is_still_found() -> None:
    core = one_group(watchdog_s=30.0, no_progress_s=1e6)
    core.called(0)
    for _ in range(5):
        core.tick(10.0)
    assert len(core.of(cmd.CondemnInstance)) == 1


@pytest.mark.parametrize(("call_limit_s", "last_s"), [(0.0, 100.0), (60.0, 160.0)])
def test_a_call_extends_the_time_without_progress_by_its_own_limit_and_no_more(
    call_limit_s: float, last_s: float
) -> None:
    core = one_group(no_progress_s=100.0, call_limit_s=call_limit_s)
    core.called(0)
    core.called(1)
    core.tick(last_s)
    assert not core.of(cmd.FailRun)
    core.tick(1.0)
    [failed] = core.of(cmd.FailRun)
    assert "trajectory 0 calling" in failed.reason


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orchestration", [KEEP, PINNED])
def test_an_evaluation_sample_calls_and_keeps_its_share(orchestration: Orchestration) -> None:
    core = started(
        groups_per_step=1,
        max_staleness=0,
        steps=2,
        eval_prompt_tokens=(3, 3),
        max_eval_share=0.01,
        orchestration=orchestration,
        slots=4,
    )
    samples = [o.trajectory for o in core.of(cmd.Generate) if o.trajectory < 0]
    assert samples == [-1, -2], "version 0 is evaluated first, with all slots"
    core.called(-1)
    assert core.result(-1) == [generate(-1, on=0, version=0, attempt=3, tokens=2)]
    core.called(-2)
    core.result(-2, failed="the host died")
    core.finished(-1, tokens=2)
    assert cmd.ReportEvaluation(0) in core.graded(-1, 1.0)  # type: ignore[arg-type]


def test_the_call_for_a_prompt_of_its_own_has_no_reward_and_limits_the_first_turn() -> None:
    core = started(own_prompts=True, slots=4)
    trajectory = core.state.trajectories[TrajectoryId(0)]
    finished = partial(ev.CallFinished, core.now, TrajectoryId(0))
    core.tell(finished(trajectory.attempt, 3, turn_tokens=7))
    assert (trajectory.turn_rewards, trajectory.turn_tokens, trajectory.num_tokens) == ((), 7, 3)
    core.called(0, tokens=5)
    core.tell(finished(trajectory.attempt, 6, reward=0.5))
    assert (trajectory.turn_rewards, trajectory.turn_tokens) == ((0.5,), 0)
