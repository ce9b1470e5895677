"""Evaluation beside rollout: held-out samples of one version at a time.

Invariant: at most one version is under evaluation; its samples carry that version, never enter the ledger, and are
decoded only by instances that hold it. Version 0 comes first, the last version last. Called by decisions.py, which
places samples, and answers.py, which counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dora.core.groups import Trajectory
from dora.core.ids import TrajectoryId, evaluation_id


class Evaluation:
    """The evaluation under way, and whether another is due."""

    __slots__ = ("due", "every", "num_resident", "prompt_tokens", "trajectories", "ungraded", "version", "waiting")

    def __init__(self, *, prompt_tokens: Sequence[int], every: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.every = every
        self.due = False  #: the newest version is to be evaluated as soon as no other is
        self.version: int | None = None  #: version under evaluation
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        self.waiting: list[Trajectory] = []  #: samples that wait for a slot, last one first
        self.num_resident = 0
        self.ungraded = 0

    def wants(self, version: int, *, is_last: bool) -> bool:
        """Is this version to be evaluated?"""
        if not self.prompt_tokens:
            return False
        return version == 0 or is_last or (self.every > 0 and version % self.every == 0)

    def start(self, version: int) -> None:
        """Begin with all samples waiting."""
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

    def finish(self) -> int:
        """All samples are graded; returns the version."""
        assert self.version is not None
        version, self.version = self.version, None
        self.trajectories = {}
        return version
