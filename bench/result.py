"""The result of a benchmark, and bench/README.md as a function of all results.

Invariant: a script measures figures and ratios and sets the bars; only this module decides whether a bar is reached,
and every figure in README.md comes from `results/*.json`. The table of what only a GPU can show is that of
`on_gpu.parts`.

A script may print anything; the last line of its stdout is its result:

    from result import Report, parser

    def main() -> None:
        options = parser(__doc__).parse_args()  # --full; else short
        report = Report(__doc__, full=options.full, sizes="1,000 streams of 4,096 tokens")
        ...
        report.row("client path", rate, "tokens/s", against="bare reader", ratio=rate / bare, bar="ratio >= 0.5")
        report.row("lag p99", lag_ms, "ms", bar="figure <= 50")
        report.skip("httpx client", "httpx is not installed")
        report.print()

The first line of the script's docstring is the title of its result; a bar is `ratio|figure >=|<= number`.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
from on_gpu.parts import MARK, PARTS

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"

PREAMBLE = """# Benchmarks

Performance lives here, never in a timed test. `python bench/run` measures all that needs no GPU, and writes this file
from `results/*.json` alone. It takes about half an hour on two idle cores, more on a slower machine or beside other
work, and shows what each script took. Names choose scripts, `--full` takes larger sizes and hours, and `--render` only
writes this file. Each script's docstring says what it does, in which sizes, and what ceiling it is compared with. A
ratio is of one run: machines are shared, so figures move with the load while ratios hold; load is that of one minute,
before and after. Whole runs are in [BY-HAND.md](BY-HAND.md).
"""


class Row(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a result."""

    what: str
    figure: float | None  # None: not measured, `against` says why
    unit: str = ""
    against: str = ""  # what `ratio` compares with
    ratio: float | None = None
    bar: str = ""  # `ratio >= 0.7`, `figure <= 50`; empty: reported without a bar

    def __post_init__(self) -> None:
        if self.bar:
            _parse(self.bar)

    @property
    def reached(self) -> bool | None:
        """Whether the bar is reached; None without a bar or a figure."""
        if not self.bar or self.figure is None:
            return None
        of, sign, limit = _parse(self.bar)
        value = self.ratio if of == "ratio" else self.figure
        assert value is not None, f"{self.what}: a bar on a ratio that was not given"
        return value >= limit if sign == ">=" else value <= limit


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run of a script found."""

    name: str
    title: str
    profile: str
    sizes: str
    hardware: str
    commit: str  # `+` at its end: with changes of the working tree
    date: str
    seconds: float
    load: tuple[float, float]  # of one minute, before and after
    rows: list[Row]

    @property
    def is_measured(self) -> bool:
        return any(row.figure is not None for row in self.rows)


class Report:
    """Collects the rows of one run; notes the load when made and when printed."""

    def __init__(self, doc: str | None, *, full: bool, sizes: str, name: str = "") -> None:
        """`name`: of the result; empty: that of the script."""
        self.accelerator = ""  #: name and memory of the GPU that is measured
        self._name = name or Path(sys.argv[0]).stem
        self._title = (doc or "").partition("\n")[0]
        self._profile = "full" if full else "short"
        self._sizes = sizes
        self._load = os.getloadavg()[0]
        self._begun = time.monotonic()
        self.rows: list[Row] = []

    def row(
        self, what: str, figure: float, unit: str, *, against: str = "", ratio: float | None = None, bar: str = ""
    ) -> None:
        """Add a row."""
        self.add(Row(what, figure, unit, against, ratio, bar))

    def skip(self, what: str, reason: str) -> None:
        """Add a row that could not be measured here."""
        self.add(Row(what, None, against=reason))

    def add(self, row: Row) -> None:
        """Add a row, and show it at once: a script takes a while."""
        self.rows.append(row)
        print("  " + " | ".join(cell for cell in _cells(row) if cell), flush=True)

    def result(self) -> Result:
        """Everything up to now."""
        return Result(
            name=self._name,
            title=self._title,
            profile=self._profile,
            sizes=self._sizes,
            hardware=", ".join(filter(None, [self.accelerator, hardware()])),
            commit=commit(),
            date=today(),
            seconds=round(time.monotonic() - self._begun, 1),
            load=(round(self._load, 1), round(os.getloadavg()[0], 1)),
            rows=self.rows,
        )

    def print(self) -> None:
        """Print the result, the last line of the script."""
        print(msgspec.json.encode(self.result()).decode(), flush=True)


def keep(path: Path, result: Result) -> None:
    """Write a file of `results/`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that every script has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--full", action="store_true", help="larger sizes and more rounds; minutes")
    return made


