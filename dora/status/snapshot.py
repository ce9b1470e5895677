"""The state of a run at one moment, as plain data: what /status answers, and what every view is drawn from.

Invariant: pure; a snapshot is made of the core's tables and the shell's facts alone, and survives JSON unchanged
(`encode`, `decode`). Called by the status server, the metrics and the terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from dora.core.groups import GroupPhase
from dora.core.instances import Instance, InstancePhase
from dora.core.state import ControllerState
from dora.core.versions import Version
from dora.errors import ProtocolError
from dora.status.facts import Score, ShellFacts, StepFacts

#: Steps that the time left and the trained tokens per second are averaged over.
AVERAGED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One policy version that something needs."""

    version: int
    is_newest: bool
    is_live: bool  #: the newest, or groups with its tag are not trained yet; else evaluated or being pushed
    serving: int  #: instances that hold it
    loading: int  #: instances that are being given it
    groups: int  #: groups with its tag that are not trained yet
    unfinished: int  #: trajectories still generated or waiting for a slot
    waiting: int  #: of these, without a slot
    evaluating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One inference server."""

    instance: int
    url: str  #: "" while it is lost
    phase: str  #: loading, serving, draining, updating, quarantined, lost
    version: int | None  #: confirmed; None unless serving or draining
    pushing: int | None  #: version of the push under way
    residents: int  #: requests being decoded
    slots: int
    kv_load: int  #: tokens of KV accounted for residents and moves on their way
    kv_tokens: int
    incarnation: int  #: how often it has come up
    asked: str  #: what was asked of it: "drain", "remove"; "" nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the trainer does."""

    step: int | None  #: the step it works on or waits for; None until its ranks are ready
    waits_for: str  #: "" while it works
    idle_share: float | None  #: of the last step; None before the first
    idle_reason: str  #: what it waited for in the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counters since the start. The first three must stay 0, unless the strategy breaks them (`Snapshot.by_design`)."""

    version_conflicts: int  #: C1: answers whose spans name another version than their tag
    scheduling_aborts: int  #: C2: trajectories stopped by the scheduler and not resumed from all their tokens
    staleness_violations: int  #: C3: groups committed outside 0 <= s - v <= K
    late_completions: int  #: of an old attempt; ignored
    migrations: int  #: trajectories that went on on a peer of their version
    recovered: int  #: trajectories that went on elsewhere after a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a person or a monitor may want to know; shares are 0 to 1."""

    run_id: str
    strategy: str
    phase: str  #: starting, running, finished, interrupted, failed
    reason: str  #: why it ended; "" before
    uptime_s: float
    eta_s: float | None  #: time left; None before the first step is trained
    max_staleness: int  #: K in force
    num_steps: int  #: T
    groups_per_step: int  #: N
    steps_trained: int
    progress: float  #: steps_trained / num_steps
    step_forming: int
    step_committed: int  #: groups committed to it
    newest_version: int | None  #: None until version 0 is published
    versions: tuple[VersionRow, ...]  #: oldest first
    instances: tuple[InstanceRow, ...]
    instances_by_phase: dict[str, int]
    trainer: Trainer
    groups_admitted: int
    groups_by_phase: dict[str, int]  #: adds up to groups_admitted
    dropped: dict[str, int]  #: groups filtered or failed, by reason
    staleness: tuple[int, ...]  #: groups committed at staleness 0, 1, ... K, and beyond where K does not bound it
    staleness_mean: float | None
    steps: tuple[StepFacts, ...]  #: the latest, oldest first
    scores: tuple[Score, ...]  #: held-out, in the order of evaluation
    num_tokens: int  #: sampled since the start, evaluation included
    num_trained_tokens: int  #: response tokens trained
    tokens_per_s: float  #: sampled, over the last ten seconds
    trained_tokens_per_s: float  #: over the last steps
    counts: Counts
    by_design: dict[str, str]  #: constraint that the strategy does without, of C1, C2, C3 -> how often it broke it
    lag_p50_s: float  #: event-loop lag, latest samples
    lag_p99_s: float
    lag_max_s: float  #: since the start


