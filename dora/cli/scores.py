"""The results of an evaluation as a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dora.app.held_out import Results, SetResult
from dora.cli.output import table
from dora.errors import one_line
from dora.journal.run_folder import RunFolder
from dora.observe.sentence import duration

#: Number of causes of failures that are named for a set.
SHOWN_CAUSES = 5


def summary(found: Results, folder: RunFolder, *, violations: int | None = 0) -> list[str]:
    """Return the lines: a table with a line for each set, failures by cause, and where everything is."""
    lines = [f"evaluation of {_named(found.model)} in {duration(found.seconds)}, seed {found.seed}"]
    lines += (f"  {row}" for row in table([HEAD, *(tuple(_cells(one)) for one in found.sets)]))
    for one in found.sets:
        lines += _notes(one)
    methods = dict.fromkeys(one.interval.method for one in found.sets if one.interval is not None)
    if methods:
        lines.append(f"  95 %: interval of the mean over all prompts of the kind ({', '.join(methods)})")
    if violations is None:
        lines.append(f"  audit: dora audit {folder.root}")
    elif violations:
        lines.append(f"  {violations} VIOLATIONS: see dora audit {folder.root}")
    lines.append(f"  scores: {folder.results}; answers: dora view {folder.root}")
    return list(map(one_line, lines))


def _named(model: str) -> str:
    """Return how a version of a run is given: as RUN@VERSION."""
    version = Path(model)
    number = version.name.removeprefix("v")
    is_version = version.parent.name == "versions" and number.isdecimal()
    return f"{version.parent.parent}@{int(number)}" if is_version else model


HEAD = ("set", "source", "prompts", "mean", "95 %", "pass@k", "failed", "cut", "tokens")


def _cells(one: SetResult) -> Iterator[str]:
    yield from (one.name, one.source, f"{one.prompts:,}")
    yield f"{one.mean:.3f}" if one.mean is not None else "-"
    yield f"{one.interval.low:.3f} to {one.interval.high:.3f}" if one.interval is not None else "-"
    yield ", ".join(f"{k}: {share:.3f}" for k, share in one.pass_at.items()) or "-"
    yield from (f"{sum(one.failed.values()):,}", f"{one.truncated:,}", f"{one.mean_tokens:,.0f}")


def _notes(one: SetResult) -> Iterator[str]:
    if one.skipped:
        yield f"  {one.name}: {one.skipped:,} rows left out: no prompt, or one over task.max_prompt_tokens"
    best = max((reward for rewards in one.rewards for reward in rewards if reward is not None), default=1.0)
    if best < 1.0 and any(reward != best for rewards in one.rewards for reward in rewards):
        yield f"  {one.name}: no answer is right for pass@k: the highest reward is {best:.3g}, and 1 is right"
    shown = list(one.failed.items())[:SHOWN_CAUSES]
    for cause, count in shown:
        yield f"  {one.name}: {count:,} failed: {cause}"
    if (more := sum(one.failed.values()) - sum(count for _, count in shown)) > 0:
        yield f"  {one.name}: {more:,} failed for other reasons"
