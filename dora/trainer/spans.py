"""The clock of a rank: what the rank does at any moment, from its start to its end, in one activity at a time.

Invariant: spans neither overlap nor leave gaps: each begins where the previous one ended, by one monotonic clock.
Spans are times of the process. Work that it has queued on a GPU counts in the activity that next waits for the GPU. A
rank waits for the other ranks (`slowest_rank`) before the first forward and the last backward pass of an update, and
when the update closes. Models that are gathered layer by layer also wait in the collectives of their passes; that time
counts as `forward_backward`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from dora.transport.messages import RankActivity, RankSpans


class RankClock:
    """The spans of one rank."""

    def __init__(self, rank: int, *, began: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """`began`: start of the first activity, `start`, by the same clock; None: now."""
        self._rank = rank
        self._now = now
        self.activity: RankActivity = "start"
        self.beats = 0  #: grows with each activity, pass and layer: the progress of this process
        self._since = now() if began is None else began
        self._closed: list[tuple[RankActivity, float]] = []

    def switch(self, activity: RankActivity) -> None:
        """Begin an activity, which ends the current one."""
        if activity == self.activity:
            return
        now = self._now()
        self._closed.append((self.activity, now - self._since))
        self.activity, self._since = activity, now
        self.beats += 1

    def beat(self) -> None:
        """Note progress in the current activity."""
        self.beats += 1

    @contextmanager
    def during(self, activity: RankActivity) -> Iterator[None]:
        """Interrupt the current activity by another."""
        before = self.activity
        self.switch(activity)
        yield
        self.switch(before)

    def take(self) -> RankSpans:
        """Return the spans since the last call; the current activity counts up to now."""
        now = self._now()
        spans, self._closed = [*self._closed, (self.activity, now - self._since)], []
        self._since = now
        return RankSpans(rank=self._rank, until=now, spans=tuple(spans))


def process_start() -> float:
    """Return when this process began, by the monotonic clock."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())
