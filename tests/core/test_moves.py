"""Instances that are drained, recalled, removed and added while the run goes on: nothing is cut, nothing idles."""

from __future__ import annotations

from dora.core import commands as cmd
from dora.core.ids import FIRST_VERSION, InstanceId
from dora.core.phases import Membership, WeightsPhase
from tests.core.builders import Core, generate, grade, push, started, stop, two_versions

ZERO, ONE = InstanceId(0), InstanceId(1)

REFUSED = "no other instance is there to take its work; add one first"


def sharing(**changes: object) -> Core:
    """Version 0 on two instances of four slots: trajectories 0 to 3 on instance 0, nothing on instance 1."""
    return started(instances=2, source=2, **changes)  # type: ignore[arg-type]


# -- drain ------------------------------------------------------------------------------------------------------------


def test_residents_of_a_drained_instance_move_to_a_peer_of_their_version() -> None:
    core = sharing()
    assert core.drain(0) == [stop(0, on=0), stop(1, on=0), stop(2, on=0), stop(3, on=0)]
    assert core.stopped(0, tokens=7) == [generate(0, on=1, version=0, attempt=2, tokens=7)]
    assert core.state.counters.migrations == 1


def test_residents_without_room_elsewhere_finish_in_place() -> None:
    core = started(instances=2, slots=3, source=3)
    on_one = set(core.state.instances[ONE].residents)
    assert set(core.state.instances[ZERO].residents) == {0, 1, 2}
    assert on_one == {3, 4, 5}
    assert core.drain(0) == []
    assert core.finished(0) == [grade(0)]
    assert core.finished(1) == [grade(1)]
    core.finished(2)
    assert core.state.instances[ZERO].is_empty


def test_remaining_residents_of_a_drained_instance_move_once_a_peer_has_room() -> None:
    core = started(instances=2, slots=3, source=3)
    core.drain(0)
    core.finished(3)
    (order,) = core.tick()
    assert isinstance(order, cmd.StopRequest)
    assert order.instance == 0


def test_the_only_server_of_a_version_ends_its_trajectories_itself() -> None:
    core = two_versions(source=12)
    for t in (20, 21, 22, 23):
        core.finished(t)  # what is left of version 0 runs on instance 0
    assert core.state.instances[ONE].full.version == 0  # and there is nothing else to do
    core.drain(1)
    core.up(2)
    assert core.drain(0) == []
    core.tick(10.0)
    for t in (16, 17, 18, 19):
        assert core.finished(t) == [grade(t)]


def test_a_drained_instance_gets_neither_work_nor_weights() -> None:
    core = started(instances=2, slots=2, max_staleness=2, groups_per_step=2)
    core.drain(0)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.tick(10.0)
    later = [o for o in core.orders[core.orders.index(core.of(cmd.CommitGroup)[0]) :] if getattr(o, "instance", 1) == 0]
    assert later == []
    assert core.state.instances[ZERO].membership is Membership.DRAINED
    assert core.state.instances[ZERO].full.phase is WeightsPhase.SERVING  # it keeps them, for a recall
    assert core.state.instances[ZERO].full.version == 0


def test_trajectories_that_wait_get_another_instance_when_the_only_server_of_their_version_is_drained() -> None:
    core = Core(max_staleness=1, source=2)
    core.ready()
    core.publish(0)
    core.up(0, slots=2)
    core.pushed(0, 0)
    core.up(1)
    if core.state.instances[ONE].full.pushing is not None:
        core.push_failed(1)
    core.failed(0, tokens=3)  # goes on at once: nothing waits yet
    core.drain(0)
    core.failed(1, tokens=2)
    assert core.state.entry(0).num_waiting == 1
    core.tick(60.0)
    assert core.state.instances[ONE].full.pushing == 0
    assert core.pushed(1, 0)[0] == generate(1, on=1, version=0, attempt=2, tokens=2)


def test_a_drain_that_would_leave_no_instance_is_refused() -> None:
    core = sharing()
    core.drain(1)
    assert core.drain(0) == [cmd.RefuseRequest(ZERO, f"instance 0: {REFUSED}")]
    assert core.drain(0, leave=True) == [cmd.RefuseRequest(ZERO, f"instance 0: {REFUSED}")]
    assert core.state.instances[ZERO].takes_work(FIRST_VERSION)


def test_a_lost_instance_does_not_count_as_another_instance() -> None:
    core = sharing()
    core.lost(1)
    assert core.drain(0) == [cmd.RefuseRequest(ZERO, f"instance 0: {REFUSED}")]


def test_an_unknown_instance_is_refused() -> None:
    assert sharing().drain(7) == [
        cmd.RefuseRequest(InstanceId(7), "instance 7: there is no such instance, or it has not come up yet")
    ]


def test_a_move_on_its_way_to_an_instance_that_is_drained_meanwhile_waits_for_another() -> None:
    core = sharing()
    core.up(2)
    core.drain(0)
    core.drain(1)
    assert [type(o) for o in core.stopped(0, tokens=4)] in ([], [cmd.PushWeights])
    assert core.state.entry(0).num_waiting == 1


def test_a_push_to_an_instance_drained_in_the_meantime_completes_without_effect() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    core.up(1)
    core.pushed(0, 0)
    core.drain(1)
    assert core.pushed(1, 0) == []
    assert core.state.instances[ONE].full.version == 0
    assert ONE not in core.state.entry(0).serving


