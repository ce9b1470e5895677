"""The liveness rules of docs/STALENESS.md: F says that a group may be committed in time, these that it will be."""

from __future__ import annotations

from dora.core import commands as cmd
from dora.core.ids import FIRST_VERSION, InstanceId, TrajectoryId
from dora.core.phases import WeightsPhase
from tests.core.builders import Core, admit, generate, grade, packing, push, started, stop, two_versions, wave


def test_the_scenario_of_two_versions_is_as_described() -> None:
    core = two_versions()
    residents = {i: sorted(instance.residents) for i, instance in core.state.instances.items()}
    assert residents == {0: [16, 17, 18, 19], 1: [20, 21, 22, 23]}
    assert {(g.version, g.deadline) for g in core.state.ledger.groups.values()} == {(0, 2)}
    assert core.state.window.newest == 1
    assert not core.state.pushes


# -- rule 1: a version needs an instance while any of its trajectories is unfinished ----------------------------------


def test_rule_1_grading_needs_no_instance() -> None:
    core = two_versions()
    for t in (20, 21, 22):
        assert core.finished(t) == [grade(t)]
    assert core.finished(23) == [grade(23), push(1, version=1, attempt=2)]
    for t in (16, 17, 18):
        assert core.finished(t) == [grade(t)]
    assert core.finished(19) == [grade(19), push(0, version=1, attempt=2)]  # none of version 0 is graded yet


def test_rule_1_one_resident_trajectory_keeps_its_instance() -> None:
    core = two_versions()
    for t in (20, 21, 22):
        assert core.finished(t) == [grade(t)]
    assert core.tick(1.0) == []  # instance 0 is full: it cannot take trajectory 23 over
    assert core.finished(23) == [grade(23), push(1, version=1, attempt=2)]


def test_rule_1_trajectories_of_lost_instances_need_one_again() -> None:
    core = two_versions()
    for t in (16, 17, 18, 20, 21, 22, 23):
        core.finished(t)
    core.lost(1)
    assert core.lost(0, {19: 5}) == []
    assert core.up(0) == [push(0, version=0, attempt=2)]  # for the one that is left, though version 1 would admit
    assert core.pushed(0, 0) == [generate(19, on=0, version=0, attempt=3, tokens=5)]


# -- rule 2: where an empty instance goes -----------------------------------------------------------------------------


def three_versions_without_instances() -> Core:
    """Versions 0 and 1 have unfinished trajectories, version 2 would admit, and every instance is lost."""
    core = two_versions()
    core.answer(10)
    core.answer(11)
    core.pushed(1, 1)
    for group in (8, 12, 13, 14, 15, 16):  # group 9 (18, 19) of version 0 is late
        core.answer(group)
    core.train(1)
    core.publish(2)
    core.lost(0)
    core.lost(1)
    waiting = {(t.version, t.id) for t in core.state.trajectories.values()}
    assert waiting == {(0, 18), (0, 19), (1, 34), (1, 35), (1, 36), (1, 37)}
    return core


def test_rule_2_versions_in_need_come_first_earliest_deadline_first_then_the_newest() -> None:
    core = three_versions_without_instances()
    assert core.up(0) == [push(0, version=0, attempt=2)]
    assert core.up(1) == [push(1, version=1, attempt=3)]  # version 0 is being loaded: that is enough
    assert core.up(2) == [push(2, version=2, attempt=1)]
    assert core.up(3) == [push(3, version=2, attempt=1)]


def test_rule_2_an_instance_keeps_what_it_holds_while_f_admits_nothing() -> None:
    core = started(groups_per_step=2, max_staleness=0)
    core.answer(0)
    assert core.answer(1)[-2:] == [
        cmd.CloseStep(0, 2),
        wave(0, 1, [2], [3], last=True),
    ]
    assert core.tick(1.0) == []


def test_rule_2_an_instance_keeps_what_it_holds_while_the_window_w_is_full() -> None:
    core = started(groups_per_step=2, max_staleness=2)
    core.answer(0)
    core.answer(1)
    core.train(0)
    core.publish(1)
    assert core.state.formation.slack(1) > 0
    for t in (4, 5, 6, 7):
        assert core.finished(t) == [grade(t)]


def test_rule_2_an_instance_keeps_what_it_holds_when_the_source_is_dry() -> None:
    core = two_versions(source=12)
    for t in range(16, 24):
        assert core.finished(t) == [grade(t)]


