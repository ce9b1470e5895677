"""Damage before a resume: a refusal in one line, or a run that ends correctly."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.damage import TARGETS, damage
from tests.crash.disk import crashed
from tests.crash.points import PLANS, Prober

CASES = 30
SHALLOW = 15


@pytest.mark.timeout(600)  # a loaded machine
@pytest.mark.parametrize("cases", [SHALLOW, pytest.param(CASES, marks=pytest.mark.deep)])
@pytest.mark.parametrize("target", TARGETS)
def test_a_damaged_run_is_refused_in_one_line_or_ends_correctly(target: str, cases: int, place: Path) -> None:
    path = place / "world-00000000"
    path.mkdir()
    prober = Prober(path, PLANS["plain"], seed=0)
    ends = Counter[str]()
    for number in range(cases):
        rng = random.Random(f"{target} {number}")
        point = rng.randrange(20, prober.num_points)
        tree = crashed(prober.base.disk, point=point, kind="kill", rng=rng)
        done, folder = damage(tree, target, rng=rng)
        if not done:
            continue
        life = prober.world.resume(tree, seed=f"{number}")
        if life.refusal is not None:
            assert "\n" not in str(life.refusal), done
            ends["refused"] += "the run has ended" not in str(life.refusal)
            continue
        try:
            prober.check(damaged=folder)
        except AssertionError as err:
            raise AssertionError(f"{done} at point {point}: {err}") from err
        ends["ended"] += 1
    assert ends.total() >= cases // 3
    if target in ("version", "metrics", "fence"):
        assert not ends["refused"], "it can be made again"
