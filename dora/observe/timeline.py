"""Time added up: seconds by activity, and rows of timeline.jsonl, one per kind of lane and bucket of time.

Invariant: pure. Every second of every lane is counted once in a row, and once in the seconds of a step; in a row it may
be divided among versions that share an instance. Buckets grow
with the age of the run, so that a run has about 2,000 rows in its first 8 minutes and 1,000 for each doubling of its
age, however long it is. In an answer for the page, rows are joined with their neighbors until they fit; the time of an
activity stays the same, in each lane or, if the lanes are added up, in all lanes together.

Rows are decoded one by one for that: with thousands of decoded rows in memory, Python's garbage collector would take
six times as long as reading them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from dora.journal.spans import ALL_LANES, MAX_LANES, Entry, Kind, TimelineRow

#: Length of the first buckets, in seconds, and the age of the run at which it doubles. Whenever the age doubles from
#: then on, the length doubles again.
FIRST_BUCKET_S: Final = 0.25
FIRST_BUCKETS_UNTIL_S: Final = 512.0

#: Maximum number of policy versions of an activity in a joined row: in one lane, unless they share it, and in all lanes
#: added up.
LANE_VERSIONS: Final = 2
FOLDED_VERSIONS: Final = 8
#: Maximum number of publications in a joined row; the latest ones are kept.
PUBLICATIONS: Final = 4
#: Share of the bounds that rows take up after joining; the rest is room for further rows.
_FILLED: Final = 0.75
_ROW: Final = msgspec.json.Decoder(TimelineRow)

#: Activity and policy version; None without one.
Doing = tuple[str, int | None]
Spent = defaultdict[Doing, float]
#: Activity -> version -> seconds.
Versions = dict[str, dict[int | None, float]]


def bucket_of(at: float) -> tuple[float, float]:
    """Return start and length of the bucket that a moment belongs to. Both are exact, as multiples of powers of two."""
    length, until = FIRST_BUCKET_S, FIRST_BUCKETS_UNTIL_S
    while at >= until:
        length, until = 2 * length, 2 * until
    return at // length * length, length


class Timeline:
    """The rows of one kind of lane."""

    def __init__(self, kind: Kind, *, begin: float, shared: bool = False) -> None:
        """`begin`: the end of the rows that were written before. `shared`: several versions share a lane."""
        self._kind = kind
        self._shared = shared
        self._begin = begin
        self._buckets: dict[float, dict[int, Spent]] = {}  # start -> lane -> seconds
        self._moved: defaultdict[float, Counter[int]] = defaultdict(Counter)  # start -> lane -> answers
        self._published: defaultdict[float, list[tuple[int, float]]] = defaultdict(list)

    def add(self, lane: int, doing: Doing, start: float, end: float, *, share: float = 1.0) -> None:
        """Add a span, a part of one, or the share of one version. The part before `begin` is in a row already."""
        start = max(start, self._begin)
        while start < end:
            begin, length = bucket_of(start)
            stop = min(end, begin + length)
            self._buckets.setdefault(begin, {}).setdefault(lane, defaultdict(float))[doing] += share * (stop - start)
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
            rows.append(replace(row, moved=dict(moved), published=published))
        begin, _ = bucket_of(until)
        self._begin = until if partial else max(self._begin, begin)
        return rows

    def _row(self, at: float, until: float, lanes: dict[int, Spent]) -> TimelineRow:
        row = TimelineRow(kind=self._kind, at=at, s=round(until - at, 6), num_lanes=len(lanes), shared=self._shared)
        if len(lanes) <= MAX_LANES:
            return replace(row, lanes={lane: _entries(spent) for lane, spent in sorted(lanes.items())})
        total: Spent = defaultdict(float)
        for spent in lanes.values():
            for doing, seconds in spent.items():
                total[doing] += seconds
        return replace(row, folded=_entries(total))


def _entries(spent: Spent) -> list[Entry]:
    return [(activity, version, round(seconds, 6)) for (activity, version), seconds in spent.items()]


# -- joined for an answer ----------------------------------------------------------------------------------------------


def decode_row(line: bytes) -> TimelineRow | None:
    """Return a row; None if the line is damaged."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _ROW.decode(line)
    return None


class Digest:
    """The rows of one kind, joined as they are read."""

    def __init__(self, *, most: int, size: int) -> None:
        """Give at most `most` rows, of at most `size` bytes in total."""
        self._most = most
        self._size = size
        self._length = 0.0  # of joined rows, in seconds
        self._sum: _Sum | None = None
        self._lines: list[bytes] = []
        self._bytes = 0

    def expect(self, seconds: float, line: bytes) -> None:
        """Choose how many rows to join, if all rows cover `seconds`, and their lines are about as long as `line`."""
        self._length = seconds / min(self._most, self._size / len(line)) / _FILLED

    def add(self, row: TimelineRow, line: bytes) -> None:
        """Add the next row; `line` is the same row encoded."""
        if self._sum is not None and row.at + row.s - self._sum.at > self._length:
            self._close()
        if self._sum is not None:
            self._sum.add(row)
        elif 2 * row.s <= self._length:
            self._sum = _Sum(row)
        else:
            self._keep(line.rstrip(b"\n"))
        if len(self._lines) >= 2 * self._most or self._bytes >= 2 * self._size:
            self.lines()

    def lines(self) -> Sequence[bytes]:
        """Return all rows."""
        self._close()
        self._lines = [*compact(self._lines, most=self._most, size=self._size)]
        self._bytes = sum(map(len, self._lines))
        return self._lines

    def _close(self) -> None:
        if self._sum is not None:
            self._keep(msgspec.json.encode(self._sum.row()))
            self._sum = None

    def _keep(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)


