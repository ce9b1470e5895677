"""Durations are taken from the events of the core."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, StepId, TrajectoryId, VersionId
from dora.observe.durations import BOUNDS_S, DurationHistogram, Durations

ANSWER, SERVER = TrajectoryId(5), InstanceId(1)
NO_SPANS = ()


def generate(attempt: int) -> cmd.Generate:
    return cmd.Generate(ANSWER, attempt, SERVER, VersionId(0), 0)


def noted(durations: Durations) -> dict[str, tuple[int, float]]:
    return {name: (sum(h.counts), h.total_s) for name, h in durations.histograms.items() if sum(h.counts)}


def test_every_kind_is_timed_from_its_order_to_its_end() -> None:
    durations = Durations()
    durations.note(ev.Ticked(10.0), [cmd.PushWeights(SERVER, 1, VersionId(0))])
    durations.note(ev.WeightPushFinished(12.0, SERVER, 1, VersionId(0)), [generate(1)])
    durations.note(ev.CallStarted(13.0, ANSWER, 1, 4, NO_SPANS), [cmd.CallEnvironment(ANSWER, 1)])
    durations.note(ev.CallFinished(17.0, ANSWER, 1, 6), [generate(2)])
    durations.note(ev.GenerationFinished(22.0, ANSWER, 2, 9, False, NO_SPANS), [cmd.GradeTrajectory(ANSWER, 1)])
    durations.note(ev.TrajectoryGraded(22.5, ANSWER, 1, 1.0), [])
    durations.note(ev.StepTrained(30.0, StepId(0)), [])
    durations.note(ev.StepTrained(31.0, StepId(1)), [])
    assert noted(durations) == {
        "push": (1, 2.0),
        "generation": (2, 6.0),
        "call": (1, 4.0),
        "grading": (1, 0.5),
        "step": (2, 21.0),
    }


def test_a_move_begins_a_request_anew_and_an_old_attempt_ends_nothing() -> None:
    durations = Durations()
    durations.note(ev.Ticked(0.0), [generate(1)])
    durations.note(ev.Ticked(5.0), [generate(2)])
    durations.note(ev.GenerationFinished(6.0, ANSWER, 1, 9, False, NO_SPANS), [])
    durations.note(ev.GenerationFinished(8.0, ANSWER, 2, 9, False, NO_SPANS), [])
    durations.note(ev.GenerationFinished(9.0, ANSWER, 2, 9, False, NO_SPANS), [])
    assert noted(durations) == {"generation": (1, 3.0)}


def test_adapters_that_are_loaded_and_unloaded_at_once_are_timed_one_by_one() -> None:
    durations = Durations()
    durations.note(
        ev.Ticked(0.0), [cmd.PushWeights(SERVER, 1, VersionId(3)), cmd.UnloadVersion(SERVER, 2, VersionId(0), 0)]
    )
    durations.note(
        ev.Ticked(1.0), [cmd.PushWeights(SERVER, 3, VersionId(4)), cmd.UnloadVersion(SERVER, 4, VersionId(1), 0)]
    )
    durations.note(ev.WeightPushFinished(4.0, SERVER, 3, VersionId(4)), [])
    durations.note(ev.VersionUnloaded(5.0, SERVER, 2), [])
    durations.note(ev.WeightPushFinished(6.0, SERVER, 1, VersionId(3)), [])
    durations.note(ev.VersionUnloadFailed(7.0, SERVER, 4, "timeout"), [])
    assert noted(durations) == {"push": (2, 9.0), "unload": (1, 5.0)}


@pytest.mark.parametrize(
    "end",
    [ev.InstanceLost(1.0, SERVER, 1, {}, "gone"), ev.InstanceRemoved(1.0, SERVER), ev.ControllerRestarted(1.0, 1, {})],
)
def test_what_was_under_way_on_a_server_that_is_lost_has_no_duration(end: ev.Event) -> None:
    durations = Durations()
    durations.note(
        ev.Ticked(0.0), [cmd.PushWeights(SERVER, 1, VersionId(3)), cmd.UnloadVersion(SERVER, 2, VersionId(0), 0)]
    )
    durations.note(end, [cmd.PushWeights(SERVER, 3, VersionId(3))])
    durations.note(ev.WeightPushFinished(4.0, SERVER, 1, VersionId(3)), [])
    durations.note(ev.VersionUnloaded(5.0, SERVER, 2), [])
    durations.note(ev.WeightPushFinished(6.0, SERVER, 3, VersionId(3)), [])
    assert noted(durations) == {"push": (1, 5.0)}


def test_a_failure_has_no_duration() -> None:
    durations = Durations()
    durations.note(ev.Ticked(0.0), [generate(1), cmd.PushWeights(SERVER, 1, VersionId(0))])
    durations.note(ev.GenerationFailed(1.0, ANSWER, 1, 0, server_gone=False, reason="gone"), [])
    durations.note(ev.WeightPushFailed(1.0, SERVER, 1, "timeout"), [])
    durations.note(ev.GenerationFinished(2.0, ANSWER, 1, 9, False, NO_SPANS), [])
    assert noted(durations) == {}


def test_a_bucket_includes_its_bound_and_the_last_one_has_none() -> None:
    histogram = DurationHistogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[1], 1e9):
        histogram.note(seconds)
    assert histogram.counts == [2, 1, *[0] * (len(BOUNDS_S) - 2), 1]
