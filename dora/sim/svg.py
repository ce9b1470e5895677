"""A few SVG shapes, enough for the charts of pictures.py without a plotting library.

Units are pixels. The background is white, so that a picture looks the same on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final

#: Colors of versions and series, in turn; adjacent ones are easy to distinguish.
COLORS: Final = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#9c755f")
INK: Final = "#333333"
WIDTH: Final = 1040
LEFT: Final = 80.0
RIGHT: Final = 280.0  #: room for the legend
TOP: Final = 56.0
BOTTOM: Final = 56.0

Point = tuple[float, float]


def color(number: int) -> str:
    """Return the color of a version or a series."""
    return COLORS[number % len(COLORS)]


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, size: int = 12) -> str:
    """Return one line of text; `y` is its baseline."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, *, fill: str, opacity: float = 1.0) -> str:
    """Return a filled rectangle."""
    shade = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{shade}/>'


def line(a: Point, b: Point, *, stroke: str = INK, width: float = 1.0, dashes: str = "") -> str:
    """Return a straight line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"'
    return f'<line {ends} stroke="{stroke}" stroke-width="{width:g}"{dashed}/>'


def document(shapes: Sequence[str], *, title: str, height: float, width: float = WIDTH) -> str:
    """Return the whole picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">'
    )
    return "\n".join(
        [head, rect(0, 0, width, height, fill="white"), text(LEFT, 24, title, size=15), *shapes, "</svg>\n"]
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, about five."""
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart whose y axis starts at 0; converts data to pixels."""

    x_low: float
    x_high: float
    y_high: float
    height: float = 420.0

    def x(self, value: float) -> float:
        """Return the pixels from the left."""
        share = (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the pixels from the top."""
        return self.height - BOTTOM - value / self.y_high * (self.height - TOP - BOTTOM)

    def axes(self, *, x_ticks: Sequence[tuple[float, str]], x_label: str, y_label: str) -> list[str]:
        """Grid, ticks and labels."""
        right, bottom = WIDTH - RIGHT, self.height - BOTTOM
        shapes = []
        for value in ticks(0, self.y_high):
            y = self.y(value)
            shapes.append(line((LEFT, y), (right, y), stroke="#dddddd"))
            shapes.append(text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
        for value, words in x_ticks:
            shapes.append(line((self.x(value), bottom), (self.x(value), bottom + 5)))
            shapes.append(text(self.x(value), bottom + 20, words, anchor="middle"))
        shapes.append(line((LEFT, bottom), (right, bottom)))
        shapes.append(text((LEFT + right) / 2, self.height - 14, x_label, anchor="middle"))
        shapes.append(text(LEFT, TOP - 12, y_label))
        return shapes

    def legend(self, names: Sequence[str]) -> list[str]:
        """Return one line per series, right of the plot."""
        shapes = []
        for i, name in enumerate(names):
            y = TOP + 18 * i
            shapes += [rect(WIDTH - RIGHT + 16, y, 12, 12, fill=color(i)), text(WIDTH - RIGHT + 34, y + 10, name)]
        return shapes

    def band(self, low: Sequence[Point], high: Sequence[Point], *, fill: str) -> str:
        """Return the area between two lines."""
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in [*low, *reversed(high)])
        return f'<polygon points="{corners}" fill="{fill}" fill-opacity="0.15"/>'

    def curve(self, points: Sequence[Point], *, stroke: str, dashes: str = "", is_marked: bool = True) -> list[str]:
        """Return a line through the points, which are marked unless the line is dashed."""
        at = [(self.x(x), self.y(y)) for x, y in points]
        shapes = [line(a, b, stroke=stroke, width=2, dashes=dashes) for a, b in pairwise(at)]
        if is_marked and not dashes:
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{stroke}"/>' for x, y in at]
        return shapes
