"""Every record, event and command is read as it was written; anything unknown is refused."""

from __future__ import annotations

import typing

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, InstanceId, TrajectoryId
from dora.core.phases import GroupPhase
from dora.errors import ProtocolError
from dora.journal.codec import FORMAT, Epoch, Handled, Header, Note, decode, encode
from tests.core.world import settings

INSTANCE, TRAJECTORY, GROUP = InstanceId(2), TrajectoryId(-7), GroupId(3)

EVENTS: list[ev.AnyEvent] = [
    ev.InstanceUp(0.5, INSTANCE, 1, 8, 4096, 3, "0a1b2c3d"),
    ev.InstanceLost(1.0, INSTANCE, 1, {TRAJECTORY: 5, TrajectoryId(9): 0}, "gone"),
    ev.ProgressReported(1.0, INSTANCE, {TRAJECTORY: 6}),
    ev.PrefillReported(1.0, INSTANCE),
    ev.KvPressureReported(1.0, INSTANCE, True),
    ev.InstanceDrainRequested(1.0, INSTANCE, True),
    ev.InstanceRecalled(1.0, INSTANCE, request=ev.RequestTag("id-1", "ada (127.0.0.1)")),
    ev.ServerOffered(1.0, "http://127.0.0.1:30000"),
    ev.EvaluationRequested(1.0),
    ev.StopRequested(1.0, request=ev.RequestTag(by="a signal")),
    ev.InstanceRemoved(1.0, INSTANCE),
    ev.WeightPushFinished(1.0, INSTANCE, 3, 4),
    ev.WeightPushFailed(1.0, INSTANCE, 3, "timeout"),
    ev.VersionUnloaded(1.0, INSTANCE, 3),
    ev.VersionUnloadFailed(1.0, INSTANCE, 3, "timeout"),
    ev.PromptsArrived(1.0, GROUP, (3, 4, 5), False),
    ev.PromptsArrived(1.0, GROUP, (3, 4), True, (ev.Visit(0, 2, (7, 1)), ev.Visit(1, 0))),
    ev.GenerationFinished(1.0, TRAJECTORY, 2, 64, True, ((4, 0, 60), (4, 60, 64))),
    ev.GenerationStopped(1.0, TRAJECTORY, 2, 0, ()),
    ev.GenerationFailed(1.0, TRAJECTORY, 2, 7, True, "«reset»"),
    ev.CallStarted(1.0, TRAJECTORY, 2, 60, ((4, 0, 60),)),
    ev.CallFinished(1.0, TRAJECTORY, 3, 80, True, "", 0.5, True),
    ev.CallFinished(1.0, TRAJECTORY, 3, 80, fork="branched"),
    ev.TrajectoryGraded(1.0, TRAJECTORY, 3, None, "killed"),
    ev.TrajectoryGraded(1.0, TRAJECTORY, 3, 0.5, judged=ev.JudgeUse(2, 900, 80)),
    ev.TrainerReady(1.0, 2),
    ev.TrainerLost(1.0, 1, "killed"),
    ev.MicroBatchTrained(1.0, 2, 0),
    ev.StepTrained(1.0, 2, "0a1b"),
    ev.VersionPublished(1.0, 3, 123, {"model.safetensors": "ab" * 16}, "0a1b", "cd" * 16),
    ev.CheckpointSaved(1.0, 2, "checkpoints/2"),
    ev.Ticked(1e9 + 0.1),
    ev.ControllerRestarted(1.0, 1, {TRAJECTORY: 3}),
    ev.ControllerRestarted(1.0, 1, {}, limits=ev.TimeLimits(60.0, 1800.0, 0.0)),
]

