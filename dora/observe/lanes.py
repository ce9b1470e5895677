"""What every rank and every instance did at any time: the lines of spans.jsonl, and the time added up from them.

dora/journal/spans.py describes the lines. Invariant: pure; the spans of a lane neither overlap nor leave holes, across
resumes too: each span begins where the span before it ended. A resume fills in the time that a crash cut off, with the
last activity of the instance according to the journal.

Ranks report durations, by their own clocks. The difference between a rank's clock and the controller's is taken from
the fastest of the rank's recent messages, so that neither the difference nor a slow drift of it matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId, VersionId
from dora.core.phases import TrajectoryPhase
from dora.core.state import State
from dora.core.tables import Server
from dora.journal.spans import Kind, SpanLine, TimelineRow, encode_line
from dora.observe.activities import admission_refusal, instance_activity, shown, waiting_cause
from dora.observe.timeline import Doing, Timeline
from dora.transport.messages import RankSpans

_CALLING: Final = TrajectoryPhase.CALLING  # globals: see core/tables.py
_GRADING: Final = TrajectoryPhase.GRADING

#: Number of recent messages of a rank from which the difference between its clock and the controller's is taken.
RECENT_MESSAGES: Final = 64
#: What a rank did from its last report until the controller was lost.
UNREPORTED: Final = "unreported"
#: The reason why nothing is admitted is looked up again after this time, in seconds, multiplied by the number of
#: instances: the look-up visits every instance.
REFUSAL_S: Final = 1e-3
#: Events after which any instance may do something else, or be empty for another reason.
_SWEEPING: Final = (ev.Ticked, ev.StepTrained, ev.VersionPublished, ev.ControllerRestarted, ev.TrainerReady)


@dataclass(slots=True)
class _Lane:
    """The span that a lane is in."""

    doing: Doing
    since: float
    counted: float  # end of the part that is added up already
    requests: Mapping[VersionId, int]  # that are decoded, by version; empty unless versions share the instance


@dataclass(slots=True)
class _RankLane:
    """Where a rank's spans end, and how its clock differs."""

    until: float
    differences: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_MESSAGES))

    def end_of(self, message_until: float, *, arrived: float) -> float:
        """Return when the last span of a message ended, by the controller's clock."""
        self.differences.append(arrived - message_until)
        return min(max(self.until, message_until + min(self.differences)), arrived)


