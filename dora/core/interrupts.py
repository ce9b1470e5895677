"""What ends or changes answers in their middle: groups that are given up, and weights that reach live requests.

Invariant: a group that is given up leaves the ledger at once and once; its siblings leave when their requests have
ended. With `Rules.in_flight` everything that is not trained belongs to the newest version (`Group.current`), while the
tag stays what it was: staleness counts from it, and an answer with a span of another version counts as a conflict. An
evaluation keeps its version all the same: an instance that decodes samples of one is updated when they have ended.
Inherited by decisions.py; called by the handlers of answers.py and state.py too.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import DropGroup, ForgetGroups, PushWeights
from dora.core.groups import GIVEN_UP, UNCONSUMED, Group, GroupPhase, Trajectory, TrajectoryPhase
from dora.core.instances import Instance, InstancePhase
from dora.core.moves import Moves

_RESIDENT: Final = TrajectoryPhase.RESIDENT
_WAITING: Final = TrajectoryPhase.WAITING
#: Phases in which an instance may be given weights while requests run on it.
_UPDATABLE: Final = frozenset({InstancePhase.LOADING, InstancePhase.SERVING, InstancePhase.QUARANTINED})


class Interrupts(Moves):
    """Groups that are given up, and updates in flight."""

    # -- groups that are given up -------------------------------------------------------------------------------------

    def _remove(self, group: Group, *, outcome: str, reason: str) -> str:
        """A group leaves U without being trained; returns outcome and reason as they are counted."""
        self._out.append(DropGroup(group.id, outcome, reason, group.rewards))
        self.ledger.move(group, GroupPhase(outcome))
        key = f"{outcome}: {reason}"
        self.ledger.reasons[key] = self.ledger.reasons.get(key, 0) + 1
        self.formation.drop(group.deadline)
        self.entry(group.current).groups -= 1
        self._release_due = True
        return key

    def _discard_surplus(self) -> None:
        """The step is full: what was over-sampled and did not make it is thrown away (not C2; counted)."""
        for group in [g for g in self.ledger.groups.values() if g.phase in UNCONSUMED]:
            if group.phase is GroupPhase.COMPLETE:
                self.complete[group.deadline].remove(group)
                if not self.complete[group.deadline]:
                    del self.complete[group.deadline]
            self.counters.scheduling_aborts += group.unfinished
            self._remove(group, outcome="discarded", reason="over-sampled")
            self._abandon_siblings(group)
            self._forget_discarded(group)

    def _abandon_siblings(self, group: Group) -> None:
        """Those that wait end here, those that run are stopped."""
        self.entry(group.current).forget_waiting(group)
        for sibling in group.trajectories:
            if sibling.phase is _WAITING:
                self._leave_unfinished(sibling)
                self._abandon(sibling)
            elif sibling.phase is _RESIDENT and sibling.instance is not None:
                self._stop(sibling)

    def _abandon(self, trajectory: Trajectory) -> None:
        trajectory.phase = TrajectoryPhase.ABANDONED
        del self.trajectories[trajectory.id]

    def _leave_unfinished(self, trajectory: Trajectory) -> None:
        assert trajectory.group is not None
        trajectory.group.unfinished -= 1
        entry = self.window.entries[trajectory.version]
        entry.unfinished -= 1
        if not entry.unfinished:
            self._place_due = self._release_due = True

    def _is_abandoned(self, trajectory: Trajectory) -> bool:
        return trajectory.group is not None and trajectory.group.phase in GIVEN_UP

    def _forget_discarded(self, group: Group) -> None:
        """Its last sibling is gone: nobody asks for its tokens any more."""
        if group.phase is GroupPhase.DISCARDED and not any(t.id in self.trajectories for t in group.trajectories):
            self._out.append(ForgetGroups((group.id,)))

    # -- weights that reach live requests -----------------------------------------------------------------------------

    def _carry_over(self, version: int) -> None:
        """A version is published: everything that is not trained goes on under it."""
        entry = self.entry(version)
        for older in self.window.entries.values():
            if older is not entry:
                entry.inherit(older)
        for group in self.ledger.groups.values():
            group.current = version
        for trajectory in self.trajectories.values():
            if trajectory.group is not None and trajectory.version != version:
                if trajectory.instance is not None:
                    self.entry(trajectory.version).kv_load -= trajectory.footprint
                    entry.kv_load += trajectory.footprint
                trajectory.version = version

    def _update_fleet(self, newest: int, *, is_wanted: bool) -> None:
        """Push the newest version to every instance at once, if anything is to run under it."""
        evaluation = self.evaluation
        if not (is_wanted or self.entry(newest).unfinished or evaluation.waiting):
            return
        for instance in self.instances.values():
            busy = instance.barred or instance.condemned or instance.pushing is not None
            if instance.phase in _UPDATABLE and not busy and instance.retry_at <= self.now:
                version = self._version_due(instance, newest=newest)
                if version != instance.version:
                    self._push(instance, version)

    def _version_due(self, instance: Instance, *, newest: int) -> int:
        """The newest, unless an evaluation runs here, or needs a server and this one is empty."""
        evaluation = self.evaluation
        if instance.version is not None and len(instance.residents) > instance.num_training:
            return instance.version
        if evaluation.version is None or not evaluation.waiting:
            return newest
        servers = self.entry(evaluation.version)
        if not servers.serving and not servers.loading and instance.is_empty:
            return evaluation.version
        return newest

    def _resumed(self, instance: Instance) -> None:
        """A push is over: who stood still has its time again; where it failed, nobody knows what would come now."""
        instance.progress_at = self.now
        for trajectory in instance.residents.values():
            trajectory.seen_at = self.now
            if instance.phase is InstancePhase.QUARANTINED and trajectory.phase is _RESIDENT:
                self._stop(trajectory)

    def _push(self, instance: Instance, version: int) -> None:
        self.vacant.pop(instance.id, None)
        self._leave_serving(instance)
        if instance.phase is not InstancePhase.LOADING:
            instance.move(InstancePhase.UPDATING)
        instance.pushing = version
        instance.attempt += 1
        self.pushes += 1
        self.entry(version).loading += 1
        self._out.append(PushWeights(instance.id, instance.attempt, version))