def test_rule_2_the_last_instance_of_a_version_in_need_is_never_reloaded() -> None:
    core = started(slots=1, groups_per_step=2, max_staleness=2)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.pressed(0)
    assert core.finished(4) == [grade(4)]  # empty, but trajectory 5 waits until the pressure is gone
    assert core.tick(1.0) == []
    assert core.relieved(0) == [generate(5, on=0, version=0)]
    assert core.finished(5) == [grade(5), push(0, version=1, attempt=2)]


def test_rule_2_an_instance_with_a_reserved_move_is_not_empty() -> None:
    core = packing()
    core.tick(1.0)
    for t in (16, 17):
        assert core.finished(t) == [grade(t)]
    assert not core.state.instances[InstanceId(0)].residents
    assert core.stopped(22, tokens=7) == [generate(22, on=0, version=0, attempt=2, tokens=7)]


# -- rule 3: a version's own waiting trajectories come first ----------------------------------------------------------


def test_rule_3_a_free_slot_serves_waiting_siblings_before_a_new_group() -> None:
    core = started(slots=3)  # group 0 and one sibling of group 1
    assert core.finished(0) == [grade(0), generate(3, on=0, version=0)]
    assert core.finished(1) == [grade(1), admit(2, version=0, deadline=1), generate(4, on=0, version=0)]


