"""Crash points: a recorded run is cut at a point, resumed to its end by the application, and checked."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dora.app.inputs import model_digest
from dora.app.settings import lineage_settings
from dora.controller.line_files import SAVE_EVERY_S
from dora.controller.lineage import base_chain
from dora.errors import ConfigError, DoraError
from dora.journal.audit import audit
from tests.crash.checker import Broken, Checker, Expected, check_order, lost_in
from tests.crash.disk import Disk, File, Kind, Tree, crashed
from tests.crash.life import Life, Plan, World
from tests.crash.loop import DELAYS
from tests.crash.models import RANK, TARGETS, Faults, Held

#: Age from which a line survives a power failure: a pause between syncs, and the delays of those of four files.
LINES_S = SAVE_EVERY_S + 4 * max(DELAYS)
#: Maximum number of resumes that crash in a row.
DEPTH = 4

#: Controllers die while servers load weights.
SLOW_LOADS = Faults(load_s=0.4)
#: Servers hold versions as adapters; controllers die during loads and unloads, whose results are often unknown.
ADAPTERS = (
    "engine.adapters=true",
    f"trainer.lora.rank={RANK}",
    f"trainer.lora.targets={json.dumps(TARGETS)}",
    "run.steps=5",
)
#: A few rows, of which half the groups have equal rewards.
VISITS = (
    'task.sources=[{kind="function", name="tests.crash.environment:sums"}]',
    'task.rewards=[{kind="math"}]',
    "task.revisit_share=0.25",
    "eval.sets=[]",
    "run.steps=6",
)
DOUBTFUL = Faults(load_s=0.2, doubtful=0.3)

PLANS = {
    plan.name: plan
    for plan in (
        Plan("plain"),
        Plan("keep", ("weights.keep=2", "run.steps=5", "trainer.checkpoint_every=3")),
        Plan("evaluation", ("eval.every=1",)),
        Plan("unevaluated", ("eval.sets=[]",)),
        Plan("slow-grades", faults=Faults(grade_s=1.0)),
        Plan("extended", more_steps=2),
        Plan("interrupted", interrupted_at=3.0),
        Plan("failed", fails_at=4.0),
        Plan("lost-ranks", losses=2),
        Plan("lost-ranks-synchronous", ("rollout.max_staleness=0", "trainer.checkpoint_every=3"), losses=3),
        Plan("rollout-only", rollout_only=True),
        Plan("synchronous", ("rollout.max_staleness=0", "trainer.checkpoint_every=1")),
        Plan("calls", ("eval.every=2",), calls=True),
        Plan("kept-servers", ("eval.every=1",), keeps_servers=True, faults=SLOW_LOADS),
        Plan("kept-servers-with-calls", keeps_servers=True, calls=True, can_replay=True, faults=SLOW_LOADS),
        Plan("replayed-calls", calls=True, can_replay=True),
        Plan(
            "no-room-for-versions",
            ("run.steps=5", "trainer.checkpoint_every=5"),
            fills="/versions/",
            faults=Faults(grade_s=5.0),
        ),
        Plan("adapters", ADAPTERS, servers=1, faults=DOUBTFUL),
        Plan("adapters-kept-servers", (*ADAPTERS, "eval.every=1"), keeps_servers=True, faults=DOUBTFUL),
        Plan(
            "adapters-with-calls",
            (*ADAPTERS, "rollout.max_staleness=2"),
            keeps_servers=True,
            calls=True,
            can_replay=True,
            losses=1,
            faults=DOUBTFUL,
        ),
        Plan("full-disk", ("eval.every=2",), fills="/"),
        Plan("visits", VISITS),
    )
}


@dataclass
class Tally:
    """The number of attempts, by result."""

    points: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class Prober:
    """One kind of run with one seed, which can be crashed at any point."""

    def __init__(self, path: Path, plan: Plan, *, seed: int) -> None:
        self.world = World(path, plan)
        self.seed = seed
        self.base = self.world.begin(seed=f"{plan.name} {seed}")
        if self.base.outcome is None and plan.fails_at is None:
            raise Broken(f"the run without a crash: {self.base.refusal}")
        self.expected = Expected(base_chain(model_digest(self.world.inputs.model)), lineage_settings(self.world.config))
        self._require_order(self.base)

    @property
    def num_points(self) -> int:
        return len(self.base.disk.steps) + 1

    def probe(self, point: int, kind: Kind, *, nested: bool, tally: Tally) -> None:
        """Crash at `point`; with `nested`, crash the resumes too. Raises Broken."""
        rng = random.Random(f"{self.world.plan.name} {self.seed} {point} {kind} {nested}")
        tree = crashed(self.base.disk, point=point, kind=kind, rng=rng)
        require_lines(self.base.disk, tree, point=point)
        calls = _calls(self.base, until=point)
        kept = self._kept(self.base, point, rng)
        for depth in range(1, (DEPTH if nested else 1) + 1):
            tally.points += 1
            life = self.world.resume(tree, seed=f"{self.seed} {point} {kind} {depth}", kept=kept)
            self._require_order(life)
            again = calls & _calls(life, until=len(life.disk.steps))
            if again and not self.world.plan.can_replay:
                raise Broken(f"made twice: {sorted(again)}")
            end = self._end_of(life, tree, with_audit=point % 3 == 0)
            tally.ends[end] += 1
            steps = len(life.disk.steps)
            if end != "finished" or not nested or not steps:
                return
            at = rng.randrange(steps + 1)
            tree = crashed(life.disk, point=at, kind=rng.choice(("kill", "power")), rng=rng)
            require_lines(life.disk, tree, point=at)
            calls |= _calls(life, until=at)
            kept = self._kept(life, at, rng)

    def _kept(self, life: Life, point: int, rng: random.Random) -> dict[str, Held]:
        """What the servers hold that outlive a crash at this point."""
        return life.servers_at(point, rng=rng) if self.world.plan.keeps_servers else {}

    def _require_order(self, life: Life) -> None:
        journal = life.disk.tree.get(self.world.folder.journal.relative_to(self.world.path).parts)
        check_order(
            journal.data if isinstance(journal, File) else b"", [(one.what, one.journal_bytes) for one in life.seen]
        )

    def _end_of(self, life: Life, tree: Tree, *, with_audit: bool) -> str:
        """The kind of end of a resume; Broken unless it is correct."""
        if life.refusal is not None and not _may_refuse(life.refusal, tree, self.world):
            raise Broken(f"refused: {life.refusal}")
        if life.refusal is not None and "the run has ended" not in str(life.refusal):
            return "nothing to resume"
        if life.outcome is not None and not life.outcome.finished:
            raise Broken(f"ended with {life.outcome}")
        self.check(with_audit=with_audit, is_told=life.refusal is None)
        return "finished" if life.refusal is None else "was finished"

    def check(self, *, with_audit: bool = True, damaged: str = "", is_told: bool = True) -> None:
        """Run the checker, and the application's audit, which takes longest.

        `is_told`: the last life continued, so that it has reported what is lost.
        """
        told = lost_in(self.world.said) if is_told else None
        Checker(self.world.folder.root, self.expected, damaged=damaged, lost=told).check()
        if not with_audit:
            return
        report = audit(self.world.folder)
        if not report.ok:
            raise Broken(f"the audit alone finds: {report.violations[0].rule} {report.violations[0].message}")


def require_lines(disk: Disk, tree: Tree, *, point: int) -> None:
    """Broken unless a crash has left the lines that were written a while before it."""
    steps = disk.steps[:point]
    for step in steps:
        if step.kind == "append" and step.path[-1].endswith(".jsonl") and step.at < steps[-1].at - LINES_S:
            file = tree.get(step.path)
            if not isinstance(file, File) or step.data not in file.data:
                raise Broken(f"{step} was written {steps[-1].at - step.at:.1f} s before the crash, and is gone")


def _calls(life: Life, *, until: int) -> set[str]:
    """The calls of environments that a life made before a step of its disk."""
    return {one.what for one in life.seen if one.what.startswith("call ") and one.num_steps <= until}


def _may_refuse(refusal: DoraError, tree: Tree, world: World) -> bool:
    """Whether a resume may refuse: there was no run yet, or nothing left to do."""
    if not isinstance(refusal, ConfigError):
        return False
    if "the run has ended" in str(refusal):
        return True
    path = world.folder.journal.relative_to(world.path).parts
    journal = tree.get(path)
    empty = not isinstance(journal, File) or b"Handled" not in journal.data
    return empty and (
        "is not a run folder" in str(refusal) or "is empty" in str(refusal) or "no such run" in str(refusal)
    )
