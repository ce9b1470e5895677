"""The state of the core, as data; the other modules of the core read and change it.

Invariant: the same events give the same state, in any process.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dora.core.agenda import Agenda
from dora.core.commands import Command, FailRun
from dora.core.evaluation import Evaluation
from dora.core.events import Event
from dora.core.feasibility import Formation, formation_of
from dora.core.ids import GroupId, InstanceId, TrajectoryId, VersionId
from dora.core.phases import Cause
from dora.core.push_limit import PushLimit
from dora.core.strategies import Settings
from dora.core.tables import Group, Ledger, Server, Trajectory
from dora.core.training import Feed
from dora.core.versions import Version, Window

#: Initial size of the admission window W, in units of N.
WINDOW_START: Final = 1.5
#: Prior of the mean answer length, as a share of the token limit; it counts as one observation.
PRIOR_LENGTH_SHARE: Final = 0.25
#: Share of the tokens still expected of an answer for which KV is reserved. Residents do not all end at once: a share
#: of 1 leaves a third of the KV empty (docs/DECISIONS.md), and 0 makes the server retract requests.
KV_RESERVE: Final = 1 / 3

#: Number of ids of users' requests to remember.
MAX_REQUESTS: Final = 256


@dataclass(slots=True)
class Counters:
    """Counters of the run. version_conflicts, scheduling_aborts and staleness_violations stay 0, unless the strategy
    breaks their constraint by design (`Rules.broken_by_design`)."""

    staleness: list[int]  #: groups committed at staleness i; it grows where K is not a bound
    version_conflicts: int = 0  #: answers with a span of another version than their group's tag (C1)
    scheduling_aborts: int = 0  #: trajectories stopped on command and not resumed from all their tokens (C2)
    staleness_violations: int = 0  #: groups committed outside 0 <= s - v <= K (C3)
    late_completions: int = 0  #: events of an old attempt or incarnation, ignored
    migrations: int = 0  #: trajectories (evaluation samples, too) stopped and continued on another instance
    replays: int = 0  #: of lost environments
    trainer_losses: int = 0  #: starts of the ranks that were lost
    recovered: int = 0  #: trajectories that continued elsewhere after their instance was lost
    #: trajectories without a reward because their environment could not go on, by cause
    environment_failed: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """The state of one run. Times are seconds since it began; lengths are tokens."""

    settings: Settings

    # -- tables
    instances: dict[InstanceId, Server] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    trajectories: dict[TrajectoryId, Trajectory] = field(default_factory=dict)  #: ungraded, of training and evaluation
    window: Window = field(default_factory=Window)
    formation: Formation = field(init=False)
    feed: Feed = field(init=False)
    evaluation: Evaluation = field(init=False)
    evaluated: int | None = None  #: the last version whose evaluation was reported
    complete: dict[int, deque[Group]] = field(default_factory=dict)  #: by deadline, in completion order; no empty queue
    missing: set[VersionId] = field(default_factory=set)  #: published versions that were lost, to be written again
    counters: Counters = field(init=False)

    # -- admission
    prompts: deque[int] = field(default_factory=deque)  #: lengths of the next prompts, not yet admitted
    fetching: bool = False  #: a FetchPrompts is in flight
    source_dry: bool = False  #: `prompts` are the last ones
    window_size: float = field(init=False)  #: W, in untrained groups
    window_limit: int = field(init=False)  #: maximum of W
    adapts_window: bool = field(init=False)
    block_version: VersionId | None = None  #: batched strategies: version of the current batch; None before the first
    block_left: int = 0  #: batched strategies: groups of the batch still to be admitted
    top_ups: int = 0  #: groups filtered or failed since the last close
    top_up_rewards: dict[float | None, int] = field(default_factory=dict)  #: reward of their siblings -> count

    # -- fleet totals, over members that are not lost
    num_up: int = 0
    num_slots: int = 0
    num_kv_tokens: int = 0
    num_draining: int = 0  #: holdings in WeightsPhase.DRAINING
    pushes: int = 0  #: in flight, including those to drained instances
    push_s: float = 0.0  #: mean time of the pushes that succeeded
    num_pushed: int = 0
    push_limit: PushLimit = field(default_factory=PushLimit)
    yielding: Server | None = None  #: admits no group, to make room for a version in need (`patience`)
    #: Servers of full weights with no training resident, reservation or push.
    vacant: dict[InstanceId, Server] = field(default_factory=dict)
    drained: dict[InstanceId, Server] = field(default_factory=dict)  #: not members, lost ones included
    leaving: dict[InstanceId, Server] = field(default_factory=dict)  #: to be dismissed once they are empty
    removed: set[InstanceId] = field(default_factory=set)  #: left since this controller began; not reused

    # -- calls
    #: Versions whose last instance was given away, and since when each needs an instance; None: it does not yet.
    given_away: dict[VersionId, float | None] = field(default_factory=dict)
    holds: list[tuple[float, TrajectoryId, int]] = field(default_factory=list)  #: heap: end of the hold, id, attempt

    # -- answer lengths
    length_sum: int = field(init=False)  #: total length of finished answers, plus the prior
    length_count: int = 1
    mean_length: int = field(init=False)  #: in whole tokens
    kv_reserve: float = field(init=False)  #: share of the tokens still expected for which KV is reserved

    # -- liveness
    now: float = 0.0  #: time of the current event
    progress_at: float = 0.0  #: when a group was last committed or a micro-batch trained
    called_at: float = 0.0  #: when a call of an environment last started or ended
    step_trained_at: float = 0.0
    finished: bool = False  #: FinishRun or FailRun was ordered: no more commands follow
    stalled: bool = False  #: FailRun was ordered for lack of progress; a new controller may continue
    stopping: bool = False  #: StopRun was ordered: events still count, and users' requests are refused

    # -- users
    requests: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS))  #: ids of the latest requests

    # -- output
    cause: Cause = Event  #: of the present changes of phases: the event being handled, or the decision being made
    agenda: Agenda = field(default_factory=Agenda)
    out: list[Command] = field(default_factory=list)  #: commands for the current event

    def __post_init__(self) -> None:
        settings, rules = self.settings, self.settings.rules
        self.formation = formation_of(settings)
        self.feed = Feed(
            num_ranks=settings.num_ranks,
            budget=settings.micro_batch_tokens,
            groups_per_update=settings.groups_per_update,
            shared_prompts=settings.shared_prompts,
        )
        self.evaluation = Evaluation(prompt_tokens=settings.eval_prompt_tokens, every=settings.eval_every)
        self.counters = Counters(staleness=[0] * (rules.max_staleness + 1))
        # F and the gate admit K + 1 steps of unconsumed groups, and as many more groups may be committed.
        most = 2 * (rules.max_staleness + 1) * math.ceil(rules.oversample)
        self.window_limit = most * settings.groups_per_step
        window = settings.orchestration.window if rules.has_window else "open"
        self.adapts_window = window == "adaptive"
        self.window_size = self.window_limit if window == "open" else WINDOW_START * settings.groups_per_step
        is_mixed = rules.max_staleness > 0 or rules.spreads  # answers in the KV do not all end at the same time
        self.kv_reserve = KV_RESERVE if settings.orchestration.kv_overcommit and is_mixed else 1.0
        self.length_sum = max(1, int(PRIOR_LENGTH_SHARE * settings.max_new_tokens))
        self.mean_length = self.length_sum

    def admission_version(self) -> VersionId | None:
        """Return the version of new groups: the newest, or the current batch's version; None before version 0."""
        if self.settings.rules.batched and self.formation.num_unconsumed:
            return self.block_version
        return self.window.newest

    def entry(self, version: VersionId) -> Version:
        """Return the window's entry of a version that is needed."""
        return self.window.entries[version]

    def hosts_have_room(self, count: int) -> bool:
        """Whether the environment has room for `count` more episodes. Evaluation samples count once they have begun.

        Only the beginning of an episode is refused: after a resume with less room, more episodes may run than fit.
        """
        most = self.settings.max_episodes
        if not most:
            return True
        return self.evaluation.num_begun + sum([e.unfinished for e in self.window.entries.values()]) + count <= most

    @property
    def next_group(self) -> GroupId:
        """Id of the next group to be admitted, which is the cursor of the prompt stream."""
        return GroupId(self.ledger.admitted)


def fail(state: State, reason: str) -> None:
    """End the run as failed."""
    if not state.finished:
        state.finished = True
        state.out.append(FailRun(reason))


def episode_left(state: State) -> None:
    """Note that the hosts have room for one more episode, which is offered to evaluation samples first."""
    if state.settings.max_episodes:
        admissions_changed(state)
        if state.evaluation.version is not None:
            state.agenda.fill(state.evaluation.version)  # the version noted last is filled first


def admissions_changed(state: State) -> None:
    """Note that F, W or the source may admit more groups than before."""
    version = state.admission_version()
    if version is not None:
        state.agenda.fill(version)
    state.agenda.place = True
    state.agenda.repack = True
