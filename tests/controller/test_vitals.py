"""Ranks that are silent or stand still are found, and those that only take long are not."""

from __future__ import annotations

import random

import pytest

from dora.controller.vitals import FIRST_S, GAP_S, LOOK_S, SILENT_S, STILL_FACTOR, STILL_S, Vitals
from dora.transport.messages import OWN_LIMIT, PULSE_S, RankActivity, RankPulse, RankSpans


class Ranks:
    """Two ranks whose pulses arrive while time goes on."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.vitals = Vitals(2, at=self.now)
        self.counts = [0, 0]
        self.doing: list[RankActivity] = ["waiting", "waiting"]
        self.silent: set[int] = set()

    def work(self, rank: int, activity: RankActivity) -> None:
        self.counts[rank] += 1
        self.doing[rank] = activity

    def both(self, activity: RankActivity) -> None:
        for rank in range(2):
            self.work(rank, activity)

    def spend(self, seconds: float, *, on: RankActivity) -> None:
        """Let both ranks do this."""
        self.both(on)
        self.until(seconds)

    def until(self, seconds: float) -> str:
        """Let time go on; return the first problem, or ""."""
        end = self.now + seconds
        while self.now < end:
            for rank in {0, 1} - self.silent:
                pulse = RankPulse(rank=rank, count=self.counts[rank], activity=self.doing[rank])
                self.vitals.note(rank, pulse, at=self.now)
            for _ in range(int(PULSE_S / LOOK_S)):
                self.now += LOOK_S
                if problem := self.vitals.problem(at=self.now):
                    return problem
        return ""


def test_ranks_may_wait_for_a_message_for_ever() -> None:
    assert Ranks().until(100_000.0) == ""


def test_a_rank_that_is_silent_is_found_at_once() -> None:
    ranks = Ranks()
    assert ranks.until(100.0) == ""
    ranks.silent = {1}
    began = ranks.now
    assert ranks.until(1_000.0).startswith("trainer rank 1 has been silent for 2")
    assert ranks.now - began <= SILENT_S + LOOK_S


def test_ranks_that_all_stand_still_are_found_and_their_activities_named() -> None:
    ranks = Ranks()
    ranks.spend(4.0, on="forward_backward")
    ranks.spend(4.0, on="slowest_rank")
    ranks.work(0, "forward_backward")
    began = ranks.now
    problem = ranks.until(10_000.0)
    assert "(rank 0: forward_backward, rank 1: slowest_rank)" in problem
    assert ranks.now - began <= STILL_S + PULSE_S + LOOK_S


def test_as_long_as_one_rank_makes_progress_the_others_may_wait_for_it() -> None:
    ranks = Ranks()
    ranks.both("slowest_rank")
    for _ in range(200):
        ranks.work(0, "forward_backward")
        assert ranks.until(20.0) == ""


def test_what_has_taken_long_before_may_take_ten_times_as_long() -> None:
    ranks = Ranks()
    ranks.both("forward_backward")
    assert ranks.until(40.0) == ""
    ranks.both("forward_backward")
    assert ranks.until(0.9 * STILL_FACTOR * 40.0) == ""
    assert ranks.until(0.2 * STILL_FACTOR * 40.0) != ""


def test_the_first_time_may_take_long_because_kernels_are_compiled() -> None:
    ranks = Ranks()
    ranks.both("forward_backward")
    assert ranks.until(FIRST_S - 10.0) == ""
    assert ranks.until(20.0) != ""


def test_what_was_done_between_two_pulses_is_not_done_for_the_first_time() -> None:
    ranks = Ranks()
    for rank in range(2):
        ranks.vitals.note_spans(RankSpans(rank=rank, until=1.0, spans=(("forward_backward", 0.2), ("waiting", 0.0))))
    ranks.both("forward_backward")
    began = ranks.now
    assert ranks.until(FIRST_S) != ""
    assert ranks.now - began <= STILL_S + PULSE_S + LOOK_S


def test_what_goes_on_as_spans_are_sent_may_take_long() -> None:
    ranks = Ranks()
    ranks.vitals.note_spans(RankSpans(rank=0, until=1.0, spans=(("waiting", 0.2), ("forward_backward", 0.2))))
    ranks.both("forward_backward")
    assert ranks.until(FIRST_S - 10.0) == ""


@pytest.mark.parametrize("activity", sorted(OWN_LIMIT))
def test_what_has_a_limit_of_its_own_is_not_judged(activity: RankActivity) -> None:
    ranks = Ranks()
    ranks.spend(2.0, on="forward_backward")
    ranks.spend(2.0, on="optimizer")
    ranks.both(activity)
    assert ranks.until(2_000.0) == ""


def test_a_controller_that_stood_still_judges_nobody_by_that_time() -> None:
    ranks = Ranks()
    ranks.spend(2.0, on="forward_backward")
    ranks.spend(2.0, on="forward_backward")
    ranks.now += 100 * GAP_S
    assert ranks.vitals.problem(at=ranks.now) == ""
    assert ranks.until(0.9 * STILL_S) == ""


def test_no_false_alarm_in_a_long_run_of_steps_of_any_length() -> None:
    """Passes vary by a factor of a hundred; layers beat within them."""
    dice = random.Random(7)
    ranks = Ranks()
    for _ in range(2_000):
        for activity in ("packing", "forward_backward", "slowest_rank", "optimizer", "publishing", "waiting"):
            ranks.both(activity)  # type: ignore[arg-type]
            assert ranks.until(dice.lognormvariate(0.0, 1.2)) == ""
