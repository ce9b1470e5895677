"""The spans of whole jobs, with losses, failing pushes and resumes: no lane has a hole or an overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.state import State
from dora.files import LineFile
from dora.journal.run_folder import RunFolder
from dora.journal.spans import SpanLine, ends_by, read_spans, read_timeline
from dora.observe.activities import WAITING
from dora.observe.lanes import Lanes
from dora.transport.messages import RankSpans
from tests.core.builders import Core, published
from tests.core.world import Faults, World, settings

FAULTS = Faults(push_fails=0.1, instance_dies=0.03, zero_variance=0.2)
RANKS = 2
CLOCK = 1_000.0  # what a rank's clock is ahead by


class Written:
    """The lanes of a run, with the files of their lines."""

    def __init__(self, folder: RunFolder, state: State, *, now: Callable[[], float]) -> None:
        has_ended = partial(ends_by, at=state.now)
        self.files = [LineFile(path, is_known=has_ended) for path in (folder.spans, folder.timeline)]
        self.now = now
        self.lanes = Lanes(
            state,
            num_ranks=RANKS,
            time_scale=1.0,
            spans=read_spans(folder.spans),
            rows=read_timeline(folder.timeline),
        )

    def apply(self, event: ev.Event, orders: list[cmd.Command]) -> None:
        self.lanes.apply(event, orders)
        self.write()

    def on_push_stage(self, instance: InstanceId, stage: str) -> None:
        self.lanes.on_push_stage(instance, stage, at=self.now())

    def on_first_token(self, trajectory: int) -> None:
        self.lanes.on_first_token(TrajectoryId(trajectory), at=self.now())

    def on_wave_done(self, rank: int) -> None:
        self.lanes.on_wave_done(rank, at=self.now())

    def on_rank_spans(self, rank: int, message: RankSpans) -> None:
        self.lanes.on_rank_spans(rank, message, at=self.now())

    def write(self) -> None:
        for file, data in zip(self.files, self.lanes.take(), strict=True):
            file.write(data)

    def close(self) -> None:
        self.lanes.end()
        self.write()
        for file in self.files:
            file.close()


class Recorded(World):
    """A job whose controller is replaced now and then, cleanly or not; its ranks report what they do."""

    def begin(self, folder: RunFolder, *, resume_every: int, clean: bool) -> None:
        self.folder, self.resume_every, self.clean = folder, resume_every, clean
        self.reported = [0.0] * RANKS
        self.delays = 0
        self.open()
        self.sink = self.take

    def open(self) -> None:
        self.recorder = Written(self.folder, self.state, now=lambda: max(self.now, self.state.now))

    def take(self, event: ev.Event, orders: list[cmd.Command]) -> None:
        if isinstance(event, ev.MicroBatchTrained | ev.TrainerReady):
            for rank in range(RANKS):
                self.report(rank, is_start=isinstance(event, ev.TrainerReady))
        self.recorder.apply(event, orders)
        for order in orders:
            if isinstance(order, cmd.PushWeights):
                self.recorder.on_push_stage(order.instance, "load")
            elif isinstance(order, cmd.Generate) and order.trajectory % 3:
                self.recorder.on_first_token(order.trajectory)
        if len(self.journal) % self.resume_every == 0:
            if self.clean:
                self.recorder.close()
            for file in self.recorder.files:
                file.close()
            self.open()

    def report(self, rank: int, *, is_start: bool) -> None:
        """Report a rank's time with a delay, except sometimes; the rank waited for the first half of it."""
        self.delays += 1
        until = self.state.now - 0.002 * (self.delays % 3)
        spent = max(0.0, until - self.reported[rank])
        self.reported[rank] = until
        activity = "start" if is_start else "waiting"
        spans = ((activity, spent / 2), ("forward_backward", spent / 2))
        self.recorder.on_rank_spans(rank, RankSpans(rank=rank, until=until + CLOCK, spans=spans))


def folder_at(path: Path) -> RunFolder:
    return RunFolder(path)


