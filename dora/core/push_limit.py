"""How many pushes may be under way at once: as many as the store and the links carry, learned from the pushes.

Pushes are slower the more of them share a store or a link, and each server is useless until its own has ended. So more
at once are better only while they carry more versions a second together. The number doubles as long as they do, else it
falls back, and is tried again after some time, as the fleet may have grown or the store be less busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Number at once with which a run begins, and below which it never falls.
FIRST: Final = 2
#: Twice as many at once must carry this many times as much; without anything shared they would carry twice as much.
GAIN: Final = 1.25
#: After a fall, the number of pushes before the next attempt, in units of the number at once.
PATIENCE: Final = 8
#: A push tells something about a number if so many of it were under way on average while it was.
FULL: Final = 0.75


@dataclass(slots=True)
class PushLimit:
    """The number of pushes that may be under way at once."""

    limit: int = FIRST
    under_way_s: float = 0.0  #: seconds of pushes under way, summed over them
    _at: float = 0.0  # until when they are counted
    _carried: float = 0.0  # pushes per second with half as many at once; 0: to be tried whatever they carry
    _patience: int = 1  # pushes to be seen before the next change, in units of `limit`
    _count: int = 0  # of pushes seen with `limit` at once
    _took_s: float = 0.0  # the sum of their times
    _among: float = 0.0  # the sum of how many were under way

    def reach(self, now: float, *, under_way: int) -> None:
        """Count the pushes that were under way until `now`; to be called before their number changes."""
        self.under_way_s += under_way * (now - self._at)
        self._at = now

    def learn(self, took_s: float, *, among: float) -> None:
        """Take the time of a push that succeeded, while `among` were under way on average, itself included."""
        if among < FULL * self.limit:
            return
        self._count += 1
        self._took_s += took_s
        self._among += among
        if self._count < self._patience * self.limit:
            return
        carried = self._among / max(self._took_s, 1e-9)
        if carried >= GAIN * self._carried:
            self.limit, self._carried, self._patience = 2 * self.limit, carried, 1
            self._restart()
        else:
            self._fall()

    def failed(self, *, among: float) -> None:
        """Take a push that failed while `among` were under way: so many may have taken too long."""
        if among >= FULL * self.limit:
            self._fall()

    def _fall(self) -> None:
        self.limit, self._carried, self._patience = max(FIRST, self.limit // 2), 0.0, PATIENCE
        self._restart()

    def _restart(self) -> None:
        self._count, self._took_s, self._among = 0, 0.0, 0.0
