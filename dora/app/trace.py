"""The records of a run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is the JSON of trace events (Google, "Trace Event Format", 2016): a process for ranks and one for instances
with a track each, complete events with the policy version as an argument, counters of reward and staleness, and marks
for versions published and instances lost. Invariant: lines are turned into events of the trace one at a time, and only
a few names are kept, so memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from dora import files, foreign
from dora.core import events as ev
from dora.errors import ConfigError
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.spans import Kind, read_spans

_PROCESS: Final[dict[Kind, int]] = {"rank": 1, "instance": 2}
_RUN: Final = 3
#: Thirty years.
_LATEST_S: Final = 1e9
#: Key of a row of metrics.jsonl -> name of its counter.
_COUNTERS: Final = {"reward_mean": "reward trained", "reward_all_mean": "reward all", "staleness_mean": "staleness"}


class _Step(msgspec.Struct):
    kind: str
    at: float = 0.0
    name: str = ""
    mean: float | None = None
    reward_mean: float | None = None
    reward_all_mean: float | None = None
    staleness_mean: float | None = None


def write_trace(path: Path, file: IO[bytes]) -> int:
    """Write the trace of a run folder; return the number of its events. ConfigError if the folder has no spans."""
    folder = RunFolder.open(path)
    if not folder.spans.is_file():
        raise ConfigError(f"{path}: has no {folder.spans.name}: this run has no record of what its servers did")
    count = 0
    for event in _events(folder):
        file.write(b",\n" if count else b'{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(msgspec.json.encode(event))
        count += 1
    file.write(b"\n]}\n")
    return count


def _events(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for number, name in ((1, "trainer ranks"), (2, "instances"), (_RUN, folder.run_id)):
        yield _name("process_name", name, process=number)
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number % _RUN}}
    yield from _spans(folder)
    yield from _counters(folder.metrics)
    yield from _marks(folder.journal)


def _name(kind: str, name: str, *, process: int, track: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _spans(folder: RunFolder) -> Iterator[dict[str, Any]]:
    named: set[tuple[Kind, int]] = set()
    for kind, lane, start, end, activity, version in read_spans(folder.spans):
        if (kind, lane) not in named:
            named.add((kind, lane))
            yield _name("thread_name", f"{kind} {lane}", process=_PROCESS[kind], track=lane)
        begin = _us(start)
        yield {
            **{"ph": "X", "name": activity, "cat": kind, "pid": _PROCESS[kind], "tid": lane},
            **{"ts": begin, "dur": _us(end) - begin},
            **({"args": {"version": version}} if version is not None else {}),
        }


def _counters(metrics: Path) -> Iterator[dict[str, Any]]:
    if not metrics.is_file():
        return
    for line in foreign.read_lines(metrics, max_bytes=files.MAX_ROW_BYTES):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            row = msgspec.json.decode(line, type=_Step)
            if row.kind == "step":
                for key, name in _COUNTERS.items():
                    yield from _counter(name, row.at, getattr(row, key))
            elif row.kind == "evaluation":
                yield from _counter(f"held-out: {row.name}", row.at, row.mean)


def _counter(name: str, at: float, value: float | None) -> Iterator[dict[str, Any]]:
    if value is not None:
        yield {"ph": "C", "name": name, "pid": _RUN, "ts": _us(at), "args": {"value": value}}


def _marks(journal: Path) -> Iterator[dict[str, Any]]:
    for event, _ in Journal(journal):
        if isinstance(event, ev.VersionPublished):
            mark = f"version {event.version} published"
        elif isinstance(event, ev.InstanceLost):
            mark = f"instance {event.instance} lost"
        else:
            continue
        yield {"ph": "i", "s": "g", "name": mark, "pid": _RUN, "tid": 0, "ts": _us(event.at)}


def _us(seconds: float) -> int:
    """Return a time in whole microseconds. Begin and end of spans are rounded in this way, so that neighbors neither
    overlap nor leave gaps.

    Times that no run can have are clamped.
    """
    return round(min(_LATEST_S, max(0.0, seconds)) * 1e6)
