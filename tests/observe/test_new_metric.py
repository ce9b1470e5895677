"""A new metric touches one file: it is declared beside its type and computed there; every view derives from that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGES = [
    (
        "    episodes: EpisodeStats | None = None",
        '    response_len_min: Annotated[float | None, Figure("tokens", "of the shortest answer", "response_len_min")]'
        " = None\n    episodes: EpisodeStats | None = None",
    ),
    (
        '        "response_len_max": max(lengths),',
        '        "response_len_max": max(lengths),\n        "response_len_min": min(lengths),',
    ),
]
SHOWN = """
from pathlib import Path
import msgspec
import dora
from dora.observe.snapshot import decode, encode
from dora.status.metrics import render
from dora.trackers.rows import parse
from tests.core.world import settings
from tests.observe.test_resumed import Watched
from tests.static.metrics import render as documented

world = Watched(settings(group_size=4), seed=3)
world.begin()
world.run()
row = world.rows[-1]
snapshot = world.observed.snapshot()
assert row["response_len_min"] > 0, "metrics.jsonl"
assert decode(encode(snapshot)).steps[-1].response_len_min == row["response_len_min"], "/status and the page's data"
assert f"dora_response_len_min {row['response_len_min']!r}\\n" in render(snapshot), "/metrics"
assert "| `response_len_min` | tokens | of the shortest answer | `dora_response_len_min`" in documented(), "METRICS.md"
tracked = parse(0, msgspec.json.encode(row), began=0.0)
assert tracked.scalars["response_len_min"] == row["response_len_min"], "trackers"
print(dora.__file__)
"""


def test_a_new_metric_is_shown_everywhere_by_a_change_of_one_file(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dora", tmp_path / "dora", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "dora" / "observe" / "steps.py"
    source = changed.read_text()
    for before, after in CHANGES:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    changed.write_text(source)
    for name in ("tests", "launch", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
