"""Tables and pictures of learning in simulated hours, from bench/results/learning/curves.jsonl and plans.jsonl."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final, NamedTuple

from dora.sim import svg
from learning.fleets import CONTROLS, FAST, FAULTS, FLEETS, SETTINGS, STEPS, WHOLE, FleetCurve, PlanFound, Setting
from learning.stats import MIN_SEEDS, Interval, crossing, paired, paired_ratio, smoothed
from learning.text import bold, table, wrapped

#: How the documents call the fleets.
NAMES: Final = {"tail-bound": "tail-bound, 12 GPUs", "paper-128": "128 GPUs", "paper-64": "64 GPUs"}
#: Shares of the way that `sync` goes.
WAYS: Final = (0.5, 0.7, 0.9)
#: The last evaluations, whose mean is the final reward.
LAST: Final = 3
#: Strategies that train on answers of the newest version only: the baselines.
ON_POLICY: Final = (Setting("sync", 0), Setting("periodic", 0))
DRAWN: Final = (
    Setting("sync", 0), Setting("periodic", 0), Setting("one_step_off", 1), Setting("oversample", 0),
    Setting("partial", 3), Setting("dora", 1), Setting("dora", 3), Setting("dora", 8),
)  # fmt: skip
NOT_RUN: Final = "Not run yet.\n"
#: Points of a picture's curves.
GRID: Final = 60

Curves = Mapping[Setting, Mapping[int, FleetCurve]]  # by seed
Points = list[tuple[float, float]]


class Way(NamedTuple):
    """Where `sync` begins and ends, as means of all seeds."""

    first: float
    last: float

    def level(self, share: float) -> float:
        """Return the reward after a share of the way."""
        return self.first + share * (self.last - self.first)


def curves_of(curves: Iterable[FleetCurve], fleet: str, *, control: str = "", every: int = 0) -> Curves:
    """Return the curves of a fleet by setting and seed; `every`: as in a cell."""
    found: dict[Setting, dict[int, FleetCurve]] = defaultdict(dict)
    for curve in curves:
        cell = curve.cell
        if (cell.fleet, cell.control, cell.every) == (fleet, control, every):
            found[Setting(cell.strategy, cell.k)][cell.seed] = curve
    return {setting: found[setting] for setting in SETTINGS if setting in found}


def name(setting: Setting) -> str:
    """Return what tables and pictures call a setting."""
    return f"{setting.strategy}, K = {setting.k}" if setting.k else setting.strategy


def final(curve: FleetCurve) -> float:
    """Return the final held-out reward."""
    return fmean(mean for _, mean in curve.heldout[-LAST:])


def final_hardest(curve: FleetCurve) -> float:
    """Return the final held-out reward of the hardest prompts."""
    return fmean(mean for _, mean in curve.hardest[-LAST:])


def way(sync: Mapping[int, FleetCurve]) -> Way:
    """Return the way that `sync` goes."""
    return Way(fmean(curve.heldout[0][1] for curve in sync.values()), fmean(map(final, sync.values())))


def over_steps(curve: FleetCurve) -> Points:
    """Return the held-out reward over versions; each point is averaged with its neighbours."""
    means = smoothed([mean for _, mean in curve.heldout])
    return [(float(version), mean) for (version, _), mean in zip(curve.heldout, means, strict=True)]


def over_seconds(curve: FleetCurve) -> Points:
    """Return the same over virtual seconds."""
    return [(curve.published_s[round(version)], mean) for version, mean in over_steps(curve)]


def seconds_to(curves: Mapping[int, FleetCurve], level: float) -> dict[int, float]:
    """Return by seed when a reward is reached; infinity if it is not."""
    return {seed: crossing(over_seconds(curve), level) for seed, curve in curves.items()}


def steps_to(curves: Mapping[int, FleetCurve], level: float) -> dict[int, float]:
    """Return by seed after how many steps a reward is reached."""
    return {seed: crossing(over_steps(curve), level) for seed, curve in curves.items()}


def baseline(found: Curves, level: float) -> Setting:
    """Return the on-policy strategy that reaches a reward first, by the mean of its seeds."""
    there = [setting for setting in ON_POLICY if setting in found]
    return min(there, key=lambda setting: fmean(seconds_to(found[setting], level).values()))


def speedup(found: Curves, setting: Setting, level: float) -> Interval:
    """Return the logarithm of how much sooner a setting reaches a reward than the best on-policy strategy; without
    seeds if one of them does not reach it."""
    base, mine = seconds_to(found[baseline(found, level)], level), seconds_to(found[setting], level)
    if not all(map(math.isfinite, [*base.values(), *mine.values()])):
        return Interval(math.nan, math.nan, 0)
    return paired_ratio(base, mine)


def main_table(found: Curves, plans: Mapping[Setting, PlanFound]) -> str:
    """Return the table of a fleet."""
    sync = found[SETTINGS[0]]
    gone = way(sync)
    levels = [gone.level(share) for share in WAYS]
    head = ["strategy", "seeds", *(f"hours to {share:.0%}" for share in WAYS), "times as soon to 90%"]
    head += ["steps to 90%", "the same at constant step times", "final", "hardest fifth", "staleness"]
    head += ["mixed answers", "groups discarded"]
    base = baseline(found, levels[-1])
    body = []
    for setting, curves in found.items():
        faster = speedup(found, setting, levels[-1])
        finals = final_difference(curves, sync)
        hard = paired(_each(curves, final_hardest), _each(sync, final_hardest))
        steps = fmean(steps_to(curves, levels[-1]).values())
        body.append([
            f"`{setting.strategy}`" + (f", K = {setting.k}" if setting.k else ""),
            len(curves),
            *(_hours(seconds_to(curves, level).values()) for level in levels),
            "1" if setting == base else bold(faster.ratio if faster.count else "not reached", shown=faster.is_shown),
            f"{steps:.0f}" if math.isfinite(steps) else "not reached",
            _constant(setting, base, steps, fmean(steps_to(found[base], levels[-1]).values()), plans),
            f"{fmean(map(final, curves.values())):.3f}{_difference(finals, is_base=curves is sync)}",
            f"{fmean(map(final_hardest, curves.values())):.3f}{_difference(hard, is_base=curves is sync)}",
            f"{fmean(_staleness(curve) for curve in curves.values()):.2f}",
            round(fmean(curve.mixed for curve in curves.values())),
            round(fmean(curve.discarded for curve in curves.values())),
        ])  # fmt: skip
    return table(head, body)


def pace(found: Curves) -> str:
    """Say in how many steps `sync` goes its way."""
    sync = found[SETTINGS[0]]
    half, most = (fmean(steps_to(sync, way(sync).level(share)).values()) for share in (WAYS[0], WAYS[-1]))
    return f"`sync` goes half of its way in {half:.0f} steps and 90 % in {most:.0f}, of {STEPS}.\n"


def plan_table(found: Curves, plans: Mapping[Setting, PlanFound]) -> str:
    """Return the plans of a fleet, and the step times of the curves."""
    body = []
    for setting, curves in found.items():
        plan = plans[setting]
        step_s = fmean(curve.published_s[-1] / (len(curve.published_s) - 1) for curve in curves.values())
        body.append(
            [
                f"`{setting.strategy}`" + (f", K = {setting.k}" if setting.k else ""),
                plan.width,
                plan.rollout_devices,
                plan.slots,
                f"{plan.step_s:.4g}",
                f"{step_s:.4g}",
                round(fmean(curve.filtered for curve in curves.values())),
                f"{fmean(curve.seconds for curve in curves.values()) / 60:.1f}",
            ]
        )
    head = ["strategy", "GPUs a server", "GPUs that roll out", "slots", "planned step s", "step s of the curves"]
    return table([*head, "groups filtered", "CPU minutes a curve"], body)


def parts_of_gain(found: Curves, plans: Mapping[Setting, PlanFound]) -> str:
    """Say what becomes of the ratio of the planned step times when K = 3 needs more steps, and when step times change;
    nothing if a curve does not arrive."""
    level, dora = way(found[SETTINGS[0]]).level(WAYS[-1]), Setting("dora", 3)
    base = baseline(found, level)
    faster = speedup(found, dora, level)
    if not faster.count:
        return ""
    steps, base_steps = (fmean(steps_to(found[one], level).values()) for one in (dora, base))
    planned = plans[base].step_s / plans[dora].step_s
    constant = _constant(dora, base, steps, base_steps, plans)
    words = f"""Planned steps of `dora` with K = 3 are {planned:.2f} times as fast as those of `{base.strategy}`. It
        needs {steps:.1f} of them for {base_steps:.1f}, which leaves a ratio of {constant}. With the steps of the
        curves, whose times change while answers grow and more groups are filtered, it is {math.exp(faster.mean):.2f}.
        """
    return wrapped(words) + "\n"


def batch_control(curves: Sequence[FleetCurve], fleet: str) -> str:
    """Return the curves of which all groups are trained, beside those with the same seeds of which few are."""
    whole, found = curves_of(curves, fleet, every=1), curves_of(curves, fleet)
    if not whole:
        return ""
    part = {setting: {seed: found[setting][seed] for seed in of} for setting, of in whole.items()}
    levels = [way(found[SETTINGS[0]]).level(share) for share in WAYS]
    body = [
        [
            _told(setting, f"seed {curve.cell.seed}"),
            "all" if curve.cell.every == 1 else f"one in {FLEETS[fleet].every}",
            *(_hours([crossing(over_seconds(curve), level)]) for level in levels),
            f"{mean_reward(curve):.3f}",
            f"{final(curve):.3f}",
            f"{final_hardest(curve):.3f}",
            f"{_staleness(curve):.2f}",
            f"{curve.published_s[-1] / (len(curve.published_s) - 1):.4g}",
            f"{curve.seconds / 60:.1f}",
        ]
        for setting, of in whole.items()
        for seed in of
        for curve in (part[setting][seed], of[seed])
    ]
    head = ["curve", "groups trained", *(f"hours to {share:.0%}" for share in WAYS), "mean of all steps", "final"]
    ratios = sorted(
        crossing(over_seconds(curve), levels[-1]) / crossing(over_seconds(part[setting][seed]), levels[-1])
        for setting, of in whole.items()
        for seed, curve in of.items()
    )
    low, high = f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
    words = f"""**Control**: with the whole batch. The 90 % take {low if low == high else f"{low} to {high}"} times the
        hours, so hours compare only between curves of one batch. {_compared(whole, part)}"""
    rows = table([*head, "hardest fifth", "staleness", "step s", "CPU minutes"], body)
    return f"{wrapped(words)}\n\n{rows}"


def _compared(whole: Curves, part: Curves) -> str:
    """Say how K = 3 compares with the baseline, each of which has 90 % of the way of `sync` with its batch to go."""
    if any(setting not in whole for setting in WHOLE):
        return "How the strategies compare with the whole batch was not measured."
    dora = Setting("dora", 3)
    ratios = [
        f"{speedup(found, dora, level).ratio} times as soon as `{baseline(found, level).strategy}`"
        for found in (whole, part)
        for level in [way(found[SETTINGS[0]]).level(WAYS[-1])]
    ]
    seeds = len(whole[dora])
    return f"""There, `dora` with K = 3 goes 90 % of the way that `sync` goes {ratios[0]}; with few groups and the same
        {"seed" if seeds == 1 else "seeds"} {ratios[1]}.{" One seed shows no interval." if seeds == 1 else ""}"""


def _each(curves: Mapping[int, FleetCurve], figure: Callable[[FleetCurve], float]) -> dict[int, float]:
    return {seed: figure(curve) for seed, curve in curves.items()}


def _hours(seconds: Iterable[float]) -> str:
    mean = fmean(seconds)
    return f"{mean / 3600:.2f}" if math.isfinite(mean) else "not reached"


def _difference(found: Interval, *, is_base: bool) -> str:
    return "" if is_base or found.count < 2 else f" ({bold(str(found), shown=found.is_shown)})"


def _staleness(curve: FleetCurve) -> float:
    return sum(age * count for age, count in enumerate(curve.staleness)) / sum(curve.staleness)


def _constant(
    setting: Setting, base: Setting, steps: float, base_steps: float, plans: Mapping[Setting, PlanFound]
) -> str:
    """Return the ratio of steps times the planned step times."""
    if not math.isfinite(steps + base_steps):
        return ""
    return f"{base_steps * plans[base].step_s / (steps * plans[setting].step_s):.2f}"


def sentence(found: Curves) -> str:
    """Say how much sooner K = 3 is there than the best on-policy strategy."""
    level = way(found[SETTINGS[0]]).level(WAYS[-1])
    faster, base = speedup(found, Setting("dora", 3), level), baseline(found, level)
    if faster.count < MIN_SEEDS:
        return ""
    verdict = "times as soon as" if faster.is_shown else "times as soon (not shown) as"
    return f"{faster.ratio} {verdict} `{base.strategy}`"


def final_difference(left: Mapping[int, FleetCurve], right: Mapping[int, FleetCurve]) -> Interval:
    """Return how much the final reward differs."""
    return paired(_each(left, final), _each(right, final))


def staleness_table(curves: Sequence[FleetCurve]) -> str:
    """Return what each K of `dora` gains and risks on each fleet."""
    found = {fleet: curves_of(curves, fleet) for fleet in fleets_in(curves)}
    if not found:
        return NOT_RUN
    body = []
    for setting in SETTINGS:
        if setting.strategy not in ("dora", "periodic"):
            continue
        row: list[object] = [setting.k]
        for of_fleet in found.values():
            sync = of_fleet[SETTINGS[0]]
            runs = of_fleet.get(setting, {})
            faster = speedup(of_fleet, setting, way(sync).level(WAYS[-1])) if runs else Interval(math.nan, math.nan, 0)
            areas = paired(_each(runs, mean_reward), _each(sync, mean_reward))
            times = faster.ratio if faster.count or not runs else "not reached"
            row += [bold(times, shown=faster.is_shown), bold(str(areas), shown=areas.is_shown)]
        body.append(row)
    columns = [f"{NAMES[fleet]}: {what}" for fleet in found for what in ("times as soon to 90%", "mean of all steps")]
    return table(["K", *columns], sorted(body, key=lambda row: int(str(row[0]))))


def fast(curves: Sequence[FleetCurve]) -> str:
    """Say what K = 3 gains over `sync` at another learning rate."""
    found, dora = curves_of(curves, "tail-bound", control=FAST), Setting("dora", 3)
    if SETTINGS[0] not in found or dora not in found:
        return ""
    sync = found[SETTINGS[0]]
    levels = [way(sync).level(share) for share in WAYS]
    faster = [speedup(found, dora, level) for level in levels]
    said = ", ".join(f"{one.ratio} to {share:.0%}" for one, share in zip(faster, WAYS, strict=True))
    change = final_difference(found[dora], sync)
    return (
        f"With {FAST}, K = 3 reaches these shares of the way that many times as soon as `sync`: {said}. The final "
        f"reward differs by {change} ({faster[0].count} seeds).\n"
    )


def controls_table(curves: Sequence[FleetCurve]) -> str:
    """Return how much worse the faults learn than what is right."""
    by_control = {control: curves_of(curves, "tail-bound", control=control) for control in CONTROLS}
    body = []
    for (fault, setting), (right, base) in FAULTS:
        if setting in by_control[fault] and base in by_control[right]:
            row = _worse(by_control[fault][setting], by_control[right][base])
            body.append([_told(setting, fault), _told(base, right), *row])
    if not body:
        return NOT_RUN
    return table(["fault", "against", "seeds", "mean of all steps", "final", "hardest fifth"], body)


def _told(setting: Setting, control: str) -> str:
    """Return what the table of controls calls curves."""
    parts = (f"`{setting.strategy}`", f"K = {setting.k}" if setting.k else "", control)
    return ", ".join(filter(None, parts))


def _worse(runs: Mapping[int, FleetCurve], plain: Mapping[int, FleetCurve]) -> list[object]:
    found = [paired(_each(runs, figure), _each(plain, figure)) for figure in (mean_reward, final, final_hardest)]
    return [found[0].count, *(bold(str(one), shown=one.is_shown) for one in found)]


def mean_reward(curve: FleetCurve) -> float:
    """Return the area under the curve over steps, divided by their number."""
    points = pairwise(curve.heldout)
    return sum((b - a) * (low + high) / 2 for (a, low), (b, high) in points) / curve.heldout[-1][0]


# ---- pictures -------------------------------------------------------------------------------------------------------


def picture(found: Curves, *, title: str, per_hour: bool) -> str:
    """Return the held-out reward over hours or steps: means of all seeds, and their range."""
    drawn = [setting for setting in DRAWN if setting in found]
    lines = {setting: _lines(found[setting], per_hour=per_hour) for setting in drawn}
    ends = [line[-1][0] for of_setting in lines.values() for line in of_setting]
    top = 1.1 * max(y for of_setting in lines.values() for line in of_setting for _, y in line)
    frame = svg.Frame(0.0, max(ends), top)
    marked = [(x, f"{x:g}") for x in svg.ticks(0.0, max(ends))]
    x_label = "simulated hours" if per_hour else "steps"
    shapes = frame.axes(x_ticks=marked, x_label=x_label, y_label="held-out reward")
    for number, setting in enumerate(drawn):
        low, mean, high = _band(lines[setting])
        shapes.append(frame.band(low, high, fill=svg.color(number)))
        shapes += frame.curve(mean, stroke=svg.color(number), is_marked=False)
    return svg.document([*shapes, *frame.legend([name(one) for one in drawn])], title=title, height=frame.height)


def _lines(curves: Mapping[int, FleetCurve], *, per_hour: bool) -> list[Points]:
    if not per_hour:
        return [over_steps(curve) for curve in curves.values()]
    return [[(x / 3600, y) for x, y in over_seconds(curve)] for curve in curves.values()]


def _band(lines: Sequence[Points]) -> tuple[Points, Points, Points]:
    """Return lowest, mean and highest of some lines, up to where the first of them ends."""
    end = min(line[-1][0] for line in lines)
    grid = [end * i / GRID for i in range(GRID + 1)]
    values = [[_at(line, x) for line in lines] for x in grid]
    return (
        [(x, min(ys)) for x, ys in zip(grid, values, strict=True)],
        [(x, fmean(ys)) for x, ys in zip(grid, values, strict=True)],
        [(x, max(ys)) for x, ys in zip(grid, values, strict=True)],
    )


def _at(line: Points, x: float) -> float:
    """Return the height of a line at x."""
    for (a, low), (b, high) in pairwise(line):
        if x <= b:
            return low if b == a else low + (high - low) * max(0.0, x - a) / (b - a)
    return line[-1][1]


def fleets_in(curves: Sequence[FleetCurve]) -> list[str]:
    """Return the fleets with a curve of each strategy."""
    return [fleet for fleet in FLEETS if len(curves_of(curves, fleet)) == len(SETTINGS)]
