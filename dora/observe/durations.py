"""How long steps, requests, pushes, gradings and calls took, as histograms.

Invariant: folded from events alone, so that a replay gives the same. A start is forgotten at its end, and work that
starts again (a request that was moved or that a new controller repeats, a push that is retried) is timed from its new
start. Several adapters may be loaded and unloaded at once on one instance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dora.core import commands as cmd
from dora.core import events as ev

#: Upper bounds of the buckets, seconds; one more has no bound.
BOUNDS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0)
#: What is timed, and how it is described.
TIMED: Final = {
    "step": "From the end of a step's training to that of the next.",
    "generation": "Requests to instances, from the order to the end; an answer that is moved or calls has several.",
    "push": "Weight pushes that were confirmed.",
    "unload": "Unloads of adapters that were confirmed.",
    "grading": "Grading of an answer, queueing included.",
    "call": "Calls of environments, queueing included.",
}


@dataclass(slots=True)
class DurationHistogram:
    """Durations of one kind."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))  #: by bucket
    total_s: float = 0.0

    def note(self, seconds: float) -> None:
        """Add a duration; a bucket includes its upper bound."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class _Timed(NamedTuple):
    name: str  # of TIMED
    of: str  # the attribute with the id, which has one attempt under way, or several if it is an instance


_BEGINS: Final = {
    cmd.Generate: _Timed("generation", "trajectory"),
    cmd.PushWeights: _Timed("push", "instance"),
    cmd.UnloadVersion: _Timed("unload", "instance"),
    cmd.GradeTrajectory: _Timed("grading", "trajectory"),
    cmd.CallEnvironment: _Timed("call", "trajectory"),
}
_ENDS: Final = {
    ev.GenerationFinished: _Timed("generation", "trajectory"),
    ev.GenerationStopped: _Timed("generation", "trajectory"),
    ev.CallStarted: _Timed("generation", "trajectory"),
    ev.WeightPushFinished: _Timed("push", "instance"),
    ev.VersionUnloaded: _Timed("unload", "instance"),
    ev.TrajectoryGraded: _Timed("grading", "trajectory"),
    ev.CallFinished: _Timed("call", "trajectory"),
    ev.GenerationFailed: _Timed("generation", "trajectory"),
    ev.WeightPushFailed: _Timed("push", "instance"),
    ev.VersionUnloadFailed: _Timed("unload", "instance"),
}
#: Ends whose durations are not noted.
_FAILURES: Final = (ev.GenerationFailed, ev.WeightPushFailed, ev.VersionUnloadFailed)


class Durations:
    """The histograms of a run, by the names of TIMED."""

    def __init__(self) -> None:
        self.histograms = {name: DurationHistogram() for name in TIMED}
        self._began: dict[tuple[str, int], dict[int, float]] = {}  # time by attempt, by name and id
        self._trained_at: float | None = None  # None until the first event

    def note(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Take in an event of the core with its commands."""
        if self._trained_at is None:
            self._trained_at = event.at
        if isinstance(event, ev.StepTrained):
            self.histograms["step"].note(event.at - self._trained_at)
            self._trained_at = event.at
        elif isinstance(event, ev.ControllerRestarted):
            self._began.clear()
        elif isinstance(event, ev.InstanceLost | ev.InstanceRemoved):
            for name in ("push", "unload"):
                self._began.pop((name, event.instance), None)
        elif (timed := _ENDS.get(type(event))) is not None:
            self._end(timed, event)
        for command in commands:
            if (timed := _BEGINS.get(type(command))) is not None:
                self._begin(timed, command, at=event.at)

    def _begin(self, timed: _Timed, order: cmd.Command, *, at: float) -> None:
        key, attempt = (timed.name, getattr(order, timed.of)), order.attempt  # type: ignore[attr-defined]
        if timed.of == "instance":
            self._began.setdefault(key, {})[attempt] = at
        else:
            self._began[key] = {attempt: at}

    def _end(self, timed: _Timed, event: ev.Event) -> None:
        key, attempt = (timed.name, getattr(event, timed.of)), event.attempt  # type: ignore[attr-defined]
        attempts = self._began.get(key, {})
        began = attempts.pop(attempt, None)
        if not attempts:
            self._began.pop(key, None)
        if began is not None and not isinstance(event, _FAILURES):
            self.histograms[timed.name].note(event.at - began)
