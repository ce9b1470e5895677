"""What the files of a run say of its past, in answers of bounded size: rows of steps, of the timeline, and samples.

Invariant: files are only read, from where the last look ended, so that what is asked while a run goes on costs as much
as what was added. An answer is `{"rows": [...], "next": N}`: asked again with N, it has what was added since.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from dora.journal.run_folder import RunFolder
from dora.journal.spans import Entry, Kind, TimelineRow
from dora.status.lines import Lines

#: Number of lanes in a row of the timeline from which on they are added up.
MAX_LANES: Final = 64
#: Number of policy versions of an activity in a joined row: of a lane, and of all lanes.
LANE_VERSIONS: Final = 2
FOLDED_VERSIONS: Final = 8
#: Number of characters of a prompt, an answer or a reference.
MAX_CHARACTERS: Final = 4_000
#: Number of tokens of a sample whose log-probs are in an answer.
MAX_TOKENS: Final = 1_000
_KINDS: Final[tuple[Kind, ...]] = ("rank", "instance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest answers. `rows` and `size` are per kind of row, and `size` is in bytes."""

    rows: int = 2_000
    size: int = 4 * 2**20
    samples: int = 50


#: Of an answer to a page.
HTTP_BOUNDS: Final = Bounds()


class _Row(msgspec.Struct):
    kind: str


class _Sample(msgspec.Struct):
    """Line of trajectories.jsonl: what is shown of it (`dora.journal.deep.KeptTrajectory`)."""

    step: int
    group: int
    trajectory: int
    version: int
    reward: float | None
    truncated: str
    prompt: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    num_tokens: int = 0  #: before they were cut
    observed: list[tuple[int, int]] = []
    turn_rewards: list[float] = []
    calls_s: list[float] = []
    outcome: str = "trained"
    answer: str = ""
    trainer_logprobs: list[float] = []


