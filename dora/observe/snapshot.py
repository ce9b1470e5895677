"""The state of a run at one moment, as plain data: the answer of /status, and the basis of every view.

Invariant: pure; a snapshot is a function of the core's tables and the shell's facts, and survives JSON unchanged
(`encode`, `decode`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from typing import Annotated

import msgspec

from dora.core.admission import why_not_admitted
from dora.core.commands import DropGroup, DropReason
from dora.core.events import NoPrompt
from dora.core.ids import GroupId, VersionId
from dora.core.phases import HOLDS_VERSION, GroupPhase, Membership, TrajectoryPhase, WeightsPhase
from dora.core.state import State
from dora.core.tables import Server
from dora.core.versions import Version
from dora.errors import ProtocolError
from dora.observe.activities import shown, trainer_waits_for
from dora.observe.drift import Alarm
from dora.observe.durations import DurationHistogram
from dora.observe.episodes import EnvironmentRow
from dora.observe.facts import ShellFacts
from dora.observe.figures import Figure, Metric
from dora.observe.judges import JudgeRow
from dora.observe.requests import RequestRow
from dora.observe.scores import Score
from dora.observe.sentence import ENDED, duration, sentence
from dora.observe.steps import StepFacts
from dora.observe.tokens import TokenAccount

#: The user's request about an instance, by its membership.
_ASKED = {
    Membership.MEMBER: "",
    Membership.DRAINED: "drain",
    Membership.LEAVING: "remove",
    Membership.DISMISSED: "remove",
}
#: Phase of an instance that a resume has not brought up yet.
STARTING = "starting"
#: Number of steps over which the time left and the trained tokens per second are averaged.
AVERAGED_STEPS = 5
#: Key of the groups whose prompt is over the limit, or cannot be read, in `Ledger.reasons`.
_TOO_LONG = DropGroup(GroupId(0), GroupPhase.FAILED, f"{DropReason.GENERATION}: {NoPrompt.TOO_LONG}", rewards=()).why
#: Number of servers that are down to name.
MAX_DOWN = 4
#: Maximum number of rewards in a snapshot.
MAX_REWARDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One policy version that is still needed."""

    version: int
    is_newest: bool
    is_live: bool  #: it is the newest, or has untrained groups; else it is being evaluated or pushed
    serving: Annotated[int, Metric("version_instances", "Instances that serve a policy version.")]
    loading: int  #: instances that are loading it
    groups: int  #: untrained groups with its tag
    unfinished: Annotated[int, Metric("version_unfinished", "Unfinished trajectories of a policy version.")]
    waiting: int  #: unfinished trajectories that are queued
    evaluating: bool
    unloading: int = 0  #: instances that are unloading its adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingRow:
    """One adapter that an instance has, gets, or may have."""

    version: int
    phase: str  #: loading, serving, unloading, quarantined (a load or unload failed: the instance may have it or not)
    requests: int  #: being decoded with it


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One inference server."""

    instance: int
    url: str  #: "" while it is lost
    phase: str  #: starting (up before a resume), loading, serving, draining, updating, unloading, quarantined, lost
    version: int | None  #: confirmed, the newest of several; None unless serving or draining
    pushing: int | None  #: version of the push under way; of adapters see `holdings`
    residents: Annotated[int, Metric("instance_residents", "Requests being decoded by an instance.")]
    slots: int
    kv_load: int  #: KV tokens reserved for residents and for moves under way
    kv_tokens: int
    incarnation: int  #: number of times it has started
    asked: str  #: the user's request about the instance: "drain", "remove" or ""
    mismatch_k3: Annotated[
        float | None,
        Metric("instance_mismatch_k3", "Mean k3 of an instance and the trainer under one version."),
    ] = None  #: of its last fresh answers whose log-probs ranks have sent; None if there were none
    holdings: tuple[HoldingRow, ...] = ()  #: adapters, oldest version first; empty if versions are full weights

    @property
    def running(self) -> tuple[int, ...]:
        """Versions with requests."""
        if self.holdings:
            return tuple(holding.version for holding in self.holdings if holding.requests)
        return (self.version,) if self.residents and self.version is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRow:
    """The state of the trainer."""

    step: int | None  #: the step that it trains or waits for; None until its ranks are ready
    waits_for: str  #: "" while it works
    idle_share: Annotated[
        float | None, Metric("trainer_idle_share", "Share of the last step in which the trainer had nothing to do.")
    ]  #: of the last step; None before the first
    mean_idle_share: float | None  #: of all steps but the first, which includes the start; None before the second
    idle_reason: str  #: what it waited for in the last step
    ranks: int  #: 0 without a trainer (--rollout-only)
    ranks_ready: int  #: ranks that have loaded the model


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """The evaluation under way."""

    version: int
    graded: int  #: samples
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counters since the start. The first three must stay 0, unless the strategy breaks them (`Snapshot.by_design`)."""

    version_conflicts: Annotated[
        int,
        Figure("answers", "C1: with tokens of a version other than their tag"),
        Metric(
            "version_conflicts_total",
            "C1: answers with tokens of a version other than their tag; 0 unless the strategy is partial.",
        ),
    ]
    scheduling_aborts: Annotated[
        int,
        Figure("answers", "C2: stopped and not resumed with all tokens"),
        Metric(
            "scheduling_aborts_total",
            "C2: trajectories stopped and not resumed with all their tokens; 0 unless oversample.",
        ),
    ]
    staleness_violations: Annotated[
        int,
        Figure("groups", "C3: committed outside the bound"),
        Metric("staleness_violations_total", "C3: groups committed outside the staleness bound; must stay 0."),
    ]
    late_completions: Annotated[
        int,
        Figure("events", "completions of an old attempt, which are ignored"),
        Metric("late_completions_total", "Completions of an old attempt, which are ignored."),
    ]
    migrations: Annotated[
        int,
        Figure("answers", "stopped and continued on another instance of their version, evaluation samples included"),
        Metric("migrations_total", "Trajectories stopped and continued on another instance of their version."),
    ]
    recovered: Annotated[
        int,
        Figure("answers", "continued elsewhere after the loss of their instance"),
        Metric("recovered_total", "Trajectories continued elsewhere after the loss of their instance."),
    ]
    trainer_losses: Annotated[
        int,
        Figure("starts", "of the trainer's ranks that were lost; they were started again"),
        Metric("trainer_losses_total", "Starts of the trainer's ranks that were lost and repeated."),
    ] = 0  # in a folder from before it was counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that people and monitors are shown; shares are between 0 and 1."""

    sentence: str  #: what is going on, in plain words
    run_id: str
    strategy: str
    task: str  #: what the prompts ask for; "" if the configuration does not say so
    phase: str  #: starting, running, finished, interrupted, failed
    reason: str  #: why it ended; "" until then
    uptime_s: Annotated[float, Metric("uptime_seconds", "Time since the run began.")]
    eta_s: Annotated[float | None, Metric("eta_seconds", "Estimated time left.")]  #: None before two steps are trained
    max_staleness: int  #: K in force
    num_steps: Annotated[int, Metric("steps", "T: number of steps of the job; 0 if it only evaluates.")]
    groups_per_step: int  #: N
    steps_trained: Annotated[int, Metric("steps_trained_total", "Steps trained.")]
    progress: float  #: steps_trained / num_steps; without steps, the share of the evaluation that is graded
    step_forming: Annotated[int, Metric("step_forming", "Step being formed, from 0.")]
    step_committed: Annotated[int, Metric("step_committed_groups", "Groups committed to the step being formed.")]
    newest_version: Annotated[
        int | None, Metric("newest_version", "Newest published policy version.")
    ]  #: None until version 0 is published
    versions: tuple[VersionRow, ...]  #: oldest first
    num_servers: int  #: servers of the configuration
    instances: tuple[InstanceRow, ...]  #: instances that have been up
    instances_by_phase: Annotated[dict[str, int], Metric("instances", "Instances by phase.", label="phase")]
    trainer: TrainerRow
    not_admitting: str  #: why no prompt group is admitted just now; "" if one may be
    groups_admitted: Annotated[int, Metric("groups_admitted_total", "Prompt groups admitted.")]
    groups_by_phase: Annotated[
        dict[str, int], Metric("groups", "Prompt groups by phase; they add up to those admitted.", label="phase")
    ]
    dropped: Annotated[
        dict[str, int], Metric("groups_dropped_total", "Groups filtered or failed, by reason.", label="reason")
    ]
    prompts_skipped: Annotated[
        int, Metric("prompts_skipped_total", "Groups whose prompt is over the limit, or cannot be read.")
    ]
    rows_passed: Annotated[
        int | None, Metric("rows_passed_total", "Visits at which a row was passed over (task.revisit_share).")
    ] = None  #: None if no row is
    staleness: Annotated[
        tuple[int, ...], Metric("groups_committed_total", "Groups committed, by staleness.", label="staleness")
    ]  #: at staleness 0, 1, ... K, and beyond where K does not bound it
    staleness_mean: float | None
    steps: tuple[StepFacts, ...]  #: the latest, oldest first
    rewards: tuple[float, ...]  #: `reward_all_mean` of all steps or, of many, of every k-th step and the latest
    trainer_metrics: dict[str, float]  #: of the last step (docs/METRICS.md), finite ones over all its tokens
    durations: dict[str, DurationHistogram]  #: by the names of `durations.TIMED`
    scores: tuple[Score, ...]  #: held-out, in the order of evaluation
    evaluations_skipped: tuple[int, ...]  #: versions not evaluated, because a newer version was due before their turn
    held_out: tuple[str, ...]  #: names of the held-out sets
    evaluation: EvaluationRow | None  #: None while there is none
    num_tokens: Annotated[int, Metric("tokens_total", "Tokens sampled.")]
    num_trained_tokens: Annotated[
        int, Metric("trained_tokens_total", "Tokens of the trained answers, with observations.")
    ]
    tokens: TokenAccount  #: what became of the tokens sampled
    rank_s: dict[str, float]  #: seconds of all trainer ranks by activity, most first, as far as reported
    instance_s: dict[str, float]  #: seconds of all instances by activity, most first
    tokens_per_s: float  #: sampled, over the last ten seconds
    accept_length: Annotated[
        float | None, Metric("accept_length", "Tokens of an answer for each decoding step (speculative decoding).")
    ] = None  #: None without speculative decoding
    trained_tokens_per_s: float  #: over the last steps
    counts: Counts
    environment: EnvironmentRow | None  #: None without one
    judges: JudgeRow | None = None  #: None without one, or before its first answer
    requests: tuple[RequestRow, ...] = ()  #: the latest of users, oldest first
    down: tuple[str, ...]  #: servers that are down, what is done about it, and why: the first MAX_DOWN, and a count
    problems: tuple[str, ...]  #: problems that do not stop the run, such as a failed reward; each once, oldest first
    alarms: tuple[Alarm, ...]  #: drift alarms, cleared ones included; the latest of each name
    by_design: dict[str, str]  #: constraint (C1, C2, C3) that the strategy breaks by design -> how often it broke it
    lag_p50_s: float  #: event-loop lag, latest samples
    lag_p99_s: float
    lag_max_s: Annotated[float, Metric("event_loop_lag_max_seconds", "Largest event-loop lag since the start.")]


