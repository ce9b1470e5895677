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
STEPS: Final = 40
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
    steps = TAIL_STEPS if file == "tail-bound" else STEPS
    settings: dict[str, Any] = {"steps": steps, "strategy": strategy} | options
    return SimulationCase(tuple(tables.split()), label, file, **settings)


def without(rule: str) -> tuple[str, ...]:
    """Return the setting that turns one rule off."""
    return (f'job.without=["{rule}"]',)


def _bases() -> Iterator[SimulationCase]:
    """What the tables compare with."""
    for k in (1, 2, 3):
        tables = "interrupt peers rules speculation" if k == 2 else "interrupt peers"
        yield _case(tables, "tail-bound", "tail-bound", k=k, split=8)
    yield _case("speculation", "tail-bound", "tail-bound", "sync")
    yield _case("interrupt scale rules speculation", "128 GPUs", "paper-128", k=3, split=66)
    yield _case("interrupt scale sensitivity speculation", "64 GPUs", "paper-64", k=3, split=36)
    for file, label in (("paper-128", "128 GPUs"), ("paper-64", "64 GPUs")):
        yield _case("scale speculation", label, file, "sync")


def _regimes() -> Iterator[SimulationCase]:
    """Other answer lengths."""
    for regime, split in (("A", 22), ("B", 44), ("C", 46)):
        yield _case("regimes", f"regime {regime}", "paper-64", k=3, split=split, sets=(f"lengths.regime={regime}",))


def _paper() -> Iterator[SimulationCase]:
    """What the paper reports besides the strategies that are planned (plans.py)."""
    for file, label in (("paper-128", "128 GPUs"), ("paper-64", "64 GPUs")):
        yield _case("paper", label, file, "partial_sync")
    for file, label, splits in (("paper-128", "128 GPUs", (64, 76)), ("paper-64", "64 GPUs", (32, 38))):
        for split in splits:
            yield _case("paper", f"{label}, the paper's rules", file, k=3, split=split, rules="paper")


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


def _peers() -> Iterator[SimulationCase]:
    """The rules of other systems, as far as ours express them, on 128 GPUs at several splits."""
    presets = (("dora", "psrl"), ("partial_bounded", "psrl"), ("partial", "areal"))
    for strategy, rules in presets:
        for k in (1, 2, 3):
            yield _case("peers", "tail-bound", "tail-bound", strategy, k=k, split=8, rules=rules)
    for strategy, rules in (("dora", ""), *presets):
        for split in (66, 70, 74):
            yield _case("peers", "128 GPUs", "paper-128", strategy, k=3, split=split, rules=rules, seeds=1)


def _sensitivity() -> Iterator[SimulationCase]:
    """One thing changed at a time."""
    changes = {
        "pushes x 10: 92 s": ("fleet.push_fixed_s=10", "fleet.push_bytes_s=0.8e9"),
        "pushes x 0.1: 0.9 s": ("fleet.push_fixed_s=0.1", "fleet.push_bytes_s=80e9"),
        "a store of 20 GB/s": ("fleet.store_bytes_s=20e9",),
        "groups of 4": ("job.group_size=4", "job.groups_per_step=2048"),
        "groups of 32": ("job.group_size=32", "job.groups_per_step=256"),
        "KV moves with an answer": ("fleet.server.kv_bytes_per_token=262144", "fleet.server.kv_bytes_s=20e9"),
    }
    for k in (0, 1, 2, 4):
        yield _case("sensitivity", f"K = {k}", "paper-64", k=k, split=36)
    for label, sets in changes.items():
        yield _case("sensitivity", label, "paper-64", k=3, split=36, sets=sets)


def _agents() -> Iterator[SimulationCase]:
    """A search agent."""
    for strategy, k, split in (
        *(("dora", 1, 4), ("dora", 3, 4), ("partial_bounded", 1, 3), ("partial_bounded", 3, 4), ("sync", None, None)),
    ):
        yield _case("agent", "search agent", "search-agent", strategy, k=k, split=split, steps=40)


def _speculation() -> Iterator[SimulationCase]:
    """Speculative decoding: 2.18 tokens a step, with which one answer alone is decoded 1.6 times as fast."""
    for file, label, k, split, draft_s, per_draft_s in (
        ("tail-bound", "tail-bound", 2, 8, 2.5e-3, 3e-5),
        ("paper-128", "128 GPUs", 3, 66, 7.5e-3, 7.3e-5),
        ("paper-64", "64 GPUs", 3, 36, 7.5e-3, 7.3e-5),
    ):
        drafts = {"draft_tokens": 3, "acceptance": 0.6, "draft_s": draft_s, "per_draft_s": per_draft_s}
        sets = tuple(f"fleet.server.speculation.{name}={value}" for name, value in drafts.items())
        yield _case("speculation", label, file, "sync", sets=sets)
        yield _case("speculation", label, file, k=k, split=split, sets=sets)


def _scale() -> Iterator[SimulationCase]:
    """Larger fleets, with a batch that grows with them."""
    yield _case("scale", "512 GPUs", "paper-512", steps=20, seeds=1)
    yield _case("scale", "4,096 GPUs", "paper-4096", steps=12, seeds=1)


#: The short ones first, then the most important.
CASES: Final = tuple(
    sorted(
        (
            *_bases(),
            *_regimes(),
            *_paper(),
            *_agents(),
            *_rules(),
            *_interrupts(),
            *_peers(),
            *_scale(),
            *_speculation(),
            *_sensitivity(),
        ),
        key=lambda case: case.file != "tail-bound",
    )
)
