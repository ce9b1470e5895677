"""Refused peers: their number, the newest reasons, and a log that they cannot fill.

Invariant: the first refusal is logged at once, and then at most one line in LOG_EVERY_S, with the number of refusals
since the last line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

LOG_EVERY_S = 60.0
MAX_REASON = 300  # characters; a peer can choose parts of a reason

log = structlog.get_logger(__name__)


class Refusals:
    """The refusals of one kind."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.count = 0
        self.newest: deque[str] = deque(maxlen=8)
        self._now = now
        self._logged_at: float | None = None
        self._unlogged = 0

    def add(self, reason: str, number: int = 1) -> None:
        """Count `number` refusals for `reason`."""
        self.count += number
        self.newest.append(reason[:MAX_REASON])
        self._unlogged += number
        now = self._now()
        if self._logged_at is None or now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            self._log()

    def close(self) -> None:
        """Log the refusals since the last line."""
        if self._unlogged:
            self._log()

    def _log(self) -> None:
        log.warning("trainer_refused", reason=self.newest[-1], number=self._unlogged)
        self._unlogged = 0
