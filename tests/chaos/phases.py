"""Detection of moments of a run from outside.

Actions that the run records first (a wave, a push, the last command) are seen in the journal; longer ones as a file or
folder with a temporary name; decoding at the status endpoint.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping

import msgspec

from tests.chaos.recorded import Record
from tests.chaos.session import Session


class Watch:
    """Records since the watch began, so that a moment that has passed is not taken for a new one."""

    def __init__(self, session: Session) -> None:
        self.session = session
        session.look()
        self._from = len(session.seen)
        self._evaluates = False
        self._take(session.seen)

    def fresh(self) -> list[Record]:
        """Return the records since the last call."""
        self.session.look()
        new, self._from = self.session.seen[self._from :], len(self.session.seen)
        self._take(new)
        return new

    def _take(self, new: list[Record]) -> None:
        for fact in new:
            if fact["type"] == "Generate" and fact["trajectory"] < 0 and fact["version"] > 0:
                self._evaluates = True
            elif fact["type"] == "ReportEvaluation" and fact["version"] > 0:
                self._evaluates = False

    def _comes(self, kind: str) -> bool:
        return any(fact["type"] == kind for fact in self.fresh())

    def generating(self) -> bool:
        self.session.look()
        return self.session.counts["WeightPushFinished"] > 0 and self._residents() > 0

    def grading(self) -> bool:
        return any(self.session.busy_folder.iterdir())

    def committing(self) -> bool:
        return self._comes("CommitGroup")

    def training(self) -> bool:
        return self._comes("TrainMicroBatch")

    def publishing(self) -> bool:
        return any(self.session.memory_folder.glob("dora-*/.stage-v*"))

    def pushing(self) -> bool:
        return self._comes("PushWeights")

    def checkpointing(self) -> bool:
        assert self.session.folder is not None
        return any((self.session.folder / "checkpoints").glob(".step-*"))

    def evaluating(self) -> bool:
        """Return whether the last evaluation has begun, and not all of its samples are graded."""
        self.fresh()
        return self._evaluates

    def ending(self) -> bool:
        return self._comes("FinishRun")

    def _residents(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.session.life.url}/status", timeout=10) as answer:
                status = msgspec.json.decode(answer.read())
        except (OSError, AssertionError):
            return 0
        return sum(instance["residents"] for instance in status["instances"])


PHASES: Mapping[str, Callable[[Watch], bool]] = {
    "generating": Watch.generating,
    "grading": Watch.grading,
    "committing": Watch.committing,
    "training": Watch.training,
    "publishing": Watch.publishing,
    "pushing": Watch.pushing,
    "checkpointing": Watch.checkpointing,
    "evaluating": Watch.evaluating,
    "ending": Watch.ending,
}


def wait_for(session: Session, phase: str, *, timeout_s: float = 180.0) -> bool:
    """Wait for the moment; False if the run ends first."""
    watch = Watch(session)
    return session.wait(lambda: PHASES[phase](watch), what=phase, timeout_s=timeout_s)


def until_counted(session: Session, kind: str, *, more: int = 1) -> bool:
    """Wait for `more` events or commands of a kind; False if the run ends first."""
    session.look()
    wanted = session.counts[kind] + more

    def is_counted() -> bool:
        session.look()
        return session.counts[kind] >= wanted

    return session.wait(is_counted, what=f"{more} more of {kind}", timeout_s=180.0)


def until_asked(session: Session) -> bool:
    """Wait for the first request of this life."""

    def has_asked() -> bool:
        session.look()
        return session.counts["Generate"] > 0

    return session.wait(has_asked, what="the first request", timeout_s=180.0)