def hardware() -> str:
    """Processor, cores that this process may use, memory, interpreter."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # another system, or a processor without a name
        model = platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    return f"{model}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def commit() -> str:
    """The commit measured; results and README do not count as changes of it."""
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results", ":!bench/README.md")
    return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def _git(*argv: str) -> str:
    done = subprocess.run(["git", *argv], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


# --- README.md


def load() -> list[Result]:
    """All results, in the order of their names."""
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(RESULTS.glob("*.json"))]


def render(results: Iterable[Result]) -> str:
    """The text of README.md."""
    results = list(results)
    return "\n".join([PREAMBLE, _durations(results), _bars(results), _on_gpu(), *map(_section, results)])


def _durations(results: list[Result]) -> str:
    """What each script took when it was last measured, the slowest first."""
    slowest = sorted(results, key=lambda result: -result.seconds)
    each = (f"{one.name} {one.seconds:,.0f}{' (`--full`)' if one.profile == 'full' else ''}" for one in slowest)
    return (
        f"The last measurement of each took, in seconds, on machines as idle as its section says: {', '.join(each)}.\n"
    )


def _bars(results: list[Result]) -> str:
    held = [(result, row) for result in results for row in result.rows if row.reached is not None]
    reached = sum(row.reached is True for _, row in held)
    rows = [[f"[{result.name}](#{result.name})", *_judged(row)] for result, row in held]
    return f"{reached} of {len(held)} bars are reached:\n\n" + _table(["script", "what", "measured", "bar", ""], rows)


def _on_gpu() -> str:
    """Which part of gpu.py settles which statement of the documents."""
    rows = [
        [f"{statement.words} ...", statement.file, f"`{part.name}`"]
        for part in PARTS.values()
        for statement in part.settles
    ]
    return (
        "## On a GPU\n\n`python bench/gpu.py` measures what only a GPU can show, in parts of at most 8 minutes "
        "(`--list`; no network). A part that has run there has a section below. These statements are still "
        f"{MARK}:\n\n" + _table(["statement", "file", "settled by"], rows)
    )


def _section(result: Result) -> str:
    before, after = result.load
    rows = [_cells(row) for row in result.rows]
    return (
        f"## {result.name}\n\n{result.title} {result.sizes}.\n"
        f"({result.commit}, {result.date}, {result.profile} profile, {result.seconds:.0f} s, load {before:g} to "
        f"{after:g}; {result.hardware})\n\n" + _table(["what", "figure", "against", "ratio", "bar"], rows)
    )


def _cells(row: Row) -> list[str]:
    if row.figure is None:
        return [row.what, "not measured", row.against, "", ""]
    ratio = "" if row.ratio is None else number(row.ratio)
    return [row.what, f"{number(row.figure)} {row.unit}".strip(), row.against, ratio, " ".join(_judged(row)[2:])]


def _judged(row: Row) -> list[str]:
    """What, the value that is held to the bar, the bar, and whether it is reached."""
    if row.reached is None or row.figure is None:
        return [row.what, "", "", ""]
    of, sign, limit = _parse(row.bar)
    unit = f"of {row.against}" if of == "ratio" else row.unit
    value = row.ratio if of == "ratio" else row.figure
    assert value is not None
    bar = f"{'≥' if sign == '>=' else '≤'} {limit:,g}"
    return [row.what, f"{number(value)} {unit}".strip(), bar, "reached" if row.reached else "**missed**"]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def number(value: float) -> str:
    """Three digits that count: 0.0123, 1.23, 12.3, 123, 220,000."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def _parse(bar: str) -> tuple[str, str, float]:
    of, sign, limit = bar.split()
    if of not in ("ratio", "figure") or sign not in (">=", "<="):
        raise ValueError(f"a bar is `ratio|figure >=|<= number`, not `{bar}`")
    return of, sign, float(limit)
