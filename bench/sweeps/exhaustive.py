"""`dora plan` against trying every plan, on the two jobs of the paper with K = 3.

    PYTHONPATH=. python bench/sweeps/exhaustive.py [WORKLOAD ...]

Every split of servers of 1, 2, 4 and 8 GPUs is simulated as the search simulates its results, the smallest limit first,
except those whose limit, a lower bound of the step time, is above the best found so far. Both sides use the first seed.
Appends to bench/results/exhaustive.jsonl.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "sweeps")]

from result import commit, today  # noqa: E402
from simulation_found import table  # noqa: E402

from dora.errors import ConfigError  # noqa: E402
from dora.sim.limit import limits  # noqa: E402
from dora.sim.plan import FINAL_STEPS, search, shortened  # noqa: E402
from dora.sim.sweep import simulate  # noqa: E402
from dora.sim.workload import Workload, checked, load  # noqa: E402

RESULTS: Final = ROOT / "bench" / "results" / "exhaustive.jsonl"
K: Final = 3


class ExhaustiveRow(msgspec.Struct, frozen=True):
    """One job: the plan that was searched, and the best of all."""

    workload: str
    commit: str
    date: str
    search_s: float  #: seconds of one process
    searched: tuple[int, int, float]  #: GPUs a server, GPUs that roll out, step seconds
    best: tuple[int, int, float]
    simulated: int  #: plans that were tried one by one
    possible: int


def recorded() -> list[ExhaustiveRow]:
    """Return the rows found so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=ExhaustiveRow) for line in lines]


def text(rows: Iterable[ExhaustiveRow]) -> str:
    """Return the rows as a table."""
    head = "job, K = 3 | searched: GPUs a server, GPUs that roll out, step s | CPU s | best of all plans | simulated"
    lines = [
        (f"`{r.workload}`", _plan(r.searched), f"{r.search_s:.0f}", _plan(r.best), f"{r.simulated} of {r.possible}")
        for r in rows
    ]
    return table(head, lines)


def _plan(plan: tuple[int, int, float]) -> str:
    width, rolling, step_s = plan
    return f"{width}, {rolling}, {step_s:.1f}"


def all_plans(base: Workload) -> Iterator[Workload]:
    """Yield every number of servers of every width; the search leaves some out on large fleets."""
    for width in base.fleet.widths:
        wide = base.with_width(width)
        for servers in range(1, base.fleet.devices // width + 1):
            with suppress(ConfigError):
                yield checked(wide.with_changes(fleet={"rollout_devices": servers * width}), origin="a split")


def main() -> None:
    """Compare the jobs that are named, or both."""
    gc.disable()
    for name in sys.argv[1:] or ("paper-64", "paper-128"):
        base = load(ROOT / "launch" / "workloads" / f"{name}.toml").with_changes(job={"max_staleness": K})
        began = time.process_time()
        searched = search(base, staleness=[K])[0]
        search_s = time.process_time() - began
        shown = [shortened(one, steps=FINAL_STEPS) for one in all_plans(base)]
        plans = list(zip([limit.step_s for limit in limits(shown, seed=0)], shown, strict=True))
        plans.sort(key=lambda plan: plan[0])
        best, tried = (0, 0, float("inf")), 0
        for limit_s, one in plans:
            if limit_s < best[2]:
                tried += 1
                step_s = simulate((one, 0)).step_s
                best = min(
                    best, (one.fleet.devices_per_instance, one.fleet.rollout_devices, step_s), key=lambda p: p[2]
                )
                sys.stdout.write(f"{one.fleet.devices_per_instance} {one.fleet.rollout_devices}: {step_s:.1f} s\n")
                sys.stdout.flush()
        fleet = searched.workload.fleet
        found = (fleet.devices_per_instance, fleet.rollout_devices, searched.result.step_s)
        row = ExhaustiveRow(name, commit(), today(), search_s, found, best, tried, len(plans))
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
