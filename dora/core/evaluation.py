"""Evaluation during rollout: held-out samples of one version at a time.

Invariant: at most one version is under evaluation; its samples carry that version, never enter the ledger, and are
decoded only by instances that hold it. Version 0 comes first, the last version last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.ids import TrajectoryId, VersionId, evaluation_id
from dora.core.tables import Trajectory


@dataclass(slots=True, eq=False, repr=False)
class Evaluation:
    """The evaluation in progress, and whether another is due."""

    prompt_tokens: Sequence[int]  #: of each sample
    every: int  #: versions between evaluations; 0: only the first and the last
    due: bool = False  #: the newest version is evaluated next
    wanted: VersionId | None = None  #: the version that made it due
    overtaken: list[VersionId] = field(default_factory=list)  #: due versions that a newer one replaced
    version: VersionId | None = None  #: version under evaluation
    trajectories: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    waiting: list[Trajectory] = field(default_factory=list)  #: samples queued for a slot; the last one is next
    num_resident: int = 0
    away: int = 0  #: samples that are calling and hold no slot
    ungraded: int = 0
    num_new: int = 0  #: samples without a first request

    @property
    def num_begun(self) -> int:
        """Number of samples between their first request and their grade."""
        return self.ungraded - self.num_new

    def wants(self, version: VersionId, *, is_last: bool) -> bool:
        """Whether this version is to be evaluated."""
        if not self.prompt_tokens:
            return False
        return version == 0 or is_last or (self.every > 0 and version % self.every == 0)

    def want(self, version: VersionId) -> None:
        """Have the version just published evaluated next, in place of one that is still due."""
        self._overtake(version)
        self.wanted, self.due = version, True

    def _overtake(self, version: VersionId) -> None:
        if self.wanted is not None and self.wanted != version:
            self.overtaken.append(self.wanted)

    def start(self, version: VersionId) -> None:
        """Start the evaluation of a version, with all samples queued."""
        self._overtake(version)
        total = len(self.prompt_tokens)
        self.version, self.wanted, self.due = version, None, False
        self.waiting = [
            Trajectory(evaluation_id(version, i, num_samples=total), group=None, version=version, num_prompt_tokens=n)
            for i, n in enumerate(self.prompt_tokens)
        ]
        self.trajectories = {t.id: t for t in self.waiting}
        self.waiting.reverse()
        self.ungraded = self.num_new = total

    def finish(self) -> VersionId:
        """End the evaluation, whose samples are all graded, and return its version."""
        assert self.version is not None
        version, self.version = self.version, None
        self.trajectories = {}
        return version
