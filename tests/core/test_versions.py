"""The version window: what is live, what may be released, who is served first and where."""

from __future__ import annotations

from dora.core import commands as cmd
from dora.core.ids import GroupId, InstanceId
from dora.core.phases import WeightsPhase
from dora.core.tables import Group, Server
from dora.core.versions import Version, Window
from tests.core.builders import admit, started
from tests.core.world import run


def group(id: int, *, unfinished: int = 2) -> Group:
    g = Group(GroupId(id), version=0, deadline=1, num_prompt_tokens=3, group_size=2, admitted_at=0.0)
    g.unfinished = unfinished
    return g


def instance(id: int, *, load: int = 0) -> Server:
    i = Server(InstanceId(id))
    i.full.phase, i.full.version, i.slots, i.kv_tokens, i.num_requests = WeightsPhase.SERVING, 0, 8, 100, load
    return i


def test_inherited_groups_are_served_by_the_fewest_unfinished_siblings() -> None:
    older, newer = Version(0), Version(1)
    for version, g in (
        (newer, group(0, unfinished=3)),
        (newer, group(1, unfinished=4)),
        (older, group(2, unfinished=1)),
    ):
        version.enqueue(g, g.trajectories[:1])
    newer.inherit(older)
    served = []
    while newer.num_waiting:
        served.append(newer.first_waiting().id)
        newer.dequeue(newer.first_waiting())
    assert served == [2, 0, 1]
    assert older.num_waiting == 0


# -- life -------------------------------------------------------------------------------------------------------------


def test_a_version_is_live_while_it_is_the_newest_or_a_group_of_it_is_not_trained() -> None:
    window = Window()
    for v in range(3):
        window.publish(v)
    window.entries[1].groups = 1
    assert window.live() == [1, 2]
    assert window.releasable() == [0]


def test_evaluation_pushes_and_unfinished_answers_hold_a_version_that_is_not_live() -> None:
    window = Window()
    for v in range(5):
        window.publish(v)
    window.entries[0].evaluating = True
    window.entries[1].loading = 1
    window.entries[2].unfinished = 1
    assert window.live() == [4]
    assert window.releasable() == [3]


def test_a_version_is_released_when_its_last_group_is_trained_and_not_before() -> None:
    core = started(groups_per_step=1, max_staleness=1)
    core.answer(0)
    assert admit(1, version=0, deadline=1) in core.train(0)
    core.publish(1)
    core.answer(1)
    assert core.of(cmd.ReleaseVersion) == []
    assert cmd.ReleaseVersion(0) in core.train(1)


def test_an_instance_that_idly_holds_a_version_does_not_keep_it() -> None:
    world = run("sync", steps=4)
    assert list(world.state.window.entries) == [4]
    assert [o.version for _, orders in world.journal for o in orders if isinstance(o, cmd.ReleaseVersion)] == [
        0,
        1,
        2,
        3,
    ]


def test_every_version_but_the_last_is_released_once() -> None:
    world = run(steps=6, max_staleness=3)
    released = [o.version for _, orders in world.journal for o in orders if isinstance(o, cmd.ReleaseVersion)]
    assert sorted(released) == list(range(6))


# -- waiting trajectories ---------------------------------------------------------------------------------------------


def test_the_group_with_the_fewest_unfinished_siblings_is_served_first_then_in_admission_order() -> None:
    version = Version(0)
    groups = [group(0), group(1, unfinished=1), group(2), group(3, unfinished=1)]
    for g in reversed(groups):
        version.enqueue(g, g.trajectories[-g.unfinished :])
    served = []
    while version.num_waiting:
        served.append(version.first_waiting().id)
        version.dequeue(version.first_waiting())
    assert served == [1, 3, 0, 0, 2, 2]


def test_a_group_moves_forward_when_one_of_its_siblings_finishes() -> None:
    version = Version(0)
    first, second = group(0), group(1)
    for g in (first, second):
        version.enqueue(g, g.trajectories[:1])
    assert version.first_waiting() is first
    second.unfinished = 1
    version.reprioritize(second)
    assert version.first_waiting() is second


def test_a_failed_group_waits_no_longer() -> None:
    version = Version(0)
    first, second = group(0), group(1)
    for g in (first, second):
        version.enqueue(g, list(g.trajectories))
    version.forget_waiting(first)
    assert version.num_waiting == 2
    assert version.first_waiting() is second


# -- instances with room ----------------------------------------------------------------------------------------------


def offered(*instances: Server) -> Version:
    version = Version(0)
    for i in instances:
        version.serving[i.id] = i
        version.offer(i, i.full)
    return version


def test_the_least_loaded_instance_comes_first_and_the_lower_id_at_equal_load() -> None:
    first, second, third = instance(0, load=2), instance(1, load=1), instance(2, load=1)
    version = offered(first, second, third)
    assert version.roomiest() is second
    second.num_requests = 3
    assert version.roomiest() is third
    third.num_requests = 4
    assert version.roomiest() is first


def test_an_instance_with_more_room_than_before_is_found_at_once() -> None:
    busy = instance(0, load=5)
    version = offered(busy, instance(1, load=3))
    busy.num_requests = 1
    version.offer(busy, busy.full)
    assert version.roomiest() is busy


def test_an_instance_that_takes_no_work_is_not_found() -> None:
    pressed, other = instance(0), instance(1, load=7)
    version = offered(pressed, other)
    pressed.pressed = True
    assert version.roomiest() is other
    other.full.version = 1
    assert version.roomiest() is None
    pressed.pressed = False
    version.offer(pressed, pressed.full)
    assert version.roomiest() is pressed
