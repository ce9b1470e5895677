"""Tables of the sweep over objectives and corrections, from bench/results/learning/sweep.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from learning import cells
from learning.cells import OBJECTIVES, TASKS, UPDATES, Cell, Result, Task
from learning.stats import Interval, paired
from learning.text import bold, table

#: K of the second round, by M.
STALENESS: Final = {1: (2, 4), 4: (4,)}

Areas = Mapping[Cell, float]


def areas_of(results: Sequence[Result]) -> Areas:
    """Return the area of each cell."""
    return {result.cell: result.area for result in results}


def rates_table(results: Sequence[Result], *, updates: int) -> str:
    """Return the learning rates that were tuned, with their area without staleness."""
    areas, best = areas_of(results), cells.rates(results)
    body = []
    for objective in OBJECTIVES:
        row: list[object] = [objective]
        for task in TASKS:
            for rate in cells.RATES[task][updates]:
                area = areas.get(cells.on_policy(task, objective, updates, rate, cells.TUNING_SEED))
                is_best = rate == best[task, objective, updates]
                row.append("not run" if area is None else bold(f"{area:.3f}", shown=is_best))
        body.append(row)
    return table(["objective", *(f"{task} × {rate:g}" for task in TASKS for rate in cells.RATES[task][updates])], body)


def first_table(results: Sequence[Result]) -> str:
    """Return the first round: areas with K = 4, the best pair first."""
    areas, best = areas_of(results), cells.rates(results)
    body = []
    for objective, correction in cells.ranked(results):
        row: list[object] = [objective, correction]
        for task in TASKS:
            for updates in UPDATES:
                rate = best[task, objective, updates]
                fresh = areas.get(cells.on_policy(task, objective, updates, rate, 0))
                stale = areas.get(Cell(task, objective, correction, 4, updates, rate, 0))
                row.append("not run" if fresh is None or stale is None else f"{stale:.3f} of {fresh:.3f}")
        body.append(row)
    return table(["objective", "correction", *(f"{task}, M = {m}" for task in TASKS for m in UPDATES)], body)


def difference(
    results: Sequence[Result], kind: tuple[str, str], task: Task, updates: int, staleness: int, *, faster: float = 1.0
) -> tuple[float, Interval]:
    """Return the mean area without staleness, and how much staleness changes it. `faster`: times the tuned rate."""
    areas, rate = areas_of(results), faster * cells.rates(results)[task, kind[0], updates]
    fresh, stale = {}, {}
    for seed in range(cells.SEEDS):
        without = cells.on_policy(task, kind[0], updates, rate, seed)
        having = Cell(task, *kind, staleness, updates, rate, seed)
        if without in areas and having in areas:
            fresh[seed], stale[seed] = areas[without], areas[having]
    return (fmean(fresh.values()) if fresh else 0.0), paired(stale, fresh)


def second_table(results: Sequence[Result], *, updates: int) -> str:
    """Return the second round: how much staleness changes the area, with all seeds."""
    body = []
    for kind in cells.repeated(results):
        row: list[object] = [*kind]
        for task in TASKS:
            fresh, _ = difference(results, kind, task, updates, STALENESS[updates][-1])
            row.append(f"{fresh:.3f}" if fresh else "not run")
            for k in STALENESS[updates]:
                _, found = difference(results, kind, task, updates, k)
                row.append(bold(_counted(found), shown=found.is_shown and found.count == cells.SEEDS))
        body.append(row)
    columns = [f"{task}, {what}" for task in TASKS for what in ("K = 0", *(f"K = {k}" for k in STALENESS[updates]))]
    return table(["objective", "correction", *columns], body)


def third_table(results: Sequence[Result]) -> str:
    """Return the third round: what staleness does on the task with a tail at half the learning rate."""
    body = []
    for updates in UPDATES:
        for kind in cells.HALVED:
            row: list[object] = [updates, *kind]
            for faster in (1.0, 0.5):
                fresh, found = difference(results, kind, "tail", updates, 4, faster=faster)
                row.append(f"{fresh:.3f}" if fresh else "not run")
                row.append(bold(_counted(found), shown=found.is_shown and found.count == cells.SEEDS))
            body.append(row)
    columns = [f"{rate} rate, {what}" for rate in ("tuned", "half") for what in ("K = 0", "K = 4")]
    return table(["M", "objective", "correction", *columns], body)


def _counted(found: Interval) -> str:
    """Return a difference, and the number of its seeds if some are missing."""
    return str(found) if found.count in (0, cells.SEEDS) else f"{found} ({found.count} of {cells.SEEDS} seeds)"


def in_words(results: Sequence[Result], kind: tuple[str, str]) -> str:
    """Say what staleness does to a pair with one update a version; without all seeds, nothing is claimed."""
    found = {f"{task}, K = {k}": difference(results, kind, task, 1, k)[1] for task in TASKS for k in STALENESS[1]}
    whole = {where: one for where, one in found.items() if one.count == cells.SEEDS}
    losses = [f"{where}: {one}" for where, one in whole.items() if one.is_shown and one.mean < 0]
    held = [where for where, one in whole.items() if not (one.is_shown and one.mean < 0)]
    open_ones = [f"{where}: {_counted(one)}" for where, one in found.items() if where not in whole]
    parts = [f"a loss in {'; '.join(losses)}" if losses else "", f"no loss in {'; '.join(held)}" if held else ""]
    said = [f"shows {' and '.join(filter(None, parts))}"] if whole else []
    if open_ones:
        said.append(f"is not decided in {'; '.join(open_ones)}")
    return ", and ".join(said)
