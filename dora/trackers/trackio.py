"""trackio: its local database, which `trackio show` displays and `trackio sync` copies to a Space.

Invariant: a row is stored in one transaction under an id made of run and row, and the database ignores an id that it
has. `trackio.log` gives no such guarantee: it queues rows under random ids, and only warns when it loses some.
"""

from __future__ import annotations

from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from dora.trackers.api import Mark, Position, TrackedRow, TrackedRun


class TrackioTracker:
    """A run in trackio's database (TRACKIO_DIR)."""

    def __init__(self, run: TrackedRun, position: Position) -> None:
        self._run = run
        self._config = run.config if position.rows == 0 else None
        self.rows = position.rows

    def log(self, row: TrackedRow) -> None:
        SQLiteStorage.bulk_log(
            self._run.project,
            self._run.run_id,
            [row.scalars],
            steps=[row.value],
            timestamps=[datetime.fromtimestamp(row.at, UTC).isoformat()],
            config=self._config,
            log_ids=[f"{self._run.run_id}-{row.number}"],
            run_id=self._run.run_id,
        )
        self._config = None

    def save(self) -> Mark:
        return {}

    def close(self) -> Mark:
        return {}
