"""docs/LEARNING.md and its pictures, as a function of the results in bench/results/learning alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

from dora.sim import svg
from learning import cells
from learning.cells import CORRECTIONS, LAGS, LIVE, OBJECTIVES, PRESET, Cell, LiveCell, LiveResult, Result
from learning.stats import Difference, paired

DOCUMENT: Final = cells.ROOT / "docs" / "LEARNING.md"
PICTURES: Final = cells.ROOT / "docs" / "pictures"
SEEDS: Final = 5
LIVE_SEEDS: Final = 3
STALENESS: Final = (1, 2, 4, 8, 16)

HEAD: Final = """# Learning

What staleness costs in learning, and what corrections give back: one task, measured. Everything below is rendered by
`python bench/learning render` from `bench/results/learning/*.jsonl`; nothing is claimed beyond these figures. They
are of a policy of 0.5 M parameters on sums, with rewards of 0 and 1: they show how the objectives behave there, not
how they rank for large models.

The task is that of `launch/configs/learning-cpu.toml`: sums of 10 to 24 numbers, of which *sampled* answers are
judged. Task and learning rate were chosen with seed 0, by the gap between K = 0 and K = 16 without a correction, so
that corrections can be told apart: the figures show more harm than a milder learning rate would.

**Area** is the area under the held-out curve over steps by the trapezoid rule, divided by the number of steps: the
mean held-out reward of a run. **Differences** are paired: runs with the same seed have the same prompts and the same
noise for every sampled token, and all evaluations have the same prompts. They are given as mean ± 2 standard errors
over seeds. "Shown" means larger than that; with five seeds it is less than the usual 95 %, and of many comparisons
some are shown by chance.
"""

HARNESS: Final = """## The lag harness

`python bench/learning sweep` runs embedded engine and trainer in one process (`bench/learning/harness.py`). Step s
trains groups that were sampled under version max(s - K, 0). Nothing depends on time, so a run is a function of its
settings and seed, bit for bit; with K = 0 it is plain synchronous training (`tests/learning/test_harness.py`). A
policy that samples no group with different rewards any more has collapsed, where a live run would fail; its score
stands for all later versions.
"""

CORRECTIONS_TEXT: Final = """### Corrections

GRPO, one update per version (M = 1). `none` multiplies by no weight at all: r = π/π_o is 1 then, so staleness is
ignored. `tis` is min(ρ, 2); `mis` rejects tokens whose ρ is outside 0.5 ... 2; `icepop` is ρ inside 0.5 ... 5, else
0; `opsm` drops answers with A < 0 whose mean of log μ - log π is above 1e-4. All are the defaults, none was tuned. At
K = 0, ρ is 1 but for rounding, so that one run stands for all.
"""

OBJECTIVES_TEXT: Final = """### Objectives

Each preset with its own correction ([CONFIG.md](CONFIG.md)), with M = 1 and M = 4 updates per version at the same
number of groups per step and the same learning rate, which was tuned for none of them. Differences are against K = 0
of the same objective and M.
"""

LIVE_TEXT: Final = """## Live runs

