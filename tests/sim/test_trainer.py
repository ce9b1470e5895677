"""The trainer's times: the fullest rank sets the pace, and updates are spread over the answers."""

from __future__ import annotations

import pytest

from dora.sim.trainer import TrainerTime, WaveTime
from tests.sim.worlds import workload

#: 16 answers and two updates a step, two ranks of 100 tokens/s each.
ONE = workload(
    job={"groups_per_step": 4, "group_size": 4},
    fleet={"devices": 10},
    train={"tokens_s_per_device": 100.0, "updates": 2, "update_s": 0.5},
)


def test_the_fullest_rank_sets_the_pace() -> None:
    assert TrainerTime(ONE).wave([300, 100], num_answers=1, last=False) == WaveTime(3.0, 2.0, 0.0)


def test_updates_are_spread_over_the_answers_and_the_last_one_ends_the_last_wave() -> None:
    time = TrainerTime(ONE)
    for _ in range(2):  # every step begins anew
        waves = [(7, False), (1, False), (7, False), (1, True)]
        taken = [time.wave([1, 1], num_answers=n, last=last).update_s for n, last in waves]
        assert taken == [0.0, 0.5, 0.0, 0.5]


def test_every_step_has_exactly_its_updates_even_a_short_one() -> None:
    time = TrainerTime(ONE)
    assert time.wave([1, 1], num_answers=3, last=True).update_s == pytest.approx(1.0)
    assert time.wave([1, 1], num_answers=30, last=False).update_s == pytest.approx(1.0)
    assert time.wave([1, 1], num_answers=30, last=True).update_s == 0.0
