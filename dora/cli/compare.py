"""`dora compare`: runs and evaluations side by side, as tables and as one HTML page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import ascii_uppercase

import msgspec

from dora.app.compare import Comparison, HeldOutRow, RunRow, VersionScore
from dora.app.compare import compare as compare_folders
from dora.cli.output import say, table, write_file
from dora.errors import ConfigError
from dora.observe.sentence import duration
from dora.status.assets import assets
from dora.status.report import COMPARISON, report

MAX_RUNS = len(ascii_uppercase)
#: Number of characters of a value.
MAX_VALUE = 40


def compare(folders: Sequence[Path], output: Path) -> None:
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ConfigError(f"dora compare: give 2 to {MAX_RUNS} run folders")
    found = asyncio.run(compare_folders(folders))
    for heading, lines in (
        ("runs", _runs(found)),
        ("settings that differ", _settings(found)),
        ("figures", _figures(found)),
        ("held-out scores, prompt by prompt", _differences(found)),
    ):
        say("", heading, *(f"  {line}" for line in lines))
    html = report(assets(), {"info": b"{}", "comparison": msgspec.json.encode(found)}, index=COMPARISON)
    write_file(output, lambda file: file.write(html))
    say("", f"{output}: the curves, {len(html) / 1e6:.1f} MB")


def _runs(found: Comparison) -> Iterator[str]:
    for letter, run in zip(ascii_uppercase, found.runs, strict=False):
        yield f"{letter}  {run.run_id} ({run.phase}): {run.folder}"


def _settings(found: Comparison) -> Iterator[str]:
    if not found.settings:
        yield "none"
        return
    shown = [one for one in found.settings if one.alters_experiment]
    rows = [[one.key, *map(_cut, one.values)] for one in shown]
    yield from table([["", *_letters(found)], *rows]) if rows else ["none that alters the experiment"]
    if others := [one.key for one in found.settings if not one.alters_experiment]:
        yield f"and, without effect on what is learned: {', '.join(others)}"


def _figures(found: Comparison) -> Iterator[str]:
    def row(name: str, tell: Callable[[RunRow], str]) -> list[str]:
        return [name, *map(tell, found.runs)]

    rows = [
        row("steps", lambda run: f"{run.steps:,}"),
        row("time", lambda run: duration(run.hours * 3600)),
        row("tokens sampled", lambda run: f"{run.num_tokens:,}"),
        row("tokens trained per second", lambda run: f"{run.trained_tokens_per_s:,.0f}" if run.steps else "-"),
        row("staleness, mean", lambda run: "-" if run.staleness is None else f"{run.staleness:.2f}"),
        row("trainer idle", lambda run: "-" if run.idle_share is None else f"{run.idle_share:.0%}"),
    ]
    for name in dict.fromkeys(one.name for run in found.runs for one in run.held_out):
        own = [next((one for one in run.held_out if one.name == name), None) for run in found.runs]
        rows.append([f"{name}: final", *(_score(one, lambda row: row.final) for one in own)])
        rows.append([f"{name}: best", *(_score(one, lambda row: row.best) for one in own)])
    yield from table([["", *_letters(found)], *rows])


def _differences(found: Comparison) -> Iterator[str]:
    for one in found.differences:
        letter, (first, other) = ascii_uppercase[one.run], one.versions
        yield (
            f"{one.name}: {letter} (v{other}) - A (v{first}) = {one.mean:+.3f}, 95 % {one.interval.low:+.3f} to "
            f"{one.interval.high:+.3f} ({one.interval.method}, {one.prompts:,} prompts)"
        )
    yield from found.not_paired


def _letters(found: Comparison) -> list[str]:
    return [*ascii_uppercase[: len(found.runs)]]


def _score(row: HeldOutRow | None, chosen: Callable[[HeldOutRow], VersionScore]) -> str:
    return "-" if row is None else f"{chosen(row).mean:.3f} (v{chosen(row).version})"


def _cut(value: str) -> str:
    """Leave out the middle of a long value: paths often differ at their end."""
    return value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE // 4]}…{value[-(3 * MAX_VALUE // 4 - 1) :]}"
