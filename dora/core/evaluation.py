"""Evaluation beside rollout: held-out samples of one version at a time.

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
    """The evaluation under way, and whether another is due."""

    prompt_tokens: Sequence[int]  #: of each sample
    every: int  #: versions between evaluations; 0: only the first and the last
    due: bool = False  #: the newest version is to be evaluated as soon as no other is
    wanted: VersionId | None = None  #: the version for whose sake it is due
    overtaken: list[VersionId] = field(default_factory=list)  #: wanted, but newer ones were there before their turn
    version: VersionId | None = None  #: version under evaluation
    trajectories: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    waiting: list[Trajectory] = field(default_factory=list)  #: samples that wait for a slot, last one first
    num_resident: int = 0
    ungraded: int = 0

    def wants(self, version: VersionId, *, is_last: bool) -> bool:
        """Is this version to be evaluated?"""
        if not self.prompt_tokens:
            return False
        return version == 0 or is_last or (self.every > 0 and version % self.every == 0)

    def want(self, version: VersionId) -> None:
        """The version just published is to be evaluated; one that still waits for its turn never is."""
        self._overtake(version)
        self.wanted, self.due = version, True

    def _overtake(self, version: VersionId) -> None:
        if self.wanted is not None and self.wanted != version:
            self.overtaken.append(self.wanted)

    def start(self, version: VersionId) -> None:
        """Begin with all samples waiting."""
        self._overtake(version)
        self.wanted = None
        total = len(self.prompt_tokens)
        self.version = version
        self.due = False
        self.waiting = [
            Trajectory(evaluation_id(version, i, num_samples=total), group=None, version=version, num_prompt_tokens=n)
            for i, n in enumerate(self.prompt_tokens)
        ]
        self.trajectories = {t.id: t for t in self.waiting}
        self.waiting.reverse()
        self.ungraded = total

    def finish(self) -> VersionId:
        """All samples are graded; returns the version."""
        assert self.version is not None
        version, self.version = self.version, None
        self.trajectories = {}
        return version
