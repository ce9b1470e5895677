"""docs/LEARNING.md and its pictures, as a function of the results in bench/results/learning alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from learning import cells, fleet_tables, live_tables, sweep_tables
from learning.cells import LiveResult, Result
from learning.fleets import (
    CALIBRATION,
    CURVES,
    FLEETS,
    PLANS,
    SAMPLED,
    SEEDS,
    SETTINGS,
    FleetCurve,
    PlanFound,
    Setting,
    curve_cells,
    stored_calibration,
)  # fmt: skip
from learning.text import wrapped

DOCUMENT: Final = cells.ROOT / "docs" / "LEARNING.md"
README: Final = cells.ROOT / "README.md"
PICTURES: Final = cells.ROOT / "docs" / "pictures"
#: Around the part of README.md that is written here.
MARKS: Final = ("<!-- learning -->\n", "<!-- end learning -->\n")
#: The fleet that README.md shows is the first of these whose curves have all seeds, or the last.
SHOWN: Final = ("paper-128", "tail-bound")


class Results(NamedTuple):
    """Everything that was measured."""

    sweep: list[Result]
    plans: list[PlanFound]
    curves: list[FleetCurve]
    live: list[LiveResult]


HEAD: Final = """# Learning

What do I gain by staleness, what do I risk, and which K do I take? Everything below is rendered by `python
bench/learning render` from `bench/results/learning`, and nothing is claimed beyond these figures. They are of a
policy of 0.5 M parameters on sums, with rewards of 0 and 1. They show how strategies and objectives behave there.
They do not show how large the effects are for a large model.

**Intervals** are 95 % intervals of Student's t over three seeds or more, of paired values: runs with the same seed
have the same prompts and the same held-out set. **Bold** is what an interval shows: a difference that is not 0, or a
ratio that is not 1. Among this many comparisons, a few are expected by chance.
"""

GAIN: Final = """## What do I gain?

