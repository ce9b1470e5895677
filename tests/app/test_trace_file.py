"""The trace of a run folder, from spans and a journal written by hand."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dora.app.trace import write_trace
from dora.core import events as ev
from dora.core.ids import InstanceId, VersionId
from dora.journal.codec import FORMAT, Handled, Header
from dora.journal.run_folder import RunFolder
from dora.journal.spans import SpanLine, encode_line
from dora.journal.writer import JournalWriter
from tests.core.world import settings

SPANS: list[SpanLine] = [
    ("instance", 0, 0.25, 1.0, "decoding", 3),
    ("rank", 1, 0.0, 0.1, "start", None),
    ("instance", 0, 1.0, 1.1, "down", None),
    ("rank", 1, 0.1, 0.3, "waiting:generation", None),
]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run-1")
    found.root.mkdir()
    found.config.touch()
    found.spans.write_bytes(b"".join(map(encode_line, SPANS)))
    with JournalWriter(found.journal) as writer:
        writer.append(Header(FORMAT, "run-1", "2026-01-01T00:00:00Z", "0.1.0", settings()))
        writer.append(Handled(ev.VersionPublished(0.5, VersionId(4), 10, {}), []))
        writer.append(Handled(ev.InstanceLost(1.0, InstanceId(0), 1, {}, "it is gone"), []))
    return found


def events_of(folder: RunFolder) -> list[dict[str, Any]]:
    file = io.BytesIO()
    count = write_trace(folder.root, file)
    events = json.loads(file.getvalue())["traceEvents"]
    assert len(events) == count
    return list(events)


def test_a_span_is_an_event_on_the_track_of_its_lane(folder: RunFolder) -> None:
    events = events_of(folder)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [
        (tracks[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e.get("args")) for e in events if e["ph"] == "X"
    ]
    assert found == [
        ("instance 0", "decoding", 250_000, 750_000, {"version": 3}),
        ("rank 1", "start", 0, 100_000, None),
        ("instance 0", "down", 1_000_000, 100_000, None),
        ("rank 1", "waiting:generation", 100_000, 200_000, None),
    ]


def test_a_version_and_a_loss_are_marked(folder: RunFolder) -> None:
    marks = [(e["name"], e["ts"]) for e in events_of(folder) if e["ph"] == "i"]
    assert marks == [("version 4 published", 500_000), ("instance 0 lost", 1_000_000)]


def test_reward_and_staleness_are_counters_and_damaged_rows_are_left_out(folder: RunFolder) -> None:
    folder.metrics.write_text(
        '{"kind":"step","at":2.0,"reward_mean":0.5,"reward_all_mean":0.25,"staleness_mean":1.5}\n'
        "nonsense\n"
        '{"kind":"step","at":3.0,"reward_mean":null}\n'
        '{"kind":"evaluation","at":4.0,"name":"h","mean":0.75}\n'
    )
    counters = [(e["name"], e["ts"], e["args"]["value"]) for e in events_of(folder) if e["ph"] == "C"]
    assert counters == [
        ("reward trained", 2_000_000, 0.5),
        ("reward all", 2_000_000, 0.25),
        ("staleness", 2_000_000, 1.5),
        ("held-out: h", 4_000_000, 0.75),
    ]


def test_memory_does_not_grow_with_the_run(folder: RunFolder, tmp_path: Path) -> None:
    line = encode_line(("instance", 0, 1.0, 2.0, "decoding", 3))
    folder.spans.write_bytes(line * 100_000)
    with (tmp_path / "trace.json").open("wb") as file:
        tracemalloc.start()
        try:
            assert write_trace(folder.root, file) > 100_000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert file.closed
    assert (tmp_path / "trace.json").stat().st_size > 8_000_000
    assert peak < 1_000_000
