"""Everything that is observed of one run: projections of its events, and of what its processes report.

Invariant: pure. Clocks, reports of ranks, tokens, addresses and the loop's lag are inputs; results are rows, lines and
the facts of the status. What is folded from events alone (`Folded`) is rebuilt by the replay of a resume; what comes
from reports continues from the last row on the disk (`recall`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final

import msgspec

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import StepId, TrajectoryId
from dora.core.state import State
from dora.core.tables import Group
from dora.observe.drift import Alarm, DriftWatch
from dora.observe.durations import Durations
from dora.observe.episodes import EpisodeStats, TimedEpisodes
from dora.observe.facts import ShellFacts
from dora.observe.figures import Figure, figures
from dora.observe.judges import JudgeRow
from dora.observe.lanes import Lanes
from dora.observe.load import SlotUse
from dora.observe.requests import RequestLog
from dora.observe.scores import Score
from dora.observe.snapshot import Counts, Snapshot, snapshot
from dora.observe.steps import StepFacts, Steps
from dora.observe.tokens import TokenAccount, TokenLedger
from dora.observe.visits import Visits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run at the end of a step: the part of its row that is not about the step (`StepFacts`)."""

    rollout_idle_share: Annotated[
        float, Figure("fraction", "share of the slots of all instances that were free, since the last step")
    ]
    tokens_per_s: Annotated[float, Figure("tokens/s", "tokens sampled, over the last ten seconds", "tokens_total")]
    staleness: Annotated[
        Sequence[int],
        Figure("groups", "groups committed since the start, at staleness 0, 1, ...", "groups_committed_total"),
    ]
    live_versions: Annotated[int, Figure("versions", "the newest, and those with untrained groups", "live_versions")]
    window: Annotated[float, Figure("versions", "most versions that may be alive")]
    dropped: Annotated[
        Mapping[str, int], Figure("groups", "filtered or failed since the start, by reason", "groups_dropped_total")
    ]
    rows_passed: Annotated[
        int | None,
        Figure(
            "visits", "at which a row was passed over, since the start, with `task.revisit_share`", "rows_passed_total"
        ),
    ]
    accept_length: Annotated[
        float | None,
        Figure(
            "tokens",
            "of an answer for each decoding step, with speculative decoding, since the start or the last resume",
            "accept_length",
        ),
    ]
    counts: Counts  #: its fields are fields of the row
    environment_failed: Annotated[
        Mapping[str, int] | None,
        Figure("episodes", "that could not go on, by cause, since the start", "environment_failed_total"),
    ]
    lag_p99_s: Annotated[
        float,
        Figure("s", "delay of the controller's event loop: 99th percentile, two minutes", "event_loop_lag_seconds"),
    ]
    controller_cpu_s: Annotated[float, Figure("s", "CPU time of the controller since the last step")]
    alarms: Annotated[Sequence[str], Figure("names", "drift alarms that are raised", "drift_alarm")]
    rank_s: Annotated[Mapping[str, float], Figure("s", "time of all ranks since the last row, by activity")]
    instance_s: Annotated[Mapping[str, float], Figure("s", "time of all instances since the last row, by activity")]
    tokens: Annotated[
        TokenAccount,
        Figure("tokens", "sampled = trained + dropped + in_flight, since the start; evaluation is separate"),
    ]
    trainer: Mapping[str, float]  #: what the ranks measured (`dora/trainer/metrics.py`)
    zero_variance_groups: Annotated[
        int, Figure("groups", "with equal rewards: filtered since the last step, or trained in this one")
    ]


#: The time of a row of kind `step`.
AT: Final = Figure("s", "time since the run began", "uptime_seconds")


def row_figures() -> dict[str, Figure]:
    """Return the figures of a row of kind `step` in order. `trainer` and `episodes` have figures of their own."""
    found = {"at": AT, **figures(StepFacts)}
    for name in RunFacts.__dataclass_fields__:
        found |= figures(Counts) if name == "counts" else {n: f for n, f in figures(RunFacts).items() if n == name}
    return found