class Lanes:
    """What the ranks and instances of one run do."""

    def __init__(
        self,
        state: State,
        *,
        num_ranks: int,
        time_scale: float,
        spans: Iterable[SpanLine] = (),
        rows: Iterable[TimelineRow] = (),
        step_at: float = 0.0,
    ) -> None:
        """`spans` and `rows`: lines from before a resume. `step_at`: when the last step that has a row was trained."""
        self._state = state
        self._time_scale = time_scale
        self._totals = _nothing_spent()
        self._since_step = _nothing_spent()
        self._lanes: dict[InstanceId, _Lane] = {}
        self._stages: dict[InstanceId, str] = {}
        self._where: dict[TrajectoryId, InstanceId] = {}
        self._left: dict[TrajectoryId, InstanceId] = {}  # last instance of each answer that is at none now
        self._sampling: dict[InstanceId, set[TrajectoryId]] = {}  # residents whose present request has a token
        self._refusal, self._refusal_at = "", -1.0
        self._causes: deque[tuple[float, str]] = deque([(state.now, "start")])
        self._waves_done = [0] * num_ranks
        self._num_present = num_ranks  # ranks that train; with trainer.min_ranks, after a loss, the first ones
        self._lines: list[bytes] = []
        self._rows: list[bytes] = []
        begins = {row.kind: row.at + row.s for row in rows}
        self._timelines: dict[Kind, Timeline] = {
            "rank": Timeline("rank", begin=begins.get("rank", 0.0)),
            "instance": Timeline("instance", begin=begins.get("instance", 0.0), shared=state.settings.adapters),
        }
        self._step_at = step_at
        ends = self._take_up(spans)
        self._ranks = [_RankLane(ends.get(("rank", rank), 0.0)) for rank in range(num_ranks)]
        for rank, lane in enumerate(self._ranks):
            self._add_rank_span(rank, UNREPORTED, lane.until, state.now)
            lane.until = state.now
        for id, instance in state.instances.items():
            self._sampling[id] = {*instance.residents}
            self._where |= dict.fromkeys(instance.residents, id)
            since = ends.get(("instance", id), state.now)
            requests = _requests(instance)
            self._lanes[id] = _Lane(self._doing(instance, requests), since, since, requests)

    def _take_up(self, spans: Iterable[SpanLine]) -> dict[tuple[Kind, int], float]:
        """Count what was written before a resume; return the end of each lane."""
        ends: dict[tuple[Kind, int], float] = {}
        for kind, lane, start, end, activity, version in spans:
            ends[kind, lane] = end
            self._count(kind, lane, (activity, version), start, end, is_new=False)
        return ends

    # -- what happens ---------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Note what an event and the commands it led to change."""
        if isinstance(event, ev.ProgressReported) and not commands:
            return  # the most frequent event; it changes nothing that an instance does
        touched = self._note(event, commands)
        if isinstance(event, _SWEEPING):
            touched = {*self._state.instances, *self._lanes}
            self._refusal_at = -1.0
        for id in touched:
            self._look(id, event.at)
        self._note_cause(event.at)
        if isinstance(event, ev.Ticked):
            self._end_rows(event.at)

    def _note(self, event: ev.Event, commands: Iterable[cmd.Command]) -> set[InstanceId]:
        """Note where trajectories are; return the instances concerned."""
        touched: set[InstanceId] = set()
        if (trajectory := getattr(event, "trajectory", None)) is not None:
            if not isinstance(event, ev.TrajectoryGraded):
                touched |= self._leave(trajectory)
        elif (instance := getattr(event, "instance", None)) is not None:
            touched.add(instance)
            if isinstance(event, ev.InstanceLost):
                self._sampling.pop(instance, None)
        elif isinstance(event, ev.ControllerRestarted):
            self._sampling.clear()
        elif isinstance(event, ev.VersionPublished):
            self._timelines["instance"].publish(event.version, event.at)
        elif isinstance(event, ev.TrainerLost):
            self._waves_done = [0] * len(self._ranks)
            for lane in self._ranks:
                lane.differences.clear()  # its next process may be on another host
        for command in commands:
            if isinstance(command, cmd.Generate):
                self._note_move(command, event.at)
                self._where[command.trajectory] = command.instance
                self._sampling.setdefault(command.instance, set()).discard(command.trajectory)
                touched.add(command.instance)
            elif isinstance(command, cmd.PushWeights):
                is_adapter = self._state.settings.adapters  # whose load reports no stages
                self._stages[command.instance] = "load" if is_adapter else "wait"
                touched.add(command.instance)
            elif isinstance(command, cmd.DropGroup):
                for sibling in range(len(command.rewards)):
                    self._left.pop(TrajectoryId(command.group * len(command.rewards) + sibling), None)
        return touched

    def _leave(self, trajectory: TrajectoryId) -> set[InstanceId]:
        """Note that an answer is at no instance now; return the one that it has left, if any."""
        place = self._where.pop(trajectory, None)
        found = self._state.trajectories.get(trajectory)
        if found is None or found.phase is _GRADING:
            self._left.pop(trajectory, None)  # it has ended
        elif place is not None:
            self._left[trajectory] = place
        if place is None:
            return set()
        self._sampling.get(place, set()).discard(trajectory)
        return {place}

    def _note_move(self, order: cmd.Generate, at: float) -> None:
        """Note that an answer continues on another instance than before; the earlier instance may be lost."""
        before = self._left.pop(order.trajectory, self._where.get(order.trajectory, order.instance))
        if before != order.instance and order.num_tokens:
            self._timelines["instance"].move(order.instance, at)

    def on_first_token(self, trajectory: TrajectoryId, *, at: float) -> None:
        """Note that a request got its first token."""
        place = self._where.get(trajectory)
        if place is not None:
            sampling = self._sampling.setdefault(place, set())
            sampling.add(trajectory)
            if len(sampling) == 1:
                self._look(place, at)

    def on_push_stage(self, id: InstanceId, stage: str, *, at: float) -> None:
        """Note the stage that a push has reached."""
        self._stages[id] = stage
        self._look(id, at)

    def on_ranks(self, num_present: int) -> None:
        """Note how many ranks train."""
        self._num_present = num_present

    def on_wave_done(self, rank: int, *, at: float) -> None:
        """Note that a rank has ended a micro-batch."""
        self._waves_done[rank] += 1
        self._note_cause(at)

    def on_rank_spans(self, rank: int, message: RankSpans, *, at: float) -> None:
        """Place the spans of a rank."""
        lane, scale = self._ranks[rank], self._time_scale
        end = lane.end_of(message.until * scale, arrived=at)
        rest = sum(seconds for _, seconds in message.spans) * scale
        if message.spans[0][0] == "start":
            self._add_rank_span(rank, "start", lane.until, end - rest)  # until its process began
            lane.until = max(lane.until, end - rest)
        for activity, seconds in message.spans:
            rest -= seconds * scale
            self._place(rank, activity, max(lane.until, end - rest))
        self._forget_causes()

    def _place(self, rank: int, activity: str, until: float) -> None:
        lane = self._ranks[rank]
        if activity == "waiting":
            for cause, end in self._causes_until(lane.until, until):
                self._add_rank_span(rank, f"waiting:{cause}", lane.until, end)
                lane.until = end
        else:
            name = f"waiting:{activity}" if activity in ("slowest_rank", "publishing") else activity
            self._add_rank_span(rank, name, lane.until, until)
            lane.until = until

    # -- results ----------------------------------------------------------------------------------------------------

    def step_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of ranks, as reported, and of instances by activity since the last call."""
        self._count_lanes(self._state.now)
        spent, self._since_step = self._since_step, _nothing_spent()
        self._step_at = self._state.now
        return _rounded(spent["rank"]), _rounded(spent["instance"])

    def seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of all ranks, as reported, and of all instances by activity since the run began."""
        self._count_lanes(self._state.now)
        return _rounded(self._totals["rank"]), _rounded(self._totals["instance"])

    def take(self) -> tuple[bytes, bytes]:
        """Return the lines for spans.jsonl and timeline.jsonl that are complete since the last call."""
        taken = b"".join(self._lines), b"".join(self._rows)
        self._lines, self._rows = [], []
        return taken

    def end(self) -> None:
        """End all spans and rows at the time of the last event."""
        now = max([self._state.now, *(lane.counted for lane in self._lanes.values())])
        for rank in range(len(self._ranks)):
            activity = "waiting" if rank < self._num_present else "start"
            self._place(rank, activity, max(now, self._ranks[rank].until))
        for id in list(self._lanes):
            self._end(id, now)
        for timeline in self._timelines.values():
            self._rows += map(encode_line, timeline.rows(now, partial=True))

    # -- lanes ------------------------------------------------------------------------------------------------------

    def _doing(self, instance: Server, requests: Mapping[VersionId, int]) -> Doing:
        if not instance.residents and self._state.now - self._refusal_at >= REFUSAL_S * len(self._state.instances):
            self._refusal, self._refusal_at = admission_refusal(self._state), self._state.now
        activity = instance_activity(
            self._state,
            instance,
            stage=self._stages.get(instance.id, "wait"),
            is_sampling=bool(self._sampling.get(instance.id)),
            refusal=self._refusal,
        )
        holding = shown(instance)
        version = holding.pushing if holding.pushing is not None else holding.version
        return activity, max(requests, default=version)

    def _look(self, id: InstanceId, at: float) -> None:
        """End the span of an instance if it does something else now."""
        instance, lane = self._state.instances.get(id), self._lanes.get(id)
        if instance is None:
            if lane is not None:
                self._end(id, at)
            return
        requests = _requests(instance)
        doing = self._doing(instance, requests)
        if lane is None:
            self._lanes[id] = _Lane(doing, at, at, requests)
        elif doing != lane.doing:
            self._end(id, at)
            self._lanes[id] = _Lane(doing, lane.counted, lane.counted, requests)
        elif requests != lane.requests:
            self._count_lane(id, lane, at)
            lane.requests = requests

    def _end(self, id: InstanceId, at: float) -> None:
        """End a span, but not before the time already counted: an event may be older than the event before it."""
        lane = self._lanes.pop(id)
        self._count_lane(id, lane, at)
        self._add_line("instance", id, lane.doing, lane.since, lane.counted)

    def _count_lanes(self, until: float) -> None:
        for id, lane in self._lanes.items():
            self._count_lane(id, lane, until)

    def _count_lane(self, id: InstanceId, lane: _Lane, until: float) -> None:
        if until > lane.counted:
            self._count("instance", id, lane.doing, lane.counted, until, requests=lane.requests)
            lane.counted = until

    def _add_rank_span(self, rank: int, activity: str, start: float, end: float) -> None:
        self._count("rank", rank, (activity, None), start, end)
        self._add_line("rank", rank, (activity, None), start, end)

    def _count(
        self,
        kind: Kind,
        lane: int,
        doing: Doing,
        start: float,
        end: float,
        *,
        is_new: bool = True,
        requests: Mapping[VersionId, int] | None = None,
    ) -> None:
        """Add up a span. If ranks report time before a step's row only after that row, it belongs to the next row."""
        if end <= start:
            return
        activity, version = doing
        self._totals[kind][activity] += end - start
        begin = start if is_new and kind == "rank" else max(start, self._step_at)
        if end > begin:
            self._since_step[kind][activity] += end - begin
        parts: Collection[tuple[int | None, int]] = requests.items() if requests else [(version, 1)]
        whole = sum(count for _, count in parts)
        for one, count in parts:
            self._timelines[kind].add(lane, (activity, one), start, end, share=count / whole)

    def _add_line(self, kind: Kind, lane: int, doing: Doing, start: float, end: float) -> None:
        start, end = round(start, 6), round(end, 6)
        if end > start:
            self._lines.append(encode_line((kind, lane, start, end, *doing)))

    # -- causes -----------------------------------------------------------------------------------------------------

    def _note_cause(self, at: float) -> None:
        if not self._ranks:
            return  # the run generates only
        cause = waiting_cause(self._state)
        if cause == "delivery" and len({*self._waves_done[: self._num_present]}) > 1:
            cause = "slowest_rank"  # the ranks that are ahead wait for the others
        if cause != self._causes[-1][1]:
            self._causes.append((max(at, self._causes[-1][0]), cause))

    def _causes_until(self, start: float, end: float) -> list[tuple[str, float]]:
        """Return the causes of the waiting in a span, each with its end."""
        found = []
        ends = [at for at, _ in list(self._causes)[1:]] + [end]
        for (_, cause), until in zip(self._causes, ends, strict=True):
            if until > start:
                found.append((cause, min(until, end)))
            if until >= end:
                break
        return found

    def _forget_causes(self) -> None:
        known = min(lane.until for lane in self._ranks[: self._num_present])
        while len(self._causes) > 1 and self._causes[1][0] <= known:
            self._causes.popleft()

    # -- rows -------------------------------------------------------------------------------------------------------

    def _end_rows(self, at: float) -> None:
        """Make the rows of the timeline that are complete."""
        if self._timelines["instance"].is_due(at):
            self._count_lanes(at)
        known = {"instance": at, "rank": min((lane.until for lane in self._ranks[: self._num_present]), default=at)}
        for rank in range(self._num_present, len(self._ranks)):
            self._place(rank, "start", max(self._ranks[rank].until, known["rank"]))
        for kind, timeline in self._timelines.items():
            self._rows += map(encode_line, timeline.rows(known[kind]))


def _requests(instance: Server) -> Mapping[VersionId, int]:
    """Return how many requests are decoded under each version, if versions share the instance."""
    if not instance.is_shared:
        return {}
    return Counter(t.version for t in instance.residents.values() if t.phase is not _CALLING)


def _nothing_spent() -> dict[Kind, defaultdict[str, float]]:
    return {"rank": defaultdict(float), "instance": defaultdict(float)}


def _rounded(spent: Mapping[str, float]) -> dict[str, float]:
    return {activity: round(seconds, 6) for activity, seconds in sorted(spent.items())}