def compact(lines: Sequence[bytes], *, most: int, size: int) -> Sequence[bytes]:
    """Return at most `most` rows with the same time of each activity as `lines`, which are rows of one kind.

    Neighbors are joined to rows of about equal length, until there is room for a third more. Together the rows have at
    most `size` bytes; a single row may have more.
    """
    total = sum(map(len, lines))
    ends = [row for line in (*lines[:1], *lines[-1:]) if (row := decode_row(line))]
    if not ends or (len(lines) <= most and total <= size):
        return lines
    most, size = int(most * _FILLED), int(size * _FILLED)
    length = (ends[-1].at + ends[-1].s - ends[0].at) / max(1.0, min(most, size * len(lines) / total))
    while len(lines) > 1 and (len(lines) > most or total > size):
        lines = [msgspec.json.encode(row) for row in _joined(lines, up_to=length)]
        total = sum(map(len, lines))
        length *= max(1.25, total / size)
    return lines


def _joined(lines: Iterable[bytes], *, up_to: float) -> Iterator[TimelineRow]:
    """Join neighbors as long as the result is not longer than `up_to` seconds."""
    current: _Sum | None = None
    for row in filter(None, map(decode_row, lines)):
        if current is not None and row.at + row.s - current.at <= up_to:
            current.add(row)
            continue
        if current is not None:
            yield current.row()
        current = _Sum(row)
    if current is not None:
        yield current.row()


class _Sum:
    """The sum of consecutive rows."""

    def __init__(self, first: TimelineRow) -> None:
        self.at = first.at
        self._kind: Kind = first.kind
        self._first = first
        self._count = 0
        self._num_lanes = 0
        self._spent: dict[int | None, Versions] = {}  # None: all lanes added up
        self._moved = Counter[int]()
        self._published: list[tuple[int, float]] = []
        self.add(first)

    def add(self, row: TimelineRow) -> None:
        """Add the next row."""
        self._count += 1
        self._end = row.at + row.s
        self._num_lanes = max(self._num_lanes, row.num_lanes, len(row.lanes))
        for lane, entries in row.lanes.items():
            _add(self._spent.setdefault(lane, {}), entries)
        if row.folded:
            _add(self._spent.setdefault(None, {}), row.folded)
        self._moved.update(row.moved)
        self._published = [*self._published, *row.published][-PUBLICATIONS:]

    def row(self) -> TimelineRow:
        """Return the sum as one row."""
        if self._count == 1:
            return self._first  # its entries are in the order in which they began
        spent, moved = self._spent, dict(self._moved)
        if None in spent or len(spent) > MAX_LANES:
            whole: Versions = {}
            for own in spent.values():
                _add(whole, _listed(own))
            spent = {None: whole}
            moved = {ALL_LANES: self._moved.total()} if moved else {}
        lanes = sorted((lane, own) for lane, own in spent.items() if lane is not None)
        versions = FOLDED_VERSIONS if self._first.shared else LANE_VERSIONS
        return TimelineRow(
            kind=self._kind,
            at=self.at,
            s=round(self._end - self.at, 6),
            num_lanes=self._num_lanes,
            lanes={lane: _kept(own, versions=versions) for lane, own in lanes},
            folded=_kept(spent.get(None, {}), versions=FOLDED_VERSIONS),
            moved=moved,
            published=self._published,
            shared=self._first.shared,
        )


def _add(spent: Versions, entries: Iterable[Entry]) -> None:
    for activity, version, seconds in entries:
        of = spent.get(activity)
        if of is None:
            spent[activity] = {version: seconds}
        else:
            of[version] = of.get(version, 0.0) + seconds


def _listed(spent: Versions) -> list[Entry]:
    return [(activity, version, seconds) for activity, of in spent.items() for version, seconds in of.items()]


def _kept(spent: Versions, *, versions: int) -> list[Entry]:
    """Return the entries; if an activity has more than `versions` versions, the shortest time is added to the
    longest."""
    found: list[Entry] = []
    for activity, of in spent.items():
        if len(of) > versions:
            kept = sorted(of, key=lambda version: -of[version])[:versions]
            rest = sum(of.values()) - sum(of[version] for version in kept)
            of = {version: of[version] for version in kept}
            of[kept[0]] += rest
        found += [(activity, version, round(seconds, 6)) for version, seconds in of.items()]
    return found
