"""What has to be decided before the core is at rest: each handler notes it here, and `decide.settle` works it off.

Invariant: an item is taken once, and noting it again before it is taken changes nothing.
"""

from __future__ import annotations

from dora.core.ids import VersionId


class Agenda:
    """Decisions that are due. All but `repack` are taken within the event that noted them."""

    __slots__ = ("_feed", "_fill", "_form", "_place", "_release", "_repack", "_repack_not_before", "at_rest")

    def __init__(self) -> None:
        self.at_rest = False  #: the event at hand changed nothing that a decision depends on
        self._form = False
        self._feed = False
        self._place = False
        self._release = False
        self._repack = False
        self._repack_not_before = 0.0  # seconds of the run
        self._fill: dict[VersionId, None] = {}  # versions, the one noted last at the end

    def rest(self) -> None:
        """The event at hand needs no decision."""
        self.at_rest = True

    def form(self) -> None:
        """Complete groups may be committed."""
        self._form = True

    def take_form(self) -> bool:
        due, self._form = self._form, False
        return due

    def feed(self) -> None:
        """The trainer may be given more."""
        self._feed = True

    def take_feed(self) -> bool:
        due, self._feed = self._feed, False
        return due

    def fill(self, version: VersionId) -> None:
        """Slots of this version are free, or something waits for them."""
        self._fill[version] = None

    def take_fill(self) -> VersionId | None:
        return self._fill.popitem()[0] if self._fill else None

    def place(self) -> None:
        """A vacant instance may deserve another version."""
        self._place = True

    def take_place(self) -> bool:
        due, self._place = self._place, False
        return due

    @property
    def wants_slots(self) -> bool:
        """Something is to be filled or placed."""
        return bool(self._fill) or self._place

    def repack(self, *, not_before: float | None = None) -> None:
        """An old version may fit on fewer instances; with `not_before`, the next look is not due before that time."""
        if not_before is None:
            self._repack = True
        else:
            self._repack_not_before = not_before

    def take_repack(self, now: float) -> bool:
        due = self._repack and now >= self._repack_not_before
        if due:
            self._repack = False
        return due

    def release(self) -> None:
        """A version may be needed no longer."""
        self._release = True

    def take_release(self) -> bool:
        due, self._release = self._release, False
        return due
