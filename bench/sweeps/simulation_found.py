"""Stored simulations by case, and the parts that all tables of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Final, NamedTuple

import msgspec
from simulation_cases import CASES, ROOT, SimulationCase

from dora.sim.measure import Result

RESULTS: Final = ROOT / "bench" / "results" / "simulation.jsonl"


class SimulationRow(msgspec.Struct, frozen=True):
    """One simulation."""

    command: str  #: of the case, which is all its seeds
    seed: int
    commit: str
    date: str
    result: Result


class Found(NamedTuple):
    """A case with the results of its seeds."""

    case: SimulationCase
    results: list[Result]

    @property
    def step_s(self) -> float:
        """The median of the seeds."""
        return median(r.step_s for r in self.results)

    def text(self, digits: str, value: Callable[[Result], float]) -> str:
        """The median of a figure and, with several seeds, its range."""
        values = sorted(map(value, self.results))
        spread = f" ({values[0]:{digits}}-{values[-1]:{digits}})" if len(values) > 1 else ""
        return f"{median(values):{digits}}{spread}"

    def mean(self, digits: str, value: Callable[[Result], float]) -> str:
        """The mean of a figure over the seeds."""
        return f"{fmean(map(value, self.results)):z{digits}}"

    def share(self, name: str) -> str:
        """The mean share of the instances' time."""
        return self.mean(".0%", lambda r: r.instance_shares[name])


def recorded() -> list[SimulationRow]:
    """Return what has been simulated so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=SimulationRow) for line in lines]


#: By case; only those with all seeds.
Results = Mapping[SimulationCase, Found]


def rows_of(table: str, found: Results) -> list[Found]:
    """Return the rows of a table."""
    return [found[case] for case in CASES if table in case.tables and case in found]


def setting(one: Found) -> tuple[str, str, str, str]:
    """Return the case, the strategy, K and the split."""
    first = one.results[0]
    split = f"{first.rollout_devices}/{first.devices}"
    return one.case.label, f"`{one.case.strategy}`", str(first.max_staleness), split


def staleness(one: Found) -> str:
    """Return the mean and the largest staleness."""
    return f"{one.mean('.2f', lambda r: r.staleness_mean)}, {max(r.staleness_max for r in one.results)}"


def seconds(value: float) -> str:
    """Return a time with the digits that count."""
    return f"{value:.2g}" if value < 1 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def sync_of(case: SimulationCase, found: Results) -> Found | None:
    """Return `sync` on the same workload."""
    same = (c for c in found if c.strategy == "sync" and (c.file, c.sets) == (case.file, case.sets))
    return next((found[c] for c in same), None)


def table(head: str, lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, or nothing without lines."""
    rows = [head.split(" | "), ["---"] * len(head.split(" | ")), *lines] if lines else []
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def commands(table: str, found: Results) -> str:
    """Return the command of each row, and those of rows that are missing."""
    done = [f"    {one.case.command}" for one in rows_of(table, found)]
    return (f"\n\nEach row is one command:\n\n{chr(10).join(done)}" if done else "") + missing(table, found)


def missing(table: str, found: Results) -> str:
    """Return the commands of rows that are missing."""
    left = [f"    {case.command}" for case in CASES if table in case.tables and case not in found]
    return "\n\nNot simulated yet:\n\n" + "\n".join(left) if left else ""


def key(case: SimulationCase) -> tuple[object, ...]:
    """Return what a case simulates, but for its split and its steps."""
    return case.file, case.strategy, case.k, case.sets, case.rules
