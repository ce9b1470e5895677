"""The search finds the same split as trying all of them, with fewer simulations."""

from __future__ import annotations

import pytest

from dora.errors import ConfigError
from dora.sim.split import MEASURED_STEPS, search
from dora.sim.sweep import simulate
from tests.sim.test_simulate import dora
from tests.sim.worlds import workload


@pytest.mark.parametrize(("strategy", "k", "trainer"), [("dora", 2, 300.0), ("periodic", 0, 500.0)])
def test_the_search_comes_close_to_the_best_of_all_splits(strategy: str, k: int, trainer: float) -> None:
    one = workload(strategy, k=k, fleet={"devices": 16}, train={"tokens_s_per_device": trainer})
    found = search(one, seed=0, processes=1)
    steps = 3 * (one.rules.max_staleness + 1) + MEASURED_STEPS
    splits = [one.with_changes(job={"steps": steps}, fleet={"rollout_devices": n}) for n in range(k + 1, 16)]
    fastest = min(simulate((split, 0)).step_s for split in splits)
    assert min(found.step_s.values()) == found.step_s[found.workload.fleet.rollout_devices] <= 1.03 * fastest
    assert found.workload.with_changes(fleet={"rollout_devices": 8}) == one, "nothing else is changed"
    assert 0.001 < found.noise < 0.5
    assert f"with a noise of {found.noise:.1%}" in str(found)


def test_a_large_fleet_is_searched_from_coarse_to_fine() -> None:
    found = search(workload("dora", k=2, fleet={"devices": 64}), seed=0, processes=1)
    best = found.workload.fleet.rollout_devices
    assert {best - 1, best + 1} <= found.step_s.keys()
    assert max(found.step_s) - min(found.step_s) >= 6
    assert len(found.step_s) < 16


def test_a_fleet_without_any_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="no split"):
        search(workload(k=2).with_changes(fleet={"devices": 3}), seed=0, processes=1)


def test_the_command_prints_the_best_split_and_simulates_it() -> None:
    done = dora("launch/workloads/tail-bound.toml", "--steps", "12", "--strategy", "dora,sync", "--split", "best")
    assert (done.returncode, done.stderr) == (0, "")
    line = next(line for line in done.stdout.splitlines() if line.startswith("dora, K = 1:"))
    assert f"| {line.split()[4]}/12* " in done.stdout
    assert "sync, K" not in done.stdout
