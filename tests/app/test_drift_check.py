"""The verdict of `dora check --drift`, and the job that it runs."""

from __future__ import annotations

import pytest

from dora.app.drift_check import Mismatches, verdict, without_learning
from dora.config.load import load


def found(*steps: dict[int, float]) -> Mismatches:
    return Mismatches(1e-6, list(steps))


@pytest.mark.parametrize(
    ("steps", "is_flat", "says"),
    [
        ([{0: 1e-13}, {1: 2e-12}, {0: 1e-13, 2: 1e-6}], True, "agree at every step and staleness (at most 1.0e-06"),
        ([{0: 2e-3}, {1: 5e-2}, {0: 1e-2, 2: 1e-3}], False, "compare their temperature, dtype and model"),
        ([{0: 1e-13}, {1: 1e-3}], False, "publishing or pushing changes it"),
        ([{0: 1e-3}, {1: 1e-13}], False, "some servers hold other weights"),
        ([], False, "no step was measured"),
        ([{}, {1: 0.0}], False, "no step was measured"),
    ],
)
def test_the_verdict_names_the_likely_cause(steps: list[dict[int, float]], is_flat: bool, says: str) -> None:
    flat, text = verdict(found(*steps))
    assert flat is is_flat
    assert says in text


def test_each_step_is_a_line_with_its_stalenesses_in_order() -> None:
    assert list(found({0: 1e-13}, {2: 2e-3, 0: 1e-4}, {}).lines()) == [
        "step 1/3  mismatch (k3, nats) 1.0e-13 at staleness 0",
        "step 2/3  mismatch (k3, nats) 1.0e-04 at staleness 0, 2.0e-03 at staleness 2",
        "step 3/3  mismatch (k3, nats) not measured",
    ]


@pytest.mark.parametrize(
    ("given", "updates", "groups"), [(16, 1, 8), (4, 1, 4), (512, 3, 9), (18, 6, 12), (32, 16, 16)]
)
def test_the_job_is_that_of_the_user_but_small_and_without_learning(given: int, updates: int, groups: int) -> None:
    changes = [f"rollout.groups_per_step={given}", f"trainer.updates={updates}", "rollout.temperature=0.7"]
    if given % updates:
        changes[0] = f"rollout.groups_per_step={given - given % updates}"
    config = without_learning(load(None, changes, environ={}))
    assert config.rollout.groups_per_step == groups
    assert config.rollout.groups_per_step % updates == 0
    assert (config.trainer.learning_rate, config.rollout.temperature, config.eval.sets) == (0.0, 0.7, ())
    [reward] = config.task.rewards  # maxrl needs rewards of at least 0
    assert (reward.kind, reward.weight) == ("length", -1.0)