def test_a_drained_instance_that_was_lost_comes_back_drained() -> None:
    core = sharing()
    core.drain(1)
    core.lost(1)
    assert core.up(1) == []
    assert core.tick(10.0) == []


# -- recall -----------------------------------------------------------------------------------------------------------


def test_a_recalled_instance_serves_the_version_that_it_holds() -> None:
    core = started(instances=2, slots=3, source=3)
    core.drain(1)
    core.failed(0, tokens=2)  # its slot is taken at once again
    core.recall(1)
    assert core.state.instances[ONE].takes_work(FIRST_VERSION)
    assert ONE in core.state.entry(0).serving


def test_an_instance_that_was_drained_empty_takes_the_newest_version_when_it_is_recalled() -> None:
    core = started(instances=2, slots=2, groups_per_step=2, max_staleness=2)
    core.drain(1)
    for t in list(core.state.instances[ONE].residents):
        core.finished(t)
    core.publish(1)
    assert push(1, version=1, attempt=2) in core.recall(1)


def test_an_instance_that_takes_work_is_not_recalled() -> None:
    assert sharing().recall(0) == [cmd.RefuseRequest(ZERO, "instance 0: it takes part already")]


# -- remove -----------------------------------------------------------------------------------------------------------


def test_an_instance_leaves_when_it_is_empty_and_is_forgotten() -> None:
    core = sharing()
    core.drain(0, leave=True)
    for t in (0, 1, 2):
        assert cmd.DismissInstance(ZERO) not in core.stopped(t, tokens=1)
    assert cmd.DismissInstance(ZERO) in core.stopped(3, tokens=1)
    core.removed(0)
    assert list(core.state.instances) == [1]
    core.tick(100.0)


def test_an_empty_instance_leaves_at_once() -> None:
    assert sharing().drain(1, leave=True) == [cmd.DismissInstance(ONE)]


def test_an_instance_does_not_leave_during_its_push() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    core.up(1)
    core.pushed(0, 0)
    assert core.drain(1, leave=True) == []
    assert core.pushed(1, 0) == [cmd.DismissInstance(ONE)]


def test_an_instance_that_is_lost_leaves_at_once_and_what_ran_on_it_goes_on_elsewhere() -> None:
    core = started(instances=2, slots=3, source=3)
    core.drain(0, leave=True)
    orders = core.lost(0, {0: 5, 1: 6, 2: 7})
    assert cmd.DismissInstance(ZERO) in orders
    core.removed(0)
    core.finished(3)
    core.finished(4)
    core.finished(5)
    resumed = {o.trajectory: o.num_tokens for o in core.of(cmd.Generate) if o.num_tokens}
    assert resumed == {0: 5, 1: 6, 2: 7}


def test_an_instance_on_its_way_out_is_not_recalled() -> None:
    core = sharing()
    core.drain(1, leave=True)
    assert core.recall(1) == [cmd.RefuseRequest(ONE, "instance 1: it is leaving the run just now")]


def test_an_instance_that_was_to_leave_and_is_not_empty_yet_can_be_recalled() -> None:
    core = started(instances=2, slots=3, source=3)
    core.drain(0, leave=True)
    core.recall(0)
    for t in (0, 1, 2):
        core.finished(t)
    assert core.of(cmd.DismissInstance) == []


def test_an_instance_removed_without_a_request_is_treated_as_lost() -> None:
    core = started(instances=2, slots=3, source=3)
    core.progress(0, {0: 4, 1: 4, 2: 4})
    core.removed(0)
    assert core.state.counters.scheduling_aborts == 0
    assert core.state.entry(0).num_waiting == 3
    before = core.state.counters.late_completions
    core.removed(0)
    assert core.state.counters.late_completions == before + 1


def test_events_of_a_removed_instance_are_late() -> None:
    core = sharing()
    core.drain(1, leave=True)
    core.removed(1)
    before = core.state.counters.late_completions
    assert core.up(1) == []
    assert core.lost(1) == []
    assert core.pushed(1, 0) == []
    assert core.state.counters.late_completions == before + 3
    assert list(core.state.instances) == [0]


def test_the_id_of_an_instance_that_has_left_comes_back_under_a_later_controller() -> None:
    core = sharing()
    core.drain(1, leave=True)
    core.removed(1)
    core.restarted(dict.fromkeys(range(4), 0))
    assert [type(o) for o in core.up(1)] == [cmd.PushWeights]


# -- join and restart -------------------------------------------------------------------------------------------------


def test_an_instance_that_joins_is_given_what_is_needed_most() -> None:
    core = started(instances=1, slots=2, groups_per_step=2)
    assert core.up(5) == [push(5, version=0, attempt=1)]
    assert [type(o) for o in core.pushed(5, 0)][:1] == [cmd.AdmitGroup]


def test_a_new_controller_forgets_drain_requests() -> None:
    core = started(instances=3, slots=3, source=3)
    core.drain(0)
    core.drain(1, leave=True)
    core.restarted(dict.fromkeys(range(6), 0))
    assert all(i.is_member for i in core.state.instances.values())
    assert [type(o) for o in core.up(1)] == [cmd.PushWeights]
