"""Adapters held side by side against merged weights, each at its best split, on fleets of about 1 to 18 servers.

    PYTHONPATH=. python bench/sweeps/adapter_plans.py [SERVERS ...]   search and simulate what is missing

launch/workloads/paper-64.toml with servers and ranks of two GPUs, cut down with the fleet. Adapters have K = 3; merged
weights have every K up to 3 that has enough servers, or 3 on larger fleets. Cells of up to 16 GPUs are searched with
the first seed, as by `dora plan`; on larger fleets three splits are tried, the one with the smallest limit and its
neighbors. The plan is then simulated with all seeds. Rows are appended to bench/results/adapter_plans.jsonl as they are
found; what is there is not simulated again. `python bench/sweeps/simulation.py --render` writes the table.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final, NamedTuple

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "sweeps")]

from result import commit, today  # noqa: E402

from dora.sim.limit import limits  # noqa: E402
from dora.sim.measure import Result  # noqa: E402
from dora.sim.plan import FINAL_STEPS, UNFILLED, search, shortened, splits_of  # noqa: E402
from dora.sim.sweep import simulate  # noqa: E402
from dora.sim.workload import Workload, load  # noqa: E402

RESULTS: Final = ROOT / "bench" / "results" / "adapter_plans.jsonl"
#: Approximate number of servers -> GPUs, and groups per step.
FLEETS: Final = {1: (4, 32), 2: (8, 64), 4: (16, 128), 8: (32, 256), 18: (64, 512)}
K: Final = 3
#: Decoding with adapters, as a multiple of that with merged weights.
THROUGHPUTS: Final = (1.0, 0.9, 0.8, 0.65)
#: Fleets that are searched; on the others three splits are tried.
SEARCHED: Final = (1, 2, 4)
#: Seeds of a cell; fewer on large fleets.
SEEDS: Final = {1: 3, 2: 3, 4: 3, 8: 2, 18: 1}


class Cell(NamedTuple):
    """One setting, to be planned."""

    servers: int
    throughput: float  #: of adapters; 0: merged weights
    ks: tuple[int, ...]  #: K that are tried

    @property
    def seeds(self) -> int:
        return SEEDS[self.servers]

    def workload(self) -> Workload:
        """Return what is planned."""
        gpus, groups = FLEETS[self.servers]
        return load(ROOT / "launch" / "workloads" / "paper-64.toml").with_changes(
            job={"groups_per_step": groups},
            fleet={"devices": gpus},
            train={"devices_per_rank": 2},
            adapters={"use": "served" if self.throughput else "merged", "throughput": self.throughput or 1.0},
        )


class AdapterRow(msgspec.Struct, frozen=True):
    """One simulation of a cell's plan."""

    servers: int
    throughput: float
    ks: tuple[int, ...]
    seed: int
    commit: str
    date: str
    slots: int
    micro_batch_tokens: int
    result: Result

    @property
    def cell(self) -> Cell:
        return Cell(self.servers, self.throughput, self.ks)


def cells() -> Iterator[Cell]:
    """Yield every cell, small fleets first."""
    for servers in FLEETS:
        yield Cell(servers, 0.0, tuple(range(K + 1)) if servers < K else (K,))
        yield from (Cell(servers, throughput, (K,)) for throughput in THROUGHPUTS)
        if servers == 1:
            yield from (Cell(servers, throughput, (0,)) for throughput in THROUGHPUTS)


def recorded() -> list[AdapterRow]:
    """Return the rows found so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=AdapterRow) for line in lines]


def planned(cell: Cell) -> Workload:
    """Return the plan of a cell: its split and K and, if it is searched, slots and micro-batch."""
    one = cell.workload()
    if cell.servers not in SEARCHED:
        return shortened(_near(one.with_changes(job={"max_staleness": K})), steps=FINAL_STEPS)
    best = search(one, staleness=cell.ks, widths=(2,), uses=(one.adapters.use,), most=1)[0]
    return shortened(best.workload, steps=FINAL_STEPS)


def _near(workload: Workload) -> Workload:
    """Return the fastest of the split with the smallest limit and its neighbors."""
    splits, _ = splits_of(workload, origin="bench")
    bounds = [max(one.step_s, UNFILLED * one.decode_s, one.train_s) for one in limits(splits, seed=0)]
    first = max(0, bounds.index(min(bounds)) - 1)
    return min(splits[first : first + 3], key=lambda split: simulate((shortened(split), 0)).step_s)


def measure(cell: Cell) -> None:
    """Search a cell's plan and simulate it with the seeds that are missing."""
    done = {row.seed for row in recorded() if row.cell == cell}
    missing = [seed for seed in range(cell.seeds) if seed not in done]
    plan = planned(cell) if missing else cell.workload()
    for seed in missing:
        result = simulate((plan, seed))
        sizes = plan.fleet.server.slots, plan.train.micro_batch_tokens
        row = AdapterRow(*cell, seed, commit(), today(), *sizes, result)
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.write(f"{cell}, seed {seed}: {result.instances} servers, {result.step_s:.4g} s\n")
        sys.stdout.flush()


def table(rows: Sequence[AdapterRow]) -> str:
    """Return the table of docs/SIMULATION.md; cells without all of their seeds are left out, and named below it."""
    found = {cell: [row.result for row in rows if row.cell == cell and row.seed < cell.seeds] for cell in cells()}
    head = (
        "GPUs | servers hold | decoding | K | split, servers | step s (range) | seeds | merged / x | bound by | "
        "trainer idle | staleness | servers halted by pushes | pushes a step"
    )
    lines = [head.split(" | "), ["---"] * len(head.split(" | "))]
    for cell, results in found.items():
        if len(results) < cell.seeds:
            continue
        merged = next((rs for c, rs in found.items() if c.servers == cell.servers and not c.throughput), [])
        lines.append(_line(cell, results, merged))
    left = [cell for cell, results in found.items() if len(results) < cell.seeds]
    names = (f"{FLEETS[cell.servers][0]} GPUs, {cell.throughput or 'merged'}, K = {cell.ks[-1]}" for cell in left)
    note = f"\n\nNot simulated yet: {'; '.join(names)}." if left else ""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + note


def _line(cell: Cell, results: Sequence[Result], merged: Sequence[Result]) -> list[str]:
    first, steps = results[0], sorted(r.step_s for r in results)
    bounds = {"train": "training", "decode": "decoding", "slowest": "longest answer"}
    return [
        str(first.devices),
        "adapters" if cell.throughput else "merged weights",
        f"{cell.throughput:g}" if cell.throughput else "1",
        str(first.max_staleness),
        f"{first.rollout_devices}/{first.devices}, {first.instances}",
        f"{median(steps):.4g}" + (f" ({steps[0]:.4g}-{steps[-1]:.4g})" if len(steps) > 1 else ""),
        str(len(results)),
        f"{median(r.step_s for r in merged) / median(steps):.2f}" if merged else "–",
        bounds[first.limit.rule],
        f"{fmean(r.trainer_idle for r in results):z.1%}",
        f"{fmean(r.staleness_mean for r in results):.2f}",
        f"{fmean(r.instance_shares['push'] for r in results):.1%}",
        f"{fmean(r.pushes for r in results):.1f}",
    ]


def main() -> None:
    """Search and simulate what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("servers", nargs="*", type=int, help="sizes of fleets, in servers (default: all)")
    chosen = parser.parse_args().servers or FLEETS
    gc.disable()  # no reference cycles are left behind, and collections take a fifth of the time
    for cell in cells():
        if cell.servers in chosen:
            measure(cell)


if __name__ == "__main__":
    main()
