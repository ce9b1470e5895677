"""The sweep over cells of the lag harness: resumable, one process per core.

Results are appended as they come, and cells that have one are skipped, so it may be interrupted and started again. The
cells come in order of their use: all corrections for the first seed, then for the next; the objectives after them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec
from result import commit, hardware

from dora.errors import ConfigError
from learning import cells
from learning.cells import Cell, Result


def sweep(*, stages: Sequence[str], seeds: int, processes: int) -> bool:
    """Run what is missing; return whether every cell has a result."""
    made = {"corrections": cells.corrections, "objectives": cells.objectives}
    wanted = list(dict.fromkeys(cell for stage in stages for cell in made[stage](seeds)))
    earlier = cells.read(cells.LAGS, Result)
    profile = cells.profile()
    if any(result.profile != profile for result in earlier):
        raise ConfigError(f"{cells.LAGS}: made with other settings than {cells.PROFILE}; move the file away")
    known = {result.cell for result in earlier}
    missing = [cell for cell in wanted if cell not in known]
    print(f"{len(missing)} of {len(wanted)} cells are to be run, {processes} at a time", flush=True)
    made_of = {"profile": profile, "commit": commit(), "machine": hardware()}
    failed, begun = 0, time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_cell, cell): cell for cell in missing}
        for number, future in enumerate(as_completed(running), start=1):
            cell = running[future]
            if (err := future.exception()) is not None:
                failed += 1
                print(f"{_name(cell)}: {type(err).__name__}: {err}", flush=True)
                continue
            result = msgspec.structs.replace(future.result(), **made_of)
            cells.append(cells.LAGS, result)
            left_s = (time.monotonic() - begun) / number * (len(missing) - number)
            print(
                f"{_name(cell)}: area {result.area:.3f}, {result.seconds:.0f} s; {left_s / 60:.0f} min left", flush=True
            )
    return failed == 0


def run_cell(cell: Cell) -> Result:
    """Run one cell in this process, with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from dora.learning.learner import OneRank  # after the number of threads is set
    from learning import harness

    config = cell.config()
    begun = time.perf_counter()
    with OneRank():
        curve = harness.run(config, staleness=cell.staleness, eval_every=config.eval.every)
    metrics = {name: [_rounded(step[name]) for step in curve.steps] for name in cells.METRICS}
    seconds = round(time.perf_counter() - begun, 1)
    return Result(cell, curve.heldout, curve.area, metrics, seconds, profile="", commit="", machine="")


def _rounded(value: float) -> float:
    """Six digits; JSON has no infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else -1.0


def _name(cell: Cell) -> str:
    return f"{cell.objective}, {cell.correction}, K = {cell.staleness}, M = {cell.updates}, seed {cell.seed}"