def snapshot(state: State, shell: ShellFacts) -> Snapshot:
    """Return the state of the run after the latest event."""
    ledger, settings = state.ledger, state.settings
    staleness = state.counters.staleness
    live = set(state.window.live())
    unloading = _unloading(state)
    now = Snapshot(
        sentence="",
        run_id=shell.run_id,
        strategy=shell.strategy,
        task=shell.task,
        phase=shell.phase,
        reason=shell.reason,
        uptime_s=state.now,
        eta_s=_eta_s(state, shell),
        max_staleness=settings.rules.max_staleness,
        num_steps=settings.steps,
        groups_per_step=settings.groups_per_step,
        steps_trained=state.feed.trained,
        progress=_progress(state),
        step_forming=state.formation.step,
        step_committed=state.formation.committed,
        newest_version=state.window.newest,
        versions=tuple(
            _version_row(e, state=state, live=live, unloading=unloading[e.number])
            for e in state.window.entries.values()
        ),
        num_servers=shell.num_servers,
        instances=tuple(_instance_row(i, shell=shell) for i in state.instances.values()),
        instances_by_phase=_count_phases(state, shell),
        trainer=_trainer(state, shell),
        not_admitting=refusal.value if (refusal := why_not_admitted(state)) is not None else "",
        groups_admitted=ledger.admitted,
        groups_by_phase={phase.value: count for phase, count in ledger.counts.items()},
        dropped=dict(ledger.reasons),
        prompts_skipped=ledger.reasons.get(_TOO_LONG, 0),
        rows_passed=shell.visits.num_passed if len(shell.visits) else None,
        staleness=tuple(staleness),
        staleness_mean=sum(i * n for i, n in enumerate(staleness)) / sum(staleness) if any(staleness) else None,
        steps=tuple(shell.steps),
        rewards=_thinned(shell.rewards),
        trainer_metrics={n: v for n, v in shell.trainer_metrics.items() if isfinite(v) and not n.startswith("lag=")},
        durations={n: replace(h, counts=[*h.counts]) for n, h in shell.durations.histograms.items()},
        scores=tuple(shell.scores),
        evaluations_skipped=tuple(state.evaluation.overtaken),
        held_out=shell.held_out,
        evaluation=_evaluation(state),
        num_tokens=shell.account.num_tokens,
        num_trained_tokens=shell.num_trained_tokens,
        tokens=shell.account,
        rank_s=_most_first(shell.rank_s),
        instance_s=_most_first(shell.instance_s),
        tokens_per_s=shell.rate.per_s,
        accept_length=shell.acceptance.length,
        trained_tokens_per_s=_trained_tokens_per_s(shell),
        counts=_counts(state),
        environment=_environment(state) if shell.has_environment else None,
        judges=replace(shell.judges) if shell.judges.answers else None,
        requests=tuple(shell.requests),
        down=_down(state, shell),
        problems=tuple(shell.problems),
        alarms=tuple(shell.alarms),
        by_design=_by_design(state),
        lag_p50_s=shell.lag.quantile(0.5),
        lag_p99_s=shell.lag.quantile(0.99),
        lag_max_s=shell.lag.max_s,
    )
    return replace(now, sentence=sentence(now))


