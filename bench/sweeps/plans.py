"""Every strategy at its best plan: the tables of docs/SIMULATION.md that compare strategies.

    PYTHONPATH=. python bench/sweeps/plans.py [TABLE ...]   search and simulate what is missing

`python bench/sweeps/simulation.py --render` writes the tables.

Each case is searched with the first seed, as by `dora plan`, with servers of 1, 2, 4 and 8 GPUs, or of two as in the
configuration of the paper. Its plan is then simulated with all seeds for STEPS steps. Rows are appended to
bench/results/plans.jsonl as they are found; what is there is neither searched nor simulated again.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench")]

from result import commit, today  # noqa: E402

from dora.sim.measure import Result  # noqa: E402
from dora.sim.plan import search  # noqa: E402
from dora.sim.sweep import simulate  # noqa: E402
from dora.sim.workload import WIDTHS, Workload, load, with_overrides  # noqa: E402

RESULTS: Final = ROOT / "bench" / "results" / "plans.jsonl"
SEEDS: Final = 3
STEPS: Final = 40


#: Obstacles to twice the speed of the best baseline, and the settings that remove each.
OBSTACLES: Final[dict[str, tuple[str, ...]]] = {
    "pushes take no time": ("fleet.push_fixed_s=0", "fleet.push_bytes_s=1e15", "fleet.store_bytes_s=1e15"),
    "updates have no fixed time": ("train.update_s=0",),
    "decoding has no fixed time per step": ("fleet.fixed_step_s=0", "fleet.server.decode.base_s=0.0139"),
}


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A strategy on one job, to be planned."""

    table: str
    file: str  #: of launch/workloads
    strategy: str
    k: int
    widths: tuple[int, ...] = WIDTHS
    sets: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What one types to search this plan."""
        words = [f"dora plan launch/workloads/{self.file}.toml --strategy {self.strategy} --k {self.k}"]
        words += [f"--widths {','.join(map(str, self.widths))}"] if self.widths != WIDTHS else []
        return " ".join([*words, *(f"--set {one}" for one in self.sets)])

    def workload(self) -> Workload:
        """Return what is planned."""
        base = load(ROOT / "launch" / "workloads" / f"{self.file}.toml")
        changed = base.with_changes(job={"strategy": self.strategy, "max_staleness": self.k, "steps": STEPS})
        return with_overrides(changed, self.sets) if self.sets else changed


class PlanRow(msgspec.Struct, frozen=True):
    """One simulation of a plan."""

    command: str
    seed: int
    commit: str
    date: str
    width: int
    slots: int
    micro_batch_tokens: int
    result: Result


def _cases() -> Iterator[PlanCase]:
    for file in ("paper-128", "paper-64", "tail-bound"):
        for strategy, k in (("sync", 0), ("dora", 0), ("dora", 1), ("dora", 3), ("dora", 2), ("one_step_off", 1)):
            yield PlanCase("strategies", file, strategy, k)
    for file in ("paper-128", "paper-64"):
        for strategy, k in (("sync", 0), ("dora", 1), ("dora", 3), ("one_step_off", 1)):
            yield PlanCase("paper", file, strategy, k, widths=(2,))
    for sets in (("fleet.store_bytes_s=50e9",), ("fleet.store_bytes_s=50e9", "fleet.relay=true")):
        for k in (1, 3):
            yield PlanCase("store", "paper-128", "dora", k, sets=sets)
    for changed in OBSTACLES.values():
        for k in (0, 3):
            yield PlanCase("obstacles", "paper-128", "dora", k, sets=changed)
    for file in ("paper-128", "paper-64"):
        for added in (2, 4):
            slower = (f"fleet.wider_step_s={added}e-3",)
            for strategy, k in (("sync", 0), ("dora", 0), ("dora", 3)):
                yield PlanCase("wider", file, strategy, k, sets=slower)


CASES: Final = tuple(_cases())


def recorded() -> list[PlanRow]:
    """Return the rows found so far."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=PlanRow) for line in lines]


def measure(case: PlanCase) -> None:
    """Search a case's plan and simulate it with all seeds."""
    planned = search(case.workload(), staleness=[case.k], widths=case.widths, most=1)[0].workload
    planned = planned.with_changes(job={"steps": STEPS})
    for seed in range(SEEDS):
        result = simulate((planned, seed))
        fleet = planned.fleet
        row = PlanRow(
            case.command,
            seed,
            commit(),
            today(),
            fleet.devices_per_instance,
            fleet.server.slots,
            planned.train.micro_batch_tokens,
            result,
        )
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.write(f"{case.command}, seed {seed}: {row.width} GPUs a server, {result.step_s:.4g} s\n")
        sys.stdout.flush()


def main() -> None:
    """Search and simulate what is missing."""
    gc.disable()  # no reference cycles are left behind, and collections take a fifth of the time
    done = {row.command for row in recorded()}
    for case in CASES:
        if case.command not in done and (len(sys.argv) == 1 or case.table in sys.argv[1:]):
            measure(case)


if __name__ == "__main__":
    main()
