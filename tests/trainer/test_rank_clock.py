"""The clock of a rank: its spans have no holes, whatever it does."""

from __future__ import annotations

import itertools
import os
import time

from dora.trainer.spans import RankClock, process_start


def clock() -> RankClock:
    ticks = itertools.count(10)
    return RankClock(1, began=7.0, now=lambda: float(next(ticks)))


def test_spans_follow_each_other_from_the_start_of_the_process() -> None:
    made = clock()
    made.switch("waiting")  # at 10
    made.switch("packing")  # at 11
    with made.during("slowest_rank"):  # from 12 to 13
        pass
    found = made.take()  # at 14
    assert found.spans == (("start", 3.0), ("waiting", 1.0), ("packing", 1.0), ("slowest_rank", 1.0), ("packing", 1.0))
    assert (found.rank, found.until) == (1, 14.0)
    assert sum(seconds for _, seconds in found.spans) == found.until - 7.0


def test_a_span_goes_on_after_a_report_and_is_not_reported_twice() -> None:
    made = clock()
    made.switch("waiting")  # at 10
    made.take()  # at 11
    made.switch("waiting")  # no change: the clock is not read
    assert made.take().spans == (("waiting", 1.0),)


def test_a_process_is_at_least_as_old_as_the_time_it_has_computed() -> None:
    assert time.monotonic() - process_start() >= time.process_time() / (os.cpu_count() or 1) > 0
