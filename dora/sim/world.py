"""The simulator: the controller's own decision core, in virtual time.

Servers, trainer, graders and store are a heap of (time, number, action). An action returns at most one event;
`core.handle` returns commands, and the handler of each command puts its consequences on the heap. Nothing reads a
clock, opens a socket or uses a shared random state, so the same workload and seed give the same journal.

Invariant: the world keeps its own accounts (the versions of each server, the tokens of each answer, the tag of each
group) and checks every command against them in O(1): C1 when a request is sent or weights change, C2 when an answer
continues, C3 when a group is committed, and the sum of the ledger after every event. `invariants.check` recounts
everything every RECOUNT_EVENTS events and at the end.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush, heapreplace
from typing import Any, ClassVar, Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import FIRST_VERSION, GroupId, InstanceId, StepId, TrajectoryId, VersionId, evaluation_index
from dora.core.invariants import check
from dora.core.phases import GroupPhase
from dora.core.state import State
from dora.errors import InvariantViolation, RunFailed
from dora.sim.answers import AnswerSource, SimulatedGroup
from dora.sim.instance import SimulatedInstance
from dora.sim.measure import Measure
from dora.sim.server import Request
from dora.sim.tools import Call
from dora.sim.trainer import wave_time
from dora.sim.transfers import Transfers
from dora.sim.workload import Workload

#: Number of events between two full recounts of the state.
RECOUNT_EVENTS: Final = 10_000
TICK_S: Final = 1.0
#: Time from requesting prompts to receiving them.
FETCH_S: Final = 0.01
#: An instance that has evicted a request is pressed until it uses less than this share of its KV.
RELIEVED: Final = 0.8
#: Added to the seed for the held-out answers.
HELD_OUT: Final = 1_000_003
#: Time without a command after which the simulation counts as stuck; a sample, a step or a call takes far less.
SILENT_S: Final = 100_000.0

Sink = Callable[[ev.Event, Sequence[cmd.Command]], None]
Action = Callable[[], ev.Event | None]


class World:
    """One simulated job."""

    def __init__(
        self, workload: Workload, *, seed: int, sink: Sink | None = None, answers: AnswerSource | None = None
    ) -> None:
        """`answers`: None for those of the workload."""
        self.workload = workload
        self.settings = workload.settings()
        self.state = State(self.settings)
        self.answers: AnswerSource = answers or workload.answers(seed=seed)
        self.held_out = workload.answers(seed=seed + HELD_OUT)  #: one sample per group is used
        self.random = random.Random(seed)
        self.sink = sink  #: receives every event with its commands
        self.now = 0.0
        self.num_events = 0
        fleet = workload.fleet
        self.instances = [
            SimulatedInstance(
                InstanceId(i), workload.server, slowness=1 / fleet.slow_speed if i < fleet.slow_instances else 1.0
            )
            for i in range(workload.num_instances)
        ]
        self.measure = Measure(workload, self.instances)
        self.outcome: cmd.FinishRun | cmd.FailRun | None = None
        self.newest = -1
        self._heap: list[tuple[float, int, Action]] = []
        self._number = 0
        self._ready: deque[ev.Event] = deque()  # events at the current time, which precede the heap
        self._touched: dict[InstanceId, SimulatedInstance] = {}  # instances whose batch has changed
        self._tags: dict[GroupId, int] = {}  # version of each admitted group that has not left
        self._interrupted: dict[TrajectoryId, Request] = {}  # stopped, lost with their server, or calling
        self._calling: set[TrajectoryId] = set()
        self._begun: set[TrajectoryId] = set()  # by a call that gave a prompt, and not sent yet
        self._pushes: dict[InstanceId, tuple[cmd.PushWeights, bool]] = {}  # under way, and whether each will fail
        self._transfers = Transfers(
            num_bytes=fleet.weight_bytes,
            link_bytes_s=fleet.push_bytes_s,
            store_bytes_s=fleet.store_bytes_s,
            relay=fleet.relay,
        )
        self._transfers_plan = 0  # number of the latest plan; a wake-up of an older one is ignored
        self._graders = [0.0] * workload.grade.workers  # a heap of the times when each becomes free
        self._trainer_free = 0.0
        self._ordered_at = 0.0  # time of the core's last command
        self._pressed: set[InstanceId] = set()
        self._evictions = [0] * len(self.instances)  # of each instance, at its last report

    # -- the clock ----------------------------------------------------------------------------------------------------

    def run(self, *, max_events: int | None = None) -> None:
        """Run to the end of the job, or for `max_events`."""
        self._begin()
        while self.outcome is None and self.num_events != max_events:
            if self._ready:
                self._deliver(self._ready.popleft())
            elif self._touched:
                self._settle(self._touched.popitem()[1])
            else:
                self.now, _, action = heappop(self._heap)  # never empty: it has a tick
                event = action()
                if event is not None:
                    self._deliver(event)
        check(self.state)
        if isinstance(self.outcome, cmd.FailRun):
            raise RunFailed(f"the simulated run failed after {self.now:.0f} s: {self.outcome.reason}")

    def _begin(self) -> None:
        faults = self.workload.faults
        self._at(0.0, lambda: ev.TrainerReady(self.now, StepId(0)))
        self._at(0.0, lambda: self._publish(FIRST_VERSION))
        self._at(TICK_S, self._tick)
        late = len(self.instances) - faults.late_instances
        for i, instance in enumerate(self.instances):
            self._at(faults.join_s if i >= late else 0.0, partial(self._come_up, instance))
            self._at(self.workload.fleet.report_s * (1 + i / len(self.instances)), partial(self._report, instance))

    def _at(self, delay: float, action: Action) -> None:
        self._put(self.now + delay, action)

    def _put(self, at: float, action: Action) -> None:
        self._number += 1
        heappush(self._heap, (at, self._number, action))

    def _deliver(self, event: ev.Event) -> None:
        orders = handle(self.state, event)
        self.num_events += 1
        if self.sink is not None:
            self.sink(event, orders)
        if orders:
            self._ordered_at = self.now
        for order in orders:
            handler = self.handlers.get(type(order))
            if handler is not None:
                handler(self, order)
        ledger = self.state.ledger
        _require(sum(ledger.counts.values()) == ledger.admitted, "C2: admitted groups do not add up")
        if self.num_events % RECOUNT_EVENTS == 0:
            check(self.state)

    def _tick(self) -> ev.Event:
        if self.now > self._ordered_at + SILENT_S:
            raise RunFailed(f"the simulation is stuck: no command since {self._ordered_at:.0f} s of virtual time")
        self._at(TICK_S, self._tick)
        if self._calling:
            held = sum(len(i.residents) for i in self.state.instances.values())
            self.measure.calls_hold(held - sum(len(i.requests) for i in self.instances), seconds=TICK_S)
        return ev.Ticked(self.now)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _settle(self, instance: SimulatedInstance) -> None:
        """Schedule the next change on an instance whose batch has changed, after all events of this moment."""
        for request in instance.settle():
            self._report_turn(request)
        instance.wake += 1
        at = instance.next_at()
        if at < math.inf:
            self._put(at, partial(self._wake, instance, instance.wake))

    def _wake(self, instance: SimulatedInstance, number: int) -> None:
        if number == instance.wake:
            instance.reach(self.now)
            for request in instance.end():
                self._report_turn(request)
            self._touched[instance.id] = instance  # settled after the commands that answer these events

    def _report_turn(self, request: Request) -> None:
        """Report a call or a complete answer, which the controller receives after `answer_s`."""
        order, late_s = request.order, self.workload.fleet.answer_s
        _require(request.offset == request.stops_at, "C2: its turn ended after {} tokens: {}", request.offset, order)
        id, at, spans = order.trajectory, self.now + late_s, self.instances[order.instance].spans(request)
        fact: ev.Event
        if request.calls:
            self._interrupted[id] = request
            fact = ev.CallStarted(at, id, order.attempt, request.offset, spans)
        else:
            if id >= 0:
                self.measure.answered(request, at=at)
            capped = request.total == self.settings.max_new_tokens
            fact = ev.GenerationFinished(at, id, order.attempt, request.total, capped, spans)
        if late_s:
            self._at(late_s, lambda: fact)
        else:
            self._ready.append(fact)

    def _come_up(self, instance: SimulatedInstance) -> ev.Event:
        instance.reach(self.now)
        instance.incarnation += 1
        instance.up = True
        mean_h = self.workload.faults.instance_hours
        if 0 < mean_h < math.inf:
            self._at(self.random.expovariate(1 / (3600 * mean_h)), partial(self._lose, instance, instance.incarnation))
        server = instance.server
        return ev.InstanceUp(self.now, instance.id, instance.incarnation, server.slots, server.kv_tokens)

    def _lose(self, instance: SimulatedInstance, incarnation: int) -> ev.Event | None:
        if not instance.up or instance.incarnation != incarnation:
            return None
        instance.reach(self.now)
        lost = instance.clear()
        self._interrupted.update(lost)
        instance.up = False
        instance.version = None
        instance.adapters.clear()
        instance.served.clear()
        if self._pushes.pop(instance.id, None) is not None:
            self._transfers.reach(self.now)
            self._transfers.stop(instance.id)
            self._plan_transfers()
        instance.wake += 1
        self._pressed.discard(instance.id)
        self._evictions[instance.id] = instance.evictions
        self._at(self.workload.faults.down_s, partial(self._come_up, instance))
        counts = {id: request.offset for id, request in lost.items()}
        return ev.InstanceLost(self.now, instance.id, incarnation, counts, "a simulated failure")

    def _report(self, instance: SimulatedInstance) -> ev.Event | None:
        self._at(self.workload.fleet.report_s, partial(self._report, instance))
        self._report_pressure(instance)
        if not instance.requests:
            return None
        instance.reach(self.now)
        return ev.ProgressReported(self.now, instance.id, instance.counts())

    def _report_pressure(self, instance: SimulatedInstance) -> None:
        """Report an instance as pressed if it has evicted since the last report, and until it has space again."""
        evicted = instance.evictions > self._evictions[instance.id]
        self._evictions[instance.id] = instance.evictions
        if instance.id not in self._pressed:
            if evicted:
                self._pressed.add(instance.id)
                self._ready.append(ev.KvPressureReported(self.now, instance.id, True))
        elif not evicted and instance.used - instance.spare() < RELIEVED * instance.server.kv_tokens:
            self._pressed.discard(instance.id)
            self._ready.append(ev.KvPressureReported(self.now, instance.id, False))

    def _on_generate(self, order: cmd.Generate) -> None:
        id, instance = order.trajectory, self.instances[order.instance]
        number, group, place = self._answer(id)
        holds = order.version == instance.version or order.version in instance.served
        _require(holds, "C1: the instance holds {}: {}", instance.served or instance.version, order)
        if id >= 0:
            tag = self._tags[GroupId(number)]
            carried_over = self.settings.rules.in_flight is not None and tag < order.version
            _require(tag == order.version or carried_over, "C1: not the tag of its group: {}", order)
        old = self._interrupted.pop(id, None)
        begun, calls = 0, group.calls_of(place)
        if old is None and self.settings.own_prompts:
            _require(id in self._begun, "C2: it has no prompt: {}", order)
            self._begun.remove(id)
            begun, calls = calls[0].num_tokens, calls[1:]
        _require((old.offset if old else begun) == order.num_tokens, "C2: not from all its tokens: {}", order)
        _require(id not in instance.requests, "it runs there already: {}", order)
        _require(len(instance.requests) < instance.server.slots, "the instance has no slot: {}", order)
        instance.reach(self.now)
        if old is None:
            total = group.lengths[place]
            request = Request(order, number, group.prompt_tokens, total, begun, calls=calls, unread=begun)
        else:
            request = old.resent(order)
            if old.order.instance != order.instance:
                self._forget(id, self.instances[old.order.instance])
        instance.take(request)
        self._touched[instance.id] = instance

    def _forget(self, id: TrajectoryId, instance: SimulatedInstance) -> None:
        """Drop the KV of an answer that was on this instance before a call and continues elsewhere."""
        instance.reach(self.now)
        instance.forget(id)
        self._touched[instance.id] = instance

    def _on_call_environment(self, order: cmd.CallEnvironment) -> None:
        id = order.trajectory
        _require(id not in self._calling, "C2: a call is under way: {}", order)
        self._calling.add(id)
        if id in self._interrupted:
            request = self._interrupted[id]
            _require(request.calls and request.offset == request.calls[0].at, "C2: no call is due: {}", order)
            self._at(request.calls[0].latency_s, partial(self._end_call, order))
        else:
            _require(self.settings.own_prompts and id not in self._begun, "C2: a call without an intent: {}", order)
            _, group, place = self._answer(id)
            self._at(group.calls[place][0].latency_s, partial(self._begin_episode, order, group.calls[place][0]))

    def _begin_episode(self, order: cmd.CallEnvironment, call: Call) -> ev.Event:
        self._calling.remove(order.trajectory)
        self._begun.add(order.trajectory)
        return ev.CallFinished(self.now, order.trajectory, order.attempt, call.num_tokens)

    def _end_call(self, order: cmd.CallEnvironment) -> ev.Event:
        request = self._interrupted[order.trajectory]
        request.receive_result()
        self._calling.remove(order.trajectory)
        ended = not request.calls and request.offset == request.total
        if ended:
            del self._interrupted[order.trajectory]
            self._forget(order.trajectory, self.instances[request.order.instance])
            if order.trajectory >= 0:
                self.measure.answered(request, at=self.now)
        return ev.CallFinished(self.now, order.trajectory, order.attempt, request.offset, ended)

    def _answer(self, id: TrajectoryId) -> tuple[int, SimulatedGroup, int]:
        """Return the number of a trajectory's group, the group, and its index there. A sample of an evaluation is a
        group of its own, with a number below 0 that no other evaluation has."""
        if id >= 0:
            number, place = divmod(id, self.settings.group_size)
            return number, self.answers.group(number), place
        _, index = evaluation_index(id, num_samples=self.workload.job.eval_samples)
        return id, self.held_out.group(index), 0

    def _on_stop_request(self, order: cmd.StopRequest) -> None:
        self._at(self.workload.fleet.stop_s, partial(self._stop, order))

    def _stop(self, order: cmd.StopRequest) -> ev.Event | None:
        instance = self.instances[order.instance]
        request = instance.requests.get(order.trajectory)
        if request is None or request.order.attempt != order.attempt:
            return None  # it has ended in the meantime
        instance.reach(self.now)
        self._settle(instance)
        if order.trajectory not in instance.requests:
            return None  # it ends at the same time
        instance.remove(order.trajectory)
        spans = instance.spans(request)
        self._settle(instance)
        request.brings_kv = request.offset > 0 and instance.server.kv_bytes_s > 0
        self._interrupted[order.trajectory] = request
        return ev.GenerationStopped(self.now, order.trajectory, order.attempt, request.offset, spans)

    def _on_push_weights(self, order: cmd.PushWeights) -> None:
        instance = self.instances[order.instance]
        _require(0 <= order.version <= self.newest, "not yet published: {}", order)
        if self.settings.adapters:
            self._load(instance, order)
            return
        pause, running = self.settings.rules.in_flight, len(instance.requests)
        _require(not running or pause, "C1: there are {} requests on it: {}", running, order)
        instance.reach(self.now)
        if running:
            self._settle(instance)
            self._touched[instance.id] = instance
        else:
            instance.version = None
        instance.begin_push(retract=pause != "in_place")
        self._pushes[order.instance] = order, self._push_fails()
        self._at(self.workload.fleet.push_fixed_s, partial(self._begin_transfer, order))

    def _push_fails(self) -> bool:
        return self.random.random() < self.workload.faults.push_failure_share

    def _begin_transfer(self, order: cmd.PushWeights) -> None:
        if self._pushes.get(order.instance, (None, False))[0] is order:
            self._transfers.reach(self.now)
            self._transfers.begin(order.instance)
            self._plan_transfers()

    def _plan_transfers(self) -> None:
        """Schedule the end of the next transfer, as their rate has changed. Call `reach` first."""
        self._transfers_plan += 1
        at = self._transfers.next_at()
        if at is not None:
            self._put(at, partial(self._end_transfer, self._transfers_plan))

    def _end_transfer(self, plan: int) -> ev.Event | None:
        if plan != self._transfers_plan:
            return None
        self._transfers.reach(self.now)
        instance = self.instances[self._transfers.ended()]
        order, fails = self._pushes.pop(instance.id)
        instance.reach(self.now)
        instance.end_push()
        if instance.requests:
            self._touched[instance.id] = instance
        if not fails:
            self._update(instance, order.version)
        self._plan_transfers()
        if fails:
            return ev.WeightPushFailed(self.now, order.instance, order.attempt, "a simulated failure")
        return ev.WeightPushFinished(self.now, order.instance, order.attempt, order.version)

    def _update(self, instance: SimulatedInstance, version: VersionId) -> None:
        """Change the weights of an instance, under its requests if there are any."""
        instance.update(version)
        instance.is_newest = version == self.newest

    def _load(self, instance: SimulatedInstance, order: cmd.PushWeights) -> None:
        """Load an adapter beside others, while requests run. If that fails, the server may have it."""
        _require(order.version not in instance.adapters.values(), "it has or may have this adapter: {}", order)
        _require(len(instance.adapters) < self.settings.num_holdings, "no place is left for it: {}", order)
        instance.adapters[order.attempt] = order.version
        end = partial(self._end_load, order, instance.incarnation, self._push_fails())
        self._at(self.workload.adapters.load_s, end)

    def _end_load(self, order: cmd.PushWeights, incarnation: int, fails: bool) -> ev.Event | None:
        instance = self.instances[order.instance]
        if not instance.up or instance.incarnation != incarnation:
            return None
        if fails:
            return ev.WeightPushFailed(self.now, order.instance, order.attempt, "a simulated failure")
        instance.served.add(order.version)
        return ev.WeightPushFinished(self.now, order.instance, order.attempt, order.version)

    def _on_unload_version(self, order: cmd.UnloadVersion) -> None:
        """Unload an adapter, which takes no time once no request has it."""
        instance = self.instances[order.instance]
        _require(instance.adapters.get(order.load) == order.version, "it has no such adapter: {}", order)
        is_used = any(request.order.version == order.version for request in instance.requests.values())
        _require(not is_used, "C1: requests on it have this adapter: {}", order)
        del instance.adapters[order.load]
        instance.served.discard(order.version)
        self._ready.append(ev.VersionUnloaded(self.now, order.instance, order.attempt))

    def _on_condemn_instance(self, order: cmd.CondemnInstance) -> None:
        self._at(self.workload.fleet.stop_s, partial(self._lose, self.instances[order.instance], order.incarnation))

    # -- prompts, graders -------------------------------------------------------------------------------------------

    def _on_fetch_prompts(self, order: cmd.FetchPrompts) -> None:
        tokens = tuple(self.answers.group(order.first + i).prompt_tokens for i in range(order.count))
        self._at(FETCH_S, lambda: ev.PromptsArrived(self.now, order.first, tokens, False))

    def _on_grade_trajectory(self, order: cmd.GradeTrajectory) -> None:
        grade, draw = self.workload.grade, self.random
        hangs = grade.hang_share and draw.random() < grade.hang_share
        latency = grade.hang_s if hangs else grade.median_s * math.exp(grade.sigma * draw.gauss(0, 1))
        if self._graders:
            begin = max(self.now, self._graders[0])
            heapreplace(self._graders, begin + latency)
            latency += begin - self.now
        _, group, place = self._answer(order.trajectory)
        reward: float | None = group.rewards[place]
        if math.isnan(group.rewards[place]) or hangs or (grade.failure_share and draw.random() < grade.failure_share):
            reward = None
        if order.trajectory >= 0:
            tag = self._tags[GroupId(order.trajectory // self.settings.group_size)]
            self.measure.graded(tag, at=self.now + latency)
        self._at(latency, lambda: ev.TrajectoryGraded(self.now, order.trajectory, order.attempt, reward))

    # -- the ledger ---------------------------------------------------------------------------------------------------

    def _on_admit_group(self, order: cmd.AdmitGroup) -> None:
        _require(order.group not in self._tags, "C2: admitted twice: {}", order)
        self._tags[order.group] = order.version

    def _on_commit_group(self, order: cmd.CommitGroup) -> None:
        _require(self._tags.get(order.group) == order.version, "C1: not the tag of its group: {}", order)
        staleness = order.step - order.version
        _require(0 <= staleness <= self.settings.max_lag, "C3: {}", order)
        self.measure.committed(order.step, staleness=staleness, lengths=self.answers.group(order.group).lengths)

    def _on_close_step(self, _: cmd.CloseStep) -> None:
        """If rollout and training share devices, halt running requests until the publication."""
        if self.workload.is_shared:
            for instance in self.instances:
                instance.reach(self.now)
                self._settle(instance)
                instance.halted = True
                self._touched[instance.id] = instance

    def _on_drop_group(self, order: cmd.DropGroup) -> None:
        if order.outcome is GroupPhase.DISCARDED:
            self.measure.discarded(self.answers.group(order.group).lengths)
            return  # it may run on until ForgetGroups
        del self._tags[order.group]
        self.measure.counts.dropped += 1

    def _on_forget_groups(self, order: cmd.ForgetGroups) -> None:
        for group in order.groups:
            del self._tags[group]  # a KeyError is a group that leaves twice
        self.answers.forget_before(min(self._tags, default=self.state.next_group))

    # -- the trainer ------------------------------------------------------------------------------------------------

    def _on_train_micro_batch(self, order: cmd.TrainMicroBatch) -> None:
        workload = self.workload
        loads = [sum(map(self._size, rank)) for rank in order.ranks]
        time = wave_time(workload, loads, closes=order.closes)
        begin = max(self.now, self._trainer_free)
        self._trainer_free = begin + time.compute_s + time.update_s
        self.measure.trained_wave(
            num_tokens=sum(loads),
            busy_s=self._trainer_free - begin,
            unbalanced_s=time.compute_s - time.balanced_s,
        )
        delay = self._trainer_free - self.now
        update_s = workload.train.update_s if order.last else 0.0  # the last update ends the step, not the micro-batch
        self._at(delay - update_s, lambda: ev.MicroBatchTrained(self.now, order.step, order.index))
        if order.last:
            self._at(delay, partial(self._step_trained, order.step))
            self._at(delay + workload.publish_s, partial(self._publish, VersionId(order.step + 1)))

    def _size(self, id: TrajectoryId) -> int:
        group, sibling = divmod(id, self.settings.group_size)
        answers = self.answers.group(group)
        return answers.prompt_tokens + answers.lengths[sibling]

    def _step_trained(self, step: StepId) -> ev.Event:
        for instance in self.instances:
            instance.reach(self.now)
        self.measure.step_trained(step, at=self.now, state=self.state)
        self._at(0.0, lambda: ev.CheckpointSaved(self.now, StepId(step + 1), ""))  # lets the core forget older waves
        return ev.StepTrained(self.now, step)

    def _publish(self, version: VersionId) -> ev.Event:
        for instance in self.instances:
            instance.reach(self.now)
            instance.is_newest = self.settings.adapters
            if instance.halted:
                instance.halted = False
                self._touched[instance.id] = instance
        self.newest = version
        self.measure.published(version, at=self.now)
        return ev.VersionPublished(self.now, version, int(self.workload.fleet.weight_bytes), {})

    def _end(self, order: cmd.FinishRun | cmd.FailRun) -> None:
        self.outcome = order

    #: The handler of each command.
    handlers: ClassVar[dict[type[cmd.Command], Callable[[Any, Any], None]]] = {
        cmd.FetchPrompts: _on_fetch_prompts,
        cmd.Generate: _on_generate,
        cmd.CallEnvironment: _on_call_environment,
        cmd.StopRequest: _on_stop_request,
        cmd.GradeTrajectory: _on_grade_trajectory,
        cmd.PushWeights: _on_push_weights,
        cmd.UnloadVersion: _on_unload_version,
        cmd.TrainMicroBatch: _on_train_micro_batch,
        cmd.CondemnInstance: _on_condemn_instance,
        cmd.AdmitGroup: _on_admit_group,
        cmd.CommitGroup: _on_commit_group,
        cmd.CloseStep: _on_close_step,
        cmd.DropGroup: _on_drop_group,
        cmd.ForgetGroups: _on_forget_groups,
        cmd.FinishRun: _end,
        cmd.FailRun: _end,
    }


def _require(condition: object, message: str, *parts: object) -> None:
    if not condition:
        raise InvariantViolation(message.format(*parts))
