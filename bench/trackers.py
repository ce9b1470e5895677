"""What trackers cost a run: paced runs with bad and with real trackers, each between two runs without one.

Run: python bench/trackers.py [--full] [--only NAME...]. `dora pace` is the real controller with simulated servers and a
simulated trainer. The bad trackers are those of tests/trackers/bad.py, which are well for two rows: one raises, one
hangs, one is stopped (SIGSTOP), one may write no more to its file (RLIMIT_FSIZE), one holds the interpreter for ever.
The real ones are wandb (offline), TensorBoard and trackio in one run. All runs have the same seed; a case has as many
runs as the profile says, and the median over all their steps is compared with the same over the runs beside them. The
run after a case is also the one before the next case.

The figures are:
  step        median step time, in seconds of the workload, against that without a tracker.
  end         real seconds from the last row of metrics.jsonl to the end of the process; 10 s is
              the 10 s for which a run waits at most.
  completed   rows of the record after `dora track`, against those of metrics.jsonl.
Ceiling: the runs without a tracker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from result import FOLDER, Report, parser

from dora.journal.run_folder import RunFolder
from dora.trackers.follow import num_rows, read_position
from dora.trackers.kinds import title

SEED = 1
SCALE = 4.0
STEPS = 16
TIMEOUT_S = 300.0
#: Rows at the beginning in which servers and trackers start.
WARM_UP = 2
#: Runs of each case in the short and in the full profile.
RUNS = (1, 4)
_BAD = FOLDER.parent / "tests" / "trackers" / "bad.py"
CASES = {
    "raises": [f"{_BAD}:Raising"],
    "hangs": [f"{_BAD}:Hanging"],
    "stopped": [f"{_BAD}:Stopped"],
    "full": [f"{_BAD}:FullDisk"],
    "deaf": [f"{_BAD}:Deaf"],
    "real": ["wandb", "tensorboard", "trackio"],
}

WORKLOAD = f"""
[job]
max_staleness = 1
steps = {STEPS}
groups_per_step = 16
group_size = 4
[lengths]
regime = "A"
scale = 0.2
cap = 300
prompt_tokens = 50
[fleet]
devices = 6
rollout_devices = 4
push_fixed_s = 0.5
[fleet.server]
slots = 16
kv_tokens = 20_000
prefill_s_per_token = 7e-5
decode = {{ base_s = 0.02, per_request_s = 4e-5, per_token_s = 5e-8 }}
[train]
tokens_s_per_device = 3000.0
micro_batch_tokens = 2048
"""


class Paced(NamedTuple):
    """One run."""

    steps_s: list[float]  # of the workload
    end_s: float
    logged: float  # smallest share of rows in a record, after `dora track`; 1 without trackers


def pace(trackers: list[str], *, home: Path) -> Paced:
    """A whole run, and its completion."""
    home.mkdir()
    path = home / "workload.toml"
    path.write_text(WORKLOAD)
    tracks = [word for name in trackers for word in ("--track", name)]
    options = ("--seed", str(SEED), "--time-scale", str(SCALE), "--folder", str(home))
    _dora("pace", str(path), *options, *tracks, trackio=home)
    ended_at = time.time()
    [journal] = home.glob("*/journal.msgpack")
    folder = RunFolder.open(journal.parent)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    end_s = ended_at - folder.metrics.stat().st_mtime
    if trackers:
        (folder.tracking / "healed").touch()
        _dora("track", str(folder.root), trackio=home)
    shares = [read_position(folder.tracker(title(name))).rows / num_rows(folder) for name in trackers]
    return Paced([row["duration_s"] for row in rows[WARM_UP:]], end_s, min(shares, default=1.0))


def _dora(*arguments: str, trackio: Path) -> None:
    command = [sys.executable, "-m", "dora", *arguments]
    environ = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(trackio / "trackio")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr}")


def measure(report: Report, name: str, *, before: Paced, runs: int, home: Path) -> Paced:
    """Compare a case with the runs beside it; return the last of those."""
    without = [before]
    tracked = []
    for number in range(1, runs + 1):
        tracked.append(pace(CASES[name], home=home / f"{name}-{number}"))
        without.append(pace([], home=home / f"{name}-without-{number}"))
    theirs = median(step for run in without for step in run.steps_s)
    ours = median(step for run in tracked for step in run.steps_s)
    each = [median(run.steps_s) for run in without]
    report.row(f"{name}: step", round(ours, 3), "s", ratio=ours / theirs, bar="ratio <= 1.03",
               against=f"without: {theirs:.3f} s; of one run {min(each):.3f} to {max(each):.3f} s")  # fmt: skip
    alone_s = median(run.end_s for run in without)
    report.row(f"{name}: end", round(max(run.end_s for run in tracked), 2), "s", against=f"without: {alone_s:.2f} s",
               bar="figure <= 12")  # fmt: skip
    report.row(f"{name}: completed", min(run.logged for run in tracked), "of 1", bar="figure >= 1")
    return without[-1]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="which trackers")
    options = arguments.parse_args()
    runs = RUNS[options.full]
    report = Report(__doc__, full=options.full, sizes=f"{STEPS} steps, {runs} runs of each case, seed {SEED}")
    with tempfile.TemporaryDirectory() as temporary:
        beside = pace([], home=Path(temporary) / "without")
        for name in options.only:
            beside = measure(report, name, before=beside, runs=runs, home=Path(temporary))
    report.print()


if __name__ == "__main__":
    main()
