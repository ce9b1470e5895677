"""Rows of metrics.jsonl as scalars, and reading them while the run writes them.

Invariant: the name of a scalar is the path of its value in the row, with `/` between keys; a name that would have no
group, as trackers call what is before the first `/`, gets that of GROUPS. In rows of an evaluation the name begins with
`evaluation/<name of the set>`. Text and null are left out. A list of names becomes a scalar 1 for each name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec

from dora import files, foreign
from dora.trackers.api import TrackedRow

#: Keys that are not values.
_HEAD = ("kind", "step", "version", "name")
#: The values of a step that have no keys of their own, by group.
GROUPS: Final = {
    "reward": ("reward_mean", "reward_all_mean", "all_right", "all_wrong", "all_same", "mixed", "zero_variance_groups"),
    "response": ("response_len_mean", "response_len_p90", "response_len_max"),
    "rollout": (
        "tokens_per_s",
        "rollout_idle_share",
        "num_groups",
        "num_tokens",
        "live_versions",
        "window",
        "rows_passed",
        "accept_length",
    ),
    "staleness": ("staleness_mean",),
    "time": ("at", "duration_s", "idle_s"),
    "checks": (
        *("version_conflicts", "scheduling_aborts", "staleness_violations"),
        *("late_completions", "migrations", "recovered", "trainer_losses"),
    ),
    "controller": ("lag_p99_s", "controller_cpu_s"),
}
_GROUP_OF: Final = {name: group for group, names in GROUPS.items() for name in names}


class RowReader:
    """The lines of a file that may grow, or appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._number = 0  # number of the next line

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and text of every complete line that was not yielded before, once it is on the disk: the number
        of a line that a power failure takes would be that of another line afterwards."""
        if self._file is None and self._path.is_file():
            self._file = foreign.open_regular(self._path)
        if self._file is None:
            return
        end = os.fstat(self._file.fileno()).st_size
        if end > self._file.tell():
            files.sync(self._path, self._file.fileno())
        while (start := self._file.tell()) < end:
            line = self._file.readline(files.MAX_ROW_BYTES + 1)
            if len(line) > files.MAX_ROW_BYTES:
                raise foreign.ForeignFileError(
                    f"{self._path}, line {self._number + 1}: has more than {files.MAX_ROW_BYTES:,} bytes"
                )
            if not line.endswith(b"\n") or start + len(line) > end:
                self._file.seek(start)
                return
            self._number += 1
            yield self._number - 1, line

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def parse(number: int, line: bytes, *, began: float) -> TrackedRow | None:
    """Return a line as a row; None if the line is torn or has nothing to log. `began`: Unix time of the run's start."""
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    axis: Literal["step", "version"] = "step" if row.get("kind") == "step" else "version"
    value, at = row.get(axis), row.get("at")
    if not isinstance(value, int) or not isinstance(at, int | float):
        return None
    if row["kind"] == "evaluation_skipped":
        scalars = {"evaluation/skipped": 1.0}
    else:
        prefix = f"evaluation/{row.get('name')}/" if axis == "version" else ""
        found = _flat({k: v for k, v in row.items() if k not in _HEAD}, prefix)
        scalars = {_grouped(name): scalar for name, scalar in found}
    return TrackedRow(number, axis, value, began + at, scalars) if scalars else None


def _grouped(name: str) -> str:
    if name.startswith("trainer/lag="):
        return name.replace("trainer", "by_staleness", 1)  # what it measures over all tokens stays in `trainer`
    return f"{_GROUP_OF[name]}/{name}" if name in _GROUP_OF else name


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, list):
            value = dict.fromkeys(value, 1) if all(isinstance(v, str) for v in value) else dict(enumerate(value))
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)
