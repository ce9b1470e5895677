"""Rule F (docs/STALENESS.md): C2 and C3 in one inequality, and the gate of strategies that do without. No other module
compares staleness with its bound.

Let s be the step being formed, c the groups committed to it, N the step size, and U the unconsumed groups. F: no group
in U has a deadline below s, and for every m >= 0 the number of groups in U with deadline <= s + m is at most
(N - c) + m·N. Admission and commit keep F; closing carries it over; filtering only loosens it (invariant; the proof is
in docs/STALENESS.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dora.core.ids import StepId, VersionId
from dora.core.strategies import Settings
from dora.errors import InvariantViolation


def fits(due: Sequence[int], *, committed: int, step_size: int) -> bool:
    """Rule F: every unconsumed group can still be committed by its deadline.

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

    __slots__ = ("committed", "due", "max_staleness", "step", "step_size", "steps")

    def __init__(self, *, step_size: int, max_staleness: int, steps: int) -> None:
        self.step = StepId(0)  #: s
        self.committed = 0  #: c
        self.due = [0] * (max_staleness + 1)  #: due[m]: unconsumed groups with deadline s + m
        self.step_size = step_size  #: N
        self.max_staleness = max_staleness  #: K
        self.steps = steps  #: T

    def extend(self, settings: Settings) -> None:
        """The job has more steps from now on."""
        self.steps = settings.steps

    @property
    def num_unconsumed(self) -> int:
        """|U|."""
        return sum(self.due)

    def deadline(self, version: VersionId) -> int:
        """Last step that may train a group of `version`: min(v + K, T - 1)."""
        return min(version + self.max_staleness, self.steps - 1)

    def staleness_allowed(self, version: VersionId, *, step: StepId) -> bool:
        """C3: 0 <= step - version <= K."""
        return 0 <= step - version <= self.max_staleness

    def slack(self, version: VersionId) -> int:
        """How many more groups of `version` F admits now."""
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
        """F still holds with one more group of `version`."""
        return self.slack(version) > 0

    def may_commit(self, deadline: int) -> bool:
        """F still holds when a group with this deadline takes a place in the step.

        The earliest deadline in U is always safe; a later one needs slack at every m below its own.
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
        """One more unconsumed group."""
        if not 0 <= self._place(deadline) < len(self.due):
            raise InvariantViolation(f"C3: a group is due at step {deadline} while step {self.step} is formed")
        self.due[self._place(deadline)] += 1

    def commit(self, deadline: int) -> None:
        """One unconsumed group takes a place in the step."""
        self.due[self._place(deadline)] -= 1
        self.committed += 1

    def drop(self, deadline: int) -> None:
        """One unconsumed group leaves without being trained."""
        self.due[self._place(deadline)] -= 1

    def _place(self, deadline: int) -> int:
        """Where groups with this deadline are counted in `due`."""
        return deadline - self.step

    def close(self) -> None:
        """The step is full (or the source is dry): the next one is formed. What is due now must not be left outside."""
        if self.due[0]:
            raise InvariantViolation(f"C3: step {self.step} closes while {self.due[0]} groups due now are outside it")
        self.step = StepId(self.step + 1)
        self.committed = 0
        self.due.pop(0)
        self.due.append(0)


class CapacityGate(Formation):
    """AReaL's capacity gate in place of F (arXiv 2505.24298, section 4): as many groups as fill the steps up to v* + K.

    Groups are committed in completion order, so nothing bounds how long one may wait: K bounds what is admitted, not
    staleness. `oversample` and `partial_sync` have the same gate at K = 0, with `surplus` groups beyond the step: when
    it closes the core discards them, or (`keeps_surplus`) they go on, and the job's last step has none. `due` has one
    entry for all.
    """

    __slots__ = ("keeps_surplus", "max_lag", "surplus")

    def __init__(
        self, *, step_size: int, max_staleness: int, steps: int, max_lag: int, surplus: int, keeps_surplus: bool
    ) -> None:
        super().__init__(step_size=step_size, max_staleness=max_staleness, steps=steps)
        self.max_lag = max_lag
        self.surplus = surplus
        self.keeps_surplus = keeps_surplus
        self.due = [0]

    def extend(self, settings: Settings) -> None:
        """The job has more steps from now on."""
        self.steps, self.max_lag = settings.steps, settings.max_lag

    def deadline(self, version: VersionId) -> int:
        """Last step that may train a group of `version`."""
        return min(version + self.max_lag, self.steps - 1)

    def staleness_allowed(self, version: VersionId, *, step: StepId) -> bool:
        """0 <= step - version, and what else the strategy keeps of C3."""
        return 0 <= step - version <= self.max_lag

    def slack(self, version: VersionId) -> int:
        """(K + v + 1)·N + surplus - (accepted + running): how many more groups are admitted now."""
        ahead = min(version + self.max_staleness, self.steps - 1) - self.step
        if ahead < 0:
            return 0
        room = (ahead + 1) * self.step_size + self.surplus
        if self.keeps_surplus:
            room = min(room, (self.steps - self.step) * self.step_size)
        return room - self.committed - self.due[0]

    def may_commit(self, deadline: int) -> bool:
        """There is a place in the step."""
        return self.committed < self.step_size

    def _place(self, deadline: int) -> int:
        return 0

    def close(self) -> None:
        """The step is full (or the source is dry): the next one is formed."""
        self.step = StepId(self.step + 1)
        self.committed = 0


def formation_of(settings: Settings) -> Formation:
    """Rule F, or the gate of a strategy that does without."""
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
