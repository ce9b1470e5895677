"""The rows of metrics.jsonl that an earlier controller wrote, or was about to write, and that a crash has lost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dora.app.resume import Recorded
from dora.controller.recorder import read_rows


def lost_rows(metrics: Path, recorded: Recorded, *, again_from: int) -> str:
    """Say which rows are lost for good; "" if none. Steps from `again_from` on get a row when trained again."""
    rows = [(row["kind"], row.get("step"), row.get("version")) for row in read_rows(metrics)]
    steps = {step for kind, step, _ in rows if kind == "step"}
    scored = {version for kind, _, version in rows if kind in ("evaluation", "evaluation_skipped")}
    lost_steps = [step for step in range(min(again_from, recorded.state.feed.trained)) if step not in steps]
    lost_scores = [version for version in sorted(recorded.evaluated) if version not in scored]
    found = [f"steps {ranges(step + 1 for step in lost_steps)}"] if lost_steps else []
    found += [f"evaluations of versions {ranges(lost_scores)}"] if lost_scores else []
    return f"{metrics}: a crash has lost the rows of {' and of '.join(found)}" if found else ""


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, consecutive ones as `first-last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
