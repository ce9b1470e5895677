"""Bugs that the crash points have found: each test checks the rule that was broken, at the points where it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dora import files
from dora.errors import DoraError
from dora.files import Operation
from dora.journal.run_folder import RunFolder
from dora.weights.fence import pass_fence
from dora.weights.store import VersionStore
from tests.crash.checker import frames, records
from tests.crash.disk import Kind, Step, Tree, crashed
from tests.crash.points import PLANS, Prober, Tally
from tests.crash.policy import POLICY


@pytest.fixture
def prober(place: Path) -> Callable[..., Prober]:
    def make(plan: str, *, seed: int = 0) -> Prober:
        path = place / f"world-{seed:08d}"
        path.mkdir()
        return Prober(path, PLANS[plan], seed=seed)

    return make


def cut(prober: Prober, point: int, kind: Kind) -> Tree:
    return crashed(prober.base.disk, point=point, kind=kind, rng=random.Random(point))


def points_where(prober: Prober, matches: Callable[[Step], bool]) -> list[int]:
    """The points directly after every matching step."""
    return [number + 1 for number, step in enumerate(prober.base.disk.steps) if matches(step)]


def journaled(step: Step, name: str) -> bool:
    return step.kind == "append" and step.path[-1] == "journal.msgpack" and name.encode() in step.data


def restarts(prober: Prober) -> list[dict[str, object]]:
    journal = prober.world.folder.journal.read_bytes()
    events = [record["event"] for _, record in records(journal) if record["type"] == "Handled"]
    return [event for event in events if event["type"] == "ControllerRestarted"]


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.deep)])
def test_a_run_that_the_journal_calls_finished_has_its_result_on_the_disk(
    seeds: int, prober: Callable[..., Prober]
) -> None:
    for seed in range(seeds):
        probed = prober("unevaluated", seed=seed)
        first = points_where(probed, lambda step: journaled(step, "FinishRun"))[0]
        for point in range(first, probed.num_points):
            probed.probe(point, "power", nested=False, tally=Tally())


@pytest.mark.parametrize("seeds", [1, pytest.param(6, marks=pytest.mark.deep)])
def test_a_result_that_was_lost_before_its_evaluation_ended_is_recomputed_first(
    seeds: int, prober: Callable[..., Prober]
) -> None:
    """A resume grades its last samples at once, long before the trainer is ready. (The disk had been full.)"""
    for seed in range(seeds):
        probed = prober("slow-grades", seed=seed)
        end = points_where(probed, lambda step: journaled(step, "FinishRun"))[0]
        tree = cut(probed, end - 2, "power")  # in front of the frame that ends it, no part of which is there
        versions = tree.folder(probed.world.folder.versions.relative_to(probed.world.path).parts)
        del versions.entries["v000004"]
        tree.sync_all()
        probed.world.plan = PLANS["plain"]  # its grades are quick
        life = probed.world.resume(tree, seed="")
        assert life.refusal is None, life.refusal
        probed.check()
        assert restarts(probed)[-1]["missing"] == [4]


@pytest.mark.parametrize("plan", ["keep", "synchronous"])
def test_no_power_failure_leaves_half_a_version_or_checkpoint_under_its_name(
    plan: str, prober: Callable[..., Prober]
) -> None:
    probed = prober(plan)
    for point in range(probed.num_points):
        assert halves(cut(probed, point, "power")) == [], point


def halves(tree: Tree) -> list[Path]:
    """Versions and checkpoints of which files are missing."""
    held: dict[Path, set[str]] = {}
    for path, data in tree.files():
        if data is not None and path.parent.name.startswith(("v0", "step-")):
            held.setdefault(path.parent, set()).add(path.name)
    version, checkpoint = {POLICY, "config.json"}, {"rank-0.safetensors", "rank-1.safetensors"}
    wholes = [{*(version if f.name.startswith("v") else checkpoint), "manifest.json"} for f in held]
    return [folder for folder, whole in zip(held, wholes, strict=True) if held[folder] != whole]


def test_what_a_kill_left_half_deleted_does_not_come_back_by_a_power_failure(prober: Callable[..., Prober]) -> None:
    """It was renamed, without a sync; the resume deletes its files, and the power fails."""
    probed = prober("synchronous")
    renamed = points_where(probed, lambda step: step.kind == "rename" and step.path[-1].startswith("step-0"))
    for point in renamed:
        life = probed.world.resume(cut(probed, point, "kill"), seed="")
        for at in range(0, len(life.disk.steps), 3):
            tree = crashed(life.disk, point=at, kind="power", rng=random.Random(at))
            assert halves(tree) == [], (point, at)


@pytest.mark.parametrize("stride", [9, pytest.param(3, marks=pytest.mark.deep)])
def test_what_a_resume_has_read_survives_a_power_failure(stride: int, prober: Callable[..., Prober]) -> None:
    """The process is killed between writing and syncing, and the power fails during the resume."""
    probed = prober("plain")
    written = points_where(
        probed, lambda step: step.kind == "append" and step.path[-1] in ("tokens.bin", "journal.msgpack")
    )
    for point in written[::stride]:
        killed = crashed(probed.base.disk, point=point, kind="kill", rng=random.Random(1))
        life = probed.world.resume(killed, seed="first")
        begun = [n for n, step in enumerate(life.disk.steps) if journaled(step, "ControllerRestarted")]
        for behind in begun[:1]:
            for draw in range(3):
                tree = crashed(life.disk, point=behind + 2, kind="power", rng=random.Random(draw))
                again = probed.world.resume(tree, seed="second")
                assert again.refusal is None, again.refusal
                probed.check()


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.deep)])
def test_the_result_survives_a_power_failure_even_if_the_process_that_copied_it_was_killed(
    seeds: int, prober: Callable[..., Prober]
) -> None:
    """The copy had its name, but the folder was not synced; the resume finds the copy and finishes."""
    for seed in range(seeds):
        probed = prober("slow-grades", seed=seed)
        named = points_where(probed, lambda step: step.kind == "rename" and ".copy-v000004" in step.path[-1])[0]
        life = probed.world.resume(cut(probed, named, "kill"), seed="")
        tree = crashed(life.disk, point=len(life.disk.steps), kind="power", rng=random.Random(seed))
        tree.lay_out(probed.world.path)
        probed.check()


@pytest.mark.parametrize(
    ("plan", "seed", "point", "kind"), [("keep", 3000, 161, "kill"), ("plain", 500000, 59, "power")]
)
def test_a_step_that_is_trained_at_the_time_of_a_restart_does_not_divide_by_zero(
    plan: str, seed: int, point: int, kind: Kind, prober: Callable[..., Prober]
) -> None:
    """The trainer's idle time was counted from before the restart, and the step's duration from after it."""
    prober(plan, seed=seed).probe(point, kind, nested=False, tally=Tally())


def test_a_finished_run_of_rollouts_is_not_resumed(prober: Callable[..., Prober]) -> None:
    """For the core all its steps are one, so that run.steps seemed to ask for more of them, and it waited forever."""
    probed = prober("rollout-only")
    tally = Tally()
    probed.probe(probed.num_points - 1, "kill", nested=False, tally=tally)
    assert tally.ends["was finished"] == 1


@pytest.mark.parametrize("stride", [24, pytest.param(4, marks=pytest.mark.deep)])
def test_a_kill_loses_no_version(stride: int, prober: Callable[..., Prober]) -> None:
    """Versions in memory survive the process, so that the trainer need not recompute the same bytes."""
    probed = prober("keep")
    for point in range(5, probed.num_points, stride):
        tally = Tally()
        probed.probe(point, "kill", nested=False, tally=tally)
        assert not tally.ends["finished"] or restarts(probed)[-1]["missing"] == [], point


def test_a_power_failure_after_the_end_of_a_run_leaves_its_metrics(prober: Callable[..., Prober]) -> None:
    probed = prober("plain")
    crashed(probed.base.disk, point=probed.num_points - 1, kind="power", rng=random.Random(0)).lay_out(
        probed.world.path
    )
    rows = [json.loads(line) for line in probed.world.folder.metrics.read_bytes().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1, 2, 3]


def test_the_name_of_a_new_run_folder_is_synced_before_the_run_begins(tmp_path: Path) -> None:
    done: list[Operation] = []
    with files.observed(done.append):
        folder = RunFolder.create(tmp_path, name="a")
    assert folder.root.parent in [one.path for one in done if one.kind == "sync_folder"]


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_a_rank_of_an_older_controller_publishes_nothing_into_a_resumed_run(
    kind: Kind, prober: Callable[..., Prober]
) -> None:
    """The rank wakes up while the resume examines the folder, after each of the resume's steps in turn."""
    probed = prober("plain")
    folder = probed.world.folder
    memory = probed.world.path / "memory" / f"dora-{folder.run_id}"
    published = 0

    def publish(version: int, when: int, counted: list[int], step: Step) -> None:
        nonlocal published
        term, _, _ = folder.fence.read_text().partition(".")
        counted.append(int(term))  # at the first step, that of the earlier controller
        if len(counted) != when or not memory.is_dir():
            return
        store = VersionStore(
            memory_root=memory, durable_root=folder.versions, fence=partial(pass_fence, folder.fence, epoch=counted[0])
        )
        staged = store.stage(version)
        (staged / POLICY).write_text("f" * 32)
        try:
            store.seal(version, staged, chain="f" * 32)
            published += 1
        except DoraError:
            return

    begins = points_where(probed, lambda step: journaled(step, "StepTrained"))
    for version, point in enumerate(begins[:3], start=1):
        for when in range(1, 14):
            tree = cut(probed, point, kind)
            life = probed.world.resume(tree, seed=f"{when}", before=partial(publish, version, when, []))
            assert life.refusal is None, life.refusal
            probed.check(with_audit=False)
    assert published


def test_an_observation_whose_call_is_not_known_to_have_ended_hinders_no_later_resume(
    prober: Callable[..., Prober],
) -> None:
    """A kill separates it from its CallFinished, the resume gives the episode up, and another kill ends that."""
    probed = prober("calls")
    observed = points_where(
        probed, lambda step: step.path[-1] == "tokens.bin" and any(record[0] == 2 for _, record in frames(step.data))
    )
    assert observed
    for point in observed:
        life = probed.world.resume(cut(probed, point, "kill"), seed="first")
        at = next(n for n, step in enumerate(life.disk.steps) if journaled(step, "ControllerRestarted"))
        tree = crashed(life.disk, point=at + 1, kind="kill", rng=random.Random(point))
        again = probed.world.resume(tree, seed="second")
        assert again.refusal is None, again.refusal
        probed.check()
