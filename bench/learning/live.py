"""Live runs: `dora run` with each strategy, one after the other, read from their run folders; resumable."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result import commit, hardware

from dora.errors import ConfigError
from learning import cells
from learning.cells import LiveCell, LiveResult

LIMIT_S = 900.0  # of one run
STARTING = ("start", "waiting:start")  # activities of a rank before training begins


def live(*, seeds: int) -> bool:
    """Run what is missing; return whether every cell has a result."""
    earlier = cells.read(cells.LIVE, LiveResult)
    profile = cells.with_objective(cells.LIVE_CONFIG)
    if any(result.profile != profile for result in earlier):
        raise ConfigError(f"{cells.LIVE}: made with other settings than {cells.LIVE_CONFIG}; move the file away")
    known = {result.cell for result in earlier}
    ended_well = True
    for cell in [cell for cell in cells.live_cells(seeds) if cell not in known]:
        rows = _run(cell)
        if rows is None:
            ended_well = False
            continue
        result = from_rows(cell, rows, profile=profile)
        cells.append(cells.LIVE, result)
        seconds, reward = result.published[-1], result.heldout[-1][1]
        name = f"{cell.strategy}, K = {cell.staleness}, seed {cell.seed}"
        print(f"{name}: {seconds:.0f} s, held-out reward {reward:.3f}", flush=True)
    return ended_well


def _run(cell: LiveCell) -> list[dict[str, Any]] | None:
    """Return the rows of metrics.jsonl; None if the run failed."""
    with tempfile.TemporaryDirectory() as parent:
        overrides = [f"run.folder={parent}", "status.port=0", *cell.overrides]
        command = [sys.executable, "-m", "dora", "run", str(cells.LIVE_CONFIG)]
        command += [part for override in overrides for part in ("--set", override)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"{cell}: not done after {LIMIT_S:.0f} s", flush=True)
            return None
        if done.returncode:
            print(f"{cell}: exit code {done.returncode}: {done.stderr[-500:]}", flush=True)
            return None
        [folder] = [path for path in Path(parent).iterdir() if (path / "metrics.jsonl").exists()]
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def from_rows(cell: LiveCell, rows: Sequence[dict[str, Any]], *, profile: str) -> LiveResult:
    """Return what the rows of a run's metrics.jsonl say. Step 0 begins with the run, but seconds count from when the
    rank was ready: what it has done and waited for since then ends with that step."""
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])
    scores = {row["version"]: row["mean"] for row in rows if row["kind"] == "evaluation"}
    since = sum(s for activity, s in steps[0]["rank_s"].items() if activity not in STARTING)  # of one rank
    began = steps[0]["at"] - since
    return LiveResult(
        cell,
        heldout=sorted(scores.items()),
        published=[0.0, *(round(row["at"] - began, 2) for row in steps)],
        staleness=[round(row["staleness_mean"], 3) for row in steps],
        profile=profile,
        commit=commit(),
        machine=hardware(),
    )
