"""The table and the picture of live runs, from bench/results/learning/live.jsonl."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final

from dora.sim import svg
from learning.cells import LiveResult
from learning.stats import Interval, crossing, paired_ratio, smoothed
from learning.text import bold, table

#: Shares of the way that `sync` goes.
WAYS: Final = (0.5, 0.7, 0.9)
#: The last evaluations, whose mean is the final reward.
LAST: Final = 3
ON_POLICY: Final = ("sync", "periodic")

Runs = Mapping[str, Mapping[int, LiveResult]]  # by name and seed


def by_name(live: Iterable[LiveResult]) -> Runs:
    """Return the runs by name and seed."""
    found: dict[str, dict[int, LiveResult]] = defaultdict(dict)
    for result in live:
        cell = result.cell
        found[f"dora, K = {cell.staleness}" if cell.strategy == "dora" else cell.strategy][cell.seed] = result
    return found


def over_seconds(run: LiveResult) -> list[tuple[float, float]]:
    """Return the held-out reward over seconds; each point is averaged with its neighbours."""
    means = smoothed([mean for _, mean in run.heldout])
    return [(run.published[version], mean) for (version, _), mean in zip(run.heldout, means, strict=True)]


def final(run: LiveResult) -> float:
    """Return the final held-out reward."""
    return fmean(mean for _, mean in run.heldout[-LAST:])


def seconds_to(runs: Mapping[int, LiveResult], level: float) -> dict[int, float]:
    """Return by seed when a reward is reached; infinity if it is not."""
    return {seed: crossing(over_seconds(run), level) for seed, run in runs.items()}


def live_table(live: Sequence[LiveResult]) -> str:
    """Return the table."""
    named = by_name(live)
    if "sync" not in named:
        return "Not run yet.\n"
    sync = named["sync"]
    first, last = fmean(run.heldout[0][1] for run in sync.values()), fmean(map(final, sync.values()))
    levels = [first + share * (last - first) for share in WAYS]
    base = min(
        (name for name in ON_POLICY if name in named),
        key=lambda name: fmean(seconds_to(named[name], levels[-1]).values()),
    )
    body = []
    for name, runs in named.items():
        step_s = fmean(run.published[-1] / len(run.staleness) for run in runs.values())
        row: list[object] = [
            name,
            len(runs),
            f"{step_s:.2f}",
            f"{fmean(fmean(r.staleness) for r in runs.values()):.2f}",
        ]
        row += [_seconds(seconds_to(runs, level).values()) for level in levels]
        for level in levels:
            faster = _faster(seconds_to(named[base], level), seconds_to(runs, level))
            row.append("1" if name == base else bold(faster.ratio, shown=faster.is_shown))
        body.append([*row, f"{fmean(map(final, runs.values())):.3f}"])
    head = ["run", "seeds", "step s", "mean staleness", *(f"seconds to {share:.0%}" for share in WAYS)]
    return table([*head, *(f"times as soon to {share:.0%}" for share in WAYS), "final"], body)


def _faster(base: Mapping[int, float], mine: Mapping[int, float]) -> Interval:
    if not all(map(math.isfinite, [*base.values(), *mine.values()])):
        return Interval(math.nan, math.nan, 0)
    return paired_ratio(base, mine)


def _seconds(values: Iterable[float]) -> str:
    mean = fmean(values)
    return f"{mean:.1f}" if math.isfinite(mean) else "not reached"


def picture(live: Sequence[LiveResult]) -> str:
    """Return the held-out reward over seconds, of all seeds."""
    named = by_name(live)
    lines = {name: [over_seconds(run) for run in runs.values()] for name, runs in named.items()}
    end = max(line[-1][0] for of_name in lines.values() for line in of_name)
    frame = svg.Frame(0.0, end, 1.1 * max(y for of_name in lines.values() for line in of_name for _, y in line))
    marked = [(x, f"{x:g}") for x in svg.ticks(0.0, end)]
    shapes = frame.axes(x_ticks=marked, x_label="seconds of training", y_label="held-out reward")
    for number, of_name in enumerate(lines.values()):
        for points in of_name:
            shapes += frame.curve(points, stroke=svg.color(number), is_marked=False)
    title = "Held-out reward over time, one line for each seed"
    return svg.document([*shapes, *frame.legend(list(lines))], title=title, height=frame.height)
