"""Calls of environments: step time of paced runs with `keep` and `release`, beside their simulations.

Run: python bench/sweeps/paced_calls.py [--table]. launch/workloads/paced-calls.toml under `dora pace`: the controller,
its environment host, HTTP and ZeroMQ are real, and wait for the times of the table. What this machine adds is magnified
by TIME_SCALE, which is low enough that the run takes a small share of a core. Both step times are over the steady state
of the simulation. Results are appended to bench/results/paced_calls.jsonl; those that are there are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
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
from dora.sim.measure import window
from dora.sim.workload import Workload, load
from dora.sim.world import World

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "bench" / "results" / "paced_calls.jsonl"
WORKLOAD: Final = ROOT / "launch" / "workloads" / "paced-calls.toml"
SETTINGS: Final = ("keep", "release")
SEEDS: Final = 3
TIME_SCALE: Final = 2.0


class PacedCallsRow(msgspec.Struct, frozen=True):
    """One paced run, whose audit was clean."""

    calls: str
    seed: int
    time_scale: float
    live_s: float  #: step time
    simulated_s: float
    cores: float  #: CPU seconds of all processes of the run per second
    load: float  #: of one minute, mean of before and after


def recorded() -> list[PacedCallsRow]:
    """Return the rows measured so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=PacedCallsRow) for line in lines]


def measure(calls: str, seed: int) -> PacedCallsRow:
    """Run one job live and simulated."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "workload.toml"
        path.write_text(WORKLOAD.read_text().replace("[job]\n", f'[job]\ncalls = "{calls}"\n'))
        workload = load(path)
        begun, load_before, cpu_before = time.monotonic(), os.getloadavg()[0], cpu_s()
        options = ("--seed", str(seed), "--time-scale", str(TIME_SCALE), "--processes", "1", "--folder", home)
        subprocess.run([sys.executable, "-m", "dora", "pace", str(path), *options], check=True)
        wall_s = time.monotonic() - begun
        [folder] = Path(home).glob("paced-*")
        return PacedCallsRow(
            calls,
            seed,
            TIME_SCALE,
            live_s=step_s(live(RunFolder(folder)), workload=workload),
            simulated_s=step_s(simulated(workload, seed=seed), workload=workload),
            cores=(cpu_s() - cpu_before) / wall_s,
            load=(load_before + os.getloadavg()[0]) / 2,
        )


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
    """Return the rows and the means of each setting as a table."""
    lines = [
        "| calls | seed | live, s | simulated, s | live / simulated | cores | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for calls in SETTINGS:
        own = sorted((row for row in rows if row.calls == calls), key=lambda row: row.seed)
        lines += [_line(f"`{row.calls}`", row.seed, [row]) for row in own]
        lines += [_line(f"`{calls}`", "mean", own)] if own else []
    return "\n".join(lines)


def _line(calls: str, seed: int | str, rows: list[PacedCallsRow]) -> str:
    live_s, simulated_s, cores, loaded = (
        statistics.mean(getattr(row, name) for row in rows) for name in ("live_s", "simulated_s", "cores", "load")
    )
    ratio = live_s / simulated_s
    return f"| {calls} | {seed} | {live_s:.1f} | {simulated_s:.1f} | {ratio:.3f} | {cores:.2f} | {loaded:.1f} |"


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print what there is, and measure nothing")
    only_table = parser.parse_args().table
    done = {(row.calls, row.seed) for row in recorded()}
    for seed, calls in itertools.product(range(SEEDS), SETTINGS):
        if not only_table and (calls, seed) not in done:
            row = measure(calls, seed)
            with RESULTS.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    sys.stdout.write(table(recorded()) + "\n")


if __name__ == "__main__":
    main()
