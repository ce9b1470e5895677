"""Placement as functions of data: floors, largest remainder, and which packings are allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.decode_time import DecodeTime
from dora.core.ids import GroupId, InstanceId, TrajectoryId
from dora.core.phases import WeightsPhase
from dora.core.placement import KV_FILL, MAX_SLOWDOWN, allot, allot_by_requests, kv_floor, plan_moves
from dora.core.tables import Group, Server, Trajectory

#: Time per token grows with the batch alone, by a tenth of the base per request.
BY_REQUESTS = DecodeTime(base_s=1.0, per_request_s=0.1, per_token_s=0.0)
#: Company costs nothing: only slots and KV decide.
FREE = DecodeTime(base_s=1.0, per_request_s=0.0, per_token_s=0.0)


def group(id: int, *, deadline: int = 9) -> Group:
    return Group(GroupId(id), version=0, deadline=deadline, num_prompt_tokens=0, group_size=1, admitted_at=0.0)


def instance(id: int, *residents: int, deadline: int = 9, slots: int = 8, kv: int = 1000) -> Server:
    """An instance with residents of these many tokens."""
    i = Server(InstanceId(id))
    i.full.phase, i.full.version, i.slots, i.kv_tokens = WeightsPhase.SERVING, 0, slots, kv
    for n, tokens in enumerate(residents):
        trajectory = group(100 * id + n, deadline=deadline).trajectories[0]
        trajectory.num_tokens = trajectory.footprint = tokens
        i.add(trajectory)
    return i


def moves(plan: list[tuple[Trajectory, Server]] | None) -> list[tuple[TrajectoryId, InstanceId]] | None:
    return None if plan is None else [(t.id, i.id) for t, i in plan]


def plan(
    source: Server, *targets: Server, urgent: int = 1, decode_time: DecodeTime = FREE
) -> list[tuple[TrajectoryId, InstanceId]] | None:
    return moves(plan_moves(source, targets, urgent_deadline=urgent, decode_time=decode_time))


# -- floors -----------------------------------------------------------------------------------------------------------


def test_a_version_with_nothing_unfinished_has_no_floor() -> None:
    assert kv_floor(num_unfinished=0, num_tokens=0, slots=8, kv_tokens=1000) == 0


def test_the_floor_is_at_least_one_instance_while_the_version_needs_one() -> None:
    assert kv_floor(num_unfinished=1, num_tokens=0, slots=8, kv_tokens=1000) == 1


@pytest.mark.parametrize(("num_tokens", "floor"), [(900, 1), (901, 2), (1800, 2), (1801, 3)])
def test_the_floor_fills_nine_tenths_of_the_kv(num_tokens: int, floor: int) -> None:
    assert kv_floor(num_unfinished=3, num_tokens=num_tokens, slots=8, kv_tokens=1000) == floor


@pytest.mark.parametrize(("num_unfinished", "floor"), [(8, 1), (9, 2), (17, 3)])
def test_the_floor_has_a_slot_for_every_unfinished_trajectory(num_unfinished: int, floor: int) -> None:
    assert kv_floor(num_unfinished=num_unfinished, num_tokens=10, slots=8, kv_tokens=1000) == floor


# -- allotment --------------------------------------------------------------------------------------------------------


@given(
    num_instances=st.integers(0, 20),
    versions=st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_the_allotment_is_the_whole_fleet_and_floors_come_first(
    num_instances: int, versions: list[tuple[float, int]]
) -> None:
    demand = {v: d for v, (d, _) in enumerate(versions)}
    floors = {v: f for v, (_, f) in enumerate(versions)}
    given_to = allot(num_instances, demand=demand, floors=floors)
    left = num_instances
    for v, floor in floors.items():
        assert given_to[v] >= min(floor, left)  # in deadline order while they last
        left -= min(floor, left)
    assert sum(given_to.values()) <= num_instances
    if sum(demand.values()) > 1 and any(demand[v] / sum(demand.values()) * num_instances > given_to[v] for v in demand):
        assert sum(given_to.values()) == num_instances


def test_without_floors_the_allotment_is_the_largest_remainder_of_the_demand() -> None:
    demand = {0: 15.0, 1: 34.0, 2: 51.0}  # ideal: 1.5, 3.4, 5.1 of ten
    assert allot(10, demand=demand, floors=dict.fromkeys(demand, 0)) == {0: 2, 1: 3, 2: 5}


def test_of_equal_remainders_the_newer_version_is_served_first() -> None:
    assert allot(3, demand={0: 1.0, 1: 1.0}, floors={0: 0, 1: 0}) == {0: 1, 1: 2}


def test_a_floor_above_a_versions_share_is_paid_by_the_others() -> None:
    assert allot(10, demand={0: 10.0, 1: 90.0}, floors={0: 4, 1: 1}) == {0: 4, 1: 6}


def test_floors_beyond_the_fleet_are_met_in_deadline_order() -> None:
    assert allot(4, demand={0: 1.0, 1: 100.0, 2: 1.0}, floors={0: 2, 1: 3, 2: 1}) == {0: 2, 1: 2, 2: 0}


# -- moves ------------------------------------------------------------------------------------------------------------


def test_the_longest_moves_first_each_onto_the_least_loaded_target() -> None:
    source = instance(0, 10, 30, 20)
    assert plan(source, instance(1), instance(2, 5)) == [(1, 1), (2, 2), (0, 1)]


def test_the_emptier_target_is_the_one_with_fewer_requests_then_with_less_kv() -> None:
    assert plan(instance(0, 10), instance(1, 50), instance(2, 40)) == [(0, 2)]
    assert plan(instance(0, 10), instance(1, 1, 1), instance(2, 400)) == [(0, 2)]


def test_a_plan_that_would_overflow_the_targets_slots_is_refused() -> None:
    assert plan(instance(0, 1, 1), instance(1, 1, slots=3)) is not None
    assert plan(instance(0, 1, 1), instance(1, 1, slots=2)) is None


def test_a_plan_that_would_exceed_the_targets_share_of_kv_is_refused() -> None:
    assert KV_FILL == 0.9
    assert plan(instance(0, 400), instance(1, 500)) == [(0, 1)]
    assert plan(instance(0, 401), instance(1, 500)) is None


def test_what_does_not_fit_on_one_target_goes_to_the_next() -> None:
    assert plan(instance(0, 300), instance(1, 700), instance(2, 1, 1)) == [(0, 2)]


def test_reserved_moves_count_as_load_of_a_target() -> None:
    target = instance(1, slots=2)
    for n in range(2):
        coming = group(500 + n).trajectories[0]
        target.reserve(coming)
    assert plan(instance(0, 1), target) is None


def test_a_move_may_slow_urgent_residents_by_less_than_a_tenth() -> None:
    assert MAX_SLOWDOWN == 1.10
    # one resident: 1.1 s per token; two: 1.2 s, 9 % more; three: 1.3 s, 18 % more
    assert plan(instance(0, 1), instance(1, 1, deadline=1), decode_time=BY_REQUESTS) == [(0, 1)]
    assert plan(instance(0, 1, 1), instance(1, 1, deadline=1), decode_time=BY_REQUESTS) is None


def test_residents_that_are_not_urgent_may_be_slowed_down() -> None:
    assert plan(instance(0, 1, 1), instance(1, 1, deadline=2), urgent=1, decode_time=BY_REQUESTS) is not None
    assert plan(instance(0, 1, 1), instance(1, 1, deadline=2), urgent=2, decode_time=BY_REQUESTS) is None


def test_the_slowdown_counts_the_tokens_that_come_too() -> None:
    by_tokens = DecodeTime(base_s=1.0, per_request_s=0.0, per_token_s=0.001)
    assert plan(instance(0, 100), instance(1, 100, deadline=1), decode_time=by_tokens) == [(0, 1)]
    assert plan(instance(0, 120), instance(1, 100, deadline=1), decode_time=by_tokens) is None


def test_planning_changes_nothing() -> None:
    source, target = instance(0, 10, 20), instance(1, 5)
    plan(source, target)
    assert (len(source.residents), target.num_requests, target.kv_load) == (2, 1, 5)
    assert all(t.target is None for t in source.residents.values())


def test_the_papers_allotment_is_by_requests_without_corrected_rounding() -> None:
    assert allot_by_requests(5, requests={0: 1, 1: 1, 2: 2}) == {0: 1, 1: 1, 2: 2}  # one of five is left over
    assert allot_by_requests(4, requests={0: 1, 1: 99}) == {0: 0, 1: 4}  # no floor for what is old
