"""The search for a plan finds what simulating every plan finds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dora.errors import ConfigError
from dora.sim.limit import limit, limits
from dora.sim.plan import SPLITS, SimulatedPlan, search, shortened, splits_of
from dora.sim.sweep import simulate
from dora.sim.workload import Workload
from tests.sim.worlds import workload


def small(**fleet: Any) -> Workload:
    """A job on twelve devices whose servers may be one to four of them wide."""
    given = {"devices": 12, "device_bytes": 10e9, "fixed_step_s": 1e-3, "weight_bytes": 4e9, "push_bytes_s": 8e9}
    return workload("dora", k=2, fleet={**given, **fleet})


def found(one: Workload, **options: Any) -> list[SimulatedPlan]:
    return search(one, **{"staleness": [one.job.max_staleness], "widths": (1, 2, 4), **options})


def test_it_is_within_two_percent_of_trying_everything() -> None:
    one = small()
    best = found(one)[0]
    everything = []
    for width in (1, 2, 4):
        for size in range(width, 12, width):
            split = one.with_width(width).with_changes(fleet={"rollout_devices": size})
            if split.num_instances >= 3:
                everything.append(simulate((shortened(split), 0)).step_s)
    again = simulate((shortened(best.workload), 0)).step_s
    assert again <= 1.02 * min(everything)


def test_plans_are_of_different_k_and_width_and_the_fastest_is_first() -> None:
    plans = found(small(), staleness=[0, 1, 2])
    assert len(plans) == len({plan.key for plan in plans}) == 3
    assert [plan.result.step_s for plan in plans] == sorted(plan.result.step_s for plan in plans)
    assert max(plan.result.max_staleness for plan in plans) <= 2


def test_plans_that_do_not_fit_are_left_out() -> None:
    plans = found(small(), why_not=lambda planned: "" if planned.train_devices >= 6 else "too few train")
    assert min(plan.workload.train_devices for plan in plans) >= 6
    with pytest.raises(ConfigError, match="K = 2, 1 devices a server: none is possible"):
        found(small(), why_not=lambda planned: "none is possible")


def test_it_says_why_nothing_is_possible() -> None:
    with pytest.raises(ConfigError, match=r"no plan for 12 devices.*\n.*cannot hold the 13 versions of K = 12"):
        found(small(), staleness=[12])


@pytest.mark.parametrize("strategy", ["partial", "partial_bounded"])
def test_a_plan_has_a_server_also_if_one_would_be_enough(strategy: str) -> None:
    [best] = found(small().with_changes(job={"strategy": strategy}), most=1)
    assert best.workload.num_instances >= 1


def test_a_large_fleet_has_no_more_splits_than_a_small_one() -> None:
    for devices in (13, 100, 1_000_000):
        splits, _ = splits_of(small(devices=devices), origin="test")
        assert 8 <= len(splits) <= SPLITS
        assert splits[-1].train_devices <= devices // 50 + 1


def test_a_server_without_memory_for_the_weights_has_no_other_width() -> None:
    with pytest.raises(ConfigError, match=r"fleet.device_bytes: 1 devices of 4e\+09 bytes cannot hold"):
        found(small(device_bytes=4e9), widths=(2,))


def test_a_strategy_without_a_split_has_its_best_width() -> None:
    one = small().with_changes(job={"strategy": "sync"})
    plans = found(one, staleness=[0])
    times = {width: simulate((shortened(one.with_width(width)), 0)).step_s for width in (1, 2, 4)}
    assert plans[0].workload.fleet.devices_per_instance == min(times, key=lambda width: times[width])


def test_progress_counts_every_simulation() -> None:
    told: list[int] = []
    found(small(), progress=told.append)
    assert told == list(range(1, len(told) + 1))


def test_the_limits_of_splits_are_those_of_each_alone() -> None:
    splits = [shortened(small().with_changes(fleet={"rollout_devices": size})) for size in (4, 7, 10)]
    assert limits(splits, seed=3) == [limit(split, seed=3) for split in splits]


# -- width --------------------------------------------------------------------------------------------------------


def test_wider_servers_divide_what_can_be_divided() -> None:
    one = small(wider_step_s=2e-3)
    wide, fleet = one.with_width(4).fleet, one.fleet
    decode = fleet.server.decode
    assert wide.server.slots == 4 * fleet.server.slots
    assert wide.server.kv_tokens == math.floor(fleet.server.kv_tokens * (40e9 - 4e9) / (10e9 - 4e9))
    assert wide.server.decode.base_s == pytest.approx(1e-3 + (decode.base_s - 1e-3) / 4 + 2e-3)
    assert wide.server.decode.per_token_s == pytest.approx(decode.per_token_s / 4)
    assert wide.server.decode.per_request_s == decode.per_request_s
    assert wide.push_bytes_s == 4 * fleet.push_bytes_s
    assert one.with_width(1) is one
    back = one.with_width(2).with_changes(fleet={"wider_step_s": 0.0}).with_width(1).fleet
    assert back.server.decode.per_token_s == pytest.approx(decode.per_token_s)


def test_a_server_that_is_too_narrow_for_the_weights_has_no_kv() -> None:
    wide = small(devices_per_instance=2, weight_bytes=12e9)
    assert wide.with_width(1).fleet.server.kv_tokens == 0


# -- the store ----------------------------------------------------------------------------------------------------


def step_takes(store_bytes_s: float, *, relay: bool = False) -> float:
    one = small(store_bytes_s=store_bytes_s, relay=relay, rollout_devices=8, weight_bytes=8e9, push_fixed_s=0.0)
    return simulate((one, 0)).step_s


def test_a_slow_store_makes_steps_longer_and_a_relay_shorter() -> None:
    slow = step_takes(1e9)
    assert slow > 1.1 * step_takes(200e9)
    assert step_takes(1e9, relay=True) < 0.95 * slow
