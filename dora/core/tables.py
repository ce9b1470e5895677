"""The state's data and the few bookkeeping moves that handlers and decisions share. No choice is made here.

Invariant: a trajectory becomes resident, or ceases to be, only through `_begin` and `_end`, so that instance, version
and evaluation counters can never disagree. Inherited by moves.py and so by all of `ControllerState`; read by the shell.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from dora.core.commands import Command, CondemnInstance, FailRun, Generate
from dora.core.evaluation import Evaluation
from dora.core.feasibility import formation_of
from dora.core.groups import Group, Ledger, Trajectory, TrajectoryPhase
from dora.core.ids import GroupId, InstanceId, TrajectoryId
from dora.core.instances import Instance, InstancePhase
from dora.core.strategies import Settings
from dora.core.training import Feed
from dora.core.versions import Version, Window

#: The admission window W starts at this many times N and moves by these factors (system.md §5.7); it grows by the share
#: of the step that the trainer has lost, within these bounds.
WINDOW_START: Final = 1.5
WINDOW_GROW: Final = (1.06, 1.5)
WINDOW_SHRINK: Final = 0.985
#: Share of a step for which the trainer may wait before W grows.
NOTICEABLE_WAIT: Final = 0.02
#: Prior of the mean answer length, as a share of the token budget: one observation.
PRIOR_LENGTH_SHARE: Final = 0.25
#: An answer that outgrew the mean is expected to end at its tokens times this.
GROWTH: Final = 1.25
#: Share of the expected rest of an answer for which KV is kept. Residents do not reach their ends together: to keep all
#: of it leaves a third of the KV empty (docs/SIMULATION.md), to keep nothing has the server retract.
KV_RESERVE: Final = 1 / 3
#: Seconds between two looks at what an instance reports of its residents: it reports more often than that matters.
LOOK_PAUSE_S: Final = 10.0

_RESIDENT: Final = TrajectoryPhase.RESIDENT
_WAITING: Final = TrajectoryPhase.WAITING
_LOST: Final = InstancePhase.LOST


class Counters:
    """Facts about the run that no table holds. Three must stay 0, unless the strategy breaks their constraint by
    design (`Rules.broken_by_design`): version_conflicts, scheduling_aborts, staleness_violations."""

    __slots__ = (
        "late_completions",
        "migrations",
        "recovered",
        "scheduling_aborts",
        "staleness",
        "staleness_violations",
        "version_conflicts",
    )

    def __init__(self, *, max_staleness: int) -> None:
        self.version_conflicts = 0  #: answers whose spans name another version than their group's tag (C1)
        self.scheduling_aborts = 0  #: trajectories stopped by us and not resumed from all their tokens (C2)
        self.staleness_violations = 0  #: groups committed outside 0 <= s - v <= K (C3)
        self.late_completions = 0  #: completions of an old attempt, ignored
        self.migrations = 0  #: trajectories that went on on a peer by our choice
        self.recovered = 0  #: trajectories that went on elsewhere after a loss
        self.staleness = [0] * (max_staleness + 1)  #: groups committed at staleness i; longer where K does not bound it

    def count_staleness(self, staleness: int) -> None:
        """One more group is committed."""
        self.staleness += [0] * (staleness + 1 - len(self.staleness))
        self.staleness[staleness] += 1


class Tables:
    """Everything the core knows."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.instances: dict[InstanceId, Instance] = {}
        self.ledger = Ledger()
        self.trajectories: dict[TrajectoryId, Trajectory] = {}  #: not yet graded, samples of an evaluation included
        self.window = Window()
        self.formation = formation_of(settings)
        self.feed = Feed(
            num_ranks=settings.num_ranks, budget=settings.micro_batch_tokens, group_size=settings.group_size
        )
        self.evaluation = Evaluation(prompt_tokens=settings.eval_prompt_tokens, every=settings.eval_every)
        self.counters = Counters(max_staleness=settings.rules.max_staleness)

        self.prompts: deque[int] = deque()  #: prompt lengths of the next groups, not yet admitted
        self.fetching = False  #: a FetchPrompts is under way
        self.source_dry = False
        self.complete: dict[int, deque[Group]] = {}  #: by deadline, in completion order
        self.top_ups = 0  #: groups filtered or failed since the last close
        self.top_up_rewards: dict[float | None, int] = {}  #: their siblings' rewards -> how many
        #: More untrained groups than F or the gate ever admits: K + 1 steps of unconsumed ones, as many committed.
        most = 2 * (settings.rules.max_staleness + 1) * math.ceil(settings.rules.oversample)
        self.window_limit = most * settings.groups_per_step
        window = settings.orchestration.window if settings.rules.has_window else "open"
        self.adapts_window = window == "adaptive"
        #: W
        self.window_size: float = self.window_limit if window == "open" else WINDOW_START * settings.groups_per_step
        is_mixed = settings.rules.max_staleness > 0 and not settings.rules.batched  # a batch grows old together
        self.kv_reserve = KV_RESERVE if settings.orchestration.kv_overcommit and is_mixed else 1.0
        self.block_version: int | None = None  #: batched strategies: version of the block being generated
        self.block_left = 0  #: batched strategies: groups of the block still to be admitted
        self.num_up = 0  #: instances that are neither lost nor barred
        self.num_slots = 0  #: of all of them
        self.num_kv_tokens = 0  #: KV room of all of them
        self.pushes = 0  #: pushes in flight
        self.vacant: dict[InstanceId, Instance] = {}  #: not lost, not barred, no training resident, nothing reserved
        self.num_draining = 0  #: instances that drain for the newest version: barred ones left out
        self.barred: dict[InstanceId, Instance] = {}
        self.leaving: dict[InstanceId, Instance] = {}  #: to be dismissed once they are empty
        self.length_sum = max(1, int(PRIOR_LENGTH_SHARE * settings.max_new_tokens))
        self.length_count = 1
        self.mean_length = self.length_sum  #: of finished answers, in whole tokens
        self.progress_at = 0.0  #: when a group was committed or a micro-batch trained
        self.step_trained_at = 0.0
        self.evaluated: int | None = None  #: the last version whose evaluation was reported
        self.finished = False  #: FinishRun or FailRun was ordered: nothing more will be
        self.stalled = False  #: FailRun was ordered for want of progress, which a new controller may have again

        self._out: list[Command] = []
        self._touched: dict[int, None] = {}  #: versions with a freed slot or a new waiting trajectory
        self._at_rest = False  #: the event at hand changed nothing that decisions depend on
        self._form_due = False
        self._feed_due = False
        self._place_due = False
        self._release_due = False
        self._moves_due = False
        self._moves_not_before = 0.0

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _footprint(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Tokens of KV to account for: prompt, what is produced, and a share of what is expected to come."""
        if not num_tokens:
            return num_prompt_tokens + int(self.kv_reserve * self.mean_length)
        expected = min(max(self.mean_length, int(num_tokens * GROWTH)), self.settings.max_new_tokens)
        return num_prompt_tokens + num_tokens + int(self.kv_reserve * (expected - num_tokens))

    def _begin(self, trajectory: Trajectory, instance: Instance, *, footprint: int) -> None:
        """A trajectory becomes resident on an instance of its version."""
        trajectory.attempt += 1
        trajectory.phase = _RESIDENT
        trajectory.instance = instance
        trajectory.seen_at = self.now
        trajectory.footprint = footprint
        instance.add(trajectory)
        entry = self.window.entries[trajectory.version]
        entry.kv_load += footprint
        if trajectory.group is None:
            self.evaluation.num_resident += 1
            if len(instance.residents) == 1:
                instance.progress_at = self.now
        else:
            trajectory.group.home = instance
            if instance.num_training == 1:
                self.vacant.pop(instance.id, None)
                instance.progress_at = self.now
        self._out.append(
            Generate(trajectory.id, trajectory.attempt, instance.id, trajectory.version, trajectory.num_tokens)
        )

    def _end(self, trajectory: Trajectory) -> Instance:
        """A trajectory is no longer resident; returns where it was."""
        instance = trajectory.instance
        assert instance is not None
        instance.remove(trajectory)
        trajectory.instance = None
        self.window.entries[trajectory.version].kv_load -= trajectory.footprint
        if trajectory.group is None:
            self.evaluation.num_resident -= 1
        self._freed(instance)
        return instance

    def _freed(self, instance: Instance) -> None:
        """An instance has more room than before."""
        version = instance.version
        if version is not None:
            entry = self.window.entries.get(version)
            if entry is not None:
                entry.offer(instance)
                self._touched[version] = None
            if version != self.window.newest:
                self._moves_due = True
        busy = instance.num_training or instance.reserved or instance.condemned or instance.pushing is not None
        if not busy and not instance.barred and instance.phase is not _LOST:
            self.vacant[instance.id] = instance
            self._place_due = True

    def _unreserve(self, trajectory: Trajectory) -> Instance | None:
        """The move of a trajectory is over or off; returns its target."""
        target = trajectory.target
        if target is not None:
            target.unreserve(trajectory)
            trajectory.target = None
            self._freed(target)
        return target

    def _wait(self, trajectory: Trajectory) -> None:
        """A trajectory waits for a slot on an instance of its version."""
        trajectory.phase = _WAITING
        if trajectory.group is None:
            self.evaluation.waiting.append(trajectory)
        else:
            self.window.entries[trajectory.version].enqueue(trajectory.group, [trajectory])
        self._touched[trajectory.version] = None
        self._place_due = True

    def _condemn(self, instance: Instance, reason: str) -> None:
        """Have the shell declare an instance lost; until then it gets no work."""
        if not instance.condemned:
            instance.condemned = True
            self.vacant.pop(instance.id, None)
            self._out.append(CondemnInstance(instance.id, instance.incarnation, reason))

    def _count(self, instance: Instance, *, sign: int = 1) -> None:
        """An instance takes part in the fleet from now on, or (-1) no longer."""
        self.num_up += sign
        self.num_slots += sign * instance.slots
        self.num_kv_tokens += sign * instance.kv_tokens

    def _serve(self, instance: Instance) -> None:
        """It is a server of the version that it holds, if anything needs that still."""
        assert instance.version is not None
        if instance.version in self.window.entries:
            self.entry(instance.version).serving[instance.id] = instance

    def _leave_serving(self, instance: Instance) -> None:
        """The instance no longer holds its version."""
        if instance.phase is InstancePhase.DRAINING and not instance.barred:
            self.num_draining -= 1
        if instance.version is not None:
            entry = self.window.entries.get(instance.version)
            if entry is not None:
                entry.serving.pop(instance.id, None)
        instance.version = None

    def _fail(self, reason: str) -> None:
        """End the run without success."""
        if not self.finished:
            self.finished = True
            self._out.append(FailRun(reason))

    def admission_version(self) -> int | None:
        """The version that new groups carry: the newest, or that of the block under way."""
        if self.settings.rules.batched and self.formation.num_unconsumed:
            return self.block_version
        return self.window.newest

    def entry(self, version: int) -> Version:
        """The window's entry of a version that something needs."""
        return self.window.entries[version]

    @property
    def next_group(self) -> GroupId:
        """Id of the next group to be admitted: the cursor of the prompt stream."""
        return GroupId(self.ledger.admitted)
