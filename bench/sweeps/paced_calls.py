"""Calls of environments: step time of paced runs with `keep` and `release`, beside their simulations.

Run: python bench/sweeps/paced_calls.py [--table]. launch/workloads/paced-calls.toml under `dora pace`: the controller,
its environment host, HTTP and ZeroMQ are real, and wait for the times of the table. What this machine adds is magnified
by TIME_SCALE. The runs of all seeds go on at the same time, as each takes a small share of a core. Both step times are
over the steady state of the simulation. Results are appended to bench/results/paced_calls.jsonl; a setting that is
there at this scale is not measured again.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from dora.core import events as ev
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.sim.limit import window
from dora.sim.workload import Workload, load
from dora.sim.world import World

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "bench" / "results" / "paced_calls.jsonl"
WORKLOAD: Final = ROOT / "launch" / "workloads" / "paced-calls.toml"
SETTINGS: Final = ("keep", "release")
SEEDS: Final = 3
TIME_SCALE: Final = 1.0


class PacedCallsRow(msgspec.Struct, frozen=True):
    """One paced run, whose audit was clean."""

    calls: str
    seed: int
    time_scale: float
    live_s: float  #: step time
    simulated_s: float
    cores: float  #: CPU seconds of all its processes per second
    load: float  #: of one minute, mean of before and after


def recorded() -> list[PacedCallsRow]:
    """Return the rows measured so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=PacedCallsRow) for line in lines]


def measure(calls: str) -> list[PacedCallsRow]:
    """Run one job with each seed, live and simulated."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "workload.toml"
        path.write_text(WORKLOAD.read_text().replace("[job]\n", f'[job]\ncalls = "{calls}"\n'))
        workload = load(path)
        begun, load_before, cpu_before = time.monotonic(), os.getloadavg()[0], cpu_s()
        runs = [paced(path, seed=seed) for seed in range(SEEDS)]
        if failed := [run for run in runs if run.wait()]:
            raise SystemExit(f"{len(failed)} runs with {calls} failed")
        cores = (cpu_s() - cpu_before) / (time.monotonic() - begun) / SEEDS
        loaded = (load_before + os.getloadavg()[0]) / 2
        return [
            PacedCallsRow(
                calls,
                seed,
                TIME_SCALE,
                live_s=step_s(live(folder_of(path, seed=seed)), workload=workload),
                simulated_s=step_s(simulated(workload, seed=seed), workload=workload),
                cores=cores,
                load=loaded,
            )
            for seed in range(SEEDS)
        ]


def paced(path: Path, *, seed: int) -> subprocess.Popen[bytes]:
    """Start a paced run in a folder of its own."""
    options = ("--time-scale", TIME_SCALE, "--seed", seed, "--processes", 1, "--folder", path.with_name(str(seed)))
    return subprocess.Popen([sys.executable, "-m", "dora", "pace", str(path), *map(str, options)])


def folder_of(path: Path, *, seed: int) -> RunFolder:
    """Return the run folder of a paced run."""
    [folder] = path.with_name(str(seed)).glob("paced-*")
    return RunFolder(folder)


def live(folder: RunFolder) -> list[float]:
    """Return when each step was trained, in seconds of the workload."""
    return [event.at for event, _ in Journal(folder.journal) if isinstance(event, ev.StepTrained)]


def simulated(workload: Workload, *, seed: int) -> list[float]:
    """Return the same of the simulation."""
    found: list[float] = []
    World(
        workload, seed=seed, sink=lambda event, _: found.append(event.at) if isinstance(event, ev.StepTrained) else None
    ).run()
    return found


def step_s(trained_at: list[float], *, workload: Workload) -> float:
    """Return the step time over the steady state."""
    first, last = window(len(trained_at), max_staleness=workload.rules.max_staleness)
    return (trained_at[last] - trained_at[first]) / (last - first)


def cpu_s() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(rows: list[PacedCallsRow]) -> str:
    """Return the rows as a table, with the mean of each setting and scale."""
    head = "| calls | scale | seed | live, s | simulated, s | live / simulated | cores | load |"
    lines = [head, f"|{'---|' * 8}"]
    for calls, scale in sorted({(row.calls, row.time_scale) for row in rows}):
        own = [row for row in rows if (row.calls, row.time_scale) == (calls, scale)]
        lines += [_line(str(row.seed), [row]) for row in own]
        lines += [_line("mean", own)] if len(own) > 1 else []
    return "\n".join(lines)


def _line(seed: str, rows: list[PacedCallsRow]) -> str:
    live_s, simulated_s, cores, loaded = (
        statistics.mean(getattr(row, name) for row in rows) for name in ("live_s", "simulated_s", "cores", "load")
    )
    ratio, first = live_s / simulated_s, rows[0]
    return (
        f"| `{first.calls}` | {first.time_scale:g} | {seed} | {live_s:.1f} | {simulated_s:.1f} | {ratio:.3f} | "
        f"{cores:.2f} | {loaded:.1f} |"
    )


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print what there is, and measure nothing")
    only_table = parser.parse_args().table
    done = {row.calls for row in recorded() if row.time_scale == TIME_SCALE}
    for calls in [] if only_table else [calls for calls in SETTINGS if calls not in done]:
        with RESULTS.open("ab") as file:
            file.writelines(msgspec.json.encode(row) + b"\n" for row in measure(calls))
    sys.stdout.write(table(recorded()) + "\n")


if __name__ == "__main__":
    main()
