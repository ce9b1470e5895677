"""The instance table: work, room, and the facts about servers that arrive late."""

from __future__ import annotations

from dora.core import commands as cmd
from dora.core.ids import FIRST_VERSION, GroupId, InstanceId
from dora.core.phases import WEIGHTS, Membership, WeightsPhase
from dora.core.tables import Group, Server
from tests.core.builders import Core, push, started


def serving(*, slots: int = 4, kv: int = 100) -> Server:
    instance = Server(InstanceId(0))
    instance.full.phase = WeightsPhase.SERVING
    instance.full.version, instance.slots, instance.kv_tokens = 0, slots, kv
    return instance


def siblings(count: int, *, footprint: int) -> Group:
    group = Group(GroupId(0), version=0, deadline=1, num_prompt_tokens=3, group_size=count, admitted_at=0.0)
    for trajectory in group.trajectories:
        trajectory.footprint = footprint
    return group


def test_only_a_confirmed_push_leads_from_quarantine_to_work() -> None:
    assert WeightsPhase.SERVING not in WEIGHTS[WeightsPhase.QUARANTINED]
    assert WeightsPhase.SERVING in WEIGHTS[WeightsPhase.UPDATING]


def test_only_a_serving_member_that_is_neither_pressed_nor_condemned_takes_work() -> None:
    instance = serving()
    assert instance.takes_work(FIRST_VERSION)
    instance.membership = Membership.DRAINED
    assert not instance.takes_work(FIRST_VERSION)
    instance.membership = Membership.MEMBER
    instance.pressed = True
    assert not instance.takes_work(FIRST_VERSION)
    instance.pressed, instance.condemned = False, True
    assert not instance.takes_work(FIRST_VERSION)
    instance.condemned = False
    instance.full.phase = WeightsPhase.DRAINING
    assert not instance.takes_work(FIRST_VERSION)


def test_room_ends_with_the_slots() -> None:
    instance, group = serving(slots=2), siblings(2, footprint=1)
    for trajectory in group.trajectories:
        assert instance.has_room(1)
        instance.add(trajectory)
    assert not instance.has_room(1)


def test_room_ends_with_the_kv_and_an_empty_instance_always_has_room() -> None:
    instance, group = serving(kv=100), siblings(1, footprint=60)
    assert instance.has_room(1000)
    instance.add(group.trajectories[0])
    assert instance.has_room(40)
    assert not instance.has_room(41)


def test_a_reserved_move_takes_slot_and_kv_like_a_resident() -> None:
    instance, group = serving(slots=2, kv=100), siblings(2, footprint=50)
    moving, resident = group.trajectories
    instance.reserve(moving)
    assert not instance.is_empty
    assert not instance.has_room(51)
    instance.add(resident)
    assert not instance.has_room(0)
    instance.unreserve(moving)
    instance.remove(resident)
    assert instance.is_empty
    assert (instance.num_requests, instance.kv_load, instance.num_training) == (0, 0, 0)


def test_load_is_the_larger_share_of_slots_and_kv() -> None:
    instance, group = serving(slots=10, kv=100), siblings(2, footprint=40)
    instance.add(group.trajectories[0])
    assert instance.load() == 0.4
    group.trajectories[1].footprint = 0
    instance.kv_load = 5
    instance.add(group.trajectories[1])
    assert instance.load() == 0.2


# -- facts ------------------------------------------------------------------------------------------------------------


def test_an_instance_that_came_up_holds_nothing_and_is_pushed_before_it_works() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    assert core.up(0) == [push(0, version=0, attempt=1)]
    assert core.state.instances[InstanceId(0)].full.phase is WeightsPhase.LOADING
    assert [type(o) for o in core.pushed(0, 0)][:2] == [cmd.AdmitGroup, cmd.Generate]


def test_a_late_push_completion_of_an_old_attempt_is_counted_and_ignored() -> None:
    core = Core()
    core.publish(0)
    core.up(0)
    assert core.push_failed(0) == []
    assert core.tick(1.0) == [push(0, version=0, attempt=2)]
    assert core.pushed(0, 0, attempt=1) == []
    assert core.push_failed(0, attempt=1) == []
    assert core.state.instances[InstanceId(0)].full.phase is WeightsPhase.UPDATING
    assert core.state.counters.late_completions == 2


def test_a_push_that_reads_back_another_version_confirms_nothing() -> None:
    core = Core()
    core.publish(0)
    core.up(0)
    assert core.pushed(0, 7) == []
    assert core.state.instances[InstanceId(0)].full.version is None


def test_events_of_an_older_incarnation_are_counted_and_ignored() -> None:
    core = started()
    core.lost(0)
    core.up(0)
    before = core.state.counters.late_completions
    core.incarnations[0] = 1
    assert core.lost(0) == []
    assert core.state.instances[InstanceId(0)].full.phase is WeightsPhase.LOADING
    core.incarnations[0] = 2
    core.lost(0)
    core.incarnations[0] = 1
    assert core.up(0) == []
    assert core.state.instances[InstanceId(0)].full.phase is WeightsPhase.LOST
    assert core.state.counters.late_completions == before + 2
