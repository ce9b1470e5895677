"""Recordings are complete: the observers write the same bytes again from what was recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dora.app.saved_status import SavedStatus
from dora.controller import recorder as recorder_module
from dora.controller.evaluations import EvalSet, Evaluations
from dora.controller.line_files import LineFiles
from dora.controller.loop import Outcome
from dora.controller.recorder import Recorder, last_step_at
from dora.controller.trainer_link import StepReport
from dora.core import events as ev
from dora.core.state import State
from dora.errors import DoraError
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder
from dora.journal.spans import read_spans, read_timeline
from dora.observe.drift import DriftWatch
from dora.observe.durations import DurationHistogram
from dora.observe.facts import Down, ShellFacts
from dora.observe.groups import GroupRow, forming
from dora.observe.lanes import Lanes
from dora.observe.observed import Folded, Observed
from dora.observe.snapshot import encode
from dora.transport.messages import RankSpans
from tests.observe import recording as kept

#: Every value that differs, with its reason: recording, place, field, recorded, written, reason.
DIFFERENCES = Path(__file__).parent / "differences.tsv"
FOLDED = "folded when StepTrained is handled: events since the trainer's report count"
#: Reasons for differences after a resume.
RESUMED = {
    r"durations\..*": "histograms are folded from events, so that a replay rebuilds them",
    r".*call_(s_mean|s_p90|share)": "calls from before the resume count",
    r"num_tokens": "observations were not sampled",
    r"trainer_metrics\..*": "the row of the last step has them",
    r"(.*\.)?(duration_s|waited_for|idle_reason)": "since the StepTrained before, also of a step trained again",
    r"eta_s|trained_tokens_per_s|.*idle_share": "follows from duration_s and from slots in use before the resume",
}
LONGEST = {r".*call_s_p90": "nine of ten calls are at most as long"}
IN_ROWS = r"at|(.*\.)?duration_s|eta_s|trained_tokens_per_s|tokens_per_s|.*idle_share|(tokens|rank_s|instance_s)\..*"

#: What snapshots have said since the recordings were taken, with its value in all of them.
ADDED = [
    b'"judges":null,',
    b'"requests":[],',
    b',"trainer_losses":0',
    b',"rows_passed":null',
    b',"accept_length":null',
    b',"unload":' + msgspec.json.encode(DurationHistogram()),
]
#: What rows have said since then.
ADDED_TO_ROWS = [b',"trainer_losses":0', b',"forks":{},"repeated_tokens_mean":0.0,"metrics":{}']
#: What every row of the instances and of the versions has said, and each step shown.
ADDED_TO_TABLES = [b',"mismatch_k3":null', b',"holdings":[]', b',"unloading":0', *ADDED_TO_ROWS[1:]]

#: Kinds of inputs of a job without an environment that decide what is written.
MATTERS = [
    kept.Durable,
    kept.Sampled,
    kept.FirstToken,
    kept.Servers,
    kept.PushStage,
    kept.WaveDone,
    kept.Spans,
    kept.Ready,
    kept.Lag,
    kept.Stepped,
    kept.Evaluated,
    kept.Ended,
    kept.Closed,
]


class Records(dict[Any, Any]):
    """Records of the trajectories that an input concerns. Others count as present, since their records are not read."""

    def __contains__(self, trajectory: object) -> bool:
        return True


@dataclass
class OtherParts:
    """What the observers read of the rest of the controller."""

    records: Records = field(default_factory=Records)
    prompts: dict[Any, Any] = field(default_factory=dict)
    urls: dict[Any, str] = field(default_factory=dict)
    down: dict[Any, Down] = field(default_factory=dict)
    disk: kept.Disk = field(default_factory=kept.Disk)
    at: float = -1.0
    cpu_s: float | None = None


class Observers:
    """The observers of one controller, which get the inputs of a recording."""

    def __init__(self, opened: kept.Opened, state: State, folder: RunFolder) -> None:
        for name, data in opened.files.items():
            (folder.root / name).write_bytes(data)
        self._state = state
        self._folder = folder
        self.shown: list[tuple[bytes, tuple[GroupRow, ...]]] = []  #: snapshots as recorded
        self.otherwise: list[kept.Difference] = []
        self.others = OtherParts()
        self._folded = _folded(opened)
        self._lines = LineFiles(folder, state)
        self._lanes = Lanes(
            state,
            num_ranks=opened.num_ranks,
            time_scale=opened.time_scale,
            spans=read_spans(folder.spans),
            rows=read_timeline(folder.timeline),
            step_at=last_step_at(folder.metrics),
        )
        self._recorder: Recorder
        self._reports: dict[int, kept.Stepped] = {}

    def close(self) -> None:
        self._lines.close()

    def _begin(self, job: kept.Began) -> None:
        self.others.cpu_s = job.cpu_s
        self._num_ranks = job.num_ranks
        sets = [
            EvalSet(one.name, [None] * one.prompts, one.samples, temperature=0.0, num_skipped=one.skipped)  # type: ignore[list-item]
            for one in job.held_out
        ]
        self._evaluations = Evaluations(sets)
        others, has_environment = self.others, job.has_environment

        def episode_stats(ids: Any) -> Any:
            return self._folded.episodes.stats({id: others.records[id] for id in ids}) if has_environment else None

        facts = ShellFacts(
            run_id=job.run_id,
            strategy=job.strategy,
            task=job.task,
            has_environment=job.has_environment,
            num_servers=job.num_servers,
            num_ranks=job.num_ranks,
            held_out=tuple(one.name for one in sets),
        )
        drift = DriftWatch(precision=job.precision, updates=job.updates, clips_many=job.clips_many)
        self._recorder = Recorder(
            Observed(
                self._state,
                facts=facts,
                folded=self._folded,
                lanes=self._lanes,
                drift=drift,
                episode_stats=episode_stats,
                cpu_s=job.cpu_s,
            ),
            state=self._state,
            lines=self._lines,
            trajectories=others,  # type: ignore[arg-type]
            evaluations=self._evaluations,
            samples=NoSamples(),  # type: ignore[arg-type]
            max_kept_bytes=0,
            urls=others.urls,
            down=others.down,
            now=lambda: others.at,
            then=others.disk.then,
        )

    def feed(self, what: kept.AnyInput | kept.Fact) -> None:
        """Pass an input on."""
        others = self.others
        match what:
            case kept.Began():
                self._begin(what)
            case kept.Before():
                if isinstance(what.event, ev.StepTrained) and (told := self._reports.pop(what.event.step, None)):
                    self._take_records(told)
                    others.cpu_s = told.cpu_s
                self._recorder.before(what.event)
            case kept.Fact():
                others.prompts |= {id: SimpleNamespace(skipped=text) for id, text in what.skipped.items()}
                self._recorder.on_event(what.event, what.commands, position=what.position)
            case kept.Durable():
                others.disk.reach(what.position)
            case kept.Restored():
                self._folded.tokens.restore(what.sampled)
            case kept.Sampled():
                self._folded.tokens.append(what.trajectory, what.num_tokens)
            case kept.FirstToken() | kept.PushStage() | kept.WaveDone() | kept.Spans() | kept.Closed():
                self._feed_spans(what)
            case kept.Servers():
                others.urls.clear()
                others.urls.update(what.urls)
                others.down.clear()
                others.down.update({id: Down(one.since, one.reason, one.then) for id, one in what.down.items()})
            case _:
                self._feed_observer(what)

    def _feed_spans(self, what: kept.AnyInput) -> None:
        self.others.at = getattr(what, "at", -1.0)
        match what:
            case kept.FirstToken():
                self._lanes.on_first_token(what.trajectory, at=what.at)
            case kept.PushStage():
                self._recorder.on_push_stage(what.instance, what.stage)
            case kept.WaveDone():
                self._recorder.on_wave_done(what.rank)
            case kept.Spans():
                message = RankSpans(rank=what.rank, until=what.until, spans=what.spans)  # type: ignore[arg-type]
                self._recorder.on_rank_spans(what.rank, message)
            case kept.Closed():
                self._recorder.close()

    def _feed_observer(self, what: kept.AnyInput) -> None:
        match what:
            case kept.Ready():
                self._recorder.on_ready(what.num_ranks, self._num_ranks)
            case kept.Lag():
                self._recorder.on_lag(what.seconds)
            case kept.Full():
                self._recorder.on_full(what.reason)
            case kept.Ended():
                self._recorder.end(Outcome(what.finished, what.reason))
            case kept.Failed():
                self._recorder.fail(DoraError(what.reason))
            case kept.Stepped():
                self._reports[what.step] = what
                self._recorder.on_step(StepReport(what.step, dict(what.metrics)))
            case kept.Evaluated():
                ids = self._evaluations.ids(what.version)
                self._take_records(what)
                for id, (reward, num_tokens) in zip(ids, what.outcomes, strict=True):
                    record = self.others.records.setdefault(id, SimpleNamespace(tokens=range(num_tokens)))
                    record.reward = reward
                self._recorder.on_evaluation(what.version, position=what.position)
            case kept.Shown():
                shown = self._recorder.snapshot()
                of = f"snapshot at {shown.uptime_s:.3f} s"
                self.otherwise += kept.differences(_without_added(encode(shown)), what.snapshot, of=of)
                self.shown.append((what.snapshot, tuple(forming(self._state))))

    def _take_records(self, what: kept.Stepped | kept.Evaluated) -> None:
        self._recorder._kept.is_full = what.samples_full
        self.others.records = Records(
            {
                id: SimpleNamespace(
                    tokens=range(one.num_tokens),
                    observed=[*one.observed],
                    turn_rewards=[*one.turn_rewards],
                    truncated=one.truncated,
                    repeated=0,
                    metrics=(),
                )
                for id, one in what.episodes.items()
            }
        )


class NoSamples:
    """Samples of nothing: trajectories.jsonl is not compared."""

    def on_commands(self, commands: object) -> None: ...

    def mismatches(self, groups: object, *, step: int) -> dict[Any, float]:
        return {}

    def of_step(self, groups: object, *, step: int) -> list[Any]:
        return []

    def of_evaluation(self, version: int, *, trained: int) -> list[Any]:
        return []


def _without_added(snapshot: bytes) -> bytes:
    for text in ADDED:
        assert text in snapshot
        snapshot = snapshot.replace(text, b"", 1)
    for text in ADDED_TO_TABLES:
        snapshot = snapshot.replace(text, b"")
    return snapshot


def _folded(opened: kept.Opened) -> Folded:
    folded = Folded.new(opened.settings.group_size, is_replay=bool(opened.earlier))
    replay(opened.settings, [(one.event, one.commands) for one in opened.earlier], projection=folded)
    return folded


def again(
    recording: kept.Recording, folder: Path, monkeypatch: pytest.MonkeyPatch, *, without: type[kept.Input] | None = None
) -> Observers:
    """Give the inputs to new observers, which write into `folder`; snapshots are compared at once. `without`: inputs of
    this kind are left out."""
    inputs = iter(recording)
    state, opened = next(inputs)
    assert isinstance(opened, kept.Opened)
    observers = Observers(opened, state, RunFolder(folder))
    clock = SimpleNamespace(process_time=lambda: observers.others.cpu_s or 0.0)
    monkeypatch.setattr(recorder_module, "time", clock)
    try:
        for _, what in inputs:
            if not isinstance(what, kept.Left) and type(what) is not without:
                observers.feed(what)
    finally:
        observers.close()
    return observers


def written_otherwise(recording: kept.Recording, observers: Observers, folder: Path) -> list[kept.Difference]:
    """Return all differences from what the controller left: of its files, and of all snapshots."""
    left = recording.left.files
    found = [*observers.otherwise]
    for name in kept.LINES:
        written = (folder / name).read_bytes()
        for text in ADDED_TO_ROWS:
            written = written.replace(text, b"")
        found += kept.differences(written, left[name], of=name)
    saved = msgspec.json.decode(left["status.json"], type=SavedStatus)
    assert left["status.json"] in [
        msgspec.json.encode({"at": saved.at, "url": saved.url, "snapshot": msgspec.Raw(snapshot), "groups": groups})
        for snapshot, groups in observers.shown
    ], "the status was not saved at one of the snapshots"
    return found


@pytest.mark.parametrize("path", kept.recordings(), ids=lambda path: path.stem)
def test_the_observers_write_what_was_recorded_but_for_changes_with_a_reason(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = kept.Recording(path)
    found = written_otherwise(recording, again(recording, tmp_path, monkeypatch), tmp_path)
    listed = [line for line in DIFFERENCES.read_text().splitlines() if line.startswith(f"{path.stem}\t")]
    assert list(_listed(path.stem, found)) == listed


def _listed(recording: str, found: list[kept.Difference]) -> Iterator[str]:
    """Yield the lines of DIFFERENCES. Snapshots repeat a value until it changes: each field is listed once."""
    shown = set()
    for each in found:
        field = _general(each.field)
        if each.place.startswith("snapshot"):
            if field in shown:
                continue
            shown.add(field)
        reasons = RESUMED if recording.endswith(".1") else {}
        reason = next(
            (why for pattern, why in {**reasons, **LONGEST, IN_ROWS: FOLDED}.items() if re.fullmatch(pattern, field)),
            "",
        )
        assert reason, each
        yield "\t".join([recording, each.place, field, f"{each.recorded}", f"{each.written}", reason])


def _general(field: str) -> str:
    """Return the path of a field without positions in lists."""
    return re.sub(r"\.\d+(?=\.|$)", "", field)


@pytest.mark.parametrize("kind", MATTERS, ids=lambda kind: kind.__name__)
def test_without_inputs_of_a_kind_they_write_something_else(
    kind: type[kept.Input], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = kept.Recording(kept.FOLDER / "dora.0.xz")
    folders = tmp_path / "all", tmp_path / "without"
    for folder in folders:
        folder.mkdir()
    known = written_otherwise(recording, again(recording, folders[0], monkeypatch), folders[0])
    assert written_otherwise(recording, again(recording, folders[1], monkeypatch, without=kind), folders[1]) != known
