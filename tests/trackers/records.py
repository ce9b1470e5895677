"""Run folders with rows, and readers of what trackers made of them."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from dora.config.load import dump
from dora.config.schema import Config
from dora.journal.codec import FORMAT, Header
from dora.journal.run_folder import RunFolder
from dora.journal.writer import JournalWriter
from dora.trackers.follow import follow
from dora.trackers.rows import GROUPS
from dora.trackers.wandb import read_records
from tests.core.world import settings

#: axis, value on it, scalars.
Logged = tuple[str, int, dict[str, float]]


def make_folder(parent: Path, rows: Iterable[Mapping[str, Any]]) -> RunFolder:
    folder = RunFolder.create(parent, name="job")
    folder.config.write_text(dump(Config()))
    with JournalWriter(folder.journal) as journal:
        journal.append(Header(FORMAT, folder.run_id, "2026-01-01T00:00:00+00:00", "0.1.0", settings()))
    append(folder, rows)
    return folder


def append(folder: RunFolder, rows: Iterable[Mapping[str, Any]]) -> None:
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def track(folder: RunFolder, name: str) -> int:
    """What `dora track` does."""
    ended = threading.Event()
    ended.set()
    return follow(folder, name, project="dora", ended=ended)


def expected(folder: RunFolder) -> list[Logged]:
    """What a record must have, computed from the file alone, and written in another way than the trackers do."""
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    rows = [_expected(json.loads(line)) for line in lines if line.endswith(b"\n")]
    return [row for row in rows if row is not None]


def _expected(row: dict[str, Any]) -> Logged:
    axis = "step" if row["kind"] == "step" else "version"
    if row["kind"] == "evaluation_skipped":
        return axis, row["version"], {"evaluation/skipped": 1.0}
    prefix = f"evaluation/{row.pop('name')}/" if axis == "version" else ""
    value = row.pop(axis)
    del row["kind"]
    found: dict[str, float] = {}
    left = [(prefix + key, value) for key, value in row.items()]
    while left:
        name, value_ = left.pop()
        if isinstance(value_, list):
            left += [(f"{name}/{v}", 1) if isinstance(v, str) else (f"{name}/{i}", v) for i, v in enumerate(value_)]
        elif isinstance(value_, dict):
            left += [(f"{name}/{key}", v) for key, v in value_.items()]
        elif value_ is not None and not isinstance(value_, str):
            found[name] = float(value_)
    return axis, value, {_in_its_group(name): value for name, value in found.items()}


def _in_its_group(name: str) -> str:
    groups = [group for group, names in GROUPS.items() if name in names]
    return "/".join([*groups, re.sub(r"^trainer/(?=lag=)", "by_staleness/", name)])


# -- readers ----------------------------------------------------------------------------------------------------------


def tensorboard_events(home: Path) -> list[Event]:
    """By TensorBoard's own reader, which checks every checksum."""
    [path] = home.glob("events.out.tfevents.*")
    return [Event.FromString(data) for data in RawEventFileLoader(str(path)).Load()]


def from_tensorboard(home: Path, rows: Sequence[Logged]) -> list[Logged]:
    """The rows in the event file; the file does not name the axis, so that of `rows` is used."""
    version, config, *events = tensorboard_events(home)
    assert version.file_version == "brain.Event:2"
    assert b"micro_batch_tokens" in config.summary.value[0].tensor.string_val[0]
    return [
        (row[0], event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event, row in zip(events, rows, strict=True)
    ]


def in_float32(rows: Sequence[Logged]) -> list[Logged]:
    """As TensorBoard stores scalars."""
    return [(axis, value, {k: float(np.float32(v)) for k, v in scalars.items()}) for axis, value, scalars in rows]


def from_wandb(home: Path) -> list[Logged]:
    """The rows in all offline folders, oldest first; W&B numbers them from 0."""
    rows: list[Logged] = []
    for path in sorted(home.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in read_records(path):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                assert int(items.pop("_step")) == len(rows)
                values = {key: float(json.loads(value)) for key, value in items.items() if not key.startswith("_")}
                axis = "step" if "step" in values else "version"
                rows.append((axis, int(values.pop(axis)), values))
    return rows


def from_trackio(database: Path, run_id: str) -> Iterator[tuple[int, dict[str, float]]]:
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (run_id,))
        for step, metrics in found:
            yield step, json.loads(metrics)
