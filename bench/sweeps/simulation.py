"""The simulations behind docs/SIMULATION.md and docs/SCALE.md, and their tables.

    PYTHONPATH=. python bench/sweeps/simulation.py [TABLE ...]   simulate what is missing, of all or of these tables
    PYTHONPATH=. python bench/sweeps/simulation.py --render      write the tables into both documents, simulate nothing

A case is one `dora simulate` command, with all of its seeds. Every simulation is appended to
bench/results/simulation.jsonl when it ends; what is there is not simulated again. The cases are in
simulation_cases.py, the tables in simulation_tables.py.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "sweeps")]

from result import commit, today  # noqa: E402
from simulation_cases import CASES, SimulationCase  # noqa: E402
from simulation_found import RESULTS, SimulationRow, recorded  # noqa: E402
from simulation_tables import documents  # noqa: E402

from dora.sim.sweep import simulate  # noqa: E402


def missing(cases: Iterable[SimulationCase]) -> list[tuple[SimulationCase, int]]:
    """Return what is not yet simulated, in order."""
    done = {(row.command, row.seed) for row in recorded()}
    wanted = [(case, seed) for case in cases for seed in range(case.seeds)]
    return [one for one in wanted if (one[0].command, one[1]) not in done]


def measure(case: SimulationCase, seed: int) -> SimulationRow:
    """Simulate one seed of a case."""
    return SimulationRow(case.command, seed, commit(), today(), simulate((case.workload(), seed)))


def main() -> None:
    """Simulate what is missing, or write the documents."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", help="names of tables")
    parser.add_argument("--render", action="store_true", help="write the documents, and simulate nothing")
    options = parser.parse_args()
    if options.render:
        for path, text in documents(recorded()).items():
            (ROOT / path).write_text(text)
        return
    gc.disable()  # no reference cycles are left behind, and collections take a fifth of the time
    for case, seed in missing(case for case in CASES if not options.tables or {*case.tables} & {*options.tables}):
        row = measure(case, seed)
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.write(f"{case.command}, seed {seed}: {row.result.step_s:.4g} s, {row.result.ratio:.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
