"""The learning rate of each step, against figures and against transformers' own schedules."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from dora.trainer.schedule import Schedule, learning_rate

rate = partial(learning_rate, peak=2.0, min_share=0.0, warmup_steps=2, steps=6)


def rates(schedule: Schedule, **changes: float) -> list[float]:
    return [rate(step, schedule=schedule, **changes) for step in range(6)]


def test_rates_are_those_computed_by_hand() -> None:
    assert rates("constant") == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rates("linear") == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates("linear", min_share=0.5) == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25]
    half = 2**-0.5
    assert rates("cosine") == pytest.approx([1.0, 2.0, 2.0, 1 + half, 1.0, 1 - half])
    assert rates("cosine", min_share=0.1) == pytest.approx([1.0, 2.0, 2.0, 1.1 + 0.9 * half, 1.1, 1.1 - 0.9 * half])


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_after_the_warm_up_rates_are_those_of_transformers(schedule: Schedule, reference) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    expected = reference(optimizer, num_warmup_steps=5, num_training_steps=40)
    for step in range(40):
        if step >= 5:
            found = rate(step, schedule=schedule, warmup_steps=5, steps=40)
            assert found == pytest.approx(expected.get_last_lr()[0])
        optimizer.step()
        expected.step()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 50, 60])
def test_rates_rise_to_the_peak_and_then_never_rise_and_never_vanish(schedule: Schedule, warmup_steps: int) -> None:
    found = [rate(step, schedule=schedule, warmup_steps=warmup_steps, steps=50) for step in range(50)]
    top = min(max(warmup_steps, 1), 50)
    assert found[:top] == sorted(found[:top])
    assert found[top - 1 :] == sorted(found[top - 1 :], reverse=True)
    assert min(found) > 0
    assert max(found) == (2.0 if warmup_steps <= 50 else pytest.approx(2.0 * 50 / 60))


def test_more_steps_raise_the_rates_that_are_left() -> None:
    assert rate(5, schedule="linear", steps=12) > rate(5, schedule="linear", steps=6)
