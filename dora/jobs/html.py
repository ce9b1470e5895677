"""What a notebook shows of a run: its sentence and small curves. Invariant: text of a run is escaped, and there are no
scripts and no addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any, Final

Point = tuple[float, float]

_WIDTH: Final = 220
_HEIGHT: Final = 56


def picture(sentence: str, *, folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML. `rows`: of metrics.jsonl."""
    steps = [row for row in rows if row.get("kind") == "step"]
    scores: dict[str, list[Point]] = {}
    for row in rows:
        if row.get("kind") == "evaluation":
            scores.setdefault(str(row.get("name")), []).extend(_points([row], x="version", y="mean"))
    curves = {
        "reward": _points(steps, x="step", y="reward_all_mean"),
        **{f"held-out: {name}": points for name, points in scores.items()},
        "tokens per answer": _points(steps, x="step", y="response_len_mean"),
    }
    drawn = "".join(_curve(title, points) for title, points in curves.items() if points)
    return f"<div><p>{escape(sentence)}</p>{drawn}<p><code>{escape(str(folder))}</code></p></div>"


def _points(rows: Sequence[Mapping[str, Any]], *, x: str, y: str) -> list[Point]:
    return [(row[x], row[y]) for row in rows if _is_number(row.get(x)) and _is_number(row.get(y))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and isfinite(value)


def _curve(title: str, points: Sequence[Point]) -> str:
    """Draw one curve with its title and its last value, scaled to its own range."""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{4 + across * (_WIDTH - 8):.1f},{_HEIGHT - 4 - up * (_HEIGHT - 8):.1f}"

    line = " ".join(place(x, y) for x, y in points)
    end = place(*points[-1]).split(",")
    return (
        '<figure style="display:inline-block;margin:0 1em 0 0">'
        f"<figcaption>{escape(title)} {points[-1][1]:.3g}</figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" fill="none" stroke="currentColor">'
        f'<polyline points="{line}"/><circle cx="{end[0]}" cy="{end[1]}" r="2"/></svg></figure>'
    )