#: Whether versions are adapters, how often the controller is replaced, and whether cleanly.
JOBS = [(adapters, *resumes) for adapters in (False, True) for resumes in ((1_000_000, True), (37, True), (37, False))]
of_every_kind = pytest.mark.parametrize(("adapters", "resume_every", "clean"), JOBS)


def job(path: Path, *, adapters: bool = False, resume_every: int = 1_000_000, clean: bool = True) -> Recorded:
    world = Recorded(
        settings(eval_prompt_tokens=(3,) * 4, eval_every=4, adapters=adapters),
        seed=5,
        num_instances=2 if adapters else 4,
        faults=FAULTS,
    )
    world.begin(folder_at(path), resume_every=resume_every, clean=clean)
    world.run()
    world.recorder.close()
    return world


def by_lane(folder: RunFolder) -> dict[tuple[str, int], list[SpanLine]]:
    lanes = defaultdict(list)
    for span in read_spans(folder.spans):
        lanes[span[0], span[1]].append(span)
    return lanes


@of_every_kind
def test_no_lane_has_a_hole_or_an_overlap(tmp_path: Path, adapters: bool, resume_every: int, clean: bool) -> None:
    world = job(tmp_path, adapters=adapters, resume_every=resume_every, clean=clean)
    lanes = by_lane(world.folder)
    assert {lane for kind, lane in lanes if kind == "rank"} == set(range(RANKS))
    assert {lane for kind, lane in lanes if kind == "instance"} == set(world.state.instances)
    for spans in lanes.values():
        assert all(a[3] == b[2] for a, b in pairwise(spans))
        assert spans[-1][3] == pytest.approx(world.state.now, abs=1e-5)
    assert all(lanes["rank", rank][0][2] == 0.0 for rank in range(RANKS))


@of_every_kind
def test_the_timeline_and_the_seconds_add_up_to_the_spans(
    tmp_path: Path, adapters: bool, resume_every: int, clean: bool
) -> None:
    world = job(tmp_path, adapters=adapters, resume_every=resume_every, clean=clean)
    of_spans: dict[tuple[str, str], float] = defaultdict(float)
    of_rows: dict[tuple[str, str], float] = defaultdict(float)
    for kind, _, start, end, activity, _ in read_spans(world.folder.spans):
        of_spans[kind, activity] += end - start
    for row in read_timeline(world.folder.timeline):
        assert all(sum(s for _, _, s in entries) <= row.s + 1e-5 for entries in row.lanes.values())
        for entries in row.lanes.values():
            for activity, _, seconds in entries:
                of_rows[row.kind, activity] += seconds
    assert sum(of_rows.values()) == pytest.approx(sum(of_spans.values()), abs=2e-2)
    for key in of_spans.keys() | of_rows.keys():  # after a crash, whether an instance still prefilled is not known
        assert of_rows[key] == pytest.approx(of_spans[key], abs=2e-2 if clean else 0.5), key
    for kind, spent in zip(("rank", "instance"), world.recorder.lanes.seconds(), strict=True):
        for activity, seconds in spent.items():
            assert seconds == pytest.approx(of_spans[kind, activity], abs=1e-2)


@pytest.mark.parametrize("resume_every", [1_000_000, 37])
def test_the_timeline_has_every_publication_and_every_answer_that_moved(tmp_path: Path, resume_every: int) -> None:
    world = job(tmp_path, resume_every=resume_every)
    rows = [*read_timeline(world.folder.timeline)]
    published = {e.version: e.at for e, _ in world.journal if isinstance(e, ev.VersionPublished)}
    assert dict(p for row in rows for p in row.published) == pytest.approx(published, abs=1e-5)
    assert all(row.at <= at <= row.at + row.s for row in rows for _, at in row.published)
    before: dict[int, InstanceId] = {}
    moves: dict[int, int] = defaultdict(int)
    for _, orders in world.journal:
        for order in orders:
            if isinstance(order, cmd.Generate):
                if order.num_tokens and before[order.trajectory] != order.instance:
                    moves[order.instance] += 1
                before[order.trajectory] = order.instance
    found: dict[int, int] = defaultdict(int)
    for row in rows:
        for lane, count in row.moved.items():
            found[lane] += count
    assert sum(moves.values()) >= world.state.counters.migrations > 0
    if resume_every > 37:  # a controller does not know where the answers were that it takes up
        assert found == moves
    assert 0 < sum(found.values()) <= sum(moves.values())