@dataclass(slots=True)
class Folded:
    """What is folded from events alone."""

    tokens: TokenLedger
    steps: Steps = field(default_factory=Steps)
    slots: SlotUse = field(default_factory=SlotUse)
    durations: Durations = field(default_factory=Durations)
    episodes: TimedEpisodes = field(default_factory=TimedEpisodes)
    requests: RequestLog = field(default_factory=RequestLog)
    judges: JudgeRow = field(default_factory=JudgeRow)
    visits: Visits = field(default_factory=Visits)
    trained: list[StepFacts] = field(default_factory=list)  #: of a replay: every step, once

    @classmethod
    def new(cls, group_size: int, *, is_replay: bool = False) -> Folded:
        """Return the beginning of a run."""
        return cls(TokenLedger(group_size=group_size, is_replay=is_replay))

    def before(self, state: State, event: ev.Event) -> None:
        """Take in an event of a replay, before the core handles it."""
        if isinstance(event, ev.StepTrained):
            is_new = event.step >= self.steps.next_step
            self.steps.take_zero_variance(state, event.step)
            facts = self.steps.take(state, event.step)
            if is_new:
                self.slots.take_idle_share()
                self.trained.append(facts)

    def apply(self, state: State, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Take in an event and the commands it led to; `state` is the state after it."""
        self.tokens.note(event, commands)
        self.steps.apply(state, event, commands)
        self.slots.apply(state, event)
        self.durations.note(event, commands)
        self.judges.note(event)
        self.episodes.apply(event, commands, group_size=state.settings.group_size)
        self.requests.note(event, commands, newest=state.window.newest)
        self.visits.apply(event, commands)


class _Trained(msgspec.Struct):
    """What a row of a step says about its trainer."""

    step: int
    trainer: dict[str, float | None]  # None: it was not finite


class Observed:
    """The projections of one run."""

    def __init__(
        self,
        state: State,
        *,
        facts: ShellFacts,
        folded: Folded,
        lanes: Lanes,
        drift: DriftWatch,
        episode_stats: Callable[[Sequence[TrajectoryId]], EpisodeStats | None] = lambda trajectories: None,
        cpu_s: float = 0.0,
    ) -> None:
        """`episode_stats`: of trajectories whose records are known; None for a run without an environment. `cpu_s`: CPU
        time of the controller so far."""
        self.facts = facts
        self.folded = folded
        self.lanes = lanes
        self.episode_stats = episode_stats
        self.changed_alarms: list[Alarm] = []  #: raised or cleared by the last step
        self._state = state
        self._drift = drift
        self._told: set[int] = set()  # steps that have a row
        self._reports: dict[StepId, Mapping[str, float]] = {}
        self._cpu_s = cpu_s
        facts.durations = folded.durations
        facts.requests = folded.requests.rows
        facts.judges = folded.judges
        facts.visits = folded.visits
        facts.starting = {*state.instances}
        for step in folded.trained:
            facts.note_step(step)
        folded.trained.clear()

    def recall(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl from before a resume; what is damaged in it is left out."""
        with suppress(ValueError):
            if row["kind"] == "evaluation":
                self.facts.scores.append(msgspec.convert(row, Score))
            elif row["kind"] == "step":
                self._recall_step(row)

    def _recall_step(self, row: Mapping[str, Any]) -> None:
        earlier = msgspec.convert(row, _Trained)
        self._told.add(earlier.step)
        self.facts.trainer_metrics = {n: v for n, v in earlier.trainer.items() if v is not None}
        self._drift.note(earlier.step, self.facts.trainer_metrics)
        self.facts.alarms = [*self._drift.alarms.values()]
        self.facts.recall_step(msgspec.convert(row, StepFacts))

    # -- inputs -------------------------------------------------------------------------------------------------------

    def on_report(self, step: StepId, metrics: Mapping[str, float]) -> None:
        """Take in the trainer's report of a step, which comes before its StepTrained."""
        self._reports[step] = metrics

    def before(self, event: ev.Event, *, cpu_s: float) -> dict[str, Any] | None:
        """Return the row of a step that is trained by an event, before the core handles it; None without one.

        `cpu_s`: CPU time of the controller so far. A step that is trained again has no second row.
        """
        if not isinstance(event, ev.StepTrained):
            return None
        state, steps, step = self._state, self.folded.steps, event.step
        groups = state.feed.groups(step)
        zero_variance = steps.take_zero_variance(state, step)
        facts = steps.take(state, step)
        self.folded.tokens.train(step)
        metrics = self._reports.pop(step, {})
        if step in self._told:
            return None
        self._told.add(step)
        facts = replace(facts, episodes=self.episode_stats([t.id for g in groups for t in _graded(g)]))
        if not self.facts.steps or step > self.facts.steps[-1].step:
            self.facts.note_step(facts)
        self.facts.trainer_metrics = dict(metrics)
        self.changed_alarms = self._drift.note(step, metrics)
        self.facts.alarms = [*self._drift.alarms.values()]
        return self._row(facts, zero_variance_groups=zero_variance, trainer=metrics, cpu_s=cpu_s)

    def _row(
        self, facts: StepFacts, *, zero_variance_groups: int, trainer: Mapping[str, float], cpu_s: float
    ) -> dict[str, Any]:
        now, state = self.snapshot(), self._state
        earlier_cpu_s, self._cpu_s = self._cpu_s, cpu_s
        rank_s, instance_s = self.lanes.step_seconds()
        run = RunFacts(
            rollout_idle_share=self.folded.slots.take_idle_share(),
            tokens_per_s=now.tokens_per_s,
            staleness=now.staleness,
            live_versions=sum(v.is_live for v in now.versions),
            window=state.window_size,
            dropped=now.dropped,
            rows_passed=now.rows_passed,
            accept_length=now.accept_length,
            counts=now.counts,
            environment_failed=now.environment.failed if now.environment is not None else None,
            lag_p99_s=now.lag_p99_s,
            controller_cpu_s=cpu_s - earlier_cpu_s,
            alarms=self._drift.active,
            rank_s=rank_s,
            instance_s=instance_s,
            tokens=now.tokens,
            trainer=trainer,
            zero_variance_groups=zero_variance_groups,
        )
        return {"kind": "step", "at": state.now, **_flat(facts), **_flat(run)}

    def apply(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Take in an event and the commands it led to, once the core has handled it."""
        state, facts = self._state, self.facts
        self.lanes.apply(event, commands)
        self.folded.apply(state, event, commands)
        match event:
            case ev.InstanceUp() | ev.InstanceLost() | ev.InstanceRemoved():
                facts.starting.discard(event.instance)
            case ev.Ticked():
                facts.rate.note(self.folded.tokens.account.num_tokens, at=event.at)
        if facts.phase == "starting" and (state.ledger.admitted or (not state.settings.steps and _begins(commands))):
            facts.phase = "running"
        for command in commands:
            if isinstance(command, cmd.FailRun):
                facts.phase, facts.reason = "failed", command.reason

    # -- results ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the status after the latest event."""
        facts = self.facts
        facts.account = self.folded.tokens.account
        facts.rank_s, facts.instance_s = self.lanes.seconds()
        return snapshot(self._state, facts)


def _flat(record: StepFacts | RunFacts) -> dict[str, Any]:
    """Return the fields that are not None, with those of `counts` in its place."""
    found: dict[str, Any] = {}
    for name, value in asdict(record).items():
        found |= value if name == "counts" else {name: value} if value is not None else {}
    return found


def _begins(commands: Sequence[cmd.Command]) -> bool:
    return any(isinstance(command, cmd.Generate) for command in commands)


def _graded(group: Group) -> list[Any]:
    return [t for t in group.trajectories if t.reward is not None]