class Records:
    """The past of one run. Its methods may be called from any thread."""

    def __init__(self, folder: RunFolder, *, bounds: Bounds = HTTP_BOUNDS) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._digest: dict[str, list[bytes]] = {}
        self._metrics = Lines(folder.metrics, kind_of=_kind_of_metric)
        self._timeline = Lines(
            folder.timeline, kind_of=_kind_of_lane, on_line=self._digest_line, on_reset=lambda: self._digest.clear()
        )
        self._samples = Lines(folder.trajectories, kind_of=_kind_of_sample)

    def steps(self, since: int = 0) -> bytes:
        """Return the rows of steps and evaluations from line `since` of metrics.jsonl on, evenly thinned."""
        with self._lock:
            self._metrics.refresh()
            found = [
                *self._thinned("step", since, self._bounds.rows * 3 // 4),
                *self._thinned("evaluation", since, self._bounds.rows // 4),
            ]
            return _answer([line for _, line in sorted(found)], self._metrics.count)

    def _thinned(self, kind: str, since: int, most: int) -> list[tuple[int, bytes]]:
        numbers = self._metrics.numbers(kind, since=_within(since, self._metrics))
        chosen = _spread(numbers, most)
        lines = self._metrics.read(kind, chosen)
        while (size := sum(map(len, lines))) > self._bounds.size and len(lines) > 1:
            chosen = _spread(chosen, len(lines) * self._bounds.size // (size + 1))
            lines = self._metrics.read(kind, chosen)
        return list(zip(chosen, lines, strict=False))

    def timeline(self, since: int = 0) -> bytes:
        """Return the rows of timeline.jsonl from line `since` on; neighbors are added up where there are too many."""
        with self._lock:
            self._timeline.refresh()
            rows: list[bytes] = []
            since = _within(since, self._timeline)
            for kind in _KINDS:
                if since:
                    rows += self._compact(self._timeline.read(kind, self._timeline.numbers(kind, since=since)))
                else:
                    known = self._digest.setdefault(kind, [])
                    known[:] = self._compact(known)
                    rows += known
            return _answer(rows, self._timeline.count)

    def _digest_line(self, kind: str, line: bytes) -> None:
        """Keep what an answer to `timeline(0)` needs, so that the file is not read again for it."""
        rows = self._digest.setdefault(kind, [])
        rows.append(line.rstrip(b"\n"))
        if len(rows) >= 2 * self._bounds.rows:
            rows[:] = self._compact(rows)

    def _compact(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        return compact(lines, most=self._bounds.rows, size=self._bounds.size)

    def samples(self, since: int = 0) -> bytes:
        """Return the latest samples from line `since` of trajectories.jsonl on, with long texts cut; newest last."""
        with self._lock:
            self._samples.refresh()
            numbers = self._samples.numbers("sample", since=_within(since, self._samples))[-self._bounds.samples :]
            lines = self._samples.read("sample", numbers)
            return _answer([shown for line in lines if (shown := _shown(line))], self._samples.count)


def _within(since: int, lines: Lines) -> int:
    """Return the first line to show: the whole file, if it was cut to fewer lines than the asker has seen."""
    return since if 0 <= since <= lines.count else 0


def _answer(rows: Sequence[bytes], count: int) -> bytes:
    return b'{"rows":[%b],"next":%d}' % (b",".join(rows), count)


def _spread(numbers: Sequence[int], most: int) -> Sequence[int]:
    """Return at most that many, evenly spread, with the first and the last one."""
    if len(numbers) <= most:
        return numbers
    if most < 2:
        return numbers[-1:]
    return [numbers[i * (len(numbers) - 1) // (most - 1)] for i in range(most)]


# -- lines ------------------------------------------------------------------------------------------------------------


def _kind_of_metric(line: bytes) -> str | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        kind = msgspec.json.decode(line, type=_Row).kind
        if kind == "step":
            return kind
        if kind in ("evaluation", "evaluation_skipped"):
            return "evaluation"
    return None


def _kind_of_lane(line: bytes) -> str | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _ROW.decode(line).kind
    return None


def _kind_of_sample(line: bytes) -> str | None:
    return "sample"


def _shown(line: bytes) -> bytes | None:
    """Return what is shown of a sample; None if the line is damaged."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        sample = msgspec.json.decode(line, type=_Sample)
        sample.num_tokens = len(sample.tokens)
        for name in ("prompt", "text", "answer"):
            setattr(sample, name, _cut(getattr(sample, name)))
        for name in ("tokens", "logprobs", "trainer_logprobs"):
            setattr(sample, name, getattr(sample, name)[:MAX_TOKENS])
        return msgspec.json.encode(sample)
    return None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


# -- rows of the timeline ---------------------------------------------------------------------------------------------

_ROW = msgspec.json.Decoder(TimelineRow)


def compact(lines: Sequence[bytes], *, most: int, size: int) -> Sequence[bytes]:
    """Return rows of one kind with the same time of each activity: at most `most`, of at most `size` bytes together
    unless it is one. Neighbors are joined to rows of about equal length; there is then room for a third more.
    """
    if not _is_too_much(lines, most=most, size=size):
        return lines
    most, size = most * 3 // 4, size * 3 // 4
    rows = [row for line in lines if (row := _decoded(line))]
    length = sum(row.s for row in rows) / max(1, most)
    while len(rows) > 1 and _is_too_much(lines, most=most, size=size):
        rows = _joined(rows, up_to=length)
        lines = [msgspec.json.encode(row) for row in rows]
        length *= max(1.25, sum(map(len, lines)) / size)
    return lines


def _is_too_much(lines: Sequence[bytes], *, most: int, size: int) -> bool:
    return len(lines) > most or sum(map(len, lines)) > size


def _joined(rows: Iterable[TimelineRow], *, up_to: float) -> list[TimelineRow]:
    """Join neighbors as long as the result is not longer than `up_to` seconds."""
    found: list[list[TimelineRow]] = []
    length = 0.0
    for row in rows:
        if found and length + row.s <= up_to:
            found[-1].append(row)
            length += row.s
        else:
            found.append([row])
            length = row.s
    return [_sum(part) for part in found]


def _sum(rows: Sequence[TimelineRow]) -> TimelineRow:
    """Return the row of all of these, one after the other."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return first
    lanes: dict[int, list[Entry]] = {}
    for row in rows:
        for lane, entries in row.lanes.items():
            lanes.setdefault(lane, []).extend(entries)
    folded = [entry for row in rows for entry in row.folded]
    num_lanes = max(len(lanes), *(row.num_lanes for row in rows))
    if folded or len(lanes) > MAX_LANES:
        folded += [entry for entries in lanes.values() for entry in entries]
        lanes = {}
    return TimelineRow(
        kind=first.kind,
        at=first.at,
        s=round(last.at + last.s - first.at, 6),
        num_lanes=num_lanes,
        lanes={lane: _added(entries, versions=LANE_VERSIONS) for lane, entries in sorted(lanes.items())},
        folded=_added(folded, versions=FOLDED_VERSIONS),
    )


def _added(entries: Iterable[Entry], *, versions: int) -> list[Entry]:
    """Add up. Of an activity with more than `versions` versions, the time of the lesser ones goes to the first."""
    spent: dict[str, dict[int | None, float]] = {}
    for activity, version, seconds in entries:
        of = spent.setdefault(activity, {})
        of[version] = of.get(version, 0.0) + seconds
    found: list[Entry] = []
    for activity, of in spent.items():
        if len(of) > versions:
            kept = sorted(of, key=lambda version: -of[version])[:versions]
            rest = sum(of.values()) - sum(of[version] for version in kept)
            of = {version: of[version] for version in kept}
            of[kept[0]] += rest
        found += [(activity, version, round(seconds, 6)) for version, seconds in of.items()]
    return found


def _decoded(line: bytes) -> TimelineRow | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _ROW.decode(line)
    return None