def test_a_job_with_losses_shows_every_kind_of_span(tmp_path: Path) -> None:
    spans = [*read_spans(job(tmp_path).folder.spans)]
    seen = {activity for kind, _, _, _, activity, _ in spans if kind == "instance"}
    assert {"decoding", "push:load", "down"} <= seen
    waits = {activity for kind, _, _, _, activity, _ in spans if kind == "rank" and activity.startswith("waiting:")}
    assert waits <= {f"waiting:{cause}" for cause in WAITING}
    assert waits & {"waiting:generation", "waiting:tail"}
    assert all(version is not None for kind, *_, activity, version in spans if activity == "decoding")


def test_a_row_divides_the_time_of_an_instance_among_the_versions_of_its_requests(tmp_path: Path) -> None:
    """That of each is the integral of its share of the requests, which the journal tells as well."""
    world = job(tmp_path, adapters=True)
    expected: dict[int | None, float] = defaultdict(float)
    where: dict[TrajectoryId, tuple[InstanceId, int]] = {}
    before = 0.0
    for event, orders in world.journal:
        for instance in world.state.instances:
            versions = [version for place, version in where.values() if place == instance]
            for version in versions:
                expected[version] += max(0.0, event.at - before) / len(versions)
        before = max(before, event.at)
        if isinstance(event, ev.GenerationFinished | ev.GenerationStopped | ev.GenerationFailed):
            where.pop(event.trajectory, None)
        elif isinstance(event, ev.InstanceLost):
            where = {id: one for id, one in where.items() if one[0] != event.instance}
        where |= {o.trajectory: (o.instance, o.version) for o in orders if isinstance(o, cmd.Generate)}
    found: dict[int | None, float] = defaultdict(float)
    rows = [row for row in read_timeline(world.folder.timeline) if row.kind == "instance"]
    for row in rows:
        for entries in row.lanes.values():
            for activity, version, seconds in entries:
                found[version] += seconds * (activity in ("decoding", "prefill"))
    assert all(row.shared for row in rows)
    assert any(len({v for a, v, _ in e if a == "decoding"}) > 2 for row in rows for e in row.lanes.values())
    assert {v: s for v, s in found.items() if s} == pytest.approx({**expected}, abs=1e-2)


def test_a_clock_that_is_ahead_and_slow_messages_do_not_shift_spans(tmp_path: Path) -> None:
    """The delays are up to 4 ms; spans end within that of what the rank knows."""
    world = job(tmp_path)
    ends = [span[3] for span in by_lane(world.folder)["rank", 0] if span[4] == "forward_backward"]
    reports = [event.at for event, _ in world.journal if isinstance(event, ev.MicroBatchTrained | ev.TrainerReady)]
    for end in ends:
        assert min(abs(end - at) for at in reports) <= 0.005


# -- single rules -----------------------------------------------------------------------------------------------------


def started(folder: RunFolder, **changes: object) -> tuple[Core, Written]:
    core = Core(groups_per_step=2, group_size=2, **changes)  # type: ignore[arg-type]
    recorder = Written(folder, core.state, now=lambda: core.now)
    return core, recorder


def feed(state: State, recorder: Written, *events: ev.Event) -> None:
    for event in events:
        recorder.apply(event, handle(state, event))


