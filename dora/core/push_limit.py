"""How many pushes may be under way at once: as many as the store and the links carry, learned from the pushes.

Pushes are slower the more of them share a store or a link, and each server is useless until its own has ended. So more
at once are better only while they carry more versions a second together. The number doubles as long as they do; then
it is halved until fewer carry less. After some time it is tried again, as the fleet may have grown or the store be less
busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Number at once with which a run begins.
FIRST: Final = 4
#: Twice as many at once must carry this many times as much; without anything shared they would carry twice as much.
GAIN: Final = 1.25
#: Pushes before a number that was found is tried again, in units of that number.
PATIENCE: Final = 8
#: A push tells something about a number if so many of it were under way on average while it was.
FULL: Final = 0.75


@dataclass(slots=True)
class PushLimit:
    """The number of pushes that may be under way at once."""

    limit: int = FIRST
    under_way_s: float = 0.0  #: seconds of pushes under way, summed over them
    _at: float = 0.0  # until when they are counted
    _since: float = -1.0  # when the limit changed: pushes that began before tell nothing about it
    _is_falling: bool = False  # twice as many were tried last, else half as many
    _carried: float = 0.0  # pushes per second with that number; 0: to be doubled whatever is carried
    _patience: int = 1  # pushes to be seen before the next change, in units of `limit`
    _count: int = 0  # of pushes seen with `limit` at once
    _took_s: float = 0.0  # the sum of their times
    _among: float = 0.0  # the sum of how many were under way

    def reach(self, now: float, *, under_way: int) -> None:
        """Count the pushes that were under way until `now`; to be called before their number changes."""
        self.under_way_s += under_way * (now - self._at)
        self._at = now

    def learn(self, began: float, ended: float, *, among: float) -> None:
        """Take the times of a push that succeeded, while `among` were under way on average, itself included."""
        if began <= self._since or among < FULL * self.limit:
            return
        self._count += 1
        self._took_s += ended - began
        self._among += among
        if self._count >= self._patience * self.limit:
            self._judge(self._among / max(self._took_s, 1e-9))

    def failed(self, *, among: float) -> None:
        """Take a push that failed while `among` were under way: so many may have taken too long."""
        if among >= FULL * self.limit:
            self._found(max(1, self.limit // 2))

    def _judge(self, carried: float) -> None:
        """Choose the next number, given the pushes per second with this one."""
        if self._is_falling and GAIN * carried <= self._carried:
            self._found(2 * self.limit)
        elif self._is_falling and self.limit == 1:
            self._found(1)
        else:
            self._is_falling = self._is_falling or carried < GAIN * self._carried
            self._try(self.limit // 2 if self._is_falling else 2 * self.limit, carried)

    def _try(self, limit: int, carried: float) -> None:
        self.limit, self._carried, self._patience, self._since = limit, carried, 1, self._at
        self._count, self._took_s, self._among = 0, 0.0, 0.0

    def _found(self, limit: int) -> None:
        """Stay with a number for some time, then double it."""
        self._try(limit, 0.0)
        self._is_falling, self._patience = False, PATIENCE
