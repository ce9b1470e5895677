"""The job with a tool, live: what it learns under each strategy, and that it learns nothing from another table.

    PYTHONPATH=. python bench/sweeps/tools.py [--render] [NAME ...]

Runs the cells that bench/results/tools.jsonl lacks (all, or those of the given names), one after the other, audits each
with `--deep`, and appends it. `--render` only prints the table of docs/AGENTS.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from result import commit, hardware, today  # noqa: E402

JOB = ROOT / "launch" / "configs" / "tools-cpu.toml"
RESULTS = ROOT / "bench" / "results" / "tools.jsonl"
LIMIT_S = 1200.0

#: Overrides by cell; each has seeds of its own.
CELLS: dict[str, tuple[str, ...]] = {
    "dora": (),
    "sync": ("rollout.strategy=sync",),
    "periodic": ("rollout.strategy=periodic",),
    "partial": ("rollout.strategy=partial",),
    "shuffled": ("environment.options={shuffled=true}", "rollout.filter_zero_variance=false"),
}
SEEDS = {"dora": (0, 1, 2)}


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if "--render" in sys.argv:
        print("\n".join(table(known)))
        return
    done = {(row["cell"], row["seed"]) for row in known}
    for cell in names or CELLS:
        for seed in SEEDS.get(cell, (0,)):
            if (cell, seed) not in done:
                row = run(cell, seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(*table([row])[2:], sep="\n", flush=True)


def run(cell: str, seed: int) -> dict[str, Any]:
    """Run a cell and audit it."""
    with tempfile.TemporaryDirectory() as parent:
        overrides = [f"run.folder={parent}", f"run.seed={seed}", "status.port=0", *CELLS[cell]]
        words = [word for override in overrides for word in ("--set", override)]
        began = time.monotonic()
        done = dora("run", str(JOB), *words)
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{cell}, seed {seed}: {done.stderr[-500:]}")
        [folder] = Path(parent).iterdir()
        return {"cell": cell, "seed": seed, "seconds": round(seconds, 1), **figures(folder)}


def figures(folder: Path) -> dict[str, Any]:
    """Return what a run folder says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    scores = {row["version"]: row["mean"] for row in rows if row["kind"] == "evaluation"}
    audit = dora("audit", str(folder))
    by_design = re.search(
        r"C1 +broken by design: (.+)", audit.stdout
    )  # then no version could compute the answers again
    deep = None if by_design else dora("audit", str(folder), "--deep").returncode
    return {
        "steps": len(steps),
        "heldout": [scores[version] for version in sorted(scores)],
        "live_versions": max(row["live_versions"] for row in steps),
        "staleness": round(sum(row["staleness_mean"] for row in steps) / len(steps), 3),
        "audit": [audit.returncode, deep],
        "mixed": by_design[1] if by_design else "",
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
        "date": today(),
        "machine": hardware(),
    }


def dora(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dora", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["| job | seed | held-out | versions alive | staleness | s | audit |", "|---|---|---|---|---|---|---|"]
    return head + [_line(row) for row in rows]


def _line(row: dict[str, Any]) -> str:
    scores = f"{row['heldout'][0]:.3f} → {row['heldout'][-1]:.3f}"
    verdict = "; ".join(("FAILED" if any(row["audit"]) else "clean", *filter(None, [row["mixed"]])))
    return (
        f"| {row['cell']} | {row['seed']} | {scores} | {row['live_versions']} | {row['staleness']:.2f} "
        f"| {row['seconds']:.0f} | {verdict} |"
    )


if __name__ == "__main__":
    main()
