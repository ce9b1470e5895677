"""Moving what runs: away from instances that are drained, pressed or silent; and who takes part in the fleet at all.

Invariant: nothing is stopped that cannot go on from all its tokens. A drained instance is barred: it gets neither work
nor weights, and does not count as a server of the version that it holds, until it is recalled. A request that would
leave no other instance to take work is refused. Inherited by interrupts.py.
"""

from __future__ import annotations

from typing import Final

from dora.core import events as ev
from dora.core.commands import DismissInstance, RefuseRequest, StopRequest
from dora.core.groups import Trajectory, TrajectoryPhase
from dora.core.ids import InstanceId
from dora.core.instances import Instance, InstancePhase
from dora.core.tables import LOOK_PAUSE_S, Tables

#: A trajectory without a token for this many watchdog times, on an instance that serves others, is stopped and goes on
#: elsewhere: after a retraction it may wait behind others, but not for ever.
SILENCE: Final = 3.0


class Moves(Tables):
    """Stops, moves, and the requests of people."""

    def _stop(self, trajectory: Trajectory) -> None:
        assert trajectory.instance is not None
        trajectory.phase = TrajectoryPhase.STOPPING
        self._out.append(StopRequest(trajectory.id, trajectory.attempt, trajectory.instance.id))

    def _reserve(self, trajectory: Trajectory, target: Instance) -> None:
        """Rule 7: slot and KV on the target first, then stop the source."""
        trajectory.target = target
        target.reserve(trajectory)
        self.vacant.pop(target.id, None)
        self._stop(trajectory)

    def _peer_for(self, trajectory: Trajectory) -> Instance | None:
        """The least loaded other instance of its version, if it has room for it."""
        for peer in self.entry(trajectory.version).roomiest_few(2):
            if peer is not trajectory.instance:
                return peer if peer.has_room(trajectory.footprint) else None
        return None

    def _relieve(self, instance: Instance) -> None:
        """KV pressure asks for a move: the smallest resident goes to the least loaded peer, if one has room."""
        movable = [t for t in instance.residents.values() if t.phase is TrajectoryPhase.RESIDENT]
        if len(movable) < 2:
            return
        smallest = min(movable, key=lambda t: (t.footprint, t.id))
        target = self._peer_for(smallest)
        if target is not None:
            self._reserve(smallest, target)

    # -- silence (rule 8 of system.md §3.1) ---------------------------------------------------------------------------

    def _look(self, instance: Instance) -> None:
        """Take in what its residents have produced; no new token of any of them for too long is its loss."""
        now, watchdog_s = self.now, self.settings.watchdog_s
        instance.look_at = now + min(LOOK_PAUSE_S, watchdog_s / 8)
        silent, silent_since = [], now - SILENCE * watchdog_s
        for id, trajectory in instance.residents.items():
            num_tokens = instance.reported.get(id, 0)
            if num_tokens > trajectory.num_tokens:
                trajectory.num_tokens = num_tokens
                trajectory.seen_at = instance.progress_at = now
                self._outgrow(trajectory, instance)
            elif trajectory.seen_at < silent_since:
                silent.append(trajectory)
        if instance.residents and now > instance.progress_at + watchdog_s:
            self._condemn(instance, f"none of its {len(instance.residents)} requests got a token for {watchdog_s:g} s")
            return
        for trajectory in silent:
            self._start_again(trajectory, instance)

    def _start_again(self, trajectory: Trajectory, instance: Instance) -> None:
        """It got no token for too long, although others here did: it goes on elsewhere, or else in a new request."""
        if trajectory.phase is TrajectoryPhase.STOPPING:
            limit_s = SILENCE * self.settings.watchdog_s
            self._condemn(instance, f"the request of trajectory {trajectory.id} did not stop within {limit_s:g} s")
            return
        trajectory.seen_at = self.now  # it has as long to stop
        target = self._peer_for(trajectory)
        if target is not None:
            self._reserve(trajectory, target)
        else:
            self._stop(trajectory)

    def _outgrow(self, trajectory: Trajectory, instance: Instance) -> None:
        """The answer has grown: account for more KV, where it is and where it will go."""
        grown = self._footprint(trajectory.num_prompt_tokens, trajectory.num_tokens) - trajectory.footprint
        if grown <= 0:
            return
        trajectory.footprint += grown
        instance.kv_load += grown
        self.entry(trajectory.version).kv_load += grown
        if trajectory.target is not None:
            trajectory.target.kv_load += grown

    def _on_prefill_reported(self, event: ev.PrefillReported) -> None:
        instance = self.instances.get(event.instance)
        if instance is not None:
            instance.progress_at = self.now
            for trajectory in instance.residents.values():
                trajectory.seen_at = self.now  # nobody knows whose prompt it is
        self._at_rest = True

    # -- who takes part -----------------------------------------------------------------------------------------------

    def _on_instance_drain_requested(self, event: ev.InstanceDrainRequested) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            self._refuse(event.instance, "there is no such instance, or it has not come up yet")
        elif not instance.barred and self.num_up - (instance.phase is not InstancePhase.LOST) < 1:
            self._refuse(event.instance, "no other instance is there to take its work; add one first")
        else:
            if not instance.barred:
                self._bar(instance)
            if event.leave and not instance.leaving:
                instance.leaving = True
                self.leaving[instance.id] = instance

    def _bar(self, instance: Instance) -> None:
        """From here on it gets nothing; what runs on it moves where there is room, and else ends there (C2)."""
        if instance.phase is not InstancePhase.LOST:
            self._count(instance, sign=-1)
        if instance.phase is InstancePhase.DRAINING:
            self.num_draining -= 1
        elif instance.phase is InstancePhase.SERVING:
            instance.move(InstancePhase.DRAINING)
        instance.barred = True
        self.barred[instance.id] = instance
        self.vacant.pop(instance.id, None)
        entry = self.window.entries.get(instance.version) if instance.version is not None else None
        if entry is not None:
            entry.serving.pop(instance.id, None)
        self._evacuate(instance)

    def _evacuate(self, instance: Instance) -> None:
        """Move its residents to peers of their version, longest first, as long as one has room."""
        for trajectory in sorted(instance.residents.values(), key=lambda t: (-t.footprint, t.id)):
            if trajectory.phase is TrajectoryPhase.RESIDENT:
                target = self._peer_for(trajectory)
                if target is not None:
                    self._reserve(trajectory, target)

    def _on_instance_recalled(self, event: ev.InstanceRecalled) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            self._refuse(event.instance, "there is no such instance, or it has not come up yet")
        elif not instance.barred:
            self._refuse(event.instance, "it takes part already")
        elif instance.leaving and instance.id not in self.leaving:
            self._refuse(event.instance, "it is leaving the run just now")
        else:
            self._unbar(instance)

    def _unbar(self, instance: Instance) -> None:
        """It takes part again, with the version that it holds."""
        instance.barred = instance.leaving = False
        del self.barred[instance.id]
        self.leaving.pop(instance.id, None)
        if instance.phase is InstancePhase.LOST:
            return
        self._count(instance)
        if instance.phase is InstancePhase.DRAINING:
            instance.move(InstancePhase.SERVING)
            self._serve(instance)
        self._freed(instance)

    def _dismiss(self) -> None:
        """Let those go that were to leave and are empty."""
        for instance in list(self.leaving.values()):
            if instance.is_empty and instance.pushing is None:
                del self.leaving[instance.id]
                self._out.append(DismissInstance(instance.id))

    def _refuse(self, instance: InstanceId, reason: str) -> None:
        self._out.append(RefuseRequest(instance, f"instance {instance}: {reason}"))
        self._at_rest = True