COMMANDS: tuple[cmd.AnyCommand, ...] = (
    cmd.FetchPrompts(GROUP, 8),
    cmd.Generate(TRAJECTORY, 2, INSTANCE, 4, 60),
    cmd.CallEnvironment(TRAJECTORY, 3),
    cmd.GradeTrajectory(TRAJECTORY, 3),
    cmd.PushWeights(INSTANCE, 3, 4),
    cmd.UnloadVersion(INSTANCE, 4, 4, 3),
    cmd.TrainMicroBatch(2, 0, True, ((TRAJECTORY,), ())),
    cmd.RestartTrainer(2, 5.0),
    cmd.CondemnInstance(INSTANCE, 1, "stuck"),
    cmd.DismissInstance(INSTANCE),
    cmd.RefuseRequest(INSTANCE, "the last one"),
    cmd.RefuseRequest(None, "the run has ended"),
    cmd.StopRun(),
    cmd.StopRequest(TRAJECTORY, 2, INSTANCE),
    cmd.ForgetGroups((GROUP,)),
    cmd.ReleaseVersion(1),
    cmd.DropCheckpoint(2, "checkpoints/step-000002-0a1b2c3d"),
    cmd.ReportEvaluation(1),
    cmd.FinishRun("done"),
    cmd.FailRun("not done"),
    cmd.AdmitGroup(GROUP, 1, 3),
    cmd.CommitGroup(GROUP, 1, 3),
    cmd.DropGroup(GROUP, GroupPhase.FILTERED, "zero variance", (1.0, None)),
    cmd.CloseStep(3, 4),
)

OTHERS = [
    Header(FORMAT, "run-1", "2026-01-01T00:00:00Z", "0.1.0", settings(eval_prompt_tokens=(3, 4))),
    Epoch(1, 12.5, "[run]\nseed = 1\n", ("run.seed: 0 -> 1",)),
    Note(1.0, "instance", {"id": 2, "url": "http://127.0.0.1:1", "load": 0.5}),
]


def test_the_examples_are_all_events_and_commands() -> None:
    assert {type(e) for e in EVENTS} == set(typing.get_args(ev.AnyEvent))
    assert {type(c) for c in COMMANDS} == set(typing.get_args(cmd.AnyCommand))


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_every_event_with_every_command_is_read_as_it_was_written(event: ev.AnyEvent) -> None:
    record = Handled(event, COMMANDS)
    assert decode(encode(record)) == record


def test_a_server_of_a_journal_from_before_take_overs_has_no_version() -> None:
    event = {"type": "InstanceUp", "at": 0.5, "instance": 2, "incarnation": 1, "slots": 8, "kv_tokens": 4096}
    record = msgspec.msgpack.encode({"type": "Handled", "event": event, "commands": []})
    assert decode(record) == Handled(ev.InstanceUp(0.5, INSTANCE, 1, 8, 4096, None, ""), ())


@pytest.mark.parametrize("record", OTHERS, ids=lambda r: type(r).__name__)
def test_every_other_record_is_read_as_it_was_written(record: Header | Epoch | Note) -> None:
    assert decode(encode(record)) == record


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"type": "Handeld", "event": {}, "commands": []}, "Handeld"),
        ({"type": "Epoch", "epoch": 0, "at": 0.0, "config": "", "more": 1}, "more"),
        ({"type": "Epoch", "epoch": 0, "at": 0.0}, "config"),
        ({"type": "Handled", "event": {"type": "Tocked", "at": 0.0}, "commands": []}, "Tocked"),
        ({"type": "Handled", "event": {"type": "Ticked", "at": 0.0, "why": 1}, "commands": []}, "why"),
        ({"type": "Handled", "event": {"type": "Ticked", "at": "now"}, "commands": []}, "float"),
        ({"type": "Handled", "event": {"type": "Ticked", "at": 0.0}, "commands": [{"type": "Stop"}]}, "Stop"),
        ({"epoch": 0}, "type"),
        ([1, 2], "array"),
    ],
)
def test_an_unknown_record_type_or_field_is_refused_by_name(fields: object, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode(msgspec.msgpack.encode(fields))


def test_bytes_that_are_not_msgpack_are_refused() -> None:
    for data in (b"", b"\xc1", encode(EVENTS[0])[:-1]):  # type: ignore[arg-type]
        with pytest.raises(ProtocolError):
            decode(data)