def test_an_instance_prefills_until_the_first_token_of_a_request(tmp_path: Path) -> None:
    core, recorder = started(folder_at(tmp_path))
    feed(
        core.state,
        recorder,
        ev.TrainerReady(0.0, 0),
        ev.VersionPublished(0.0, 0, 1, {}),
        ev.PromptsArrived(0.0, 0, (3,), True),
        ev.InstanceUp(1.0, InstanceId(0), 1, 8, 10_000),
    )
    core.now = 2.0
    recorder.on_push_stage(InstanceId(0), "load")
    feed(core.state, recorder, ev.WeightPushFinished(4.0, InstanceId(0), 1, 0))
    core.now = 6.0
    recorder.on_first_token(0)
    feed(core.state, recorder, ev.GenerationFinished(7.0, 0, 1, 5, False, ((0, 0, 5),)))
    feed(core.state, recorder, ev.GenerationFinished(9.0, 1, 1, 5, False, ((0, 0, 5),)), ev.Ticked(10.0))
    recorder.close()
    spans = [span[2:] for span in read_spans(tmp_path / "spans.jsonl") if span[0] == "instance"]
    assert spans == [
        (1.0, 2.0, "push:wait", 0),
        (2.0, 4.0, "push:load", 0),
        (4.0, 6.0, "prefill", 0),
        (6.0, 7.0, "decoding", 0),
        (7.0, 9.0, "prefill", 0),
        (9.0, 10.0, "empty:no_prompt", 0),
    ]


def test_an_adapter_is_loaded_in_an_empty_server(tmp_path: Path) -> None:
    core, recorder = started(folder_at(tmp_path), adapters=True)
    up, ready = ev.InstanceUp(1.0, InstanceId(0), 1, 8, 10_000), ev.TrainerReady(0.0, 0)
    feed(core.state, recorder, ready, ev.VersionPublished(0.0, 0, 1, {}), up)
    feed(core.state, recorder, ev.WeightPushFinished(4.0, InstanceId(0), 1, 0), ev.Ticked(5.0))
    recorder.close()
    spans = [span[2:] for span in read_spans(tmp_path / "spans.jsonl") if span[0] == "instance"]
    assert spans == [(1.0, 4.0, "push:load", 0), (4.0, 5.0, "empty:no_prompt", 0)]


def test_a_load_beside_requests_changes_nothing_until_the_version_has_requests(tmp_path: Path) -> None:
    core = published(slots=8)  # all of them taken by version 0
    begin = core.now
    recorder = Written(folder_at(tmp_path), core.state, now=lambda: core.now)
    feed(core.state, recorder, ev.WeightPushFinished(begin + 2.0, InstanceId(0), 2, 1))
    for t in (8, 9):
        feed(core.state, recorder, ev.GenerationFinished(begin + 4.0, t, 1, 5, False, ((0, 0, 5),)))
    feed(core.state, recorder, ev.Ticked(begin + 5.0))
    recorder.close()
    spans = [(span[3] - span[2], *span[4:]) for span in read_spans(tmp_path / "spans.jsonl") if span[0] == "instance"]
    assert spans == [(4.0, "decoding", 0), (1.0, "decoding", 1)]


def test_an_event_that_is_older_than_the_one_before_it_is_counted_once(tmp_path: Path) -> None:
    core, recorder = started(folder_at(tmp_path))
    feed(
        core.state,
        recorder,
        ev.TrainerReady(0.0, 0),
        ev.InstanceUp(0.0, InstanceId(0), 1, 8, 10_000),
        ev.VersionPublished(0.0, 0, 1, {}),
        ev.Ticked(4.2),
        ev.PromptsArrived(4.05, 0, (3,), True),
        ev.WeightPushFinished(6.0, InstanceId(0), 1, 0),
        ev.Ticked(5.9),
    )
    recorder.close()
    spans: dict[int, float] = defaultdict(float)
    for kind, lane, start, end, *_ in read_spans(tmp_path / "spans.jsonl"):
        spans[lane] += (end - start) * (kind == "instance")
    rows: dict[int, float] = defaultdict(float)
    for row in read_timeline(tmp_path / "timeline.jsonl"):
        for lane, entries in row.lanes.items():
            rows[lane] += sum(seconds for *_, seconds in entries) * (row.kind == "instance")
    assert rows == pytest.approx(spans)
    assert spans == pytest.approx({0: 6.0, 1: 0.0})