def encode(snapshot: Snapshot) -> bytes:
    """Encode as JSON."""
    return msgspec.json.encode(snapshot)


def decode(body: bytes) -> Snapshot:
    """Decode the JSON of another process; ProtocolError if it is not a snapshot."""
    try:
        return msgspec.json.decode(body, type=Snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"not the status of a run: {err}") from err


def _unloading(state: State) -> Counter[VersionId | None]:
    return Counter(h.adapter for i in state.instances.values() for h in i.holdings if h.phase is WeightsPhase.UNLOADING)


def _version_row(entry: Version, *, state: State, live: set[VersionId], unloading: int) -> VersionRow:
    return VersionRow(
        version=entry.number,
        is_newest=entry.number == state.window.newest,
        is_live=entry.number in live,
        serving=len(entry.serving),
        loading=entry.loading,
        groups=entry.groups,
        unfinished=entry.unfinished,
        waiting=entry.num_waiting,
        evaluating=entry.evaluating,
        unloading=unloading,
    )


def _instance_row(instance: Server, *, shell: ShellFacts) -> InstanceRow:
    holding = shown(instance)
    return InstanceRow(
        instance=instance.id,
        url=shell.urls.get(instance.id, ""),
        phase=_phase_of(instance, shell),
        version=holding.version,
        pushing=holding.pushing,
        residents=len(instance.residents),
        slots=instance.slots,
        kv_load=instance.kv_load,
        kv_tokens=instance.kv_tokens,
        incarnation=instance.incarnation,
        asked=_ASKED[instance.membership],
        mismatch_k3=shell.mismatches.get(instance.id),
        holdings=_holding_rows(instance),
    )


