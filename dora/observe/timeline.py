"""Time added up: seconds by activity, and rows of timeline.jsonl, one per kind of lane and bucket of time.

Invariant: pure. Every second of every lane is counted once in a row, and once in the seconds of a step. Buckets grow
with the age of the run, so that a run has about 2,000 rows in its first 8 minutes and 1,000 for each doubling of its
age, however long it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

import msgspec

from dora.journal.spans import ALL_LANES, MAX_LANES, Entry, Kind, TimelineRow

#: Length of the first buckets, in seconds, and the age of the run at which it doubles. Whenever the age doubles from
#: then on, the length doubles again.
FIRST_BUCKET_S: Final = 0.25
FIRST_BUCKETS_UNTIL_S: Final = 512.0

#: Activity and policy version; None without one.
Doing = tuple[str, int | None]
Spent = defaultdict[Doing, float]


def bucket_of(at: float) -> tuple[float, float]:
    """Return start and length of the bucket that a moment belongs to. Both are exact, as multiples of powers of two."""
    length, until = FIRST_BUCKET_S, FIRST_BUCKETS_UNTIL_S
    while at >= until:
        length, until = 2 * length, 2 * until
    return at // length * length, length


class Timeline:
    """The rows of one kind of lane."""

    def __init__(self, kind: Kind, *, begin: float) -> None:
        """`begin`: the end of the rows that were written before."""
        self._kind = kind
        self._begin = begin
        self._buckets: dict[float, dict[int, Spent]] = {}  # start -> lane -> seconds
        self._moved: defaultdict[float, Counter[int]] = defaultdict(Counter)  # start -> lane -> answers
        self._published: defaultdict[float, list[tuple[int, float]]] = defaultdict(list)

    def add(self, lane: int, doing: Doing, start: float, end: float) -> None:
        """Add a span, or a part of one. The part before `begin` is in a row already."""
        start = max(start, self._begin)
        while start < end:
            begin, length = bucket_of(start)
            stop = min(end, begin + length)
            self._buckets.setdefault(begin, {}).setdefault(lane, defaultdict(float))[doing] += stop - start
            start = stop

    def move(self, lane: int, at: float) -> None:
        """Note that an answer came to a lane from another one."""
        self._moved[bucket_of(at)[0]][lane] += 1

    def publish(self, version: int, at: float) -> None:
        """Note that a version became available."""
        self._published[bucket_of(at)[0]].append((version, round(at, 6)))

    def is_due(self, until: float) -> bool:
        """Whether the first bucket without a row has ended at `until`."""
        begin, length = bucket_of(self._begin)
        return begin + length <= until

    def rows(self, until: float, *, partial: bool = False) -> list[TimelineRow]:
        """Return the rows of the buckets that have ended at `until`; nothing may be added to these buckets any more.

        `partial`: also return the row of the last bucket, as far as it goes.
        """
        rows = []
        for begin in sorted(self._buckets):
            end = begin + bucket_of(begin)[1]
            if end > until and not partial:
                break
            row = self._row(max(begin, self._begin), min(end, until), self._buckets.pop(begin))
            moved, published = self._moved.pop(begin, Counter[int]()), self._published.pop(begin, [])
            if row.folded and moved:
                moved = Counter({ALL_LANES: moved.total()})
            rows.append(msgspec.structs.replace(row, moved=dict(moved), published=published))
        begin, _ = bucket_of(until)
        self._begin = until if partial else max(self._begin, begin)
        return rows

    def _row(self, at: float, until: float, lanes: dict[int, Spent]) -> TimelineRow:
        length = round(until - at, 6)
        if len(lanes) <= MAX_LANES:
            entries = {lane: _entries(spent) for lane, spent in sorted(lanes.items())}
            return TimelineRow(kind=self._kind, at=at, s=length, num_lanes=len(lanes), lanes=entries)
        total: Spent = defaultdict(float)
        for spent in lanes.values():
            for doing, seconds in spent.items():
                total[doing] += seconds
        return TimelineRow(kind=self._kind, at=at, s=length, num_lanes=len(lanes), folded=_entries(total))


def _entries(spent: Spent) -> list[Entry]:
    return [(activity, version, round(seconds, 6)) for (activity, version), seconds in spent.items()]
