"""In whole simulated runs, nothing irreversible happens before its cause is on the disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.checker import check_order, records
from tests.crash.disk import File
from tests.crash.life import Life, Plan, World

PLAN = Plan("order", ("run.steps=6", "weights.keep=1", "trainer.checkpoint_every=1", "eval.every=2"))


@pytest.fixture(scope="module", params=["0", "9", "21"])
def lived(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Life]:
    world = World(tmp_path_factory.mktemp("world"), PLAN)
    life = world.begin(seed=request.param)
    assert life.outcome is not None, life.refusal
    assert life.outcome.finished
    return world, life


def test_waves_and_pushes_leave_after_their_cause_is_on_the_disk(lived: tuple[World, Life]) -> None:
    world, life = lived
    seen = [(one.what, one.journal_bytes) for one in life.seen]
    assert Counter(what.partition(" ")[0] for what, _ in seen).keys() == {"wave", "push"}
    check_order(world.folder.journal.read_bytes(), seen)


def test_deletions_and_metrics_follow_their_decision_on_the_disk(lived: tuple[World, Life]) -> None:
    world, life = lived
    known = causes(world.folder.journal.read_bytes())
    done = effects(world, life)
    assert {what.partition(" ")[0] for what, _ in done} == {"version", "checkpoint", "step", "evaluation"}
    early = [what for what, synced in done if what not in known or known[what] > synced]
    assert early == []


def causes(journal: bytes) -> dict[str, int]:
    """Decision or fact -> end of its frame in the journal."""
    known: dict[str, int] = {}
    for end, record in records(journal):
        if record["type"] != "Handled":
            continue
        if record["event"]["type"] == "StepTrained":
            known.setdefault(f"step {record['event']['step']}", end)
        for order in record["commands"]:
            match order["type"]:
                case "ReleaseVersion":
                    known.setdefault(f"version {order['version']}", end)
                case "DropCheckpoint":
                    known.setdefault(f"checkpoint {Path(order['folder']).name}", end)
                case "ReportEvaluation":
                    known.setdefault(f"evaluation {order['version']}", end)
    return known


def effects(world: World, life: Life) -> list[tuple[str, int]]:
    """Every deletion and every row of metrics, with the number of bytes of the journal on the disk then."""
    journal = world.folder.journal.relative_to(world.path).parts
    tree, found = life.disk.start.copy(), []
    for step in life.disk.steps:
        node = tree.get(journal)
        synced = len(node.synced) if isinstance(node, File) else 0
        name = step.path[-1]
        if step.kind == "rename" and step.target.startswith(".trash-"):
            what = f"version {int(name[1:])}" if name.startswith("v") else f"checkpoint {name}"
            found.append((what, synced))
        elif step.kind == "append" and name == "metrics.jsonl" and step.data:
            row = json.loads(step.data)
            number = row["step"] if row["kind"] == "step" else row["version"]
            found.append((f"{row['kind']} {number}", synced))
        tree.apply(step)
    return found