def test_a_rank_that_is_ahead_waits_for_the_slowest(tmp_path: Path) -> None:
    core, recorder = started(folder_at(tmp_path))
    core.state.feed.open_step, core.state.feed.idle_since = 0, None  # a wave is under way
    core.state.ledger.admitted = 1
    recorder.apply(ev.Ticked(0.0), [])
    core.now = 2.0
    recorder.on_wave_done(0)
    core.now = 5.0
    recorder.on_wave_done(1)
    core.now = 6.0
    spans = (("start", 1.0), ("forward_backward", 1.0), ("waiting", 4.0))
    recorder.on_rank_spans(0, RankSpans(rank=0, until=6.0, spans=spans))
    core.state.now = 6.0
    recorder.close()
    found = [
        (s, e, a) for kind, lane, s, e, a, _ in read_spans(tmp_path / "spans.jsonl") if (kind, lane) == ("rank", 0)
    ]
    assert found == [
        (0.0, 1.0, "start"),
        (1.0, 2.0, "forward_backward"),
        (2.0, 5.0, "waiting:slowest_rank"),
        (5.0, 6.0, "waiting:delivery"),
    ]


def test_ranks_that_are_absent_after_a_loss_do_not_hold_up_those_that_train(tmp_path: Path) -> None:
    core, recorder = started(folder_at(tmp_path))
    core.state.feed.open_step, core.state.feed.idle_since = 0, None  # a wave is under way
    core.state.ledger.admitted = 1
    for rank in range(RANKS):
        recorder.on_rank_spans(rank, RankSpans(rank=rank, until=1.0, spans=(("start", 1.0),)))
    recorder.apply(ev.TrainerLost(1.0, 1, "its host is gone"), [])
    recorder.lanes.on_ranks(1)
    for second in range(2, 1_000):
        core.state.now = core.now = float(second)
        recorder.on_wave_done(0)
        spans = (("forward_backward", 0.5), ("waiting", 0.5))
        recorder.on_rank_spans(0, RankSpans(rank=0, until=core.now, spans=spans))
        recorder.apply(ev.Ticked(core.now), [])
    assert len(recorder.lanes._causes) <= 2
    assert sum(row.kind == "rank" for row in read_timeline(tmp_path / "timeline.jsonl")) > 1
    seconds, _ = recorder.lanes.seconds()
    assert seconds["waiting:delivery"] > 400.0
    assert "waiting:slowest_rank" not in seconds
    spans = (("start", 3.0), ("forward_backward", 1.0))
    recorder.on_rank_spans(1, RankSpans(rank=1, until=999.0, spans=spans))
    recorder.close()
    absent = [
        (s, e, a) for kind, lane, s, e, a, _ in read_spans(tmp_path / "spans.jsonl") if (kind, lane) == ("rank", 1)
    ]
    assert absent[0][2] == absent[-2][2] == "start"
    assert all(before[1] == after[0] for before, after in pairwise(absent))
    assert absent[-1][1] == 999.0


@pytest.mark.parametrize("calls", [0.0, 0.5])
def test_nothing_is_kept_of_answers_that_have_ended(calls: float) -> None:
    faults = replace(FAULTS, call_ends=0.3, call_fails=0.1, late_completion=0.1)
    world = World(settings(group_size=4), seed=5, faults=faults, calls=calls)
    lanes = Lanes(world.state, num_ranks=RANKS, time_scale=1.0)

    def take(event: ev.Event, orders: list[cmd.Command]) -> None:
        lanes.apply(event, orders)
        assert lanes._left.keys() | lanes._where.keys() <= world.state.trajectories.keys()

    world.sink = take
    world.run()
    assert not lanes._left
