"""Pictures of simulations as SVG: the timeline of instances, staleness, step time against K, scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dora.sim import svg
from dora.sim.report import ADAPTERS, ReportRow, title_of
from dora.sim.sweep import Case
from dora.sim.trace import Period, Trace, trace
from dora.sim.workload import Workload

#: Maximum number of instances to draw; of a larger fleet, an evenly spaced sample is drawn.
MAX_ROWS: Final = 64
ROWS_HEIGHT: Final = 480.0  #: pixels of all instances together
TRAINER_HEIGHT: Final = 16.0
#: Minimum distance, in pixels, between two labels of versions.
LABEL_WIDTH: Final = 28.0
#: Opacity of the version's color where an instance holds the version and decodes nothing.
HELD: Final = 0.25
KEY: Final = (
    "full color: decodes (trainer: trains) under that version; pale: holds it, but is empty; "
    "white: push, down or idle; dashed: publication"
)


def draw(rows: Sequence[ReportRow], cases: Iterable[Case]) -> dict[str, str]:
    """Return pictures by name: the charts for which the sweep has points, and a timeline of each setting (a short job
    with its first seed)."""
    drawn = {"staleness": staleness(rows), "step-time": step_time(rows)}
    if len({row.devices for row in rows}) > 1:
        drawn["scaling"] = scaling(rows)
    seeds: dict[Workload, int] = {}
    for workload, seed in cases:
        seeds.setdefault(workload, seed)
    for workload, seed in seeds.items():
        job, fleet = workload.job, workload.fleet
        k, split = workload.rules.max_staleness, f"{fleet.devices if workload.is_shared else fleet.rollout_devices}"
        traced, begin, end = trace(workload, seed=seed)
        without = f" without {', '.join(job.without)}" if job.without else ""
        ruled = f", rules of {job.rules}{without}" if without or job.rules != "dora" else ""
        title = f"{job.strategy}{ADAPTERS[workload.adapters.use]}, K = {k}, {split} of {fleet.devices} devices roll out"
        parts = [job.strategy, *([workload.adapters.use] if workload.adapters.use != "none" else []), f"k{k}"]
        parts += [*([job.rules] if ruled else []), *(f"no_{switch}" for switch in job.without)]
        name = "-".join(["timeline", *parts, f"{split}of{fleet.devices}"])
        title += ruled
        drawn[name] = timeline(traced, title=title, begin=begin, end=end)
    return drawn


def timeline(trace: Trace, *, title: str, begin: float, end: float) -> str:
    """Draw which version each instance held, when it decoded, and when the trainer worked, from `begin` to `end`."""
    every = math.ceil(len(trace.rows) / MAX_ROWS)
    shown = trace.rows[::every]
    scale = (svg.WIDTH - 24 - svg.LEFT) / (end - begin)
    window = _Window(begin, end, scale)
    top = svg.TOP + 16
    first = top + TRAINER_HEIGHT + 8
    height = min(TRAINER_HEIGHT * len(shown[0]), ROWS_HEIGHT / len(shown))
    bottom = first + len(shown) * height
    shapes = window.bars(trace.trainer, y=top, height=TRAINER_HEIGHT)
    for number, row in enumerate(shown):
        thickness = 0.85 * height / len(row)
        for place, lane in enumerate(row):
            y = first + number * height + place * thickness
            shapes += window.bars(lane.held, y=y, height=thickness, opacity=HELD)
            shapes += window.bars(lane.decoding, y=y, height=thickness)
    labeled = 0.0
    for version, at in enumerate(trace.published):
        if begin <= at < end:
            x = window.x(at)
            shapes.append(svg.line((x, top - 4), (x, bottom), dashes="3 3"))
            if x >= labeled:
                shapes.append(svg.text(x + 2, top - 6, f"v{version}", fill=svg.color(version)))
                labeled = x + LABEL_WIDTH
    for value in svg.ticks(begin, end):
        x = window.x(value)
        shapes += [svg.line((x, bottom), (x, bottom + 5)), svg.text(x, bottom + 20, f"{value:,.0f} s", anchor="middle")]
    shapes.append(svg.text(svg.LEFT - 8, top + 12, "trainer", anchor="end"))
    shapes.append(svg.text(svg.LEFT - 8, first + 12, "instances", anchor="end"))
    if every > 1:
        shapes.append(svg.text(svg.LEFT - 8, first + 28, f"1 of {every}", anchor="end"))
    shapes.append(svg.text(svg.LEFT, bottom + 44, KEY))
    return svg.document(shapes, title=title, height=bottom + 60)


@dataclass(frozen=True, slots=True)
class _Window:
    """The time span that is drawn, and its scale."""

    begin: float
    end: float
    scale: float

    def x(self, at: float) -> float:
        return svg.LEFT + (at - self.begin) * self.scale

    def bars(self, spans: Iterable[Period], *, y: float, height: float, opacity: float = 1.0) -> list[str]:
        """Return bars for the spans inside the window; gaps below a third of a pixel are closed."""
        inside = [s for s in spans if s.end > self.begin and s.begin < self.end]
        shapes = []
        for s in _merged(inside, gap=1 / (3 * self.scale)):
            left, right = self.x(max(s.begin, self.begin)), self.x(min(s.end, self.end))
            shapes.append(svg.rect(left, y, right - left, height, fill=svg.color(s.version), opacity=opacity))
        return shapes


def _merged(spans: Iterable[Period], *, gap: float) -> list[Period]:
    found: list[Period] = []
    for span in spans:
        if found and span.version == found[-1].version and span.begin - found[-1].end < gap:
            found[-1] = Period(found[-1].begin, span.end, span.version)
        else:
            found.append(span)
    return found


def staleness(rows: Sequence[ReportRow]) -> str:
    """Draw the share of the trained groups by staleness, for the fastest split of every strategy and K."""
    rows = _fastest(rows)
    longest = max(len(row.staleness) for row in rows)
    frame = svg.Frame(-0.5, longest - 0.5, 1.0)
    shapes = frame.axes(
        x_ticks=[(i, str(i)) for i in range(longest)],
        x_label="staleness: step - version, when the group was committed",
        y_label="share of trained groups",
    )
    width = 0.8 * (frame.x(1) - frame.x(0)) / len(rows)
    for number, row in enumerate(rows):
        for value, count in enumerate(row.staleness):
            share = count / sum(row.staleness)
            x = frame.x(value - 0.4) + number * width
            shapes.append(svg.rect(x, frame.y(share), width, frame.y(0) - frame.y(share), fill=svg.color(number)))
    names = [f"{_name(row)}, {row.devices} devices: mean {row.staleness_mean:.2f}" for row in rows]
    return svg.document([*shapes, *frame.legend(names)], title="Staleness of what is trained", height=frame.height)


def step_time(rows: Sequence[ReportRow]) -> str:
    """Draw the seconds per step against K, with the limit dashed."""
    fastest = _fastest(rows)
    ks = sorted({row.max_staleness for row in fastest})
    frame = svg.Frame(ks[0] - 0.3, ks[-1] + 0.3, 1.1 * max(row.step_s for row in fastest))
    shapes = frame.axes(
        x_ticks=[(k, str(k)) for k in ks], x_label="K (max_staleness)", y_label="seconds per step (dashed: the limit)"
    )
    series: dict[str, list[ReportRow]] = {}
    for row in sorted(fastest, key=lambda row: row.max_staleness):
        series.setdefault(f"{row.strategy}, {row.devices} devices", []).append(row)
    for number, found in enumerate(series.values()):
        stroke = svg.color(number)
        shapes += frame.curve([(row.max_staleness, row.limit_s) for row in found], stroke=stroke, dashes="5 4")
        shapes += frame.curve([(row.max_staleness, row.step_s) for row in found], stroke=stroke)
    return svg.document([*shapes, *frame.legend(list(series))], title="Step time against K", height=frame.height)


def scaling(rows: Sequence[ReportRow]) -> str:
    """Draw the step time over the limit against the size of the fleet, on a logarithmic axis."""
    fastest = _fastest(rows)
    sizes = sorted({row.devices for row in fastest})
    frame = svg.Frame(math.log2(sizes[0]), math.log2(sizes[-1]), 1.1 * max(row.ratio for row in fastest))
    shapes = frame.axes(
        x_ticks=[(math.log2(n), f"{n:,}") for n in sizes], x_label="devices", y_label="step time over its limit"
    )
    shapes.append(svg.line((svg.LEFT, frame.y(1)), (svg.WIDTH - svg.RIGHT, frame.y(1)), dashes="5 4"))
    series: dict[str, list[ReportRow]] = {}
    for row in sorted(fastest, key=lambda row: row.devices):
        series.setdefault(_name(row), []).append(row)
    for number, found in enumerate(series.values()):
        shapes += frame.curve([(math.log2(row.devices), row.ratio) for row in found], stroke=svg.color(number))
    return svg.document([*shapes, *frame.legend(list(series))], title="Scaling", height=frame.height)


def _fastest(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Return the fastest split of every fleet, strategy with its rules, and K."""
    best: dict[tuple[int, str], ReportRow] = {}
    for row in rows:
        key = (row.devices, _name(row))
        if key not in best or row.step_s < best[key].step_s:
            best[key] = row
    return list(best.values())


def _name(row: ReportRow) -> str:
    return f"{title_of(row)}, K = {row.max_staleness}"
