"""The counts inside and outside the steady state, against figures worked out by hand."""

from __future__ import annotations

import pytest

from dora.core.state import State
from dora.sim.instance import SimulatedInstance
from dora.sim.limit import limit, window
from dora.sim.measure import Measure, Result
from tests.sim.worlds import workload

#: Of twelve steps at K = 1 the first four and the last two are left out.
STEADY = range(4, 10)


def measured(*, busy_s: float = 8.0) -> Result:
    """In steady steps the trainer is busy for `busy_s` of 10 s and every third group is stale; others are extreme."""
    one = workload("dora", k=1, job={"steps": 12}, fleet={"rollout_devices": 2})
    state, instances = State(one.settings()), [SimulatedInstance(i, one.fleet.server) for i in range(2)]  # type: ignore[arg-type]
    measure, at = Measure(one, instances), 0.0
    for step in range(12):
        is_steady = step in STEADY
        at += 10.0 if is_steady else 170.0
        stale = step % 3 == 0 if is_steady else True
        measure.committed(step, staleness=int(stale), lengths=[30, 50] if is_steady else [9, 9])
        if is_steady and step % 2:
            measure.discarded([100, 20])
        measure.trained_wave(
            num_tokens=400 if is_steady else 7_000, busy_s=busy_s if is_steady else 1.0, unbalanced_s=2.0
        )
        state.counters.migrations += 3 if is_steady else 40
        for instance in instances:
            instance.up = True
            instance.use.full_s += 0.25 * (at - instance.anchor)
            instance.use.empty_s += 0.75 * (at - instance.anchor)
            instance.anchor = at
            instance.evictions += 5 if is_steady else 60
        measure.step_trained(step, at=at, state=state)
    return measure.result(seed=0, limit=limit(one, seed=0), state=state, num_events=0)


def test_a_trainer_that_is_always_busy_is_not_idle_for_less_than_no_time() -> None:
    result = measured(busy_s=10.000000000000002)  # what rounding makes of 10
    assert f"{result.trainer_idle:.1%}" == "0.0%"


def test_only_the_steady_state_counts() -> None:
    result = measured()
    assert (result.steps, result.step_s, result.tokens_s) == (len(STEADY), 10.0, 40.0)
    assert result.ratio == result.step_s / result.limit.step_s
    assert result.step_error_s == 0, "all steady steps take as long"
    assert (result.trainer_idle, result.trainer_unbalanced) == (pytest.approx(0.2), pytest.approx(0.2))
    assert (result.staleness, result.staleness_mean, result.staleness_max) == ((4, 2), pytest.approx(2 / 6), 1)
    assert (result.migrations, result.evictions) == (3, 10)
    assert result.discarded_share == pytest.approx(3 / 9)
    assert result.instance_shares["full"] == pytest.approx(0.25)
    assert result.instance_shares["empty"] == pytest.approx(0.75)


def test_the_length_bias_is_that_of_the_whole_job() -> None:
    trained, thrown_away = (6 * 80 + 6 * 18, 24), (3 * 120, 6)
    admitted = (trained[0] + thrown_away[0]) / (trained[1] + thrown_away[1])
    assert measured().length_bias == pytest.approx(trained[0] / trained[1] / admitted)


@pytest.mark.parametrize(
    ("steps", "k", "found"), [(12, 1, (3, 9)), (40, 3, (7, 35)), (24, 0, (1, 22)), (2, 3, (0, 1)), (6, 3, (1, 2))]
)
def test_a_job_too_short_for_its_warm_up_still_has_a_measured_step(steps: int, k: int, found: tuple[int, int]) -> None:
    assert window(steps, max_staleness=k) == found
