"""TensorBoard: one event file per run, written with the `tensorboard` package alone.

Invariant: the file is a function of the rows. So after a crash, everything after the last saved byte is cut off and
written again.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import tomli_w
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from dora.trackers.api import Mark, Position, TrackedRow, TrackedRun


class TensorBoardTracker:
    """The event file in the tracker's folder; `tensorboard --logdir` shows it."""

    def __init__(self, run: TrackedRun, position: Position) -> None:
        path = run.folder / f"events.out.tfevents.{int(run.began)}.{run.run_id}"
        size = position.mark.get("bytes", 0)
        is_whole = path.is_file() and path.stat().st_size >= size > 0
        self.rows = position.rows if is_whole else 0
        self._file = _open_at(path, size if is_whole else 0)
        self._writer = RecordWriter(self._file)
        if not is_whole:
            self._write(Event(wall_time=run.began, file_version="brain.Event:2"))
            self._write(Event(wall_time=run.began, summary=Summary(value=[_text("config", tomli_w.dumps(run.config))])))

    def log(self, row: TrackedRow) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.scalars.items()]
        self._write(Event(wall_time=row.at, step=row.value, summary=Summary(value=values)))

    def save(self) -> Mark:
        self._file.flush()
        return {"bytes": self._file.tell()}

    def close(self) -> Mark:
        mark = self.save()
        self._file.close()
        return mark

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())


def _open_at(path: Path, size: int) -> io.BufferedRandom:
    """Open a file for writing at its end, after cutting it off at `size`."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _text(tag: str, toml: str) -> Summary.Value:
    """Return a text as the text plugin reads it, shown as TOML."""
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[f"```toml\n{toml}```".encode()])
    return Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
