"""The audit names every step, version and checkpoint of another history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.strategies import Settings
from dora.journal.audit import audit, audit_entries
from dora.journal.audit_report import AuditReport
from dora.journal.codec import Epoch
from dora.journal.writer import JournalWriter
from tests.core.world import World, run
from tests.journal.recorded import Entries, first_event, new_folder, with_event, write

#: (entries, settings) -> the report.
Audited = Callable[..., AuditReport]


@pytest.fixture(scope="module")
def world() -> World:
    return run(seed=3, steps=5)


@pytest.fixture
def entries(world: World) -> Entries:
    return list(world.journal)


@pytest.fixture
def audited(world: World) -> Audited:
    def audit(entries: Entries, **settings: object) -> AuditReport:
        changed: Settings = msgspec.structs.replace(world.settings, **settings)
        return audit_entries(changed, entries)

    return audit


def lineage(report: AuditReport) -> dict[str, str]:
    """Message by id."""
    return {found.id: found.message for found in report.violations if found.rule == "lineage"}


def again(entries: Entries, index: int, **changes: object) -> Entries:
    """The entries with a changed copy of the event at `index` in front of the last one, which ends the run."""
    *before, end = entries
    event = msgspec.structs.replace(entries[index][0], at=end[0].at, **changes)
    return [*before, (event, []), end]


def test_a_whole_run_has_one_history(entries: Entries, audited: Audited) -> None:
    assert lineage(audited(entries)) == {}


def test_a_step_trained_again_with_another_chain_is_named(entries: Entries, audited: Audited) -> None:
    at, event = first_event(entries, ev.StepTrained)
    found = lineage(audited(again(entries, at, chain="another")))
    assert "is trained again with chain another" in found[f"step {event.step + 1}"]
    assert lineage(audited(again(entries, at))) == {}


def test_a_version_of_another_chain_than_its_step_is_named(entries: Entries, audited: Audited) -> None:
    at, event = first_event(entries, ev.VersionPublished, lambda e: e.version == 1)
    found = lineage(audited(with_event(entries, at, chain="another")))
    assert "has chain another; step 1 has" in found[f"version {event.version}"]


def test_a_version_served_with_other_bytes_than_it_was_published_with_is_named(
    entries: Entries, audited: Audited
) -> None:
    at, event = first_event(entries, ev.VersionPublished, lambda e: e.version == 1)
    other = msgspec.structs.replace(event, files={"model.safetensors": "other"})
    found = lineage(audited([*entries[: at + 1], (other, []), *entries[at + 1 :]]))
    assert "is published again with other bytes" in found["version 1"]


def test_other_bytes_of_a_replay_are_counted_if_the_version_was_released(entries: Entries, audited: Audited) -> None:
    """With `weights.keep`, no copy is left with which the trainer could compare them."""
    at, _ = first_event(entries, ev.VersionPublished, lambda e: e.version == 1)
    assert any(cmd.ReleaseVersion(1) in orders for _, orders in entries)
    planted = again(entries, at, files={"model.safetensors": "other"})
    reports = {is_exact: audited(planted, deterministic=is_exact) for is_exact in (True, False)}
    assert [report.replays_differ for report in reports.values()] == [1, 1]
    assert "is recomputed with other bytes: checksum " in lineage(reports[True])["version 1"]
    assert lineage(reports[False]) == {}


def test_other_bytes_of_a_replay_are_counted_and_a_violation_where_the_trainer_is_deterministic(
    entries: Entries, audited: Audited
) -> None:
    at, _ = first_event(entries, ev.VersionPublished, lambda e: e.version == 1)
    planted = again(entries, at, differs="0f")
    reports = {is_exact: audited(planted, deterministic=is_exact) for is_exact in (True, False)}
    assert [report.replays_differ for report in reports.values()] == [1, 1]
    assert "is recomputed with other bytes: checksum 0f" in lineage(reports[True])["version 1"]
    assert lineage(reports[False]) == {}


@pytest.mark.parametrize(
    ("change", "may_differ"),
    [
        ("trainer.threads: 1 -> 4", True),
        ("trainer.compile: true -> false", True),
        ('trainer.shared_prompts: "on" -> "off"', True),
        ('trainer.publish_dtype: "float32" -> "bfloat16"', True),
        ("trainer.checkpoint_every: 10 -> 20", False),
    ],
)
def test_other_bytes_are_no_violation_after_a_change_of_how_the_trainer_rounds(
    entries: Entries, world: World, tmp_path: Path, change: str, may_differ: bool
) -> None:
    at, _ = first_event(entries, ev.VersionPublished, lambda e: e.version == 1)
    settings = msgspec.structs.replace(world.settings, deterministic=True)
    folder = write(new_folder(tmp_path), settings, again(entries, at, differs="0f"))
    with JournalWriter(folder.journal) as journal:
        journal.append(Epoch(1, entries[-1][0].at, "", (change,)))
    report = audit(folder)
    assert report.replays_differ == 1
    assert (lineage(report) == {}) is may_differ


def saved(entries: Entries, steps: int, *, chain: str | None = None) -> Entries:
    """Checkpoints after each of the first steps, at the end of the journal."""
    chains = {event.step: event.chain for event, _ in entries if isinstance(event, ev.StepTrained)}
    at = entries[-1][0].at
    made = [(ev.CheckpointSaved(at, s, f"step-{s}", chain or chains[s - 1]), []) for s in range(1, steps + 1)]
    return [*entries, *made]


def test_a_checkpoint_of_another_chain_is_named(entries: Entries, audited: Audited) -> None:
    assert lineage(audited(saved(entries, 1))) == {}
    assert "follows a checkpoint with chain another" in lineage(audited(saved(entries, 1, chain="another")))["step 2"]


def test_a_checkpoint_deleted_while_fewer_than_two_newer_ones_are_kept_is_named(
    entries: Entries, audited: Audited
) -> None:
    def dropped(steps: int) -> dict[str, str]:
        *before, (event, _) = saved(entries, steps)
        return lineage(audited([*before, (event, [cmd.DropCheckpoint(1, "step-1")])]))

    assert "loses its checkpoint, but only 1 newer ones are kept" in dropped(2)["step 2"]
    assert dropped(3) == {}
