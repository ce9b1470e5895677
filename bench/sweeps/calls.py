"""Calls of environments: the step time with `keep`, `pinned` and `release`, simulated.

Run: python bench/sweeps/calls.py [--table]. launch/workloads/search-agent.toml (docs/SIMULATION.md) with calls as
published, ten and a hundred times as long, and with one in a thousand stuck, on 2, 4 and 32 instances. Training is made
fast (14 GPUs for each server; half as many groups for each of 32 servers, and as many GPUs), as otherwise it hides what
the fleet does. Results are appended to bench/results/calls.jsonl; those that are there are not simulated again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from dora.core.orchestration import Calls
from dora.sim.sweep import simulate
from dora.sim.workload import Workload, load

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "bench" / "results" / "calls.jsonl"
CASES: Final[dict[str, dict[str, Any]]] = {
    "published": {"stuck_share": 0.0},
    "x 10": {"stuck_share": 0.0, "latency_median_s": 1.7, "latency_max_s": 40.0},
    "x 100": {"stuck_share": 0.0, "latency_median_s": 17.0, "latency_max_s": 400.0},
    "stuck": {},
}
#: Instances -> (K, groups of a step for each, steps, seeds).
FLEETS: Final = {2: (1, 64, 14, 3), 4: (3, 64, 16, 3), 32: (3, 32, 10, 2)}
TRAINERS: Final = 14  #: GPUs for each server
SETTINGS: Final = get_args(Calls)


class CallsRow(msgspec.Struct, frozen=True):
    """One simulation."""

    case: str
    instances: int
    calls: str
    seed: int
    step_s: float
    limit_s: float
    staleness_mean: float
    slowest_run_s: float
    violations: int


def workload(case: str, instances: int, calls: str) -> Workload:
    """Return the workload of one cell."""
    k, groups, steps, _ = FLEETS[instances]
    job = {"max_staleness": k, "groups_per_step": groups * instances, "steps": steps, "calls": calls}
    devices = (1 + TRAINERS * groups // 64) * instances
    base = load(ROOT / "launch" / "workloads" / "search-agent.toml")
    return base.with_changes(job=job, tools=CASES[case], fleet={"devices": devices, "rollout_devices": instances})


def cells() -> Iterator[tuple[str, int, str, int]]:
    """Yield every cell, the first seed of all first."""
    for seed in range(max(seeds for *_, seeds in FLEETS.values())):
        for instances, case, calls in itertools.product(FLEETS, CASES, SETTINGS):
            if seed < FLEETS[instances][3]:
                yield case, instances, calls, seed


def recorded() -> list[CallsRow]:
    """Return the rows measured so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=CallsRow) for line in lines]


def measure(case: str, instances: int, calls: str, seed: int) -> CallsRow:
    """Simulate one cell."""
    found = simulate((workload(case, instances, calls), seed))
    return CallsRow(
        case,
        instances,
        calls,
        seed,
        step_s=found.step_s,
        limit_s=found.limit.step_s,
        staleness_mean=found.staleness_mean,
        slowest_run_s=found.slowest_run_s,
        violations=found.violations,
    )


def table(rows: list[CallsRow]) -> str:
    """Return the medians as a table: step s and its range."""
    lines = ["| instances, K | calls | " + " | ".join(f"`{name}`" for name in SETTINGS) + " |", "|---|---|---|---|---|"]
    for instances, case in itertools.product(FLEETS, CASES):
        texts = []
        for calls in SETTINGS:
            cell = [r for r in rows if (r.instances, r.case, r.calls) == (instances, case, calls)]
            texts.append(_text(cell) if cell else "–")
        lines.append(f"| {instances}, {FLEETS[instances][0]} | {case} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _text(cell: list[CallsRow]) -> str:
    times = sorted(row.step_s for row in cell)
    spread = f" ({times[0]:.1f}-{times[-1]:.1f})" if len(times) > 1 else ""
    return f"{statistics.median(times):.1f}{spread}"


def main() -> None:
    """Simulate what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print what there is, and simulate nothing")
    only_table = parser.parse_args().table
    done = {(r.case, r.instances, r.calls, r.seed) for r in recorded()}
    for cell in [] if only_table else [cell for cell in cells() if cell not in done]:
        row = measure(*cell)
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    sys.stdout.write(table(recorded()) + "\n")


if __name__ == "__main__":
    main()