def test_rule_3_the_group_with_the_fewest_unfinished_siblings_is_served_first_then_admission_order() -> None:
    core = started(instances=3, slots=2)
    for t in (4, 5, 6):  # group 3 is admitted instead of group 2, and has one sibling left
        core.finished(t)
    core.lost(0, {0: 1, 1: 1})
    core.lost(2, {7: 1})
    served = [o.trajectory for t in (2, 3, 7) for o in core.finished(t) if isinstance(o, cmd.Generate)]
    assert [t // 2 for t in served] == [3, 0, 0]


# -- rule 4: new groups go only to the newest version, on an instance confirmed to hold it ----------------------------


def test_rule_4_a_free_slot_of_an_old_version_gets_no_new_group() -> None:
    core = two_versions()
    assert core.finished(16) == [grade(16)]
    assert core.finished(17) == [grade(17)]
    assert core.state.instances[InstanceId(0)].num_requests == 2


def test_rule_4_admission_pauses_until_the_push_of_the_newest_is_confirmed() -> None:
    core = two_versions()
    for t in (20, 21, 22, 23):
        core.finished(t)
    assert core.state.formation.may_admit(1)
    assert core.tick(1.0) == []
    assert core.pushed(1, 1) == [
        admit(12, version=1, deadline=3),
        generate(24, on=1, version=1),
        generate(25, on=1, version=1),
        admit(13, version=1, deadline=3),
        generate(26, on=1, version=1),
        generate(27, on=1, version=1),
    ]


# -- rule 5: fewer instances than versions in need --------------------------------------------------------------------


def test_rule_5_one_instance_serves_the_versions_in_need_in_deadline_order() -> None:
    core = three_versions_without_instances()
    core.up(0)
    assert core.pushed(0, 0) == [generate(t, on=0, version=0, attempt=3) for t in (19, 18)]
    assert core.finished(18) == [grade(18, attempt=4)]
    assert core.finished(19) == [grade(19, attempt=4), push(0, version=1, attempt=3)]


def test_rule_5_the_newest_goes_on_admitting_while_an_older_version_has_no_instance() -> None:
    core = two_versions()
    core.answer(10)
    core.answer(11)
    core.pushed(1, 1)
    core.lost(0)
    assert core.state.entry(0).needs_instance
    assert core.finished(24) == [grade(24), admit(14, version=1, deadline=3), generate(28, on=1, version=1)]


# -- rule 6: a push in progress is not redirected ---------------------------------------------------------------------


def test_rule_6_a_push_completes_and_its_instance_is_then_vacant() -> None:
    core = Core(groups_per_step=8)
    core.ready()
    core.publish(0)
    core.up(0)
    assert core.up(1) == [push(1, version=0, attempt=1)]
    core.pushed(0, 0)
    for group in range(8):
        core.answer(group)
    core.train(0)
    assert core.publish(1) == []
    assert core.pushed(1, 0) == [push(1, version=1, attempt=2)]


def test_rule_6_a_push_in_flight_when_the_controller_dies_is_repeated() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    assert core.up(0) == [push(0, version=0, attempt=1)]
    core.restarted()
    assert core.pushed(0, 0, attempt=1) == []
    assert core.up(0) == [push(0, version=0, attempt=2)]
    assert core.pushed(0, 0, attempt=1) == []
    assert core.pushed(0, 0)[0] == admit(0, version=0, deadline=1)


# -- rule 7: a move reserves slot and KV on the target before the source is stopped -----------------------------------


def test_rule_7_a_move_has_its_slot_and_kv_before_the_source_is_stopped() -> None:
    core = packing()
    assert core.tick(1.0) == [stop(22, on=1), stop(23, on=1)]
    target = core.state.instances[InstanceId(0)]
    assert sorted(target.reserved) == [22, 23]
    assert target.num_requests == target.slots == 4
    assert target.kv_load == sum(core.state.trajectories[TrajectoryId(t)].footprint for t in (16, 17, 22, 23))
    assert core.stopped(22, tokens=7) == [generate(22, on=0, version=0, attempt=2, tokens=7)]
    assert core.stopped(23, tokens=2) == [
        generate(23, on=0, version=0, attempt=2, tokens=2),
        push(1, version=1, attempt=2),
    ]
    assert core.state.counters.migrations == 2


def test_rule_7_an_answer_that_ends_by_itself_gives_the_reserved_slot_back() -> None:
    core = packing()
    core.tick(1.0)
    assert core.finished(22) == [grade(22)]
    assert sorted(core.state.instances[InstanceId(0)].reserved) == [23]
    assert core.state.instances[InstanceId(0)].num_requests == 3


def test_rule_7_a_move_whose_target_takes_no_more_work_waits() -> None:
    core = packing()
    core.tick(1.0)
    core.pressed(0)
    assert core.stopped(22, tokens=7) == []
    assert core.relieved(0) == [generate(22, on=0, version=0, attempt=2, tokens=7)]


def test_rule_7_a_move_whose_target_is_lost_goes_on_where_there_is_room() -> None:
    core = packing()
    core.tick(1.0)
    core.lost(0, {16: 1, 17: 1})
    assert core.stopped(22, tokens=7) == []
    orders = core.stopped(23, tokens=2)
    assert WeightsPhase.SERVING is core.state.instances[InstanceId(1)].full.phase
    assert sorted(o.trajectory for o in orders if isinstance(o, cmd.Generate)) == [16, 17, 22, 23]
    assert core.state.counters.scheduling_aborts == 0


# -- rule 8: a server that answers and makes no progress is lost; a request without progress goes on elsewhere -------

#: Longer than the time between two looks.
LOOK_S = 8.0


def test_rule_8_an_instance_none_of_whose_requests_got_a_token_for_the_watchdogs_time_is_condemned() -> None:
    core = started(watchdog_s=60.0)
    core.now = 50.0
    core.progress(0, {0: 5, 1: 5, 2: 5})
    assert core.tick() == []
    assert core.tick(60.0) == []
    assert core.tick(LOOK_S) == [
        cmd.CondemnInstance(InstanceId(0), 1, "none of its 4 requests got a token for 60 s"),
    ]
    assert core.tick(100.0) == []  # once
    assert not core.state.instances[InstanceId(0)].takes_work(FIRST_VERSION)


def test_rule_8_an_answer_that_ends_is_progress_of_its_server() -> None:
    core = started(watchdog_s=60.0, source=2)
    core.now = 50.0
    core.finished(0)  # shorter than the time between two looks: never reported
    assert core.tick(60.0) == []
    assert [type(o) for o in core.tick(LOOK_S)] == [cmd.CondemnInstance]


def test_rule_8_the_watchdog_of_an_instance_starts_with_its_first_request() -> None:
    core = Core(watchdog_s=60.0, no_progress_s=1e6)
    core.ready()
    core.publish(0)
    core.up(0)
    core.now = 1000.0
    core.pushed(0, 0)
    assert core.tick(60.0) == []
    assert [type(o) for o in core.tick(LOOK_S)] == [cmd.CondemnInstance]


def test_rule_8_the_watchdog_of_an_evaluating_instance_starts_with_its_first_sample() -> None:
    core = Core(watchdog_s=60.0, no_progress_s=1e6, source=0, eval_prompt_tokens=(3,))
    core.ready()
    core.publish(0)
    core.up(0)
    core.now = 1000.0
    core.pushed(0, 0)
    assert core.state.instances[InstanceId(0)].num_requests == 1
    assert core.tick(60.0) == []
    assert [type(o) for o in core.tick(LOOK_S)] == [cmd.CondemnInstance]


def test_rule_8_a_long_prefill_counts_as_progress_while_its_kv_grows() -> None:
    core = started(watchdog_s=60.0, no_progress_s=1e6)
    for _ in range(5):
        core.now += 50.0
        assert core.prefill(0) == []
        assert core.tick() == []
    assert core.tick(60.0) == []
    assert [type(o) for o in core.tick(LOOK_S)] == [cmd.CondemnInstance]


def almost_stuck(**changes: object) -> Core:
    """Requests 0 to 2 on instance 0 get tokens, request 3 has had none for three times the watchdog's time."""
    core = started(watchdog_s=60.0, no_progress_s=1e6, source=2, **changes)  # type: ignore[arg-type]
    grow(core, since=0)
    return core


def grow(core: Core, *, since: int) -> None:
    for tokens in range(since + 1, since + 7):
        core.progress(0, dict.fromkeys(range(3), tokens))
        assert core.tick(30.0) == []
    core.progress(0, dict.fromkeys(range(3), since + 7))


def test_rule_8_a_silent_request_on_an_active_instance_continues_on_a_peer() -> None:
    core = almost_stuck(instances=2)
    assert core.tick(LOOK_S) == [stop(3, on=0)]
    assert core.state.instances[InstanceId(1)].reserved.keys() == {3}
    assert core.stopped(3, tokens=0) == [generate(3, on=1, version=0, attempt=2)]
    assert core.of(cmd.CondemnInstance) == []


def test_rule_8_a_silent_request_without_a_peer_continues_in_a_new_request() -> None:
    core = almost_stuck()
    assert core.tick(LOOK_S) == [stop(3, on=0)]
    assert core.stopped(3, tokens=0) == [generate(3, on=0, version=0, attempt=2)]


def test_rule_8_an_instance_that_does_not_stop_a_silent_request_is_condemned() -> None:
    core = almost_stuck()
    assert core.tick(LOOK_S) == [stop(3, on=0)]
    grow(core, since=10)
    assert core.tick(LOOK_S) == [
        cmd.CondemnInstance(InstanceId(0), 1, "the request of trajectory 3 did not stop within 180 s")
    ]


def test_rule_8_a_trajectory_that_grows_is_left_alone() -> None:
    core = started(watchdog_s=60.0, no_progress_s=1e6)
    for tokens in range(1, 20):
        core.now += 30.0
        core.progress(0, dict.fromkeys(range(4), tokens))
        assert core.tick() == []


def test_rule_8_tokens_streamed_before_the_silence_are_kept() -> None:
    core = started(watchdog_s=60.0)
    core.up(1)
    core.tick(61.0)
    core.pushed(1, 0)
    assert core.lost(0, {0: 4, 1: 3, 2: 2, 3: 1}) == []  # instance 1 is full of new groups
    assert core.finished(4) == [grade(4), generate(1, on=1, version=0, attempt=3, tokens=3)]
    assert core.finished(5) == [grade(5), generate(0, on=1, version=0, attempt=3, tokens=4)]


# -- rule 9: evaluation (its share and its order are in test_evaluation.py) -------------------------------------------


def test_rule_9_samples_make_room_for_a_version_in_need_and_go_on_when_it_is_served() -> None:
    core = started(slots=8, groups_per_step=2, max_staleness=2, source=4, eval_prompt_tokens=(3,), eval_every=1)
    core.finished(-1)
    core.graded(-1, 1.0)
    core.answer(0)
    core.answer(1)
    core.train(0)
    core.publish(1)
    assert core.up(1) == [push(1, version=1, attempt=1)]  # the source is dry: for the evaluation alone
    assert core.pushed(1, 1) == [generate(-2, on=1, version=1)]
    assert core.lost(0, {4: 3, 5: 3, 6: 3, 7: 3}) == [stop(-2, on=1)]
    assert core.stopped(-2, tokens=5) == [push(1, version=0, attempt=2)]
    assert [type(o) for o in core.pushed(1, 0)] == [cmd.Generate] * 4
    for t in (4, 5, 6):
        assert core.finished(t, tokens=9) == [grade(t, attempt=4)]
    assert core.finished(7, tokens=9) == [grade(7, attempt=4), push(1, version=1, attempt=3)]
    assert core.pushed(1, 1) == [generate(-2, on=1, version=1, attempt=2, tokens=5)]
