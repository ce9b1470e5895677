"""Rows of metrics.jsonl as named scalars."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import msgspec

from dora import files
from dora.observe.observed import RunFacts, row_figures
from dora.observe.snapshot import Counts
from dora.observe.steps import StepFacts
from dora.trackers.api import TrackedRow
from dora.trackers.rows import GROUPS, RowReader, parse


def scalars_of(**row: object) -> TrackedRow | None:
    return parse(7, msgspec.json.encode(row), began=100.0)


def test_a_name_is_the_path_of_a_value_and_texts_and_nulls_are_left_out() -> None:
    row = scalars_of(
        kind="step",
        at=2.5,
        step=3,
        waited_for="answers",
        staleness=[4, 1],
        dropped={"filtered: zero variance": 2},
        alarms=["low_ess"],
        reward_mean=0.25,
        trainer={"loss": -0.5, "all/entropy": 1.25, "lag=1/entropy": 1.5, "grad_norm": None},
    )
    assert row == TrackedRow(
        number=7,
        axis="step",
        value=3,
        at=102.5,
        scalars={
            "time/at": 2.5,
            "staleness/0": 4.0,
            "staleness/1": 1.0,
            "dropped/filtered: zero variance": 2.0,
            "alarms/low_ess": 1.0,
            "reward/reward_mean": 0.25,
            "trainer/loss": -0.5,
            "trainer/all/entropy": 1.25,
            "by_staleness/lag=1/entropy": 1.5,
        },
    )


def test_every_scalar_of_a_step_has_a_group_and_every_grouped_name_is_one() -> None:
    numbers = (float, int, float | None, int | None)
    kinds = get_type_hints(StepFacts) | get_type_hints(Counts) | get_type_hints(RunFacts) | {"at": float}
    scalars = {name for name in row_figures() if kinds[name] in numbers} - {"step"}
    assert {name for names in GROUPS.values() for name in names} == scalars


def test_an_evaluation_has_the_version_as_its_axis_and_the_set_in_its_names() -> None:
    row = scalars_of(kind="evaluation", at=1.0, version=4, name="heldout", mean=0.75, num_samples=64)
    assert row is not None
    assert (row.axis, row.value) == ("version", 4)
    assert row.scalars == {
        "evaluation/heldout/at": 1.0,
        "evaluation/heldout/mean": 0.75,
        "evaluation/heldout/num_samples": 64.0,
    }


def test_a_skipped_evaluation_is_a_point() -> None:
    row = scalars_of(kind="evaluation_skipped", at=1.0, version=6)
    assert row is not None
    assert (row.axis, row.value, row.scalars) == ("version", 6, {"evaluation/skipped": 1.0})


def test_a_row_without_an_axis_and_a_damaged_line_are_left_out() -> None:
    assert scalars_of(kind="step", at=1.0) is None
    assert scalars_of(kind="else", version="new", at=1.0) is None
    assert parse(0, b"[1]\n", began=0.0) is None
    assert parse(0, b'{"kind": "st\n', began=0.0) is None
    assert parse(0, b"\xff\n", began=0.0) is None


def test_a_line_is_read_once_it_is_complete_even_if_the_file_appears_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert list(reader.new()) == []
    path.write_bytes(b"a\nb")
    assert list(reader.new()) == [(0, b"a\n")]
    assert list(reader.new()) == []
    with path.open("ab") as file:
        file.write(b"c\nd\n")
    assert list(reader.new()) == [(1, b"bc\n"), (2, b"d\n")]
    reader.close()


def test_a_line_is_yielded_only_when_it_is_on_the_disk(tmp_path: Path) -> None:
    """After a power failure, the numbers of lost lines are those of others: they must not count as logged."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"a\nb\n")
    reader = RowReader(path)
    synced = []

    def observe(operation: files.Operation) -> None:
        synced.append((operation.kind, operation.path, path.read_bytes()))
        with path.open("ab") as file:
            file.write(b"c\n")

    with files.observed(observe):
        assert list(reader.new()) == [(0, b"a\n"), (1, b"b\n")]
        assert synced == [("sync", path, b"a\nb\n")]
        assert list(reader.new()) == [(2, b"c\n")]
    reader.close()
