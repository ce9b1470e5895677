"""The orchestrator's rules, one by one, as event lists."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId
from dora.core.orchestration import Orchestration
from dora.core.phases import GroupPhase
from tests.core.builders import Core, admit, commit, generate, grade, packing, push, started, stop, two_versions

# -- dispatch ---------------------------------------------------------------------------------------------------------


def test_a_new_group_goes_to_the_instance_with_the_most_room() -> None:
    core = started(instances=2, slots=8, groups_per_step=2, max_staleness=2)  # groups 0 and 1 on instance 0, 2 on 1
    core.answer(0)
    core.answer(1)
    assert core.train(0)[1:] == [
        admit(3, version=0, deadline=2),
        generate(6, on=0, version=0),
        generate(7, on=0, version=0),
    ]


def test_what_is_admitted_while_the_version_still_loads_is_spread_over_all_that_will_hold_it() -> None:
    core = started(instances=2, slots=8, groups_per_step=4, max_staleness=2)  # W admits six groups of two
    assert [len(i.residents) for i in core.state.instances.values()] == [6, 6]
    lazy = Orchestration(tail_care=False)
    core = started(instances=2, slots=8, groups_per_step=4, max_staleness=2, orchestration=lazy)
    assert [len(i.residents) for i in core.state.instances.values()] == [8, 4]


def test_siblings_share_an_instance_while_it_has_room() -> None:
    core = started(instances=2, slots=8, groups_per_step=1, max_staleness=2)
    core.answer(0)
    assert core.train(0)[1:] == [
        admit(1, version=0, deadline=2),
        generate(2, on=0, version=0),
        generate(3, on=0, version=0),  # though instance 1 is emptier: here is the prompt's prefix
    ]


def test_a_waiting_sibling_goes_where_its_groups_prefix_is() -> None:
    core = started(instances=3, slots=3, source=3)  # group 1 is on instances 0 and 1; instance 2 is empty
    for t in (0, 1, 4):
        core.finished(t)
    assert core.lost(0, {2: 5}) == [generate(2, on=1, version=0, attempt=3, tokens=5)]


def test_siblings_that_find_no_room_go_to_another_instance_of_their_version() -> None:
    core = started(slots=3)
    core.up(1, slots=3)
    assert core.pushed(1, 0)[:2] == [generate(3, on=1, version=0), admit(2, version=0, deadline=1)]


def test_a_group_is_admitted_only_when_its_first_request_can_be_sent() -> None:
    core = started(slots=2)
    assert core.of(cmd.AdmitGroup) == [admit(0, version=0, deadline=1)]  # F, W and the source would admit more
    assert core.finished(0) == [grade(0), admit(1, version=0, deadline=1), generate(2, on=0, version=0)]


def test_siblings_that_wait_for_a_slot_keep_the_groups_tag() -> None:
    core = started(slots=1, groups_per_step=2, max_staleness=2)
    core.answer(0)
    core.answer(1)
    core.train(0)
    core.publish(1)
    assert core.finished(4) == [grade(4), generate(5, on=0, version=0)]


# -- re-partition (largest remainder and floors as functions: test_placement.py) --------------------------------------


def test_consolidation_stops_at_the_kv_floor_of_the_old_version() -> None:
    core = packing(kv=400)
    core.progress(0, {16: 60, 17: 60})
    core.progress(1, {22: 55, 23: 55})
    core.tick(1.0)
    core.tick(1.0)
    assert core.of(cmd.StopRequest) != []  # four answers of 64 at most fit into 400 tokens
    core = packing(kv=200)
    core.progress(0, {16: 60, 17: 60})
    core.progress(1, {22: 55, 23: 55})
    core.tick(1.0)
    core.tick(1.0)
    assert core.of(cmd.StopRequest) == []


# -- consolidation ----------------------------------------------------------------------------------------------------


def test_what_is_left_of_an_old_version_is_packed_and_the_freed_instance_goes_to_the_newest() -> None:
    core = packing()
    assert core.tick(1.0) == [stop(22, on=1), stop(23, on=1)]
    core.stopped(22, tokens=7)
    assert core.stopped(23, tokens=9) == [
        generate(23, on=0, version=0, attempt=2, tokens=9),
        push(1, version=1, attempt=2),
    ]


def test_the_instance_with_the_fewest_resident_tokens_is_emptied() -> None:
    core = packing()
    core.progress(0, {16: 10, 17: 10})
    core.progress(1, {22: 40, 23: 40})
    assert core.tick(20.0) == [stop(16, on=0), stop(17, on=0)]


def test_a_packing_that_would_overflow_the_targets_slots_is_refused() -> None:
    core = two_versions()
    for t in (20, 21):
        core.finished(t)
    assert core.tick(1.0) == []
    core.finished(18)
    assert core.tick(1.0) == []
    core.finished(19)
    assert core.tick(1.0) == [stop(22, on=1), stop(23, on=1)]


def test_nothing_is_packed_if_the_freed_instance_is_not_needed() -> None:
    assert packing(source=12).tick(1.0) == []


def test_a_packing_that_slows_urgent_work_by_a_tenth_or_more_is_refused() -> None:
    by_requests = DecodeTime(base_s=1.0, per_request_s=0.1, per_token_s=0.0)  # two more: from 1.2 s to 1.4 s a token
    assert packing(decode_time=by_requests).tick(1.0) == []
    assert packing(decode_time=by_requests, max_staleness=3).tick(1.0) != []  # due at step 3: not urgent at step 1


def test_consolidation_can_be_switched_off() -> None:
    assert packing(orchestration=Orchestration(consolidation=False)).tick(1.0) == []


def test_the_version_with_more_instances_than_it_deserves_is_packed_not_the_oldest() -> None:
    core = two_versions(max_staleness=3)  # version 0 on instances 0 and 1
    for i in (2, 3):
        core.up(i)
        core.pushed(i, 1)
    for group in (8, 10, 12, 13, 14, 15, 16, 17):
        core.answer(group)
    core.train(1)
    core.publish(2)
    core.progress(0, {18: 60, 19: 60})
    core.progress(1, {22: 60, 23: 60})
    for i in (2, 3):  # of version 1, one short answer is left on each
        for t in sorted(core.state.instances[InstanceId(i)].residents)[1:]:
            core.finished(t)
    assert [o.instance for o in core.tick(20.0) if isinstance(o, cmd.StopRequest)] == [2]


def test_no_more_instances_are_emptied_than_the_newest_version_deserves() -> None:
    core = started(instances=3, slots=8, groups_per_step=12, max_staleness=2)
    for group in range(12):
        core.answer(group)
    core.train(0)
    core.publish(1)
    for i, instance in core.state.instances.items():
        late, *others = sorted(instance.residents)
        for t in others:
            core.finished(t)
        core.progress(i, {late: 60})
    assert [type(o) for o in core.tick(20.0)] == [cmd.StopRequest]  # one of three is what version 1 deserves
    assert core.tick(1.0) == []


# -- refill -----------------------------------------------------------------------------------------------------------


def three_versions(*, refill: bool) -> Core:
    """Group 9 of version 0 on instance 0, groups 17 and 18 of version 1 on instance 1, version 2 served nowhere."""
    core = two_versions(orchestration=Orchestration(refill=refill))
    core.answer(10)
    core.answer(11)
    core.pushed(1, 1)
    for group in (8, 12, 13, 14, 15, 16):
        core.answer(group)
    core.train(1)
    core.publish(2)
    return core


def test_old_versions_are_not_refilled_by_default() -> None:
    core = three_versions(refill=False)
    core.up(2, slots=2)
    core.pushed(2, 2)
    for t in (34, 35):
        assert core.finished(t) == [grade(t)]


def test_refill_gives_a_version_between_oldest_and_newest_new_groups_once_the_newest_serves() -> None:
    core = three_versions(refill=True)
    core.up(2, slots=2)
    assert core.finished(34) == [grade(34)]  # version 2 has no instance yet
    core.pushed(2, 2)
    before = len(core.of(cmd.AdmitGroup))
    core.finished(35)
    assert core.of(cmd.AdmitGroup)[before:] == [admit(20, version=1, deadline=3)]
    assert core.finished(18) == [grade(18)]  # version 0 is the oldest


# -- tail care --------------------------------------------------------------------------------------------------------


def test_queued_trajectories_go_to_the_least_loaded_instances() -> None:
    core = started(instances=3, slots=8, groups_per_step=8, max_staleness=2)
    for t in (8, 16, 17, 18):  # instance 1 has one slot free, instance 2 three
        core.finished(t)
    orders = core.lost(0)
    assert [o.instance for o in orders if isinstance(o, cmd.Generate)] == [2, 2, 1, 2]


def test_siblings_that_hold_up_a_nearly_complete_group_come_first() -> None:
    core = started(instances=2, slots=4, groups_per_step=4, max_staleness=2)
    for t in (6, 4, 2):
        core.finished(t)
    core.lost(1, {5: 1, 7: 1})
    core.lost(0, {0: 1, 1: 1, 3: 1})
    core.up(0, slots=3)
    orders = [o for o in core.pushed(0, 0) if isinstance(o, cmd.Generate)]
    assert [o.trajectory for o in orders] == [3, 5, 7]


# -- window -----------------------------------------------------------------------------------------------------------


def test_k_plus_1_versions_are_live_and_the_next_one_waits_for_the_oldest_ones_last_group() -> None:
    core = three_versions(refill=False)
    assert core.state.window.live() == [0, 1, 2]
    core.up(2, slots=16)
    core.pushed(2, 2)
    for group in (17, 18, 19, 20, 21, 22, 23, 24):
        core.answer(group)
    committed = [o.group for o in core.of(cmd.CommitGroup) if o.step == 2]
    assert committed == [17, 18, 19, 20, 21, 22, 23]  # seven of eight places: the last one is group 9's, due at step 2
    assert core.answer(9)[2:5] == [
        commit(9, version=0, step=2),
        cmd.CloseStep(2, 8),
        commit(24, version=2, step=3),
    ]
    core.train(2)
    assert core.state.window.live() == [2]


# -- the admission window W -------------------------------------------------------------------------------------------


def test_w_starts_at_one_and_a_half_steps() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=3)
    assert len(core.of(cmd.AdmitGroup)) == 6


def test_w_counts_committed_groups_until_they_are_trained() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=3)
    for group in range(4):
        core.answer(group)
    assert len(core.of(cmd.AdmitGroup)) == 6
    core.train(0)
    assert len(core.of(cmd.AdmitGroup)) == 9  # four more, less what W shrank


def test_w_gives_the_place_of_a_filtered_group_back_at_once() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=3)
    core.answer(0, rewards=(1.0, 1.0))
    assert len(core.of(cmd.AdmitGroup)) == 7


def trained_step(core: Core, *, waited: float, trained: float) -> float:
    """Run a step for whose first wave the trainer waits `waited` seconds, and which it trains for `trained` seconds;
    return W after it."""
    state, instance = core.state, core.state.instances[InstanceId(0)]
    step = state.formation.step
    core.now += waited
    while state.formation.step == step:
        while instance.full.pushing is not None:
            core.pushed(0, instance.full.pushing)
        core.answer(min(g.id for g in state.ledger.groups.values() if g.phase is GroupPhase.GENERATING))
    core.now += trained
    core.train(step)
    core.publish(step + 1)
    return state.window_size


def test_w_grows_after_a_step_for_which_the_trainer_waited_noticeably_and_shrinks_after_others() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=3)
    assert trained_step(core, waited=0.03, trained=0.97) == pytest.approx(6 * 1.06)
    assert trained_step(core, waited=0.01, trained=0.99) == pytest.approx(6 * 1.06 * 0.985)


def test_w_stays_between_one_step_and_all_that_f_could_admit() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=1, steps=200)
    assert [trained_step(core, waited=1.0, trained=1.0) for _ in range(8)][-2:] == [16.0, 16.0]
    assert [trained_step(core, waited=0.0, trained=1.0) for _ in range(120)][-2:] == [4.0, 4.0]


def test_w_grows_the_faster_the_more_the_trainer_waited() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=3)
    assert trained_step(core, waited=0.25, trained=0.75) == pytest.approx(6 * 1.25)
    assert trained_step(core, waited=0.9, trained=0.1) == pytest.approx(6 * 1.25 * 1.5)


def test_ranks_that_wait_for_the_fullest_of_too_few_groups_count_as_waiting() -> None:
    core = started(slots=64, groups_per_step=4, max_staleness=3, num_ranks=4, micro_batch_tokens=1000)
    assert trained_step(core, waited=0.0, trained=1.0) > 6  # a group of two gives two of four ranks nothing
    assert core.state.feed.uneven_s == core.state.feed.idle_s == 0, "every step is judged by itself"
    full = started(slots=64, groups_per_step=4, max_staleness=3, num_ranks=4, micro_batch_tokens=1)
    assert trained_step(full, waited=0.0, trained=1.0) < 6  # the same, but more groups would not have helped


def test_without_the_adaptive_window_f_alone_bounds_admission() -> None:
    without = Orchestration(window="open")
    core = started(slots=64, groups_per_step=4, max_staleness=3, orchestration=without)
    assert len(core.of(cmd.AdmitGroup)) == 16


def test_w_does_not_bind_a_batched_strategy() -> None:
    core = started("one_step_off", slots=64, groups_per_step=4)
    for group in range(4):
        core.answer(group)
    assert core.state.ledger.num_untrained == 8  # a step being trained and the next block: more than 1.5 N


# -- KV room ----------------------------------------------------------------------------------------------------------


def test_a_request_is_dispatched_only_where_its_prompt_and_expected_length_fit_beside_the_residents() -> None:
    core = started(slots=8, kv=60)  # 3 + 16 tokens are expected of each: three fit, the fourth waits
    assert core.orders[-5:] == [
        admit(0, version=0, deadline=1),
        generate(0, on=0, version=0),
        generate(1, on=0, version=0),
        admit(1, version=0, deadline=1),
        generate(2, on=0, version=0),
    ]


def test_the_expected_length_is_the_running_mean_of_finished_answers() -> None:
    core = started(slots=2)
    core.finished(0, tokens=40)
    footprint = core.state.instances[InstanceId(0)].kv_load - 19  # of trajectory 2, beside trajectory 1
    assert footprint == 3 + (16 + 40) // 2


def test_kv_is_kept_for_a_third_of_what_is_expected_to_come() -> None:
    core = started(slots=2, orchestration=Orchestration())
    assert core.state.instances[InstanceId(0)].kv_load == 2 * (3 + 16 // 3)
    core.progress(0, {0: 10})
    core.tick(20.0)
    assert core.state.instances[InstanceId(0)].kv_load == 3 + 16 // 3 + (3 + 10 + (16 - 10) // 3)


@pytest.mark.parametrize(("strategy", "share"), [("periodic", 1), ("sync", 3), ("one_step_off", 3)])
def test_kv_is_reserved_for_whole_answers_only_if_siblings_grow_side_by_side(strategy: str, share: int) -> None:
    core = started(strategy, slots=2, orchestration=Orchestration())
    assert core.state.instances[InstanceId(0)].kv_load == 2 * (3 + 16 // share)


def test_an_answer_that_outgrows_its_expectation_takes_more_room() -> None:
    core = started(slots=8, kv=60)
    core.progress(0, {0: 40})
    core.tick(20.0)
    core.finished(1, tokens=16)  # its slot and KV would do for trajectory 3, had 0 stayed short
    assert generate(3, on=0, version=0) not in core.orders


def test_an_empty_instance_takes_a_request_whatever_is_expected() -> None:
    core = started(slots=8, kv=10)
    assert core.of(cmd.Generate) == [generate(0, on=0, version=0)]


def test_kv_pressure_stops_dispatch_to_that_instance_until_it_has_passed() -> None:
    core = started(slots=3)
    core.pressed(0)
    assert core.finished(0) == [grade(0)]
    assert core.finished(1) == [grade(1)]
    assert core.relieved(0) == [
        generate(3, on=0, version=0),
        admit(2, version=0, deadline=1),
        generate(4, on=0, version=0),
    ]


def test_a_server_that_comes_up_again_is_not_pressed() -> None:
    core = started(slots=3)
    core.pressed(0)
    core.lost(0)
    core.up(0)
    assert {o.instance for o in core.pushed(0, 0) if isinstance(o, cmd.Generate)} == {0}


def test_kv_pressure_moves_the_smallest_resident_to_a_peer_with_room() -> None:
    core = started(slots=3)
    core.up(1, slots=20)
    core.pushed(1, 0)
    core.progress(0, {0: 40, 1: 30, 2: 20})
    core.tick(20.0)
    assert core.pressed(0) == [stop(2, on=0)]
    assert core.stopped(2, tokens=24) == [generate(2, on=1, version=0, attempt=2, tokens=24)]


def test_kv_pressure_without_a_peer_moves_nothing() -> None:
    assert started(slots=3).pressed(0) == []