def _holding_rows(instance: Server) -> tuple[HoldingRow, ...]:
    if not instance.is_shared:
        return ()
    requests = Counter(t.version for t in instance.residents.values())
    rows = [
        HoldingRow(version=h.adapter, phase=h.phase.value, requests=requests[h.adapter])
        for h in instance.holdings
        if h.adapter is not None
    ]
    return tuple(sorted(rows, key=lambda row: row.version))


def _phase_of(instance: Server, shell: ShellFacts) -> str:
    """Return the phase to show: a drained instance with a version is draining."""
    if instance.is_lost and instance.id in shell.starting:
        return STARTING
    phase = shown(instance).phase
    drains = phase in HOLDS_VERSION and not instance.is_member
    return WeightsPhase.DRAINING.value if drains else phase.value


def _count_phases(state: State, shell: ShellFacts) -> dict[str, int]:
    found = Counter(_phase_of(i, shell) for i in state.instances.values())
    return {phase: found[phase] for phase in (STARTING, *(phase.value for phase in WeightsPhase))}


def _trainer(state: State, shell: ShellFacts) -> TrainerRow:
    last = shell.steps[-1] if shell.steps else None
    return TrainerRow(
        step=state.feed.open_step,
        waits_for=trainer_waits_for(state),
        idle_share=last.idle_s / last.duration_s if last is not None and last.duration_s > 0 else None,
        mean_idle_share=shell.later_idle_s / shell.later_s if shell.later_s > 0 else None,
        idle_reason=last.waited_for if last is not None else "",
        ranks=shell.num_ranks,
        ranks_ready=shell.ranks_ready,
    )


