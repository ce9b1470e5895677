"""Excerpts: everything about one id, nothing about others, causes with their orders."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.excerpt import RUN, Entry, excerpt, subject_of
from dora.core.ids import GroupId, InstanceId, Subject, TrajectoryId
from tests.core.world import World, run


@pytest.fixture(scope="module")
def world() -> World:
    return run(steps=4)


def test_the_excerpt_of_a_group_runs_from_admission_to_training(world: World) -> None:
    lines = excerpt(world.journal, Subject("group", 3), group_size=2)
    orders = [line.split()[1] for line in lines if "→" in line]
    assert orders[:3] == ["AdmitGroup", "Generate", "Generate"]
    assert orders[-1] == "ForgetGroups"
    assert orders.count("CommitGroup") == 1
    assert orders.count("TrainMicroBatch") >= 1
    assert sum("GenerationFinished trajectory=6 " in line for line in lines) == 1
    assert sum("GenerationFinished trajectory=7 " in line for line in lines) == 1
    assert not any("trajectory=8 " in line for line in lines)


def test_the_excerpt_of_a_trajectory_leaves_its_sibling_out_and_keeps_its_group(world: World) -> None:
    lines = excerpt(world.journal, Subject("trajectory", 6), group_size=2)
    assert not any("→ Generate trajectory=7" in line for line in lines)
    assert any("→ AdmitGroup group=3" in line for line in lines)
    assert any("→ CommitGroup group=3" in line for line in lines)


@pytest.mark.parametrize("subject", [Subject("instance", 1), Subject("version", 2), Subject("step", 3)])
def test_every_order_that_names_an_id_is_in_its_excerpt(world: World, subject: Subject) -> None:
    lines = excerpt(world.journal, subject, group_size=2)
    named = [c for _, commands in world.journal for c in commands if getattr(c, subject.kind, None) == subject.id]
    assert named
    assert sum("→" in line for line in lines) == len(named)


def test_an_event_that_only_causes_an_order_is_shown_as_its_cause() -> None:
    entries: list[Entry] = [
        (ev.Ticked(2.0), [cmd.ReleaseVersion(1), cmd.CondemnInstance(InstanceId(4), 1, "stuck")]),
        (ev.Ticked(3.0), []),
    ]
    assert excerpt(entries, Subject("instance", 4), group_size=2) == [
        "     2.000 s  Ticked",
        "              → CondemnInstance instance=4 incarnation=1 reason=stuck",
    ]


def test_of_progress_in_a_row_only_the_last_report_is_kept_and_only_its_own_count() -> None:
    reports: list[Entry] = [
        (ev.ProgressReported(float(i), InstanceId(0), {TrajectoryId(6): i, TrajectoryId(9): i}), []) for i in range(5)
    ]
    lost = ev.InstanceLost(5.0, InstanceId(0), 1, {TrajectoryId(6): 4, TrajectoryId(9): 4}, "gone")
    assert excerpt([*reports, (lost, [])], Subject("trajectory", 6), group_size=2) == [
        "     4.000 s  ProgressReported instance=0 num_tokens={6: 4}",
        "     5.000 s  InstanceLost instance=0 incarnation=1 num_tokens={6: 4} reason=gone",
    ]


def test_the_subject_of_a_fact_is_the_narrowest_id_it_names() -> None:
    assert subject_of(cmd.Generate(TrajectoryId(6), 1, InstanceId(0), 2, 0)) == Subject("trajectory", 6)
    assert subject_of(cmd.CommitGroup(GroupId(3), 2, 4)) == Subject("group", 3)
    assert subject_of(cmd.PushWeights(InstanceId(1), 1, 2)) == Subject("instance", 1)
    assert subject_of(ev.VersionPublished(0.0, 2, 1, {})) == Subject("version", 2)
    assert subject_of(ev.Ticked(0.0)) == RUN
