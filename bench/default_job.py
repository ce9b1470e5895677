"""The default job as a newcomer sees it: how long it takes, what it learns, how many versions serve at once.

Run: python bench/default_job.py [--full]. `dora run` without a file, with one seed; three in the full profile. The
figures are read from the run's folder; from the first admission to the last event of its journal:
  versions    share of the time in which servers hold two or more versions; one that is being pushed to holds none.
  rises until share of the steps at which the held-out reward was last higher than ever before.
Ceiling: 120 s, the time that the README promises; 60 % of the time; three quarters of the steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from result import Report, Row, parser

from dora.core.commands import AdmitGroup, PushWeights
from dora.core.events import InstanceLost, WeightPushFinished
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder

SEEDS = {False: (0,), True: (0, 1, 2)}
TIMEOUT_S = 600.0


def measure(what: str, *, home: Path, settings: Sequence[str]) -> Iterator[Row]:
    """Run the job with these settings, and audit it; `what` begins each row."""
    began = time.monotonic()
    chosen = (f"run.folder={home}", "status.port=0", *settings)
    run_dora("run", *(word for setting in chosen for word in ("--set", setting)))
    seconds = time.monotonic() - began
    [root] = home.iterdir()
    folder = RunFolder.open(root)
    run_dora("audit", str(root))
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    scores = {row["version"]: row["mean"] for row in rows if row["kind"] == "evaluation"}
    curve = " ".join(f"{scores[version]:.3f}" for version in sorted(scores))
    skipped = sum(row["kind"] == "evaluation_skipped" for row in rows)
    start_s, share, three = versions_serving(folder)
    staleness = sum(step["staleness_mean"] for step in steps) / len(steps)
    yield Row(f"{what}: time", round(seconds, 1), "s", f"start {start_s:.0f} s", bar="figure <= 120")
    yield Row(f"{what}: two or more versions serve", round(share, 3), "of the time", bar="figure >= 0.6",
              against=f"three or more: {three:.2f}; staleness {staleness:.2f}")  # fmt: skip
    yield Row(f"{what}: held-out reward", round(scores[max(scores)], 3), "", bar="figure >= 0.85",
              against=f"versions {', '.join(map(str, sorted(scores)))}: {curve}; {skipped} skipped")  # fmt: skip
    yield Row(f"{what}: held-out reward rises until", round(last_rise(scores) / len(steps), 3), "of the steps",
              bar="figure >= 0.75")  # fmt: skip


def versions_serving(folder: RunFolder) -> tuple[float, float, float]:
    """Return the seconds until the first admission, and the shares of the time after it with two and three versions."""
    held: dict[int, int] = {}
    admitted_at, last, seconds = None, 0.0, [0.0, 0.0, 0.0]
    for event, commands in Journal(folder.journal):
        if admitted_at is not None:
            for least in range(3):
                seconds[least] += (event.at - last) * (len(set(held.values())) > least or not least)
        last = event.at
        if isinstance(event, WeightPushFinished):
            held[event.instance] = event.version
        elif isinstance(event, InstanceLost):
            held.pop(event.instance, None)
        for command in commands:
            if isinstance(command, PushWeights):
                held.pop(command.instance, None)
            elif isinstance(command, AdmitGroup) and admitted_at is None:
                admitted_at = event.at
    assert admitted_at is not None, "nothing was admitted"
    return admitted_at, seconds[1] / seconds[0], seconds[2] / seconds[0]


def last_rise(scores: dict[int, float]) -> int:
    """Return the last version with a higher score than all before it."""
    best, found = -1.0, 0
    for version in sorted(scores):
        if scores[version] > best:
            best, found = scores[version], version
    return found


def run_dora(*arguments: str) -> None:
    """Run a command to its end."""
    command = [sys.executable, "-m", "dora", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr}")


def main() -> None:
    options = parser(__doc__).parse_args()
    seeds = SEEDS[options.full]
    report = Report(__doc__, full=options.full, sizes=f"the defaults, {len(seeds)} seeds")
    for seed in seeds:
        with tempfile.TemporaryDirectory() as home:
            for row in measure(f"seed {seed}", home=Path(home), settings=(f"run.seed={seed}",)):
                report.add(row)
    report.print()


if __name__ == "__main__":
    main()
