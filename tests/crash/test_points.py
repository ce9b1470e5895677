"""Crash points, 970 over 22 kinds of run: each is resumed to its end and passes the checker.

The long profile is `python -m tests.crash --points 100000 --seed N`; it prints a command that replays a failure.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dora.core import events as ev
from dora.journal.audit import audit
from dora.journal.reader import Journal
from tests.crash.disk import crashed
from tests.crash.life import Plan
from tests.crash.points import PLANS, Prober, Tally

POINTS = {"plain": 90, "evaluation": 60, "keep": 60}
OTHERS = 40
SHALLOW, STRIDE = 8, 23
SPARSE = 3  #: so that these points lie in all of a run


def worker_of_its_own(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.xdist_group(f"crash points {name}"))


@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_crashes_at_some_points_is_resumed_to_a_correct_end(name: str, place: Path) -> None:
    crash_and_resume(name, place, num_points=SHALLOW, stride=STRIDE)


@pytest.mark.deep
@pytest.mark.timeout(900)  # a loaded machine
@pytest.mark.parametrize("name", [worker_of_its_own(name) for name in PLANS])
def test_a_run_that_crashes_anywhere_is_resumed_to_a_correct_end(name: str, place: Path) -> None:
    crash_and_resume(name, place, num_points=POINTS.get(name, OTHERS), stride=SPARSE)


def crash_and_resume(name: str, place: Path, *, num_points: int, stride: int = 1) -> None:
    """Crash at every point (or every `stride`-th) of worlds 0, 1, ... until there were enough."""
    tally = Tally()
    seed = 0
    while tally.points < num_points:
        path = place / f"world-{seed:08d}"
        path.mkdir()
        prober = Prober(path, PLANS[name], seed=seed)
        rng = random.Random(f"{seed} {name}")
        for point in range(0, prober.num_points, stride):
            kind, nested = rng.choice(("kill", "power")), rng.random() < 0.25
            try:
                prober.probe(point, kind, nested=nested, tally=tally)
            except AssertionError as err:
                again = f"python -m tests.crash --plan {name} --only {seed}:{point}:{kind}{':nested' if nested else ''}"
                raise AssertionError(f"{again}: {err}") from err
            if tally.points >= num_points:
                break
        seed += 1
    assert tally.ends["finished"] > tally.points // 2


def test_a_version_whose_evaluation_is_skipped_has_a_row_of_metrics(place: Path) -> None:
    path = place / "world"
    path.mkdir()
    plan = Plan("overtaken", ("eval.every=1", "run.steps=8", "eval.sets.0.prompts=12"))
    prober = Prober(path, plan, seed=1)
    whole = crashed(prober.base.disk, point=prober.num_points - 1, kind="kill", rng=random.Random(0))
    whole.lay_out(prober.world.path)
    rows = [json.loads(row) for row in prober.world.folder.metrics.read_bytes().splitlines()]
    versions = {
        kind: {r["version"] for r in rows if r["kind"] == kind} for kind in ("evaluation", "evaluation_skipped")
    }
    assert versions["evaluation_skipped"]
    assert not versions["evaluation"] & versions["evaluation_skipped"]
    assert versions["evaluation"] | versions["evaluation_skipped"] == set(range(9))


def test_rows_that_were_chosen_before_a_crash_stay_and_the_audit_derives_the_others(place: Path) -> None:
    path = place / "world"
    path.mkdir()
    prober = Prober(path, PLANS["visits"], seed=3)
    world, rng = prober.world, random.Random(3)
    whole = crashed(prober.base.disk, point=prober.num_points - 1, kind="kill", rng=rng)
    whole.lay_out(world.path)
    unbroken = rows_of(world.folder.journal)
    for point in range(prober.num_points // 3, 2 * prober.num_points // 3, 40):
        tree = crashed(prober.base.disk, point=point, kind="kill", rng=rng)
        tree.lay_out(world.path)
        chosen = rows_of(world.folder.journal)
        assert 0 < len(chosen) < len(unbroken)
        assert chosen == unbroken[: len(chosen)]
        assert world.resume(tree, seed=str(point)).outcome is not None
        again = rows_of(world.folder.journal)
        assert again[: len(chosen)] == chosen
        assert len(again) > len(chosen)
        assert audit(world.folder).ok


def rows_of(journal: Path) -> list[tuple[int, ...]]:
    """Source and row of each group, and the rows passed over before it."""
    found: list[tuple[int, ...]] = []
    for event, _ in Journal(journal):
        if isinstance(event, ev.PromptsArrived):
            new = event.visits[max(0, len(found) - event.first) :]
            found += [(visit.source, visit.row, *visit.passed) for visit in new]
    return found
