"""How many failed episodes are too many: a budget for each source, and rows that are set aside.

Invariant: pure. A few failed episodes cost little, as they are left out; many of one source mean that the environment
is broken, and the run fails with its commonest error. A row that fails again and again is set aside and no longer
tried. When a host is lost, it is unknown which of the running calls caused it. So the loss counts once against the row
of each of these calls, until an episode of that row succeeds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

from dora.errors import RunFailed, kind_of


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """How many failures are too many."""

    budget: float = 0.5  #: share of the last `window` episodes of a source above which the run fails; 1: it never does
    window: int = 100
    row: int = 8  #: failures of a row after which it is set aside


#: The limits of every run.
NORMAL: Final = FailureLimits()


@dataclass(frozen=True, slots=True)
class Death:
    """The loss of a host, and the sources and rows against which it was counted: once each, whatever number of episodes
    was lost."""

    sources: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)


class Failures:
    """The endings of episodes, by source and by row. Errors name the config key `field`."""

    def __init__(self, limits: FailureLimits, *, field: str) -> None:
        self._limits = limits
        self._field = field
        self._endings: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=limits.window))  # "": no failure
        self._of_rows: Counter[str] = Counter()
        self._suspected: Counter[str] = Counter()  # losses of hosts by row, since the row's last success
        #: Name of a row that is set aside -> the reason of its last failure.
        self.set_aside: dict[str, str] = {}

    def ended(self, *, source: str, row: str) -> None:
        """Note an episode that did not fail."""
        self._endings[source].append("")
        self._suspected.pop(row, None)

    def failed(self, reason: str, *, source: str, row: str, is_own: bool = True, death: Death | None = None) -> None:
        """Note a failed episode. RunFailed if they are too many.

        `is_own`: the episode itself may have caused the failure. `death`: the loss of the host that made the episode
        fail; None if no host was lost.
        """
        if is_own and (death is None or row not in death.rows):
            (self._of_rows if death is None else self._suspected)[row] += 1
            if self._of_rows[row] + self._suspected[row] >= self._limits.row:
                self.set_aside[row] = reason
        if death is not None:
            if is_own:
                death.rows.add(row)
            if source in death.sources:
                return
            death.sources.add(source)
        endings = self._endings[source]
        endings.append(reason)
        num_failed = sum(map(bool, endings))
        if num_failed > self._limits.budget * self._limits.window:
            [(kind, times)] = Counter(kind_of(ending) for ending in endings if ending).most_common(1)
            commonest = next(ending for ending in endings if kind_of(ending) == kind)
            raise RunFailed(
                f"{self._field}: {num_failed} of the last {len(endings)} episodes of source '{source}' "
                f"failed in the environment; {times} of them: {commonest}"
            )
