"""The trainer's times: the fullest rank sets the pace, and an update follows the wave that closes it."""

from __future__ import annotations

from dora.sim.trainer import WaveTime, wave_time
from tests.sim.worlds import workload

#: Two ranks of 100 tokens/s each.
ONE = workload(fleet={"devices": 10}, train={"tokens_s_per_device": 100.0, "updates": 2, "update_s": 0.5})


def test_the_fullest_rank_sets_the_pace() -> None:
    assert wave_time(ONE, [300, 100], closes=False) == WaveTime(3.0, 2.0, 0.0)


def test_an_update_takes_its_time_after_the_wave_that_closes_it() -> None:
    assert wave_time(ONE, [300, 100], closes=True) == WaveTime(3.0, 2.0, 0.5)
