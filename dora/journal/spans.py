"""The lines of spans.jsonl and timeline.jsonl, for programs that read a run folder.

A span is `[kind, lane, start, end, activity, version]`: kind `rank` or `instance`, times in seconds since the run
began, version null without one. Lines of one lane are in order, those of different lanes are not.

A row of the timeline is an object: `kind` as above, `at` and `s` (start and length of its bucket of time), and
`num_lanes`. `lanes` has the time of each lane as `[activity, version, seconds]`, in the order in which the activities
began. A row with more than 64 lanes has `folded` instead of `lanes`: lane-seconds, added up over all lanes. A row of
instances also has `moved` and `published`. `moved` is the number of answers that came from another instance, by lane;
lane -1 stands for all lanes. `published` has each version that became available, with the time.

With adapters, an instance decodes answers of several versions at once. Its spans have the newest of these versions. A
row says so (`shared`) and divides the time of `decoding` and `prefill` among them, in proportion to their requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from dora import files, foreign

Kind = Literal["rank", "instance"]
#: Kind, lane, start, end, activity, version.
SpanLine = tuple[Kind, int, float, float, str, int | None]
#: Activity, version, seconds.
Entry = tuple[str, int | None, float]


class TimelineRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the lanes of one kind did in one bucket of time."""

    kind: Kind
    at: float
    s: float
    num_lanes: int
    lanes: dict[int, list[Entry]] = msgspec.field(default_factory=dict)
    folded: list[Entry] = msgspec.field(default_factory=list)
    moved: dict[int, int] = msgspec.field(default_factory=dict)
    published: list[tuple[int, float]] = msgspec.field(default_factory=list)
    shared: bool = False


#: Maximum number of lanes in a row. With more lanes, it has lane-seconds by activity and version instead.
MAX_LANES: Final = 64
#: The lane of `moved` that stands for all lanes.
ALL_LANES: Final = -1
#: Times are rounded to a microsecond.
ROUNDING_S: Final = 2e-6

Line = TypeVar("Line")
_SPAN = msgspec.json.Decoder(SpanLine)
_ROW = msgspec.json.Decoder(TimelineRow)


def encode_line(line: SpanLine | TimelineRow) -> bytes:
    """Return a line of either file."""
    return msgspec.json.encode(line) + b"\n"


def ends_by(line: bytes, at: float) -> bool:
    """Whether a line of either file is undamaged, and its span or bucket ends at `at` or before."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if line.startswith(b"["):
            end: float = _SPAN.decode(line)[3]
            return end <= at + ROUNDING_S
        row = _ROW.decode(line)
        return row.at + row.s <= at + ROUNDING_S
    return False


def read_spans(path: Path) -> Iterator[SpanLine]:
    """Yield the spans of a run; damaged lines are left out."""
    return _read(path, _SPAN)


def read_timeline(path: Path) -> Iterator[TimelineRow]:
    """Yield the rows of a timeline; damaged lines are left out."""
    return _read(path, _ROW)


def _read(path: Path, decoder: msgspec.json.Decoder[Line]) -> Iterator[Line]:
    if not path.is_file():
        return
    for line in foreign.read_lines(path, max_bytes=files.MAX_ROW_BYTES):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield decoder.decode(line)
