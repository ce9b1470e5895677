"""The heap of rooms gives the same result as a search over all instances of the version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora.core.ids import InstanceId, TrajectoryId
from dora.core.phases import WeightsPhase
from dora.core.tables import Server, Trajectory
from dora.core.versions import Version


def serving(id: int, entry: Version) -> Server:
    instance = Server(InstanceId(id))
    instance.slots, instance.kv_tokens = 1 + id % 3, 100
    instance.full.phase, instance.full.version = WeightsPhase.SERVING, entry.number
    entry.serving[instance.id] = instance
    entry.offer(instance, instance.full)
    return instance


def by_search(entry: Version) -> list[Server]:
    return sorted((i for i in entry.serving.values() if i.takes_work(entry.number)), key=lambda i: (i.load(), i.id))


@given(moves=st.lists(st.tuples(st.sampled_from(["fill", "empty", "press", "look"]), st.integers(0, 4)), max_size=60))
def test_the_roomiest_instances_are_those_with_the_least_load_that_take_work(moves: list[tuple[str, int]]) -> None:
    entry = Version(3)
    fleet = [serving(i, entry) for i in range(5)]
    for count, (move, index) in enumerate(moves):
        instance = fleet[index]
        if move == "fill":
            trajectory = Trajectory(TrajectoryId(count), group=None, version=3, num_prompt_tokens=1)
            trajectory.footprint = 10 * index
            instance.add(trajectory)
        elif move == "empty" and instance.residents:
            instance.remove(next(iter(instance.residents.values())))
            entry.offer(instance, instance.full)
        elif move == "press":
            instance.pressed = not instance.pressed
            if not instance.pressed:
                entry.offer(instance, instance.full)
        elif move == "look":
            assert entry.roomiest_few(index) == by_search(entry)[:index]
        assert entry.roomiest() is next(iter(by_search(entry)), None)
