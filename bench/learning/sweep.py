"""The sweep over cells of the lag harness: resumable, one process per core.

Learning rates are tuned first, then comes a round of all pairs of an objective and a correction with one seed, then one
of the best pairs with all seeds, then one of some pairs at half the rate. Results are appended as they come,
and cells that have one are skipped, so it may be interrupted and started again.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

import msgspec
from result import commit, hardware

from dora.errors import ConfigError
from learning import cells
from learning.cells import Cell, Result
from learning.jobs import finished

#: Name -> the cells of a stage, which may depend on results of earlier ones.
STAGES: dict[str, Callable[[Sequence[Result]], Iterable[Cell]]] = {
    "tuning": lambda _: cells.tuning(),
    "first round": cells.first_round,
    "second round": cells.second_round,
    "third round": cells.third_round,
}


def sweep(*, processes: int) -> bool:
    """Run what is missing; return whether every cell has a result."""
    profiles = {task: cells.profile(path) for task, path in cells.TASKS.items()}
    if any(result.profile != profiles[result.cell.task] for result in cells.read(cells.SWEEP, Result)):
        raise ConfigError(f"{cells.SWEEP}: made with other settings than those of launch/configs; move the file away")
    made_of = {"commit": commit(), "machine": hardware()}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return all(_run_stage(name, pool, made_of) for name in STAGES)


def _run_stage(name: str, pool: ProcessPoolExecutor, made_of: dict[str, str]) -> bool:
    """Run what is missing of a stage; return whether all of it has a result."""
    earlier = cells.read(cells.SWEEP, Result)
    known = {result.cell for result in earlier}
    wanted = list(dict.fromkeys(STAGES[name](earlier)))
    missing = [cell for cell in wanted if cell not in known]
    print(f"{name}: {len(missing)} of {len(wanted)} cells are to be run", flush=True)
    begun = time.monotonic()
    made = 0
    for made, result in enumerate(finished({pool.submit(run_cell, cell): _name(cell) for cell in missing}), start=1):
        cells.append(cells.SWEEP, msgspec.structs.replace(result, **made_of))
        left_s = (time.monotonic() - begun) / made * (len(missing) - made)
        took = f"area {result.area:.3f}, {result.seconds:.0f} s; {left_s / 60:.0f} min left"
        print(f"{_name(result.cell)}: {took}", flush=True)
    return made == len(missing)


def run_cell(cell: Cell) -> Result:
    """Run one cell in this process, with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from dora.learning.learner import OneRank  # after the number of threads is set
    from learning import harness

    config = cell.config()
    begun = time.perf_counter()
    with OneRank():
        curve = harness.run(config, staleness=cell.staleness, eval_every=config.eval.every)
    means = {name: _rounded([step[name] for step in curve.steps]) for name in cells.METRICS}
    seconds = round(time.perf_counter() - begun, 1)
    profile = cells.profile(cells.TASKS[cell.task])
    return Result(cell, curve.heldout, curve.area, means, seconds, profile=profile, commit="", machine="")


def _rounded(values: Sequence[float]) -> float:
    """The mean of six digits; JSON has no infinity."""
    value = fmean(values) if values else math.nan
    return float(f"{value:.6g}") if math.isfinite(value) else -1.0


def _name(cell: Cell) -> str:
    found = f"{cell.task}, {cell.objective}, {cell.correction}, K = {cell.staleness}, M = {cell.updates}"
    return f"{found}, rate x {cell.rate:g}, seed {cell.seed}"