`python bench/learning live`: whole runs of the CLI with the same settings. Seconds count from the end of step 0.
Versions that were overtaken before their evaluation have no point, so areas of live runs have other grids than those
above; the area over seconds ends when the fastest run of the same seed ends. `dora` with K = 8 has 9
instances, which it needs; all others have 4.
"""

Rows = Mapping[tuple[str, str, int, int], Mapping[int, Result]]


def write() -> None:
    """Write the document and its pictures."""
    PICTURES.mkdir(exist_ok=True)
    lags, live = cells.read(LAGS, Result), cells.read(LIVE, LiveResult)
    for name, picture in pictures(lags, live).items():
        (PICTURES / name).write_text(picture)
    DOCUMENT.write_text(render(lags, live))


def render(lags: Sequence[Result], live: Sequence[LiveResult]) -> str:
    """Return the document."""
    rows = by_kind(lags)
    parts = [HEAD, _missing(lags, live), HARNESS, _measured(lags), CORRECTIONS_TEXT, _corrections(rows)]
    if _sync(rows):
        parts += ["![Area against K](pictures/learning-staleness.svg)\n", "![Curves](pictures/learning-curves.svg)\n"]
        parts.append(_verdict(rows))
    parts += [OBJECTIVES_TEXT, _objectives(rows), LIVE_TEXT, _measured(live), _live(live)]
    if live:
        parts.append("![Held-out reward over seconds](pictures/learning-seconds.svg)\n")
    return "\n".join(part for part in parts if part)


def by_kind(lags: Iterable[Result]) -> Rows:
    """Return results by (objective, correction, K, M) and seed."""
    found: dict[tuple[str, str, int, int], dict[int, Result]] = defaultdict(dict)
    for result in lags:
        cell = result.cell
        found[cell.objective, cell.correction, cell.staleness, cell.updates][cell.seed] = result
    return found


def _areas(rows: Rows, objective: str, correction: str, staleness: int, updates: int = 1) -> dict[int, float]:
    return {seed: one.area for seed, one in rows.get((objective, correction, staleness, updates), {}).items()}


def _sync(rows: Rows) -> dict[int, float]:
    return _areas(rows, "grpo", "tis", 0)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _missing(lags: Sequence[Result], live: Sequence[LiveResult]) -> str:
    wanted: set[Cell | LiveCell] = {*cells.corrections(SEEDS), *cells.objectives(SEEDS), *cells.live_cells(LIVE_SEEDS)}
    done: set[Cell | LiveCell] = {result.cell for result in lags} | {result.cell for result in live}
    left = len(wanted - done)
    if not left:
        return f"**All {len(wanted)} cells were run.**\n"
    return f"**{left} of {len(wanted)} cells were not run yet; cells and differences without a figure say so.**\n"


def _measured(results: Sequence[Result | LiveResult]) -> str:
    machines = sorted({result.machine for result in results})
    if not results:
        return "Not run yet.\n"
    commits = ", ".join(sorted({result.commit for result in results}))
    first = fmean(result.heldout[0][1] for result in results)
    last = [result.heldout[-1][1] for result in results]
    return (
        f"{len(results)} runs, on {'; '.join(machines)}, at {commits}. The held-out reward starts at {first:.2f} and "
        f"ends between {min(last):.2f} and {max(last):.2f}.\n"
    )


def _corrections(rows: Rows) -> str:
    sync = _sync(rows)
    if not sync:
        return ""
    body = [[k, *(_cell(paired(_areas(rows, "grpo", name, k), sync)) for name in CORRECTIONS)] for k in STALENESS]
    head = f"Area of `sync` (K = 0): {fmean(sync.values()):.3f}, {len(sync)} seed(s). Differences from it:\n\n"
    return head + _table(["K", *CORRECTIONS], body)


def _cell(difference: Difference) -> str:
    seeds = f" ({difference.pairs})" if difference.pairs else ""
    return f"**{difference}**{seeds}" if difference.is_shown else f"{difference}{seeds}"


def _verdict(rows: Rows) -> str:
    """Say for each K which corrections differ from none, and whether K <= 2 equals sync."""
    lines = ["In words, with the number of seeds in parentheses above, and bold where a difference is shown:\n"]
    for k in STALENESS:
        none = _areas(rows, "grpo", "none", k)
        against = {name: paired(_areas(rows, "grpo", name, k), none) for name in CORRECTIONS if name != "none"}
        is_judged = any(found.pairs > 1 for found in against.values())
        lines.append(f"- K = {k}, against no correction: {_words(against) if is_judged else 'fewer than two seeds'}.")
    for k in (1, 2):
        against = {name: paired(_areas(rows, "grpo", name, k), _sync(rows)) for name in CORRECTIONS}
        judged = [name for name, found in against.items() if found.pairs > 1]
        apart = [name for name in judged if against[name].is_shown]
        if judged:
            same = ", ".join(name for name in judged if name not in apart) or "nothing"
            more = f"; {', '.join(apart)} differ" if apart else ""
            lines.append(f"- K = {k} equals `sync` within 2 standard errors with {same}{more}.")
    found = {k: paired(_areas(rows, "grpo", "icepop", k), _areas(rows, "grpo", "tis", k)) for k in STALENESS}
    if all(difference.pairs > 1 for difference in found.values()):
        said = ", ".join(f"{difference} (K = {k})" for k, difference in found.items())
        rule = "the default, which would change for one that is better at every K"
        lines.append(f"- icepop against tis, {rule}: {said}.")
    return "\n".join(lines) + "\n"


def _words(against: Mapping[str, Difference]) -> str:
    said = []
    for name, found in against.items():
        if found.pairs < 2:
            verdict = "fewer than two seeds"
        elif not found.is_shown:
            verdict = f"no difference shown ({found})"
        else:
            verdict = f"{'helps' if found.mean > 0 else 'hurts'} ({found})"
        said.append(f"{name}: {verdict}")
    return "; ".join(said)


def _objectives(rows: Rows) -> str:
    body = []
    for objective in OBJECTIVES:
        correction = "tis" if objective == "grpo" else PRESET
        for updates in (1, 4):
            base = _areas(rows, objective, correction, 0, updates)
            found = [_cell(paired(_areas(rows, objective, correction, k, updates), base)) for k in (2, 8)]
            body.append(
                [objective, updates, f"{fmean(base.values()):.3f} ({len(base)})" if base else "not run", *found]
            )
    return _table(["objective", "M", "area at K = 0", "K = 2", "K = 8"], body)


def _live(live: Sequence[LiveResult]) -> str:
    if not live:
        return ""
    named = _by_name(live)
    sync = named.get("sync", {})
    body = []
    for name, runs in named.items():
        steps, seconds = (
            {seed: area(run, seconds=per_second, until=_horizon(live, seed)) for seed, run in runs.items()}
            for per_second in (False, True)
        )
        base_steps, base_seconds = (
            {seed: area(run, seconds=per_second, until=_horizon(live, seed)) for seed, run in sync.items()}
            for per_second in (False, True)
        )
        length = fmean(run.published[-1] / (len(run.staleness) - 1) for run in runs.values())
        last = fmean(run.heldout[-1][1] for run in runs.values())
        stale = fmean(fmean(run.staleness) for run in runs.values())
        differences = [_cell(paired(steps, base_steps)), _cell(paired(seconds, base_seconds))]
        body.append([name, len(runs), f"{length:.2f} s", f"{stale:.2f}", f"{last:.3f}", *differences])
    columns = ["run", "seeds", "step", "mean staleness", "held out, last", "area over steps", "area over seconds"]
    return _table(columns, body)


def _by_name(live: Sequence[LiveResult]) -> dict[str, dict[int, LiveResult]]:
    found: dict[str, dict[int, LiveResult]] = defaultdict(dict)
    for result in live:
        cell = result.cell
        found[cell.strategy if cell.strategy != "dora" else f"dora, K = {cell.staleness}"][cell.seed] = result
    return found


def _horizon(live: Sequence[LiveResult], seed: int) -> float:
    """Return when the fastest run of a seed ended, in seconds."""
    return min(result.published[-1] for result in live if result.cell.seed == seed)


def area(run: LiveResult, *, seconds: bool, until: float) -> float:
    """Return the mean held-out reward over all steps, or over the first `until` seconds."""
    points = [(run.published[v] if seconds else float(v), mean) for v, mean in run.heldout]
    end = until if seconds else points[-1][0]
    total = 0.0
    for (a, low), (b, high) in pairwise([*points, (max(end, points[-1][0]), points[-1][1])]):
        stop = min(b, end)
        if stop > a:
            total += (stop - a) * (low + (low + (high - low) * (stop - a) / (b - a))) / 2
    return total / end


# ---- pictures -------------------------------------------------------------------------------------------------------


def pictures(lags: Sequence[Result], live: Sequence[LiveResult]) -> dict[str, str]:
    """Return the pictures by file name."""
    rows = by_kind(lags)
    drawn = {}
    if _sync(rows):
        drawn["learning-staleness.svg"] = _draw_staleness(rows)
        drawn["learning-curves.svg"] = _draw_curves(rows)
    if live:
        drawn["learning-seconds.svg"] = _draw_seconds(live)
    return drawn


def _draw_staleness(rows: Rows) -> str:
    places = [0, *STALENESS]
    series = {
        name: [
            (float(places.index(k)), fmean(found.values()))
            for k in places
            if (found := _areas(rows, "grpo", name if k else "tis", k))
        ]
        for name in CORRECTIONS
    }
    ticks = [(float(i), str(k)) for i, k in enumerate(places)]
    return _chart(series, title="Area under the held-out curve, mean of all seeds", x_label="K", x_ticks=ticks)


def _draw_curves(rows: Rows) -> str:
    kinds = {"sync": ("tis", 0), **{f"K = 16, {name}": (name, 16) for name in CORRECTIONS}}
    series = {
        label: _mean_curve(list(rows["grpo", name, k, 1].values()))
        for label, (name, k) in kinds.items()
        if ("grpo", name, k, 1) in rows
    }
    return _chart(series, title="Held-out reward, mean of all seeds", x_label="step")


def _mean_curve(results: Sequence[Result]) -> list[svg.Point]:
    return [
        (float(points[0][0]), fmean(mean for _, mean in points))
        for points in zip(*(result.heldout for result in results), strict=True)
    ]


def _draw_seconds(live: Sequence[LiveResult]) -> str:
    first = min(result.cell.seed for result in live)
    series = {
        name: [(run.published[version], mean) for version, mean in run.heldout]
        for name, runs in _by_name(live).items()
        if (run := runs.get(first))
    }
    return _chart(series, title=f"Held-out reward over time, seed {first}", x_label="seconds from the end of step 0")


def _chart(
    series: Mapping[str, Sequence[svg.Point]],
    *,
    title: str,
    x_label: str,
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> str:
    xs = [x for points in series.values() for x, _ in points]
    frame = svg.Frame(min(xs), max(xs), 1.1 * max(y for points in series.values() for _, y in points))
    marked = x_ticks or [(x, f"{x:g}") for x in svg.ticks(min(xs), max(xs))]
    shapes = frame.axes(x_ticks=marked, x_label=x_label, y_label="held-out reward")
    for number, points in enumerate(series.values()):
        shapes += frame.curve(points, stroke=svg.color(number))
    return svg.document([*shapes, *frame.legend(list(series))], title=title, height=frame.height)


def picture_files() -> list[Path]:
    """Return the pictures that are there."""
    return sorted(PICTURES.glob("learning-*.svg"))
