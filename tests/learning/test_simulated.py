"""Learning in simulated time: real answers and versions under the simulator's decisions."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning import cells, harness

from dora.app.learn import LearningCurve, configured, learn
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.sim.workload import Workload
from tests.learning.test_harness import TINY

#: Sizes come from the workload.
TASK = tuple(one for one in TINY if not one.startswith(("run.steps", "rollout.group")))


def workload(*, strategy: str = "dora", k: int = 0, steps: int = 3) -> Workload:
    return Workload().with_changes(
        job={
            "strategy": strategy, "max_staleness": k, "steps": steps, "groups_per_step": 8, "group_size": 4,
        },
        lengths={"scale": 100.0},
        fleet={"devices": 6, "rollout_devices": 4},
    )  # fmt: skip


def prepared(one: Workload, *changes: str, seed: int = 0) -> tuple[Config, Workload]:
    return configured(cells.PROFILE, one, [*TASK, *changes], seed=seed)


def learned(one: Workload, *changes: str, seed: int = 0) -> LearningCurve:
    config, fitted = prepared(one, *changes, seed=seed)
    return learn(fitted, config, seed=seed, show=str)


def test_without_staleness_a_policy_learns_what_it_learns_in_the_lag_harness() -> None:
    found = learned(workload(strategy="sync"))
    config, _ = prepared(workload(strategy="sync"))
    with harness.Process():
        expected = harness.run(config, staleness=0, eval_every=1)
    assert [(point.version, point.heldout) for point in found.points] == expected.heldout
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        for name in cells.METRICS:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_a_simulation_repeats_itself_and_another_seed_or_k_does_not() -> None:
    first, second = (learned(workload(k=2, steps=4)) for _ in range(2))
    assert first == second or first.digest == second.digest
    assert [point.heldout for point in first.points] == [point.heldout for point in second.points]
    assert first.digest != learned(workload(k=2, steps=4), seed=1).digest
    assert first.digest != learned(workload(k=0, steps=4)).digest


def test_longer_answers_take_longer() -> None:
    short, long = (learned(workload().with_changes(lengths={"scale": scale})) for scale in (10.0, 1000.0))
    assert long.step_s > 5 * short.step_s
    assert [point.version for point in long.points] == [0, 1, 2, 3]


def test_what_cannot_be_simulated_is_refused_by_name(tmp_path: Path) -> None:
    for one, changes, says in (
        (workload(), ("eval.sets=[]",), "eval.sets: a curve needs a held-out set"),
        (workload(), ('environment.name="mine:Env"',), "environment.name: only single answers are simulated"),
        (workload(strategy="partial", k=1), (), "partial changes weights under requests"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepared(one, *changes)
