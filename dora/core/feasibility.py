"""Rule F, which implies C2 and C3, and the gate of strategies without it. No other module compares staleness with K.

Let s be the step being formed, c the number of groups committed to it, N the step size, and U the unconsumed groups. F:
no group in U has a deadline below s, and for every m >= 0 the number of groups in U with deadline <= s + m is at most
(N - c) + m·N. Invariant: admission, commit and close preserve F, and filtering only loosens it (proof:
docs/STALENESS.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dora.core.ids import StepId, VersionId
from dora.core.strategies import Settings
from dora.errors import InvariantViolation


def fits(due: Sequence[int], *, committed: int, step_size: int) -> bool:
    """Whether rule F holds: every unconsumed group can still be committed by its deadline.

    `due[m]` counts unconsumed groups with deadline `step + m`; none is overdue.
    """
    room = step_size - committed
    for count in due:
        room -= count
        if room < 0:
            return False
        room += step_size
    return True


class Formation:
    """The step being formed and the counters of F. Every method is O(K)."""

    __slots__ = ("committed", "due", "max_lag", "max_staleness", "step", "step_size", "steps")

    def __init__(self, *, step_size: int, max_staleness: int, steps: int) -> None:
        self.step = StepId(0)  #: s
        self.committed = 0  #: c
        self.due = [0] * (max_staleness + 1)  #: due[m]: unconsumed groups with deadline s + m
        self.step_size = step_size  #: N
        self.max_staleness = max_staleness  #: K
        self.max_lag = max_staleness  #: largest staleness; larger than K if K does not bound it
        self.steps = steps  #: T

    def extend(self, settings: Settings) -> None:
        """Adopt a larger number of steps."""
        self.steps, self.max_lag = settings.steps, settings.max_lag

    @property
    def num_unconsumed(self) -> int:
        """|U|."""
        return sum(self.due)

    def deadline(self, version: VersionId) -> int:
        """Return the last step that may train a group of `version`: min(v + K, T - 1) under F."""
        return min(version + self.max_lag, self.steps - 1)

    def staleness_allowed(self, version: VersionId, *, step: StepId) -> bool:
        """C3: 0 <= step - version <= K under F."""
        return 0 <= step - version <= self.max_lag

    def slack(self, version: VersionId) -> int:
        """Return the number of groups of `version` that F admits now."""
        first = min(version + self.max_staleness, self.steps - 1) - self.step
        if first < 0:
            return 0
        room = self.step_size - self.committed
        slack = self.steps * self.step_size
        for m, count in enumerate(self.due):
            room -= count
            if m >= first and room < slack:
                slack = room
            room += self.step_size
        return slack

    def may_admit(self, version: VersionId) -> bool:
        """Whether F holds with another group of `version`."""
        return self.slack(version) > 0

    def may_commit(self, deadline: int) -> bool:
        """Whether F holds after a group with this deadline is committed.

        The earliest deadline in U is always safe; a later deadline needs slack at every m below its own.
        """
        room = self.step_size - self.committed
        if room < 1:
            return False
        for m in range(deadline - self.step):
            room -= self.due[m]
            if room < 1:
                return False
            room += self.step_size
        return True

    def admit(self, deadline: int) -> None:
        """Count a new unconsumed group."""
        if not 0 <= self._index(deadline) < len(self.due):
            raise InvariantViolation(f"C3: a group is due at step {deadline + 1} while step {self.step + 1} is formed")
        self.due[self._index(deadline)] += 1

    def commit(self, deadline: int) -> None:
        """Count an unconsumed group as committed to the step."""
        self.due[self._index(deadline)] -= 1
        self.committed += 1

    def drop(self, deadline: int) -> None:
        """Remove an unconsumed group that will not be trained."""
        self.due[self._index(deadline)] -= 1

    def _index(self, deadline: int) -> int:
        """Return the index of groups with this deadline in `due`."""
        return deadline - self.step

    def close(self) -> None:
        """Form the next step; InvariantViolation if a group that is due now is not committed."""
        if self.due[0]:
            raise InvariantViolation(f"C3: step {self.step + 1} closes without {self.due[0]} groups that are due now")
        self.step = StepId(self.step + 1)
        self.committed = 0
        self.due.pop(0)
        self.due.append(0)


class CapacityGate(Formation):
    """AReaL's capacity gate in place of F (arXiv 2505.24298, section 4): it admits groups for the steps up to v* + K.

    Groups are committed in completion order, so K bounds admission, not staleness. `oversample` and `partial_sync` use
    the gate with K = 0 and `surplus` groups beyond the step. When the step closes, the surplus groups are discarded.
    With `keeps_surplus` they continue instead, and the last step of the job has no surplus. `due` has a single entry.
    """

    __slots__ = ("keeps_surplus", "surplus")

    def __init__(
        self, *, step_size: int, max_staleness: int, steps: int, max_lag: int, surplus: int, keeps_surplus: bool
    ) -> None:
        super().__init__(step_size=step_size, max_staleness=max_staleness, steps=steps)
        self.max_lag = max_lag
        self.surplus = surplus
        self.keeps_surplus = keeps_surplus
        self.due = [0]

    def slack(self, version: VersionId) -> int:
        """Return the number of groups admitted now: (K + v + 1)·N + surplus - (accepted + running)."""
        ahead = min(version + self.max_staleness, self.steps - 1) - self.step
        if ahead < 0:
            return 0
        room = (ahead + 1) * self.step_size + self.surplus
        if self.keeps_surplus:
            room = min(room, (self.steps - self.step) * self.step_size)
        return room - self.committed - self.due[0]

    def may_commit(self, deadline: int) -> bool:
        """Whether the step is not full."""
        return self.committed < self.step_size

    def _index(self, deadline: int) -> int:
        return 0

    def close(self) -> None:
        """Form the next step."""
        self.step = StepId(self.step + 1)
        self.committed = 0


def formation_of(settings: Settings) -> Formation:
    """Return the counters of rule F, or the gate of a strategy without it."""
    rules, size, steps = settings.rules, settings.groups_per_step, settings.steps
    if rules.bounded and rules.oversample == 1.0:
        return Formation(step_size=size, max_staleness=rules.max_staleness, steps=steps)
    surplus = math.ceil(rules.oversample * size) - size
    return CapacityGate(
        step_size=size,
        max_staleness=rules.max_staleness,
        steps=steps,
        max_lag=settings.max_lag,
        surplus=surplus,
        keeps_surplus=not rules.discards,
    )
