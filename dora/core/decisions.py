"""The orchestrator (system.md §3, §3.1, §5): after every fact, bring the tables to rest.

`_settle` runs the decisions in a fixed order, each only where something changed: form the step, feed the trainer,
evaluate, dispatch and admit, place empty instances, consolidate, release, dismiss, fetch, conclude. Invariant: settled
tables are left alone by a second call at the same time. Inherited by answers.py, called by `ControllerState.handle`.
"""

from __future__ import annotations

import math
from typing import Final

from dora.core.commands import (
    AdmitGroup,
    CloseStep,
    CommitGroup,
    FetchPrompts,
    FinishRun,
    ReleaseVersion,
)
from dora.core.groups import Group, GroupPhase, TrajectoryPhase
from dora.core.ids import GroupId
from dora.core.instances import Instance, InstancePhase
from dora.core.interrupts import Interrupts
from dora.core.placement import allot, allot_by_requests, kv_floor, plan_moves
from dora.core.versions import Version

#: Time between two looks at what could be packed: a plan costs more than an ordinary event.
CONSOLIDATION_PAUSE_S: Final = 0.25
#: Instances of a version that a packing looks at, least loaded first.
PACKING_CANDIDATES: Final = 16


class Decisions(Interrupts):
    """What to do next, as a function of the tables."""

    def _settle(self) -> None:
        if self._form_due:
            self._form()
        if self._feed_due:
            self._feed_trainer()
        if self.evaluation.due:
            self._start_evaluation()
        while self._touched or self._place_due:
            while self._touched:
                self._fill(self._touched.popitem()[0])
            if self._place_due:
                self._place()
        if self._moves_due and self.now >= self._moves_not_before:
            self._consolidate()
        if self._release_due:
            self._release()
        if self.leaving:
            self._dismiss()
        if not self.fetching and len(self.prompts) < self.settings.groups_per_step:
            self._fetch()
        if self.source_dry or self.formation.step >= self.settings.steps:
            self._conclude()

    # -- forming steps: commit and close under F ----------------------------------------------------------------------

    def _form(self) -> None:
        self._form_due = False
        while self._fill_step():
            self._close()

    def _fill_step(self) -> bool:
        """Commit complete groups as far as F and the strategy allow; True once the step is full."""
        size = self.settings.groups_per_step
        if not (self.settings.rules.streamed and self.settings.orchestration.streaming):
            ready = sum(len(q) for q in self.complete.values())
            if ready + self.formation.committed < size and not self._is_tail(ready):
                return False
        while self.formation.committed < size:
            group = self._next_to_commit()
            if group is None:
                return False
            self._commit(group)
        return True

    def _is_tail(self, ready: int) -> bool:
        """The source is dry and every unconsumed group is complete."""
        return self.source_dry and not self.prompts and ready == self.formation.num_unconsumed

    def _next_to_commit(self) -> Group | None:
        """Earliest deadline, then completion order, if F holds afterwards."""
        if not self.complete:
            return None
        deadline = min(self.complete)
        return self.complete[deadline][0] if self.formation.may_commit(deadline) else None

    def _commit(self, group: Group) -> None:
        queue = self.complete[group.deadline]
        queue.popleft()
        if not queue:
            del self.complete[group.deadline]
        step = self.formation.step
        if not self.formation.staleness_allowed(group.version, step=step):
            self.counters.staleness_violations += 1
            self._fail(f"C3: group {group.id} of version {group.version} committed to step {step}")
        else:
            self.counters.count_staleness(step - group.version)
        self.formation.commit(group.deadline)
        self.ledger.move(group, GroupPhase.COMMITTED)
        group.step = step
        self.feed.commit(group, step=step)
        self._feed_due = True
        self.progress_at = self.now
        self._out.append(CommitGroup(group.id, group.version, step))

    def _close(self) -> None:
        formation = self.formation
        if self.settings.rules.discards:
            self._discard_surplus()
        self._out.append(CloseStep(formation.step, formation.committed))
        self.feed.step(formation.step).closed = True
        formation.close()
        self._feed_due = True
        self.top_ups = 0
        self.top_up_rewards.clear()
        self._admissions_changed()

    def _admissions_changed(self) -> None:
        """F, W or the source may admit more than before."""
        version = self.admission_version()
        if version is not None:
            self._touched[version] = None
        self._place_due = True
        self._moves_due = True

    # -- training and evaluation --------------------------------------------------------------------------------------

    def _feed_trainer(self) -> None:
        self._feed_due = False
        while (wave := self.feed.next_wave()) is not None:
            if self.feed.idle_since is not None:
                self.feed.idle_s += self.now - self.feed.idle_since
                self.feed.idle_since, self.feed.busy_since = None, self.now
            self._out.append(wave)

    def _start_evaluation(self) -> None:
        version = self.window.newest
        if self.evaluation.version is not None or version is None:
            return
        self.evaluation.start(version)
        self.trajectories.update(self.evaluation.trajectories)
        self.entry(version).evaluating = True
        self._touched[version] = None
        self._place_due = True

    def _fill_evaluation(self, entry: Version) -> None:
        """Give samples their share of the slots; all slots while training work could not use them (rule 9)."""
        evaluation = self.evaluation
        limit = max(1, int(self.settings.max_eval_share * self.num_slots))
        if self._is_baseline() or not self._training_wants_slots():
            limit = self.num_slots
        while evaluation.waiting and evaluation.num_resident < limit:
            trajectory = evaluation.waiting[-1]
            footprint = self._footprint(trajectory.num_prompt_tokens, trajectory.num_tokens)
            instance = entry.roomiest()
            if instance is None or not instance.has_room(footprint):
                return
            evaluation.waiting.pop()
            self._begin(trajectory, instance, footprint=footprint)

    def _is_baseline(self) -> bool:
        """Version 0 is evaluated before anything is admitted."""
        return self.evaluation.version == 0 and self.ledger.admitted == 0

    def _training_wants_slots(self) -> bool:
        version = self.admission_version()
        return any(e.num_waiting for e in self.window.entries.values()) or (
            version is not None and self._would_admit(version)
        )

    # -- dispatch and admission ---------------------------------------------------------------------------------------

    def _fill(self, version: int) -> None:
        """Use the free slots of a version: its waiting trajectories first, then new groups (rules 3 and 4)."""
        entry = self.window.entries.get(version)
        if entry is None:
            return
        if self.evaluation.version == version and self.evaluation.waiting:
            self._fill_evaluation(entry)
        while entry.num_waiting:
            group = entry.first_waiting()
            trajectory = group.waiting[-1]
            footprint = self._footprint(trajectory.num_prompt_tokens, trajectory.num_tokens)
            instance = self._room_for(group, entry, footprint=footprint)
            if instance is None:
                return
            entry.dequeue(group)
            self._begin(trajectory, instance, footprint=footprint)
        if version == self.admission_version() or (self.settings.orchestration.refill and self._may_refill(entry)):
            self._admit(entry)

    def _room_for(self, group: Group, entry: Version, *, footprint: int) -> Instance | None:
        """The instance of its latest sibling, which holds the prompt already, else the least loaded one."""
        home = group.home
        if home is not None and home.version == entry.number and home.takes_work and home.has_room(footprint):
            return home
        instance = entry.roomiest()
        return instance if instance is not None and instance.has_room(footprint) else None

    def _may_refill(self, entry: Version) -> bool:
        """Old versions get new groups only if asked for, never the oldest, never while the newest serves nowhere."""
        newest = self.window.newest
        oldest = self.window.live()[0]
        return newest is not None and bool(self.entry(newest).serving) and oldest < entry.number < newest

    def _would_admit(self, version: int) -> bool:
        """F, the window W, the strategy and the source admit a group of this version; room apart."""
        if not self.prompts or self.finished:
            return False
        if self.ledger.num_untrained + 1 > self.window_size:
            return False
        if self._is_baseline() and self.evaluation.waiting:
            return False
        if self.settings.rules.batched and not self.block_left and self.formation.num_unconsumed:
            return False
        return self.formation.may_admit(version)

    def _admit(self, entry: Version) -> None:
        version = entry.number
        batched = self.settings.rules.batched
        while (instance := entry.roomiest()) is not None and self._would_admit(version):
            if not instance.has_room(self._footprint(self.prompts[0], 0)) or self._has_its_share(instance, entry):
                return
            if batched and not self.formation.num_unconsumed:
                if self.pushes:
                    return  # the fleet gets the block's version all together
                self.block_version, self.block_left = version, self.settings.groups_per_step
            self._admit_one(entry, instance)
            if entry.num_waiting:
                return  # every slot is taken

    def _has_its_share(self, instance: Instance, entry: Version) -> bool:
        """Others get the version in a moment: what is admitted meanwhile is spread over all of them (§5.5)."""
        if not entry.loading or self.settings.rules.batched or not self.settings.orchestration.tail_care:
            return False
        if instance.is_empty:
            return False
        servers = len(entry.serving) + entry.loading + len(self.vacant)  # none of these is an empty one of this version
        wanted = entry.unfinished + self._num_admissible(entry.number) * self.settings.group_size
        return instance.num_requests * servers >= wanted

    def _num_admissible(self, version: int) -> int:
        """How many groups F and W admit now."""
        return min(self.formation.slack(version), int(self.window_size) - self.ledger.num_untrained)

    def _admit_one(self, entry: Version, instance: Instance) -> None:
        """Tag a prompt with the version and dispatch as many of its siblings as there is room for."""
        deadline = self.formation.deadline(entry.number)
        group = Group(
            self.next_group,
            version=entry.number,
            deadline=deadline,
            num_prompt_tokens=self.prompts.popleft(),
            group_size=self.settings.group_size,
            at=self.now,
        )
        if not self.formation.num_unconsumed:
            self.progress_at = self.now  # until now there was nothing to make progress with
        self.ledger.admit(group)
        self.formation.admit(deadline)
        if self.settings.rules.batched:
            self.block_left -= 1
        entry.groups += 1
        entry.unfinished += self.settings.group_size
        self._out.append(AdmitGroup(group.id, entry.number, deadline))
        for trajectory in group.trajectories:
            self.trajectories[trajectory.id] = trajectory
        footprint = self._footprint(group.num_prompt_tokens, 0)
        waiting = group.trajectories[::-1]
        home: Instance | None = instance
        while waiting and home is not None:
            if home.has_room(footprint):
                self._begin(waiting.pop(), home, footprint=footprint)
            else:
                roomiest = entry.roomiest()
                home = roomiest if roomiest is not None and roomiest.has_room(footprint) else None
        if waiting:
            entry.enqueue(group, waiting)

    # -- empty instances (rule 2 of system.md §3.1) -------------------------------------------------------------------

    def _place(self) -> None:
        """Give each vacant instance the version that needs it most."""
        self._place_due = False
        newest = self.admission_version()
        if self.settings.rules.in_flight is not None and newest is not None and not self.finished:
            self._update_fleet(newest, is_wanted=self._would_admit(newest))
            return
        if not self.vacant or self.finished:
            return
        needs = [v for v, e in self.window.entries.items() if e.num_waiting and not e.serving and not e.loading]
        newest_wants = newest is not None and (self._would_admit(newest) or self.entry(newest).num_waiting > 0)
        idle = not needs and not newest_wants and not self.evaluation.waiting and not self._versions_waiting()
        if idle and not self.num_draining:
            return
        for instance in list(self.vacant.values()):
            if instance.pushing is not None or instance.retry_at > self.now:
                continue
            version = None
            if not self._is_last_of_needed(instance):
                version = self._version_for(instance, needs=needs, newest=newest if newest_wants else None)
            if version is None or version == instance.version:
                self._undrain(instance)
            elif instance.residents:
                self._vacate(instance)
            elif self.pushes >= self.settings.max_parallel_pushes:
                return  # the next push that ends comes back here
            else:
                self._push(instance, version)
            if version in needs:
                needs.remove(version)

    def _undrain(self, instance: Instance) -> None:
        """Nobody wants the instance after all: it serves its version again."""
        if instance.phase is InstancePhase.DRAINING and instance.is_empty and instance.version is not None:
            instance.move(InstancePhase.SERVING)
            self.num_draining -= 1
            self._touched[instance.version] = None
            if instance.version in self.window.entries:
                self.entry(instance.version).offer(instance)

    def _version_for(self, instance: Instance, *, needs: list[int], newest: int | None) -> int | None:
        """A version in need that has none, the newest, the one under evaluation, one whose trajectories wait."""
        if needs:
            return needs[0]
        if newest is not None:
            return newest
        evaluated = self.evaluation.version
        if evaluated is not None and self.evaluation.waiting:
            entry = self.entry(evaluated)
            if len(entry.serving) + entry.loading < math.ceil(len(self.evaluation.waiting) / instance.slots):
                return evaluated
        waiting = self._versions_waiting()
        return waiting[0] if waiting else None

    def _versions_waiting(self) -> list[int]:
        return [v for v, e in self.window.entries.items() if e.num_waiting]

    def _is_last_of_needed(self, instance: Instance) -> bool:
        entry = self.window.entries.get(instance.version) if instance.version is not None else None
        return entry is not None and entry.needs_instance and len(entry.serving) == 1

    def _vacate(self, instance: Instance) -> None:
        """Evaluation makes room: its samples wait, with their tokens, for another instance of their version."""
        if instance.phase is not InstancePhase.SERVING:
            return
        instance.move(InstancePhase.DRAINING)
        self.num_draining += 1
        for trajectory in instance.residents.values():
            if trajectory.phase is TrajectoryPhase.RESIDENT:
                self._stop(trajectory)

    # -- consolidation (system.md §5.2, §5.3) -------------------------------------------------------------------------

    def _consolidate(self) -> None:
        """Free an instance of an old version for the newest, by moving what is left on it to its peers."""
        self._moves_due = False
        newest = self.admission_version()
        rules, strategy = self.settings.orchestration, self.settings.rules
        if not rules.consolidation or strategy.batched or strategy.in_flight or newest is None or self.finished:
            return
        if not any(v < newest and len(e.serving) > 1 for v, e in self.window.entries.items()):
            return
        if not self._would_admit(newest):
            return
        taker = self.entry(newest)
        roomiest = taker.roomiest()
        if rules.hysteresis and roomiest is not None and roomiest.has_room(self._footprint(self.prompts[0], 0)):
            return
        self._moves_not_before = self.now + CONSOLIDATION_PAUSE_S
        allotted = self._allotment(newest)
        if len(taker.serving) + taker.loading + self.num_draining >= allotted[newest]:
            return
        for version, entry in self.window.entries.items():
            if version != newest and allotted[version] < len(entry.serving) and self._pack(entry):
                return

    def _allotment(self, newest: int) -> dict[int, int]:
        """Instances per version, by demand in tokens of KV (largest remainder over floors); or by requests."""
        if not self.settings.orchestration.kv_floor:
            requests = {v: e.unfinished for v, e in self.window.entries.items()}
            requests[newest] += max(1, self._num_admissible(newest)) * self.settings.group_size
            return allot_by_requests(self.num_up, requests=requests)
        slots, kv_tokens = self.num_slots / self.num_up, self.num_kv_tokens / self.num_up
        mean = self.mean_length
        demand: dict[int, float] = {}
        floors: dict[int, int] = {}
        for version, entry in self.window.entries.items():
            demand[version] = entry.kv_load + entry.num_waiting * mean
            floors[version] = kv_floor(
                num_unfinished=entry.unfinished, num_tokens=entry.kv_load, slots=slots, kv_tokens=kv_tokens
            )
        demand[newest] += max(1, self._num_admissible(newest)) * self.settings.group_size * mean
        floors[newest] = max(1, floors[newest])
        return allot(self.num_up, demand=demand, floors=floors)

    def _pack(self, entry: Version) -> bool:
        """Move what runs on the version's emptiest instance to its peers, if that is allowed."""
        candidates = entry.roomiest_few(PACKING_CANDIDATES)
        if len(candidates) < 2:
            return False
        source = min(candidates, key=lambda i: (i.kv_load, i.id))
        if source.reserved or not source.residents:
            return False
        plan = plan_moves(
            source,
            [i for i in candidates if i is not source],
            urgent_deadline=self.formation.step + 1 if self.settings.orchestration.tail_care else -1,
            decode_time=self.settings.decode_time,
        )
        if plan is None:
            return False
        source.move(InstancePhase.DRAINING)
        self.num_draining += 1
        for trajectory, target in plan:
            if trajectory.phase is TrajectoryPhase.RESIDENT:
                self._reserve(trajectory, target)
        return True

    # -- releases, prompts, the end -----------------------------------------------------------------------------------

    def _release(self) -> None:
        self._release_due = False
        for version in self.window.releasable():
            del self.window.entries[version]
            self._out.append(ReleaseVersion(version))

    def _fetch(self) -> None:
        if self.source_dry or self.finished:
            return
        self.fetching = True
        first = GroupId(self.next_group + len(self.prompts))
        self._out.append(FetchPrompts(first, 2 * self.settings.groups_per_step - len(self.prompts)))

    def _conclude(self) -> None:
        """End the job when everything admitted is trained, published and evaluated."""
        formation = self.formation
        if formation.num_unconsumed or self.finished:
            return
        if formation.step < self.settings.steps:
            if self.prompts or not self.source_dry:
                return
            if formation.committed:
                self._close()  # the source is dry: the last step is short
                self._feed_trainer()
        if self.feed.trained < formation.step or self.window.newest != formation.step:
            return
        if self.evaluation.version is not None or self.evaluation.due or self.trajectories:
            return  # (a sibling of a failed group may still be on its way out)
        if self.evaluation.wants(formation.step, is_last=True) and self.evaluated != formation.step:
            self.evaluation.due = True
            self._start_evaluation()
            self._settle()
            return
        self.finished = True
        if formation.step == self.settings.steps:
            reason = f"all {formation.step} steps are trained"
        else:
            reason = f"the prompt source is dry after step {formation.step} of {self.settings.steps}"
        self._out.append(FinishRun(reason))
