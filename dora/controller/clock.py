"""The clock of a run: seconds since it began, over all of its controllers.

Invariant: it never goes back. Time in which no controller ran does not count, and neither does time in which this one
was stopped (SIGSTOP, Ctrl-Z): servers, answers and the run itself would seem to have made no progress meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: While the controller runs, something asks for the time at least at every tick. If more time than this passes between
#: two questions, in seconds beyond a tick, the controller was stopped.
STOPPED_S: Final = 10.0


class RunClock:
    """The clock of one controller."""

    def __init__(
        self, *, at: float, scale: float, tick_s: float, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """`at`: what it shows first. `scale`: seconds of the run per second; `tick_s`: of a tick, by the wall clock."""
        self._seconds = seconds
        self._scale = scale
        self._longest_s = tick_s + STOPPED_S
        self._began = seconds() - at / scale
        self._asked_at: float | None = None

    def watch(self) -> None:
        """Leave out from now on what the controller is stopped."""
        self._asked_at = self._seconds()

    def __call__(self) -> float:
        """Return the time."""
        now = self._seconds()
        if self._asked_at is not None:
            if now - self._asked_at > self._longest_s:
                self._began += now - self._asked_at
            self._asked_at = now
        return (now - self._began) * self._scale
