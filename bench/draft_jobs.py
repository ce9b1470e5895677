"""Whole jobs with drafts of the embedded engine, and without.

Run: python bench/draft_jobs.py [--full]. The default job, and steps of launch/configs/tools-cpu.toml: seconds from the
first admission to the last event, and CPU seconds of all processes from start to end, which other work on the machine
hardly changes. Ceiling: the same job without drafts, taking turns; ratios are medians of five turns, one in the short
profile.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from default_job import run_dora
from result import Report, parser

from dora.core.commands import AdmitGroup
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder

TURNS = {False: 1, True: 5}
DRAFT_TOKENS = 4
JOBS = {"default job": (), "16 steps of the tool job": ("launch/configs/tools-cpu.toml", "--set", "run.steps=16")}


@dataclass(frozen=True)
class Seconds:
    wall: float  # from the first admission to the last event
    cpu: float  # of all processes of the run


def compare(report: Report, *, turns: int) -> None:
    for job, arguments in JOBS.items():
        taken: dict[int, list[Seconds]] = {0: [], DRAFT_TOKENS: []}
        for turn in range(turns):
            for length in sorted(taken, reverse=bool(turn % 2)):
                taken[length].append(seconds_of(arguments, draft_tokens=length))
        for clock in ("wall", "cpu"):
            plain, drafting = ([getattr(one, clock) for one in taken[length]] for length in (0, DRAFT_TOKENS))
            ratios = [one / other for one, other in zip(plain, drafting, strict=True)]
            report.row(
                f"{job}, {clock}",
                statistics.median(drafting),
                "s",
                against=f"without drafts; ratios {min(ratios):.2f} to {max(ratios):.2f}",
                ratio=statistics.median(ratios),
                bar="ratio >= 0.98",
            )


def seconds_of(arguments: Sequence[str], *, draft_tokens: int) -> Seconds:
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as home:
        settings = (f"run.folder={home}", "status.port=0", f"engine.draft_tokens={draft_tokens}")
        run_dora("run", *arguments, *(word for setting in settings for word in ("--set", setting)))
        [root] = Path(home).iterdir()
        admitted_at, ended_at = None, 0.0
        for event, commands in Journal(RunFolder.open(root).journal):
            ended_at = event.at
            if admitted_at is None and any(isinstance(command, AdmitGroup) for command in commands):
                admitted_at = event.at
    assert admitted_at is not None, "nothing was admitted"
    return Seconds(ended_at - admitted_at, cpu_seconds() - before)


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = parser(__doc__).parse_args()
    turns = TURNS[options.full]
    report = Report(__doc__, full=options.full, sizes=f"drafts of up to {DRAFT_TOKENS} tokens, {turns} turns")
    compare(report, turns=turns)
    report.print()


if __name__ == "__main__":
    main()
