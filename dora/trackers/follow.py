"""Logs the rows of a run in one tracker: those that its record lacks, then new ones, until the run has ended.

metrics.jsonl is the queue: nothing else passes from a run to its trackers, and a process that starts late, or again,
begins where the record ends. Consumes: lines of metrics.jsonl. Produces: the record, and the position beside it. Waits
for: new lines (it looks every POLL_S). Unblocked by: time, and `ended`.
"""

from __future__ import annotations

import threading
import tomllib
from datetime import datetime
from pathlib import Path

import msgspec

from dora import files, foreign
from dora.errors import RunFailed
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.trackers.api import Mark, Position, TrackedRun, Tracker
from dora.trackers.kinds import open_tracker, title
from dora.trackers.rows import RowReader, parse

POLL_S = 1.0


def follow(folder: RunFolder, name: str, *, project: str, ended: threading.Event) -> int:
    """Log rows until `ended` is set and all are logged; return the number of rows in the record.

    RunFailed if the tracker raises.
    """
    home = folder.tracker(title(name))
    folder.require_plain(home, may_link=name == "wandb")
    run = TrackedRun(
        run_id=folder.run_id,
        project=project,
        folder=home,
        config=tomllib.loads(folder.config.read_text(encoding="utf-8")),
        began=datetime.fromisoformat(Journal(folder.journal).header.created).timestamp(),
    )
    try:
        home.mkdir(parents=True, exist_ok=True)
        tracker = open_tracker(name, run, read_position(home))
        return _Follower(folder, tracker, run).follow(ended)
    except Exception as err:  # a package, its service, its server, or a class of the user: anything may be raised
        raise RunFailed(f"{name}: {type(err).__name__}: {err}") from err


def read_position(home: Path) -> Position:
    """Return how far the record in a tracker's folder has come; the beginning if nothing is known."""
    try:
        return msgspec.json.decode(foreign.read(_position(home), max_bytes=files.MAX_ROW_BYTES), type=Position)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Position()


def num_rows(folder: RunFolder) -> int:
    """Return the number of rows of a run."""
    if not folder.metrics.is_file():
        return 0
    return sum(1 for _ in foreign.read_lines(folder.metrics, max_bytes=files.MAX_ROW_BYTES))


def _position(home: Path) -> Path:
    return home / "position.json"


class _Follower:
    """One pass over the rows of a run, as they are written."""

    def __init__(self, folder: RunFolder, tracker: Tracker, run: TrackedRun) -> None:
        self._reader = RowReader(folder.metrics)
        self._tracker = tracker
        self._run = run
        self._rows = 0  # read
        self._saved = 0

    def follow(self, ended: threading.Event) -> int:
        """Log until `ended` is set, and then what is left; return the number of rows."""
        is_last = False
        while not is_last:
            is_last = ended.is_set()  # asked first: rows from before the end are read below
            self._log_new()
            if not is_last:
                self._save(self._tracker.save())
                ended.wait(POLL_S)
        self._save(self._tracker.close())
        self._reader.close()
        return self._rows

    def _log_new(self) -> None:
        for number, line in self._reader.new():
            self._rows = number + 1
            if number < self._tracker.rows:
                continue
            if (row := parse(number, line, began=self._run.began)) is not None:
                self._tracker.log(row)

    def _save(self, mark: Mark | None) -> None:
        if mark is not None and self._rows > self._saved:
            files.replace(_position(self._run.folder), msgspec.json.encode(Position(self._rows, mark)))
            self._saved = self._rows