def snapshot(state: ControllerState, shell: ShellFacts) -> Snapshot:
    """The run as it stands at the state's latest event."""
    ledger, settings = state.ledger, state.settings
    staleness = state.counters.staleness
    live = set(state.window.live())
    lags_s = sorted(shell.lags_s)
    return Snapshot(
        run_id=shell.run_id,
        strategy=shell.strategy,
        phase=shell.phase,
        reason=shell.reason,
        uptime_s=state.now,
        eta_s=_eta_s(state, shell),
        max_staleness=settings.rules.max_staleness,
        num_steps=settings.steps,
        groups_per_step=settings.groups_per_step,
        steps_trained=state.feed.trained,
        progress=state.feed.trained / settings.steps,
        step_forming=state.formation.step,
        step_committed=state.formation.committed,
        newest_version=state.window.newest,
        versions=tuple(_version_row(e, state=state, live=live) for e in state.window.entries.values()),
        instances=tuple(_instance_row(i, shell=shell) for i in state.instances.values()),
        instances_by_phase=_count_phases(state),
        trainer=_trainer(state, shell),
        groups_admitted=ledger.admitted,
        groups_by_phase={phase.value: count for phase, count in ledger.counts.items()},
        dropped=dict(ledger.reasons),
        staleness=tuple(staleness),
        staleness_mean=sum(i * n for i, n in enumerate(staleness)) / sum(staleness) if any(staleness) else None,
        steps=tuple(shell.steps),
        scores=tuple(shell.scores),
        num_tokens=shell.num_tokens,
        num_trained_tokens=shell.num_trained_tokens,
        tokens_per_s=shell.tokens.per_s,
        trained_tokens_per_s=_trained_tokens_per_s(shell),
        counts=_counts(state),
        by_design=_by_design(state),
        lag_p50_s=_quantile(lags_s, 0.5),
        lag_p99_s=_quantile(lags_s, 0.99),
        lag_max_s=shell.max_lag_s,
    )


def trainer_waits_for(state: ControllerState) -> str:
    """What the trainer waits for, in words; "" while it works, or when it has nothing left to do."""
    feed = state.feed
    if state.finished or feed.trained >= state.settings.steps:
        return ""
    if feed.open_step is None:
        return "its ranks"
    if feed.idle_since is None:
        return ""
    if state.ledger.admitted == 0 and state.evaluation.version == 0:
        return "the evaluation of version 0"
    counts = state.ledger.counts
    if counts[GroupPhase.GENERATING]:
        return _answers(state)
    if counts[GroupPhase.GRADING]:
        return f"the grading of {counts[GroupPhase.GRADING]} groups"
    newest = state.window.newest
    if newest is None or newest < state.formation.step - state.settings.rules.max_staleness:
        return "a new version"
    if not state.entry(newest).serving:
        return f"version {newest} on an instance"
    return "prompts" if not state.prompts else "admission"


def encode(snapshot: Snapshot) -> bytes:
    """As JSON."""
    return msgspec.json.encode(snapshot)


def decode(body: bytes) -> Snapshot:
    """From JSON, as another process sent it."""
    try:
        return msgspec.json.decode(body, type=Snapshot)
    except (msgspec.DecodeError, msgspec.ValidationError) as err:
        raise ProtocolError(f"this is not the status of a run: {err}") from err


def _answers(state: ControllerState) -> str:
    entries = state.window.entries.values()
    unfinished = sum(e.unfinished for e in entries)
    waiting = sum(e.num_waiting for e in entries)
    slots = f", {waiting} of them without a slot" if waiting else ""
    return f"{unfinished} answers of {state.ledger.counts[GroupPhase.GENERATING]} groups{slots}"


def _version_row(entry: Version, *, state: ControllerState, live: set[int]) -> VersionRow:
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
    )


def _instance_row(instance: Instance, *, shell: ShellFacts) -> InstanceRow:
    return InstanceRow(
        instance=instance.id,
        url=shell.urls.get(instance.id, ""),
        phase=instance.phase.value,
        version=instance.version,
        pushing=instance.pushing,
        residents=len(instance.residents),
        slots=instance.slots,
        kv_load=instance.kv_load,
        kv_tokens=instance.kv_tokens,
        incarnation=instance.incarnation,
        asked="remove" if instance.leaving else "drain" if instance.barred else "",
    )


def _count_phases(state: ControllerState) -> dict[str, int]:
    found = Counter(i.phase for i in state.instances.values())
    return {phase.value: found[phase] for phase in InstancePhase}


def _trainer(state: ControllerState, shell: ShellFacts) -> Trainer:
    last = shell.steps[-1] if shell.steps else None
    return Trainer(
        step=state.feed.open_step,
        waits_for=trainer_waits_for(state),
        idle_share=last.idle_s / last.duration_s if last is not None and last.duration_s > 0 else None,
        idle_reason=last.waited_for if last is not None else "",
    )


def _counts(state: ControllerState) -> Counts:
    counters = state.counters
    return Counts(
        version_conflicts=counters.version_conflicts,
        scheduling_aborts=counters.scheduling_aborts,
        staleness_violations=counters.staleness_violations,
        late_completions=counters.late_completions,
        migrations=counters.migrations,
        recovered=counters.recovered,
    )


def _by_design(state: ControllerState) -> dict[str, str]:
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


def _eta_s(state: ControllerState, shell: ShellFacts) -> float | None:
    """Mean duration of the last steps x steps left, less what the current one has taken."""
    recent = _averaged(shell)
    if not recent:
        return None
    step_s = sum(s.duration_s for s in recent) / len(recent)
    left_s = step_s * (state.settings.steps - state.feed.trained)
    return max(0.0, left_s - (state.now - state.step_trained_at))


def _trained_tokens_per_s(shell: ShellFacts) -> float:
    recent = _averaged(shell)
    duration_s = sum(s.duration_s for s in recent)
    return sum(s.num_tokens for s in recent) / duration_s if duration_s > 0 else 0.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0
