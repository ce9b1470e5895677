"""Evaluation during rollout: held-out samples of one version at a time.

Invariant: at most one version is under evaluation, and at most one more waits for its turn; both are kept. Samples
carry their version, never enter the ledger, and are decoded only by instances that hold it. Version 0 comes first, the
last version last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.ids import TrajectoryId, VersionId, evaluation_id
from dora.core.tables import Trajectory


@dataclass(slots=True, eq=False, repr=False)
class Evaluation:
    """The evaluation in progress, and the one that is next."""

    prompt_tokens: Sequence[int]  #: prompt length of each sample
    every: int  #: versions between evaluations; 0: only the first and the last
    due: VersionId | None = None  #: the version that is evaluated next
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

    def want(self, version: VersionId) -> VersionId | None:
        """Have a version evaluated next; return the due version that it replaces, which will not be evaluated."""
        replaced, self.due = self.due, version
        if replaced is not None:
            self.overtaken.append(replaced)
        return replaced

    def start(self) -> VersionId:
        """Start the evaluation of the version that is due, with all samples queued."""
        assert self.version is None
        assert self.due is not None
        total = len(self.prompt_tokens)
        version = self.version = self.due
        self.due = None
        self.waiting = [
            Trajectory(evaluation_id(version, i, num_samples=total), group=None, version=version, num_prompt_tokens=n)
            for i, n in enumerate(self.prompt_tokens)
        ]
        self.trajectories = {t.id: t for t in self.waiting}
        self.waiting.reverse()
        self.ungraded = self.num_new = total
        return version

    def finish(self) -> VersionId:
        """End the evaluation, whose samples are all graded, and return its version."""
        assert self.version is not None
        version, self.version = self.version, None
        self.trajectories = {}
        return version