def _progress(state: State) -> float:
    if state.settings.steps:
        return state.feed.trained / state.settings.steps
    total, evaluation = len(state.settings.eval_prompt_tokens), state.evaluation
    ungraded = total if state.evaluated is None and evaluation.version is None else evaluation.ungraded
    return 1.0 - ungraded / max(1, total)


def _evaluation(state: State) -> EvaluationRow | None:
    found = state.evaluation
    if found.version is None:
        return None
    samples = len(found.prompt_tokens)
    return EvaluationRow(version=found.version, graded=samples - found.ungraded, samples=samples)


def _counts(state: State) -> Counts:
    counters = state.counters
    return Counts(
        version_conflicts=counters.version_conflicts,
        scheduling_aborts=counters.scheduling_aborts,
        staleness_violations=counters.staleness_violations,
        late_completions=counters.late_completions,
        migrations=counters.migrations,
        recovered=counters.recovered,
        trainer_losses=counters.trainer_losses,
    )


def _down(state: State, shell: ShellFacts) -> tuple[str, ...]:
    """Describe the servers that are down while the run goes on; during the start only those that failed."""
    if shell.phase in ENDED:
        return ()
    found = [
        f"server {id} has been down for {duration(state.now - down.since)} ({down.then}): {down.reason}"
        if down.reason
        else f"server {id} has not come up for {duration(state.now - down.since)}"
        for id, down in shell.down.items()
        if down.reason or shell.phase == "running"
    ]
    more = len(found) - MAX_DOWN
    return (*found[:MAX_DOWN], *([f"{more:,} more server{'s are' if more > 1 else ' is'} down"] if more > 0 else []))


def _environment(state: State) -> EnvironmentRow:
    calling = sum(t.phase is TrajectoryPhase.CALLING for t in state.trajectories.values())
    return EnvironmentRow(calling=calling, failed=dict(state.counters.environment_failed))


def _by_design(state: State) -> dict[str, str]:
    rules, counters, ledger = state.settings.rules, state.counters, state.ledger
    found = {
        "C1": f"{counters.version_conflicts} answers have tokens of several versions",
        "C2": f"{ledger.counts[GroupPhase.DISCARDED]} groups discarded, {counters.scheduling_aborts} of their answers "
        "unfinished",
        "C3": f"{sum(counters.staleness[rules.max_staleness + 1 :])} groups staler than K",
    }
    return {name: found[name] for name in rules.broken_by_design}


def _averaged(shell: ShellFacts) -> list[StepFacts]:
    return list(islice(reversed(shell.steps), AVERAGED_STEPS))


def _eta_s(state: State, shell: ShellFacts) -> float | None:
    """Mean duration of the last steps x steps left, minus the time spent in the current one.

    None before two steps are trained: the first step includes the start of the run.
    """
    recent = [s for s in _averaged(shell) if s.step > 0]
    if not recent:
        return None
    step_s = sum(s.duration_s for s in recent) / len(recent)
    left_s = step_s * (state.settings.steps - state.feed.trained)
    return max(0.0, left_s - (state.now - state.step_trained_at))


def _trained_tokens_per_s(shell: ShellFacts) -> float:
    recent = _averaged(shell)
    duration_s = sum(s.duration_s for s in recent)
    return sum(s.num_tokens for s in recent) / duration_s if duration_s > 0 else 0.0


def _thinned(rewards: Sequence[float]) -> tuple[float, ...]:
    stride = -(-len(rewards) // (MAX_REWARDS - 1)) or 1
    found = rewards[::stride]
    return (*found, rewards[-1]) if (len(rewards) - 1) % stride else tuple(found)


def _most_first(spent: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(spent.items(), key=lambda item: -item[1]))
