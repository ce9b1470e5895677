"""Calls of environments at the best split: step time over the limit with `keep`, `pinned` and `release`, simulated.

Run: python bench/sweeps/calls_split.py [--table]. launch/workloads/search-agent.toml as it is shipped, on 32 GPUs with
K = 3 and on 16 GPUs with K = 1 and half as many groups, with the calls of calls.py. Each cell searches its own best
split with the first seed (`dora plan`). Results are appended to bench/results/calls_split.jsonl; those that are
there are not simulated again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from typing import Final

import msgspec
from calls import CASES, ROOT, SETTINGS

from dora.sim.plan import search
from dora.sim.sweep import simulate
from dora.sim.workload import Workload, load

RESULTS: Final = ROOT / "bench" / "results" / "calls_split.jsonl"
#: GPUs -> (K, groups of a step).
FLEETS: Final = {32: (3, 256), 16: (1, 128)}
STEPS: Final = 20
SEEDS: Final = 3

#: (case, GPUs, setting)
Cell = tuple[str, int, str]


class SplitRow(msgspec.Struct, frozen=True):
    """One simulation at the best split of its cell."""

    case: str
    gpus: int
    calls: str
    seed: int
    instances: int
    step_s: float
    limit_s: float
    rule: str
    staleness_mean: float
    violations: int


def workload(cell: Cell) -> Workload:
    """Return the workload of one cell, with the shipped split."""
    case, gpus, calls = cell
    k, groups = FLEETS[gpus]
    job = {"max_staleness": k, "groups_per_step": groups, "steps": STEPS, "calls": calls}
    base = load(ROOT / "launch" / "workloads" / "search-agent.toml")
    return base.with_changes(job=job, tools=CASES[case], fleet={"devices": gpus})


def cells() -> Iterator[Cell]:
    """Yield every cell, the default setting first."""
    for gpus, calls, case in itertools.product(FLEETS, ("release", "keep", "pinned"), CASES):
        yield case, gpus, calls


def recorded() -> list[SplitRow]:
    """Return the rows measured so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=SplitRow) for line in lines]


def measure(cell: Cell, *, instances: int, seed: int) -> SplitRow:
    """Simulate one cell at a split."""
    case, gpus, calls = cell
    found = simulate((workload(cell).with_changes(fleet={"rollout_devices": instances}), seed))
    return SplitRow(
        case,
        gpus,
        calls,
        seed,
        instances,
        step_s=found.step_s,
        limit_s=found.limit.step_s,
        rule=found.limit.rule,
        staleness_mean=found.staleness_mean,
        violations=found.violations,
    )


def table(rows: list[SplitRow]) -> str:
    """Return the medians as a table: servers, step s, and step over the limit with its range."""
    lines = ["| GPUs, K | calls | " + " | ".join(f"`{name}`" for name in SETTINGS) + " |", f"|{'---|' * 5}"]
    for gpus, case in itertools.product(FLEETS, CASES):
        own = [row for row in rows if (row.gpus, row.case) == (gpus, case)]
        if not own:
            continue
        texts = [_text([row for row in own if row.calls == calls]) for calls in SETTINGS]
        lines.append(f"| {gpus}, {FLEETS[gpus][0]} | {case} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _text(cell: list[SplitRow]) -> str:
    if not cell:
        return "–"
    ratios = sorted(row.step_s / row.limit_s for row in cell)
    spread = f" ({ratios[0]:.3f}-{ratios[-1]:.3f})" if len(ratios) > 1 else ""
    step_s = statistics.median(row.step_s for row in cell)
    return f"{cell[0].instances}: {step_s:.1f}, **{statistics.median(ratios):.3f}**{spread}"


def main() -> None:
    """Simulate what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print what there is, and simulate nothing")
    only_table = parser.parse_args().table
    splits = {(r.case, r.gpus, r.calls): r.instances for r in recorded()}
    done = {(r.case, r.gpus, r.calls, r.seed) for r in recorded()}
    for cell, seed in [] if only_table else itertools.product(cells(), range(SEEDS)):
        if (*cell, seed) in done:
            continue
        if cell not in splits:
            one = workload(cell)
            best = search(one, staleness=[one.job.max_staleness], widths=[one.fleet.devices_per_instance])[0]
            splits[cell] = best.workload.fleet.rollout_devices
        row = measure(cell, instances=splits[cell], seed=seed)
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    sys.stdout.write(table(recorded()) + "\n")


if __name__ == "__main__":
    main()
