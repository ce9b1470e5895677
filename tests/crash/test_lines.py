"""Rows of metrics after a power failure, and versions after a full disk: nothing is lost without a message."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dora.controller.copies import LAST_COPIES_S, MAX_COPY_PAUSE_S
from dora.weights.store import VersionStore
from tests.crash.checker import lost_in
from tests.crash.disk import File, Step, Tree, crashed
from tests.crash.life import FULL_FROM_S, FULL_S, RUN_ID, World
from tests.crash.points import PLANS, Prober, require_lines


@pytest.fixture
def probed(place: Path, request: pytest.FixtureRequest) -> Prober:
    path = place / "world-00000000"
    path.mkdir()
    return Prober(path, PLANS[request.param], seed=0)


def metrics_in(tree: Tree, probed: Prober) -> File:
    return tree.file(probed.world.folder.metrics.relative_to(probed.world.path).parts)


def steps_in(data: bytes) -> list[int]:
    rows = map(json.loads, data.splitlines())
    return [row["step"] for row in rows if row["kind"] == "step"]


def is_row(step: Step, number: int) -> bool:
    return step.kind == "append" and step.path[-1] == "metrics.jsonl" and b'"step":%d,' % number in step.data


@pytest.mark.parametrize("probed", ["plain", "rollout-only"], indirect=True)
def test_every_line_survives_a_power_failure_a_few_seconds_later(probed: Prober) -> None:
    for point in range(probed.num_points):
        tree = crashed(probed.base.disk, point=point, kind="power", rng=random.Random(point))
        require_lines(probed.base.disk, tree, point=point)


def after_the_row_of(probed: Prober, number: int) -> Tree:
    """The world after a kill directly behind the row of a step."""
    steps = probed.base.disk.steps
    point = next(i for i, step in enumerate(steps) if is_row(step, number)) + 1
    return crashed(probed.base.disk, point=point, kind="kill", rng=random.Random(1))


@pytest.mark.parametrize("probed", ["plain"], indirect=True)
def test_a_step_that_is_trained_again_gets_the_row_that_it_has_lost(probed: Prober) -> None:
    """Steps 1 and 2 lose theirs in a power failure; step 2 is trained again, from the checkpoint in front of it."""
    tree = after_the_row_of(probed, 2)
    file = metrics_in(tree, probed)
    lines = file.data.splitlines(keepends=True)
    lost = [line for line in lines if steps_in(line) in ([1], [2])]
    file.data = file.synced = b"".join(b"\0" * (len(line) - 1) + b"\n" if line in lost else line for line in lines)
    life = probed.world.resume(tree, seed="")
    assert life.refusal is None
    probed.check()
    assert steps_in(probed.world.folder.metrics.read_bytes()) == [0, 2, 3]
    assert lost_in(life.said).steps == {1}
    assert f"metrics.jsonl: {len(lost)} of its lines were damaged" in life.said


@pytest.mark.parametrize("probed", ["evaluation"], indirect=True)
def test_a_resume_says_which_rows_are_gone_for_good(probed: Prober) -> None:
    tree = after_the_row_of(probed, 3)
    file = metrics_in(tree, probed)
    before = [json.loads(line) for line in file.data.splitlines()]
    file.data = file.synced = b""
    life = probed.world.resume(tree, seed="")
    assert life.refusal is None
    probed.check()
    lost, kept = lost_in(life.said), steps_in(probed.world.folder.metrics.read_bytes())
    assert lost.scores == {row["version"] for row in before if row["kind"] == "evaluation"} != set()
    assert {*kept} | lost.steps == {0, 1, 2, 3}
    assert lost.steps


@pytest.mark.parametrize("probed", ["no-room-for-versions"], indirect=True)
def test_versions_that_found_no_room_are_copied_when_there_is_room_again(probed: Prober) -> None:
    copied = [step for step in probed.base.disk.steps if step.kind == "rename" and "/.copy-" in "/".join(step.path)]
    late = [step for step in copied if step.at >= FULL_FROM_S + FULL_S]
    assert len(late) >= 2, "a version was published and released while there was no room"
    probed.check()
    assert lost_in(probed.world.said).versions == set()
    assert {path.name for path in probed.world.folder.versions.glob("v*")} == {f"v{number:06d}" for number in range(6)}


def test_versions_for_which_there_never_was_room_stay_in_memory_at_the_end(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.crash.life.FULL_S", math.inf)
    path = place / "world"
    path.mkdir()
    world = World(path, PLANS["no-room-for-versions"])
    life = world.begin(seed="")
    assert "the last version is in memory alone" in str(life.refusal)
    held = VersionStore(memory_root=path / "memory" / f"dora-{RUN_ID}", durable_root=world.folder.versions)
    assert held.live() == held.stranded(range(6)) == [1, 2, 3, 4, 5]
    trained = max(step.at for step in life.disk.steps if is_row(step, 4))
    graded = trained + 6 * PLANS["no-room-for-versions"].faults.grade_s  # the samples of its evaluation
    assert trained + LAST_COPIES_S < life.disk.steps[-1].at < graded + LAST_COPIES_S + 2 * MAX_COPY_PAUSE_S


def test_ranks_that_are_lost_while_the_disk_is_full_start_again_once_there_is_room(place: Path) -> None:
    path = place / "world"
    path.mkdir()
    world = World(path, replace(PLANS["lost-ranks"], fills="/.epoch-"))
    life = world.begin(seed="a")
    assert life.refusal is None
    raised = [step.at for step in life.disk.steps if step.kind == "rename" and step.path[-1].startswith(".epoch-")]
    assert raised[0] == 0 < FULL_FROM_S + FULL_S < raised[1]
