"""Weights & Biases, online or offline (WANDB_MODE), through the `wandb` package and its service.

Invariant: W&B's own step is the number of the row. Online, the server's last step is therefore the position. Offline,
each process writes its own folder. A folder counts when it has been read back and is complete; the others are removed,
and their rows are written again.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from dora.trackers.api import Mark, Position, TrackedRow, TrackedRun

#: The format of a .wandb file: a header of 7 bytes, then LevelDB's log format.
_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768
_CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, type
_FULL, _LAST = 1, 4


class WandbTracker:
    """A W&B run with the id of the DORA run."""

    def __init__(self, run: TrackedRun, position: Position) -> None:
        self._complete: list[str] = position.mark.get("offline", [])
        for folder in run.folder.glob("wandb/offline-run-*"):
            if folder.name not in self._complete:
                shutil.rmtree(folder)
        settings = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, save_code=False, quiet=True)
        self._run = wandb.init(
            project=run.project,
            id=run.run_id,
            name=run.run_id,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step", step_sync=False)  # every row has its own axis
        self._run.define_metric("evaluation/*", step_metric="version", step_sync=False)
        self.rows = position.rows if self._run.offline else self._run.starting_step
        self._num_logged = 0

    def log(self, row: TrackedRow) -> None:
        self._run.log({row.axis: row.value, **row.scalars}, step=row.number)
        self._num_logged += 1

    def save(self) -> None:
        """The service does not tell what it has stored."""

    def close(self) -> Mark:
        folder = Path(self._run.dir).parent
        self._run.finish()
        wandb.teardown()  # waits for the service; offline, `finish` returns before its file is written
        if not self._run.offline:
            return {"offline": self._complete}
        [file] = folder.glob("*.wandb")
        found = sum(record.WhichOneof("record_type") == "history" for record in read_records(file))
        if found != self._num_logged:
            raise OSError(f"{file} has {found} of {self._num_logged} rows")
        return {"offline": [*self._complete, folder.name]}


def read_records(path: Path) -> list[Record]:
    """Read a .wandb file, up to the first record that is torn."""
    data = path.read_bytes()
    records, parts = [], b""
    at = _FILE_HEADER_BYTES
    while at + _CHUNK_HEADER.size <= len(data):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _CHUNK_HEADER.size:  # the rest of a block is too short for a chunk
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, at)
        at += _CHUNK_HEADER.size
        if not kind or at + length > len(data):
            break
        parts += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            records.append(Record.FromString(parts))
            parts = b""
    return records
