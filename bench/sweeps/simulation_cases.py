"""The simulations behind the tables of docs/SIMULATION.md and docs/SCALE.md.

A case belongs to the tables whose names it has, and is simulated once. Where a table's rows are compared, they have the
same steps and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.core.orchestration import SWITCHES
from dora.sim.sweep import cases
from dora.sim.workload import Workload, load, with_overrides

ROOT: Final = Path(__file__).resolve().parents[2]
SEEDS: Final = 3
STEPS: Final = 100
#: `sync` has no staleness, so that its steps are alike from the third on.
SYNC_STEPS: Final = 40
TAIL_STEPS: Final = 200


@dataclass(frozen=True, slots=True)
class SimulationCase:
    """One `dora simulate` command with one setting, and all of its seeds."""

    tables: tuple[str, ...]
    label: str  #: what the rows of a table call it
    file: str  #: of launch/workloads
    steps: int
    strategy: str = "dora"
    k: int | None = None
    split: int | None = None
    rules: str = ""
    sets: tuple[str, ...] = ()
    seeds: int = SEEDS

    @property
    def command(self) -> str:
        """What one types to get this row."""
        words = ["dora simulate", f"launch/workloads/{self.file}.toml", f"--steps {self.steps}"]
        words += [f"--seeds {self.seeds}"] * (self.seeds > 1)
        words += [f"--strategy {self.strategy}"] * (self.strategy != "dora")
        words += [f"--k {self.k}"] if self.k is not None else []
        words += [f"--split {self.split}"] if self.split is not None else []
        words += [f"--rules {self.rules}"] if self.rules else []
        return " ".join([*words, *(f"--set {one}" if '"' not in one else f"--set '{one}'" for one in self.sets)])

    def workload(self) -> Workload:
        """Return what the command simulates."""
        base = load(ROOT / "launch" / "workloads" / f"{self.file}.toml").with_changes(job={"steps": self.steps})
        [(one, _)] = cases(
            with_overrides(base, self.sets) if self.sets else base,
            strategies=[self.strategy],
            staleness=[] if self.k is None else [self.k],
            splits=[] if self.split is None else [self.split],
            instances=[],
            rules=[self.rules] if self.rules else [],
            seeds=[0],
        )
        return one


def _case(tables: str, label: str, file: str, strategy: str = "dora", **options: Any) -> SimulationCase:
    steps = SYNC_STEPS if strategy == "sync" else STEPS
    steps = TAIL_STEPS if file == "tail-bound" else steps
    settings: dict[str, Any] = {"steps": steps, "strategy": strategy} | options
    return SimulationCase(tuple(tables.split()), label, file, **settings)


def without(rule: str) -> tuple[str, ...]:
    """Return the setting that turns one rule off."""
    return (f'job.without=["{rule}"]',)


def _limits() -> Iterator[SimulationCase]:
    """The job of the paper, and the case with a tail, against their limits."""
    for k in (1, 2, 3):
        tables = "limit tail interrupt rules" if k == 2 else "limit tail interrupt"
        yield _case(tables, "tail-bound", "tail-bound", k=k, split=8)
    for strategy in ("sync", "periodic", "one_step_off"):
        yield _case("limit tail", "tail-bound", "tail-bound", strategy, split=8)
    yield _case("limit tail interrupt scale rules paper width", "128 GPUs", "paper-128", k=3, split=66)
    yield _case("limit tail scale paper width", "128 GPUs", "paper-128", "sync")
    yield _case("limit tail width", "128 GPUs", "paper-128", k=1, split=76)
    yield _case("limit tail interrupt scale sensitivity paper", "64 GPUs", "paper-64", k=3, split=36)
    yield _case("limit tail scale paper", "64 GPUs", "paper-64", "sync")
    whole = without("streaming")
    yield _case("limit tail", "128 GPUs, steps as a whole", "paper-128", k=1, split=76, sets=whole)
    yield _case("limit width", "128 GPUs", "paper-128", k=2, split=70)
    yield _case("limit tail paper", "128 GPUs", "paper-128", "one_step_off", split=88)
    yield _case("limit", "64 GPUs", "paper-64", k=1, split=38)
    yield _case("limit paper", "128 GPUs, the paper's rules", "paper-128", k=3, split=76, rules="paper")
    yield _case("limit paper", "128 GPUs, the paper's rules", "paper-128", k=3, split=64, rules="paper")
    for regime, split in (("A", 22), ("B", 44), ("C", 46)):
        sets = (f"lengths.regime={regime}",)
        yield _case("limit", f"64 GPUs, regime {regime}", "paper-64", k=3, split=split, sets=sets)


def _paper() -> Iterator[SimulationCase]:
    """What the paper reports besides."""
    yield _case("paper", "64 GPUs", "paper-64", "one_step_off", split=44, steps=40)
    for file, label in (("paper-128", "128 GPUs"), ("paper-64", "64 GPUs")):
        yield _case("paper", label, file, "partial_sync", steps=40)
    for split in (32, 38):
        yield _case("paper", "64 GPUs, the paper's rules", "paper-64", k=3, split=split, rules="paper", steps=40)


def _rules() -> Iterator[SimulationCase]:
    """One rule left out at a time."""
    for rule in SWITCHES:
        yield _case("rules", rule, "tail-bound", k=2, split=8, sets=without(rule))
    for rule in SWITCHES:
        yield _case("rules", rule, "paper-128", k=3, split=66, sets=without(rule))


def _interrupts() -> Iterator[SimulationCase]:
    """Strategies that break C1, C2 or C3."""
    for strategy in ("partial_bounded", "partial"):
        for k in (1, 2, 3):
            yield _case("interrupt", "tail-bound", "tail-bound", strategy, k=k, split=8)
    yield _case("interrupt", "tail-bound", "tail-bound", "oversample", split=8)
    for file, label, split in (("paper-128", "128 GPUs", 66), ("paper-64", "64 GPUs", 36)):
        for strategy in ("partial_bounded", "partial"):
            yield _case("interrupt", label, file, strategy, k=3, split=split)
        yield _case("interrupt", label, file, "oversample", split=40 if split == 36 else 68)


def _sensitivity() -> Iterator[SimulationCase]:
    """One thing changed at a time."""
    changes = {
        "pushes x 10: 92 s": ("fleet.push_fixed_s=10", "fleet.push_bytes_s=0.8e9"),
        "pushes x 0.1: 0.9 s": ("fleet.push_fixed_s=0.1", "fleet.push_bytes_s=80e9"),
        "groups of 4": ("job.group_size=4", "job.groups_per_step=2048"),
        "groups of 32": ("job.group_size=32", "job.groups_per_step=256"),
        "KV moves with an answer": ("fleet.server.kv_bytes_per_token=262144", "fleet.server.kv_bytes_s=20e9"),
    }
    for k in (0, 1, 2, 4):
        yield _case("sensitivity", f"K = {k}", "paper-64", k=k, split=36)
    for label, sets in changes.items():
        yield _case("sensitivity", label, "paper-64", k=3, split=36, sets=sets)


#: Of a server of two GPUs (docs/SIMULATION.md): seconds per step that are not reading, and what is read.
FIXED_S: Final = 8e-3
WEIGHT_BYTES: Final = 65.5e9
KV_BYTES: Final = 262_144
BYTES_S: Final = 4.7e12
PER_REQUEST_S: Final = 4e-5
#: Of the memory that the weights leave free: what KV takes.
KV_SHARE: Final = 284_000 * KV_BYTES / (2 * 80e9 - WEIGHT_BYTES)


def wide(gpus: int, *, fixed_s: float = FIXED_S, efficiency: float = 1.0, divided: bool = False) -> tuple[str, ...]:
    """Return the settings of servers of so many GPUs each, by the physics of the shipped server of two; `divided`: the
    time per sequence shrinks with the number of GPUs, too."""
    times = gpus / 2 * efficiency
    values = {
        "devices_per_instance": gpus,
        "server.slots": 128 * gpus,
        "server.kv_tokens": round(KV_SHARE * (gpus * 80e9 - WEIGHT_BYTES) / KV_BYTES, -3),
        "server.prefill_s_per_token": 7.3e-5 / times,
        "server.decode.base_s": fixed_s + WEIGHT_BYTES / (BYTES_S * times),
        "server.decode.per_token_s": KV_BYTES / (BYTES_S * times),
        **({"server.decode.per_request_s": PER_REQUEST_S / times} if divided else {}),
    }
    return tuple(f"fleet.{name}={value:{'.0f' if value >= 1 else '.4g'}}" for name, value in values.items())


#: Splits of `dora` with K = 0, 1, 2, 3 by the GPUs of a server; for two GPUs, `_limits` has the others.
_SPLITS: Final = {2: (96,), 4: (88, 68, 60, 60), 8: (80, 64, 64, 64)}
#: Other physics of wider servers: fixed time per step, efficiency, whether the time per sequence is divided.
_PHYSICS: Final = (
    (8e-3, 1.0, True),
    (9e-3, 1.0, False),
    (10e-3, 1.0, False),
    (8e-3, 0.85, False),
    (10e-3, 0.85, False),
)


def _widths() -> Iterator[SimulationCase]:
    """Servers of more GPUs, each strategy at a good split."""
    for gpus, splits in _SPLITS.items():
        sets = wide(gpus) if gpus > 2 else ()
        if gpus > 2:
            yield _case("width", f"{gpus} GPUs a server", "paper-128", "sync", sets=sets, seeds=2)
        for k, split in enumerate(splits):
            yield _case("width", f"{gpus} GPUs a server", "paper-128", k=k, split=split, sets=sets, steps=30, seeds=2)
    for fixed_s, efficiency, divided in _PHYSICS:
        label = f"{1e3 * fixed_s:g} ms | {efficiency:.0%} | {'40 µs × 2 / n' if divided else '40 µs'}"
        sync, dora = (wide(n, fixed_s=fixed_s, efficiency=efficiency, divided=divided) for n in (8, 4))
        yield _case("physics", label, "paper-128", "sync", sets=sync, seeds=1)
        yield _case("physics", label, "paper-128", k=3, split=64, sets=dora, steps=30, seeds=1)


def _agents() -> Iterator[SimulationCase]:
    """A search agent."""
    for strategy, k, split in (
        *(("dora", 1, 4), ("dora", 3, 4), ("partial_bounded", 1, 3), ("partial_bounded", 3, 4), ("sync", None, None)),
    ):
        yield _case("agent", "search agent", "search-agent", strategy, k=k, split=split, steps=40)


def _scale() -> Iterator[SimulationCase]:
    """Larger fleets, with a batch that grows with them."""
    yield _case("scale", "512 GPUs", "paper-512", steps=20, seeds=1)
    yield _case("scale", "4,096 GPUs", "paper-4096", steps=12, seeds=1)


#: The short ones first, then the most important.
CASES: Final = tuple(
    sorted(
        (*_limits(), *_paper(), *_agents(), *_rules(), *_interrupts(), *_scale(), *_sensitivity(), *_widths()),
        key=lambda case: case.file != "tail-bound",
    )
)
