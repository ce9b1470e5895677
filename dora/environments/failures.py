"""How many failed episodes are too many: a budget for each source, and rows that are set aside.

Invariant: pure. A few failed episodes cost little, as they are left out; many of one source mean that the environment
is broken, and the run fails with its commonest error. A row that fails again and again is poisoned, and is no longer
tried.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from dora.errors import RunFailed


class Failures:
    """The endings of episodes, by source and by row. Errors name the config key `field`."""

    def __init__(self, *, budget: float, window: int, row_failures: int, field: str) -> None:
        self._budget = budget
        self._window = window
        self._row_failures = row_failures
        self._field = field
        self._endings: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=window))  # "": without failure
        self._of_rows: Counter[str] = Counter()
        #: Name of a row that is set aside -> the reason of its last failure.
        self.set_aside: dict[str, str] = {}

    def ended(self, source: str) -> None:
        """Note an episode that did not fail."""
        self._endings[source].append("")

    def failed(self, reason: str, *, source: str, row: str, is_own: bool, is_known: bool = False) -> None:
        """Note a failed episode. RunFailed if they are too many.

        `is_own`: by its own fault, as far as one can know. `is_known`: another of the source has failed by the same
        event, the loss of their host; they count as one.
        """
        if is_own:
            self._of_rows[row] += 1
            if self._of_rows[row] >= self._row_failures:
                self.set_aside[row] = reason
        if is_known:
            return
        endings = self._endings[source]
        endings.append(reason)
        num_failed = sum(map(bool, endings))
        if num_failed > self._budget * self._window:
            commonest, times = Counter(filter(None, endings)).most_common(1)[0]
            raise RunFailed(
                f"{self._field}.failure_budget: {num_failed} of the last {len(endings)} episodes of source '{source}' "
                f"failed in the environment; {times} of them: {commonest}"
            )
