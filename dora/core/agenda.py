"""The decisions that are due. Handlers note them here, and `decide.settle` makes them.

Invariant: a decision is made once, however often it was noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora.core.ids import VersionId


@dataclass(slots=True)
class Agenda:
    """Decisions that are due. All but `repack` are made within the event that noted them."""

    at_rest: bool = False  #: this event changed nothing that a decision depends on
    form: bool = False  #: complete groups may be committed
    feed: bool = False  #: the trainer may be given more
    place: bool = False  #: a vacant instance may need another version
    release: bool = False  #: a version may no longer be needed
    repack: bool = False  #: an old version may fit on fewer instances
    repack_not_before: float = 0.0  #: seconds of the run
    versions: dict[VersionId, None] = field(default_factory=dict)  #: to be filled; the latest is at the end

    def fill(self, version: VersionId) -> None:
        """Note that slots of this version are free, or that a trajectory waits for one."""
        self.versions[version] = None