Held-out reward over **simulated hours**. `python bench/learning fleets` simulates a job on a fleet, as
[SIMULATION.md](SIMULATION.md#learning-in-simulated-time) describes, with the decision core of a run: real time is not
involved. But a real policy gives the answers, under the weights of the version with which the simulation tags them;
its rewards decide which groups are filtered; and the trainer's own step makes each version from the very groups that
the simulated step has. The task is `launch/configs/learning-tail.toml`: sums of 2 to 52 numbers, three in ten
of them of 14 or more, whose worked answers differ thirtyfold in length.

**Each strategy has its own best plan** (width of servers, split, slots, micro-batch): what `dora plan` finds for the
answers of a policy that `sync` trains. Each real token stands for a constant number of simulated ones, chosen so that
the mean answer of the trained policy is as long as that of the job. On the fleets of the paper one group in 16 is
sampled and trained, in the same steps and updates; the others borrow lengths and rewards of these. "Hours to 50 %" is
when a curve, each point averaged with its neighbours, first reaches half of the way that `sync` goes in 60 steps, as
the mean of all seeds. "Times as soon" is against the faster of `sync` and `periodic`, the strategies that train on
answers of the newest version only. "At constant step times" is the same ratio with the step times of the plans, which
do not change while the answers grow. The hardest fifth are the prompts with most numbers. In parentheses are
differences from `sync`.
"""

WHICH: Final = """## Which K do I take?

The smallest that is fast enough. K = 0 is `periodic`. "Mean of all steps" is the mean held-out reward of a run less
that of `sync`: what each step taught less, or more, whatever it took. A larger K pays as long as the trainer waits
for answers ([choose K and a split](how-to/choose-k-and-split.md)).
"""

RISK: Final = """## What do I risk?

### Controls

Faults that must show, or the task could not tell good from bad. "No correction" is `objective.weight = "none"`. In
"C3 broken by 24" answers are sampled under weights that are 24 versions older than their tag, so that neither the
core nor the trainer sees it. Both are compared at eight times the learning rate, where a version differs more from the
next. `oversample` discards the slowest groups of each step, which is what C2 forbids: a third of them, or two thirds
where groups without different rewards are not filtered. With the filter, later steps discard few of the long ones:
most short groups are filtered then, and the step waits for the long ones.
"""

SWEEP: Final = """### Objectives and corrections

`python bench/learning sweep` runs the embedded engine and the trainer in one process (`bench/learning/harness.py`).
Step s trains groups that were sampled under version max(s - K, 0): every group has the full staleness K, while most
are younger in a run. Two tasks: `sums`, of 10 to 24 numbers (`launch/configs/learning-cpu.toml`, 24 steps), and
`tail`, that of the fleets (30 steps). **Area** is the mean held-out reward of a run: the area under the curve over
steps, divided by their number. M is the number of updates per version. A policy that samples no group with different
rewards any more has collapsed; its score stands for all later versions.

`dr_grpo` with `tis` is what a configuration without `[objective]` has; before this sweep it was `dapo` with `tis`.
`gspo`, `cispo` and `dppo` are over k = π/μ, which contains the effect of staleness, so they have no other weight. All
bands and caps are the defaults ([OBJECTIVES.md](OBJECTIVES.md)).

**Learning rates** were tuned without staleness and with a seed that is not used below; all objectives of a task had the
same rates to choose from. The figures are areas, and the chosen ones are bold. The factors are of the rate of the
task's file.
"""

FIRST: Final = """**First round**: all pairs with K = 4, one seed; the area, of that without staleness. The order of
the pairs, which decides about the second round, is by the area over that of the best pair: the mean of both tasks and
both M.
"""

SECOND: Final = """**Second round**: the best pairs, all seeds; the area without staleness, and how much staleness
changes it.
"""

THIRD: Final = """**Third round**: three pairs with `tail` at half of their tuned rates too, because a rate that is the
best without staleness may be too large with it; all seeds.
"""

LIVE: Final = """## The same with processes and a clock

`python bench/learning live`: whole runs of `launch/configs/learning-live.toml` on two CPU cores, with four embedded
servers whose decoding steps take at least 10 ms, as those of a server with a GPU do. Without that floor two busy
cores leave nothing to overlap. Seconds count from when the rank is ready. All strategies have one learning rate, which
was tuned for none of them, and the objective `dapo` with `tis`, which was the default then.
"""

METHOD: Final = """## How this was measured, and what it cannot show

- With K = 0 a curve is that of the lag harness, and with staleness an independent replay with a plain trainer makes
  the same versions from the commands of the core (`tests/learning/test_simulated.py`). The same seed has the same
  digest, whatever else the machine does.
- The policy is trained with the batch of the job, or a sixteenth of it. How staleness and batch interact in large
  models is open.
- A group that is filtered is replaced at once, as in a run. So a step of `sync` may wait for several longest answers,
  one after the other. `oversample`, which asks for more groups at the beginning, is the usual remedy.
- Hours are those of the simulator, whose errors [SIMULATION.md](SIMULATION.md) states.
"""


def measured() -> Results:
    """Return all results."""
    return Results(
        cells.read(cells.SWEEP, Result),
        cells.read(PLANS, PlanFound),
        cells.read(CURVES, FleetCurve),
        cells.read(cells.LIVE, LiveResult),
    )


def write() -> None:
    """Write the document and its pictures."""
    found = measured()
    drawn = pictures(found)
    for path in picture_files():
        if path.name not in drawn:
            path.unlink()
    for name, picture in drawn.items():
        (PICTURES / name).write_text(picture)
    DOCUMENT.write_text(render(found))
    before, after = (README.read_text().partition(mark) for mark in MARKS)
    README.write_text("".join((before[0], MARKS[0], first_screen(found), MARKS[1], after[2])))


def first_screen(found: Results) -> str:
    """Return what README.md says: one picture, and the sentence that it supports."""
    fleet = next((one for one in SHOWN if _seeds(found, one) == SEEDS), SHOWN[-1])
    curves = fleet_tables.curves_of(found.curves, fleet)
    if Setting("dora", 3) not in curves or not (said := fleet_tables.sentence(curves)):
        return "What staleness costs and gains in learning: [docs/LEARNING.md](docs/LEARNING.md).\n"
    sync, dora = curves[Setting("sync", 0)], curves[Setting("dora", 3)]
    final = fleet_tables.final_difference(dora, sync)
    where, file = fleet_tables.NAMES[fleet], f"docs/pictures/learning-hours-{fleet}.svg"
    part = f" of one group in {every}" if (every := FLEETS[fleet].every) > 1 else ""
    task = f"""What that buys, in simulated time on {where}: a policy of 0.5 M parameters learns sums, with real answers
        and real updates{part}, each strategy at its best plan."""
    gain = f"""`dora` with K = 3 goes 90 % of the way of `sync` {said} ({len(dora)} seeds, 95 % interval). Its final
        reward differs from that of `sync` by {final}. How large this is for a large model was not measured:
        [docs/LEARNING.md](docs/LEARNING.md)."""
    picture = f"![Held-out reward over simulated hours, for each strategy]({file})"
    return "\n\n".join((wrapped(task), picture, wrapped(gain))) + "\n"


def _seeds(found: Results, fleet: str) -> int:
    """Return how many seeds all curves of a fleet have."""
    curves = fleet_tables.curves_of(found.curves, fleet)
    return min((len(curves.get(setting, ())) for setting in SETTINGS), default=0)


def render(found: Results) -> str:
    """Return the document."""
    parts = [HEAD, _in_short(found), _missing(found), GAIN, *_fleets(found)]
    parts += [WHICH, fleet_tables.staleness_table(found.curves), RISK]
    parts.append(fleet_tables.controls_table(found.curves))
    parts.append(SWEEP)
    parts += [f"M = {m}:\n\n{sweep_tables.rates_table(found.sweep, updates=m)}" for m in cells.UPDATES]
    parts += [FIRST, sweep_tables.first_table(found.sweep), SECOND]
    parts += [f"M = {m}:\n\n{sweep_tables.second_table(found.sweep, updates=m)}" for m in cells.UPDATES]
    parts += [THIRD, sweep_tables.third_table(found.sweep)]
    parts += [LIVE, live_tables.live_table(found.live)]
    if found.live:
        parts.append("![Held-out reward over seconds](pictures/learning-seconds.svg)\n")
    parts += [METHOD, _tail(), _made_of(found)]
    return "\n".join(part for part in parts if part)


def _in_short(found: Results) -> str:
    """Answer the three questions."""
    gains = [
        f"{fleet_tables.NAMES[fleet]}: {words}"
        for fleet in fleet_tables.fleets_in(found.curves)
        if (words := fleet_tables.sentence(fleet_tables.curves_of(found.curves, fleet)))
    ]
    lines = []
    if gains:
        lines.append(f"- **Gain**: `dora` with K = 3 goes 90 % of the way of `sync`: {'; '.join(gains)}.")
    if any(cell.staleness == 2 for cell in sweep_tables.areas_of(found.sweep)):
        said = sweep_tables.in_words(found.sweep, cells.DEFAULT)
        lines.append(
            f"- **Risk**: at constant staleness, with one update per version, the default objective {said} "
            "([the sweep](#objectives-and-corrections))."
        )
    return "\n".join(lines) + "\n" if lines else ""


def _missing(found: Results) -> str:
    wanted = {*curve_cells()}
    left = len(wanted - {curve.cell for curve in found.curves})
    if not left:
        return f"**All {len(wanted)} curves were made.**\n"
    return f"**{left} of {len(wanted)} curves are still to be made; the tables say how many seeds they have.**\n"


def _fleets(found: Results) -> list[str]:
    parts = []
    for fleet in FLEETS:
        title = f"### {fleet_tables.NAMES[fleet]}\n"
        curves = fleet_tables.curves_of(found.curves, fleet)
        if fleet not in fleet_tables.fleets_in(found.curves):
            parts += [title, fleet_tables.NOT_RUN]
            continue
        plans = {Setting(plan.strategy, plan.k): plan for plan in found.plans if plan.fleet == fleet}
        parts += [title, f"![Held-out reward over hours](pictures/learning-hours-{fleet}.svg)\n"]
        parts += [
            fleet_tables.main_table(curves, plans),
            fleet_tables.parts_of_gain(curves, plans),
            f"![The same over steps](pictures/learning-steps-{fleet}.svg)\n",
            fleet_tables.pace(curves),
        ]
        parts += ["The plans, and what the curves took:\n", fleet_tables.plan_table(curves, plans)]
        if fleet == "tail-bound":
            parts.append(fleet_tables.fast(found.curves))
        parts.append(fleet_tables.batch_control(found.curves, fleet))
    return parts


def _tail() -> str:
    """Say how unlike the answers of a policy are."""
    if not CALIBRATION.exists():
        return ""
    tokens = stored_calibration().tokens
    lengths = sorted(length for group in tokens[-SAMPLED:] for length in group)
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    words = f"""Answers of a small policy have a lighter tail than those of a large one. Plans are made for answers
        of which the last version's have {middle} tokens in the median, and {longest} in the longest of
        {len(lengths):,}."""
    return wrapped(words) + "\n"


def _made_of(found: Results) -> str:
    """Say on what and at which commits the results were made."""
    lines = []
    groups: list[tuple[str, Sequence[Result | FleetCurve | LiveResult]]] = [
        ("sweep", found.sweep), ("fleets", found.curves), ("live", found.live),
    ]  # fmt: skip
    for name, rows in groups:
        if rows:
            machines = "; ".join(sorted({row.machine for row in rows}))
            commits = ", ".join(sorted({row.commit for row in rows}))
            lines.append(f"- {name}: {len(rows)} runs, on {machines}, at {commits}.")
    return "\n".join(lines) + "\n"


def pictures(found: Results) -> dict[str, str]:
    """Return the pictures by file name."""
    drawn = {}
    for fleet in fleet_tables.fleets_in(found.curves):
        curves = fleet_tables.curves_of(found.curves, fleet)
        for kind, per_hour in (("hours", True), ("steps", False)):
            title = f"Held-out reward, {fleet_tables.NAMES[fleet]}: mean and range of the seeds"
            drawn[f"learning-{kind}-{fleet}.svg"] = fleet_tables.picture(curves, title=title, per_hour=per_hour)
    if found.live:
        drawn["learning-seconds.svg"] = live_tables.picture(found.live)
    return drawn


def picture_files() -> list[Path]:
    """Return the pictures that are there."""
    return sorted(PICTURES.glob("learning-*.svg"))
