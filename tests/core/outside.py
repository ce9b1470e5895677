"""Everything around one State, controlled by the test: the effect of each command stays outstanding until the test, or
a fair scheduler, completes it. Invariant: it keeps its own accounts (tokens, tags, places in steps, what each server
really holds) and refuses every command that contradicts them; `invariants.check` and `_nothing_idles` run after every
event. Called by test_state_machine.py and test_regressions.py.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import FOREIGN_VERSION, GroupId, InstanceId, TrajectoryId
from dora.core.invariants import check
from dora.core.on_run import culprit
from dora.core.state import State
from dora.core.strategies import Settings
from dora.core.versions import digest_of
from tests.core.world import replay, require_room

#: Of every version here.
DIGEST: Final = digest_of({})
#: Events that a job may still need once nothing fails any more; the largest job here takes a tenth of it.
MAX_FAIR_EVENTS: Final = 10_000


@dataclass
class Server:
    """One inference server as it really is."""

    incarnation: int = 0
    up: bool = False
    slots: int = 1
    kv_tokens: int = 1
    version: int = FOREIGN_VERSION  #: what it holds; foreign whenever nobody can know
    weights: int = FOREIGN_VERSION  #: what it really decodes with
    adapters: dict[int, int] = field(default_factory=dict)  #: of several versions: the load of each that is confirmed
    doubtful: dict[int, int] = field(default_factory=dict)  #: those that it may have: orders are open or failed
    attempts: set[int] = field(default_factory=set)  #: of all loads and unloads, under which names are made
    pressed: bool = False
    condemned: bool = False

    def holds(self, version: int) -> bool:
        return self.up and version in (self.version, *self.adapters)


@dataclass
class Request:
    """A Generate that has not been answered."""

    order: cmd.Generate
    stopping: bool = False
    spans: tuple[ev.Span, ...] = ()  #: ended by weights that reached it


class Outside:
    """Shell, servers and trainer of one run; every public method is one thing that can happen."""

    def __init__(
        self,
        settings: Settings,
        *,
        seed: int,
        num_servers: int,
        prompts: int | None,
        checked: bool = True,
        calls: float = 0.0,
    ) -> None:
        self.first_settings = self.settings = settings  #: a new controller may have others
        self.checked = checked
        self.sink: Callable[[ev.Event, list[cmd.Command]], None] | None = None
        self.random = random.Random(seed)
        self.state = State(settings)
        self.journal: list[tuple[ev.Event, list[cmd.Command]]] = []
        self.now = 0.0
        self.sound = True  #: no event has been refused
        self.prompts = prompts  #: length of the source; None: endless
        self.outcome: cmd.FinishRun | cmd.FailRun | None = None
        self.servers = {InstanceId(i): Server() for i in range(num_servers)}
        self.next_instance = InstanceId(num_servers)
        self.fetch: cmd.FetchPrompts | None = None
        self.requests: dict[TrajectoryId, Request] = {}
        self.grades: dict[TrajectoryId, cmd.GradeTrajectory] = {}
        self.call_share = calls  #: of the times when an answer gets on, those when it calls its environment
        self.intents: set[TrajectoryId] = set()  #: calls that may be made now, once each
        self.calls: dict[TrajectoryId, cmd.CallEnvironment] = {}
        self.pushes: dict[tuple[InstanceId, int], cmd.PushWeights] = {}  #: by instance and attempt
        self.unloads: dict[tuple[InstanceId, int], cmd.UnloadVersion] = {}
        self.late: deque[ev.Event] = deque(maxlen=40)  #: completions whose command has been answered or voided
        self.epoch = 0
        self.restarted_at = 0  #: number of events before the latest start of the controller
        self.given_up: set[InstanceId] = set()  #: servers that do not come back
        self.barred: set[InstanceId] = set()  #: drained on request
        self.dismissed: set[InstanceId] = set()  #: on their way out of the run
        self.refusals = 0

        self.totals: dict[TrajectoryId, int] = {}  #: length of each answer, drawn when it begins
        self.tokens: dict[TrajectoryId, int] = {}  #: produced so far
        self.tags: dict[GroupId, int] = {}
        self.places: dict[GroupId, int] = {}  #: step of each committed group
        self.left: set[GroupId] = set()  #: trained, filtered, failed or discarded
        self.discarded: set[GroupId] = set()  #: and not forgotten
        self.forming = 0
        self.published: list[int] = []
        self.released: set[int] = set()

        self.trainer_step: int | None = None  #: None until the trainer is ready
        self.ready_at = 0  #: the step it will report
        self.starting = True  #: it will be ready
        self.trainer_incarnation = 0
        self.waves: deque[cmd.TrainMicroBatch] = deque()  #: not yet trained
        self.num_waves = 0  #: given to the trainer for its step
        self.update_due = False  #: the last wave is trained, the step is not yet reported
        self.unpublished = [0]
        self.trained = 0  #: steps
        self.checkpoint = 0  #: step of the last one
        self.all_waves: dict[tuple[int, int], cmd.TrainMicroBatch] = {}

    # -- one event in, its commands onto the books ------------------------------------------------------------------

    def deliver(self, event: ev.Event) -> None:
        self.sound = False
        orders = handle(self.state, event)
        self.journal.append((event, orders))
        if self.sink is not None:
            self.sink(event, orders)
        assert self.outcome is None or not orders, "orders after the end"
        for order in orders:
            handler: Callable[[Any], None] | None = getattr(self, "_" + type(order).__name__, None)
            if handler is not None:
                handler(order)
        if self.checked:
            check(self.state)
            require_room(self.state, orders)
        if self.checked and self.outcome is None:
            self._nothing_idles(event)
            if self.settings.adapters:
                self._nothing_overtakes(event, orders)
        self.sound = True

    def answer(self, event: ev.Event) -> None:
        """Deliver a completion and keep it, to be delivered again."""
        self.deliver(event)
        self.late.append(event)

    def _nothing_idles(self, event: ev.Event) -> None:
        """At rest, the roomiest server of a version has no room for its queued work, and no server is vacant while a
        version is in need."""
        state = self.state
        for version, entry in state.window.entries.items():
            groups = [g for g in state.ledger.groups.values() if g.current == version and g.waiting]
            if groups:
                first = min(groups, key=lambda g: (g.unfinished, g.id))
                most = first.num_prompt_tokens + self.settings.max_new_tokens
                roomiest = min(
                    (i for i in state.instances.values() if i.takes_work(version)),
                    key=lambda i: (i.load(), i.id),
                    default=None,
                )
                idle = roomiest is not None and roomiest.has_room(most)
                idle = idle and not (self.settings.adapters and self._is_sample_next())
                assert not idle, f"version {version} has room while its group {first.id} waits: {roomiest}"
                if roomiest is not None and self.settings.adapters:
                    break  # what is due later must not overtake it
            if isinstance(event, ev.Ticked) and entry.num_waiting and not entry.serving and not entry.loading:
                free = [i.id for i in state.vacant.values() if self._may_be_pushed(i.id)]
                if self.settings.adapters:
                    free = [i.id for i in state.instances.values() if self._may_load(i.id, version)]
                assert not free, f"version {version} has no instance while {free} are free"

    def _may_be_pushed(self, id: InstanceId) -> bool:
        i = self.state.instances[id]
        holds = self.state.window.entries.get(i.full.version) if i.full.version is not None else None
        is_last = holds is not None and holds.needs_instance and len(holds.serving) == 1
        return i.is_empty and i.full.retry_at <= self.now and not is_last

    def _may_load(self, id: InstanceId, version: int) -> bool:
        i, server = self.state.instances[id], self.servers[id]
        if not i.is_member or i.condemned or not server.up or version in server.doubtful:
            return False
        return len(server.adapters) + len(server.doubtful) < self.settings.num_holdings

    def _nothing_overtakes(self, event: ev.Event, orders: list[cmd.Command]) -> None:
        """A free slot of a shared server goes to the evaluation's share, then to queued work by deadline, then to new
        groups: nothing was begun although something that comes before it waits for room where it could run."""
        state = self.state
        new = [order.group for order in orders if isinstance(order, cmd.AdmitGroup)]
        goes_on = getattr(event, "trajectory", -1)  # it had its slot before
        begun = [o for o in orders if isinstance(o, cmd.Generate) and o.trajectory >= 0 and o.trajectory != goes_on]
        if self._is_sample_next() and not state.settings.max_episodes:
            assert not begun, f"{begun} overtake a sample of version {state.evaluation.version}"
        for version, entry in state.window.entries.items():
            if entry.num_waiting and self._takes_work(version):
                first = {g.id for g in state.ledger.groups.values() if g.version == version and g.waiting} - set(
                    new[-1:]
                )
                late = [o.trajectory for o in begun if o.version > version]
                assert not (first and (new or late)), f"groups {new} and {late} overtake groups {first} of {version}"

    def _is_sample_next(self) -> bool:
        """Whether an evaluation sample waits that is within its share, and servers take its work."""
        samples, share = self.state.evaluation, int(self.settings.max_eval_share * self.state.num_slots)
        is_within = samples.num_resident + samples.away < max(1, share)
        return bool(samples.waiting) and is_within and self._takes_work(samples.version)

    def _takes_work(self, version: int | None) -> bool:
        return any(i.takes_work(version) for i in self.state.instances.values())

    # -- commands ---------------------------------------------------------------------------------------------------

    def _FetchPrompts(self, order: cmd.FetchPrompts) -> None:
        assert self.fetch is None
        assert order.count > 0
        self.fetch = order

    def _Generate(self, order: cmd.Generate) -> None:
        t, server = order.trajectory, self.servers[order.instance]
        self.totals.setdefault(t, self._length())
        assert t not in self.requests, "a trajectory is generated twice at the same time"
        assert t not in self.calls, "a trajectory is generated during its call"
        assert order.num_tokens == self.tokens.setdefault(t, 0), "C2: not from all its tokens"
        assert order.num_tokens or not self.settings.own_prompts, "generated without its prompt"
        assert server.up
        assert order.instance not in self.barred
        assert server.holds(order.version), f"C1: instance {order.instance} does not hold it: {order}"
        assert self.settings.adapters or not self._has_orders(order.instance)
        assert order.version not in self.released
        if t >= 0:
            tag = self.tags[self._group(t)]
            assert order.version == tag or (self.in_flight and tag < order.version), "C1: not the group's tag"
        self.requests[t] = Request(order)
        assert sum(r.order.instance == order.instance for r in self.requests.values()) <= server.slots

    def _CallEnvironment(self, order: cmd.CallEnvironment) -> None:
        t = order.trajectory
        assert t not in self.requests
        assert t not in self.calls
        if self.settings.own_prompts and t not in self.tokens:  # it asks for its prompt
            self.tokens[t] = 0
            self.totals[t] = self._length()
        else:
            self.intents.remove(t)  # a KeyError is a call without an intent, or a second one
        self.calls[t] = order

    def _GradeTrajectory(self, order: cmd.GradeTrajectory) -> None:
        assert order.trajectory not in self.requests
        assert order.trajectory not in self.grades
        assert order.trajectory not in self.calls
        assert self.tokens[order.trajectory] == self.totals[order.trajectory], "C2: an unfinished answer is graded"
        self.grades[order.trajectory] = order

    def _PushWeights(self, order: cmd.PushWeights) -> None:
        assert self.servers[order.instance].up
        assert order.instance not in self.barred
        assert order.version in self.published
        assert order.version not in self.released
        held = any(s.holds(order.version) for i, s in self.servers.items() if i not in self.barred)
        is_first = not held and order.version not in {p.version for p in self.pushes.values()}
        assert len(self.pushes) < self.state.push_limit.limit or is_first or self.in_flight
        if self.settings.adapters:
            self._load_adapter(order)
            return
        assert not self._has_orders(order.instance)
        running = [
            t for t, r in self.requests.items() if r.order.instance == order.instance and (t < 0 or not self.in_flight)
        ]
        assert not running, f"C1: instance {order.instance} is pushed while it decodes {running}"
        self.pushes[order.instance, order.attempt] = order
        before, self.servers[order.instance].version = self.servers[order.instance].version, FOREIGN_VERSION
        entry = self.state.window.entries.get(before)
        if entry is not None and entry.needs_instance and entry.away < entry.unfinished:
            assert any(s.holds(before) for s in self.servers.values()), f"the last of version {before} is gone"

    def _load_adapter(self, order: cmd.PushWeights) -> None:
        server = self.servers[order.instance]
        assert order.version not in server.adapters.keys() | server.doubtful.keys(), f"it may have it already: {order}"
        assert len(server.adapters) + len(server.doubtful) < self.settings.rules.max_staleness + 3
        assert order.attempt not in server.attempts, "a name is used again"
        server.attempts.add(order.attempt)
        server.doubtful[order.version] = order.attempt
        self.pushes[order.instance, order.attempt] = order

    def _UnloadVersion(self, order: cmd.UnloadVersion) -> None:
        server, v = self.servers[order.instance], order.version
        assert server.up
        assert order.instance not in self.dismissed
        assert order.attempt not in server.attempts
        assert (order.instance, order.load) not in self.pushes, "it is being loaded"
        assert all(u.version != v for (i, _), u in self.unloads.items() if i == order.instance)
        users = [t for t, r in self.requests.items() if r.order.instance == order.instance and r.order.version == v]
        assert not users, f"C1: version {v} is unloaded from instance {order.instance} under {users}"
        if v in server.adapters:
            open_ones = {self._group(t) for t in (*self.requests, *self.calls) if t >= 0} - self.left
            assert all(self.tags[g] != v for g in open_ones), f"version {v} is unloaded and needed"
            assert server.adapters.pop(v) == order.load
        else:
            assert server.doubtful[v] == order.load, "something else than what was loaded is unloaded"
        server.attempts.add(order.attempt)
        server.doubtful[v] = order.load
        self.unloads[order.instance, order.attempt] = order

    def _has_orders(self, instance: InstanceId) -> bool:
        return any(i == instance for i, _ in (*self.pushes, *self.unloads))

    def _TrainMicroBatch(self, order: cmd.TrainMicroBatch) -> None:
        assert len(order.ranks) == self.settings.num_ranks
        first = self.all_waves.setdefault((order.step, order.index), order)
        assert first == order, "a replayed micro-batch differs"
        if self.trainer_step is None:
            return  # sent to a trainer that has died: it will be sent again
        assert order.step == self.trainer_step, "a micro-batch of a step the trainer has not opened"
        assert order.index == self.num_waves, "micro-batches of a step are numbered without a gap"
        assert not self.update_due, "a micro-batch after the last one"
        assert not (self.waves and self.waves[-1].last), "a micro-batch after the last one"
        self.waves.append(order)
        self.num_waves += 1

    def _RestartTrainer(self, order: cmd.RestartTrainer) -> None:
        assert self.trainer_step is None, "the trainer is started twice"
        assert not self.starting, "the trainer is started twice"
        assert order.incarnation == self.trainer_incarnation + 1
        self.starting, self.trainer_incarnation = True, order.incarnation

    def _CondemnInstance(self, order: cmd.CondemnInstance) -> None:
        server = self.servers[order.instance]
        assert server.up
        assert server.incarnation == order.incarnation
        server.condemned = True

    def _DismissInstance(self, order: cmd.DismissInstance) -> None:
        assert order.instance in self.barred
        assert order.instance not in self.dismissed
        assert not self._has_orders(order.instance)
        assert all(r.order.instance != order.instance for r in self.requests.values()), "dismissed while it decodes"
        self.dismissed.add(order.instance)

    def _RefuseRequest(self, order: cmd.RefuseRequest) -> None:
        self.refusals += 1

    def _StopRequest(self, order: cmd.StopRequest) -> None:
        request = self.requests[order.trajectory]
        assert (request.order.attempt, request.order.instance) == (order.attempt, order.instance)
        assert not request.stopping
        request.stopping = True

    def _AdmitGroup(self, order: cmd.AdmitGroup) -> None:
        assert order.group == len(self.tags), "groups are admitted in the order of the stream"
        newest = self.published[-1]
        assert order.version == newest or self.settings.rules.batched or self.settings.orchestration.refill
        assert order.version not in self.released
        assert order.deadline == min(order.version + self.settings.max_lag, self.settings.steps - 1)
        assert order.deadline >= self.forming
        self.tags[order.group] = order.version

    def _CommitGroup(self, order: cmd.CommitGroup) -> None:
        assert order.group not in self.places
        assert order.group not in self.left
        assert order.version == self.tags[order.group]
        assert order.step == self.forming
        assert 0 <= order.step - order.version <= self.settings.max_lag, "C3"
        self.places[order.group] = order.step

    def _DropGroup(self, order: cmd.DropGroup) -> None:
        assert order.group not in self.places
        assert order.group not in self.left
        graded = [r for r in order.rewards if r is not None]
        if order.outcome.value == "filtered":
            assert self.settings.filter_zero_variance
            assert len(graded) >= 2
            assert len(set(graded)) == 1
        elif order.outcome.value == "discarded":
            assert self.settings.rules.oversample > 1
            assert sum(step == self.forming for step in self.places.values()) == self.settings.groups_per_step
            self.discarded.add(order.group)
        else:
            assert order.reason.startswith("generation") or len(graded) < 2
        self.left.add(order.group)

    def _CloseStep(self, order: cmd.CloseStep) -> None:
        assert order.step == self.forming
        assert order.num_groups == sum(step == order.step for step in self.places.values()) > 0
        outside = self.tags.keys() - self.places.keys() - self.left
        if order.num_groups < self.settings.groups_per_step:
            assert self.state.source_dry, "a step closes short while the source has prompts"
            assert not outside, "a step closes short with work outstanding"
        last = order.step - self.settings.max_lag
        late = [g for g in outside if self.tags[g] <= last or order.step == self.settings.steps - 1]
        assert not late, f"C3: groups {late} are due at step {order.step} and left outside"
        self.forming += 1

    def _ForgetGroups(self, order: cmd.ForgetGroups) -> None:
        if self.discarded.issuperset(order.groups):
            assert not any(self._group(t) in order.groups for t in (*self.requests, *self.grades, *self.calls))
            self.discarded.difference_update(order.groups)
            return
        sent = {t for (step, _), w in self.all_waves.items() if step == self.trained for r in w.ranks for t in r}
        assert {g for g, step in self.places.items() if step == self.trained} == set(order.groups)
        assert {self._group(t) for t in sent} == set(order.groups), "C2: a committed group was not sent"
        assert self.left.isdisjoint(order.groups), "a group is trained twice"
        self.left.update(order.groups)

    def _ReleaseVersion(self, order: cmd.ReleaseVersion) -> None:
        v = order.version
        assert v in self.published[:-1]
        assert v not in self.released
        assert all(r.order.version != v for t, r in self.requests.items() if t < 0 or not self.in_flight)
        assert all(p.version != v for p in self.pushes.values())
        holders = [i for i, s in self.servers.items() if s.up and v in s.adapters.keys() | s.doubtful.keys()]
        assert not holders, f"released while instances {holders} may have it"
        untrained = [g for g, tag in self.tags.items() if tag == v and g not in self.left]
        assert not untrained or self.in_flight, f"released with untrained groups {untrained}"
        self.released.add(v)

    def _FinishRun(self, order: cmd.FinishRun) -> None:
        self.outcome = order
        assert not self.requests
        assert not self.grades
        assert not self.calls
        assert self.left == set(self.tags), "C2: the job ends with groups that were not trained"
        assert not self.discarded
        assert self.forming == self.trained == self.published[-1]
        assert self.forming == self.settings.steps or self.state.source_dry

    def _FailRun(self, order: cmd.FailRun) -> None:
        self.outcome = order
        assert "had to top up" in order.reason, order.reason

    @property
    def in_flight(self) -> bool:
        """Weights reach live requests."""
        return self.settings.rules.in_flight is not None

    def _length(self) -> int:
        """A long tail: one answer in five may take the whole budget."""
        most = self.settings.max_new_tokens
        return self.random.randint(1, most if self.random.random() < 0.2 else most // 8)

    def _group(self, t: TrajectoryId) -> GroupId:
        return GroupId(t // self.settings.group_size)

    # -- what can happen: requests ------------------------------------------------------------------------------------

    def bring_prompts(self) -> None:
        assert self.fetch is not None
        order, self.fetch = self.fetch, None
        count = order.count if self.prompts is None else max(0, min(order.count, self.prompts - order.first))
        lengths = tuple(0 if self.settings.own_prompts else 1 + (order.first + i) % 7 for i in range(count))
        self.deliver(ev.PromptsArrived(self.now, order.first, lengths, count < order.count))

    def produce(self, t: TrajectoryId, num_tokens: int) -> int:
        """More tokens, not yet reported; returns all there are."""
        self.tokens[t] = min(self.tokens[t] + num_tokens, self.totals[t])
        return self.tokens[t]

    def report(self, instance: InstanceId) -> None:
        counts = {t: self.tokens[t] for t, r in self.requests.items() if r.order.instance == instance}
        self.deliver(ev.ProgressReported(self.now, instance, counts))

    def _spans(self, request: Request) -> tuple[ev.Span, ...]:
        """Of all it has produced so far."""
        order, ended = request.order, request.spans
        start = ended[-1][2] if ended else order.num_tokens
        server = self.servers[order.instance]
        weights = order.version if order.version in server.adapters else server.weights
        return (*ended, (weights, start, self.tokens[order.trajectory]))

    def _load(self, instance: InstanceId, version: int) -> None:
        """The weights change, and what runs goes on."""
        for request in self.requests.values():
            if request.order.instance == instance:
                request.spans = self._spans(request)
        self.servers[instance].weights = version

    def advance(self, t: TrajectoryId) -> None:
        """Some more tokens are reported, its end, or a call."""
        if self.call_share and self.random.random() < self.call_share:
            self.start_call(t)
            return
        if self.produce(t, self.random.randint(1, 6)) == self.totals[t]:
            self.finish(t)
        else:
            self.report(self.requests[t].order.instance)

    def finish(self, t: TrajectoryId) -> None:
        request = self.requests.pop(t)
        total = self.produce(t, self.totals[t])
        capped = total == self.settings.max_new_tokens
        attempt = request.order.attempt
        self.answer(ev.GenerationFinished(self.now, t, attempt, total, capped, self._spans(request)))

    def stop(self, t: TrajectoryId) -> None:
        request = self.requests.pop(t)
        attempt = request.order.attempt
        self.answer(ev.GenerationStopped(self.now, t, attempt, self.tokens[t], self._spans(request)))

    def fail(self, t: TrajectoryId, *, server_gone: bool, final: bool = False) -> None:
        order = self.requests.pop(t).order
        self.answer(ev.GenerationFailed(self.now, t, order.attempt, self.tokens[t], server_gone, "injected", final))

    def start_call(self, t: TrajectoryId) -> None:
        request = self.requests.pop(t)
        total = self.produce(t, self.random.randint(0, 6))
        self.intents = {t}
        self.answer(ev.CallStarted(self.now, t, request.order.attempt, total, self._spans(request)))
        given_up = t >= 0 and self._group(t) in self.left
        assert self.intents == ({t} if given_up or self.outcome is not None else set())

    def end_call(self, t: TrajectoryId, *, num_tokens: int, ended: bool = False, failed: str = "") -> None:
        order = self.calls.pop(t)
        total = self.produce(t, num_tokens)
        if ended:
            self.totals[t] = total
        graded = ended and t % 2 == 0
        self.answer(ev.CallFinished(self.now, t, order.attempt, total, ended, failed, float(t % 3), graded))

    def any_result(self, t: TrajectoryId) -> None:
        begins = self.settings.own_prompts and not self.tokens[t]
        ended = not begins and self.random.random() < 0.1
        self.end_call(t, num_tokens=self.random.randint(int(begins), 9), ended=ended)

    def grade(self, t: TrajectoryId, reward: float | None) -> None:
        order = self.grades.pop(t)
        self.answer(ev.TrajectoryGraded(self.now, t, order.attempt, reward))

    # -- what can happen: servers -------------------------------------------------------------------------------------

    def come_up(self, instance: InstanceId, *, slots: int, kv_tokens: int) -> None:
        server = self.servers[instance]
        self.servers[instance] = Server(
            server.incarnation + 1, up=True, slots=slots, kv_tokens=kv_tokens, attempts=server.attempts
        )
        self.answer(ev.InstanceUp(self.now, instance, server.incarnation + 1, slots, kv_tokens))

    def take_over(self, instance: InstanceId, *, digest: str) -> None:
        """A server that nobody heard comes back as it was; its label tells what it holds, if a push has proved it."""
        old = self.servers[instance]
        label = next(iter(old.adapters), old.version)
        version = label if label != FOREIGN_VERSION else None
        is_right = version is not None and digest == DIGEST and version not in self.released
        is_right = is_right and not self.settings.adapters  # of those, nobody knows which it has
        holds = version if version is not None and is_right else FOREIGN_VERSION
        self.servers[instance] = Server(
            old.incarnation + 1, True, 1 + instance % 4, 300, holds, old.weights, attempts=old.attempts
        )
        self.answer(ev.InstanceUp(self.now, instance, old.incarnation + 1, 1 + instance % 4, 300, version, digest))
        taken = self.state.instances.get(instance)
        assert taken is None or taken.incarnation != old.incarnation + 1 or is_right == (taken.full.version is not None)

    def lose(self, instance: InstanceId) -> None:
        self._void(instance)
        counts = {t: self.tokens[t] for t, r in self.requests.items() if r.order.instance == instance}
        for t in counts:
            self._void_request(t)
        incarnation = self.servers[instance].incarnation
        self.answer(ev.InstanceLost(self.now, instance, incarnation, counts, "injected"))

    def _void(self, instance: InstanceId) -> None:
        self.servers[instance].up = False
        for key in [key for key in self.pushes if key[0] == instance]:
            push = self.pushes.pop(key)
            self.late.append(ev.WeightPushFinished(self.now, instance, push.attempt, push.version))
        for key in [key for key in self.unloads if key[0] == instance]:
            self.late.append(ev.VersionUnloaded(self.now, instance, self.unloads.pop(key).attempt))

    def _void_request(self, t: TrajectoryId) -> None:
        attempt = self.requests.pop(t).order.attempt
        self.late.append(ev.GenerationFinished(self.now, t, attempt, self.totals[t], False, ()))

    # -- what can happen: people --------------------------------------------------------------------------------------

    def drain(self, instance: InstanceId, *, leave: bool) -> None:
        others = self.state.instances.keys() - self.barred - {instance}
        is_last = instance not in self.barred and not any(self.servers[i].up for i in others)
        is_new, before = instance not in self.barred, self.refusals
        self.barred.add(instance)
        self.deliver(ev.InstanceDrainRequested(self.now, instance, leave))
        refused = self.refusals > before
        assert refused == (is_last or instance not in self.state.instances)
        if refused and is_new:
            self.barred.discard(instance)

    def recall(self, instance: InstanceId) -> None:
        before, was_barred = self.refusals, instance in self.barred
        self.barred.discard(instance)  # it may get work at once
        self.deliver(ev.InstanceRecalled(self.now, instance))
        if self.refusals > before:
            assert not was_barred or instance in self.dismissed
            if was_barred:
                self.barred.add(instance)

    def evaluate(self) -> None:
        evaluation, newest, before = self.state.evaluation, self.state.window.newest, self.refusals
        known = (evaluation.version, evaluation.due, self.state.evaluated)
        can = bool(evaluation.prompt_tokens) and newest is not None and newest not in known
        self.deliver(ev.EvaluationRequested(self.now))
        assert (self.refusals == before) == can

    def let_go(self, instance: InstanceId) -> None:
        """The keeper of the instance has ended; its reports may still arrive, again and too late."""
        self._void(instance)
        del self.servers[instance]
        self.dismissed.remove(instance)
        self.barred.remove(instance)
        self.answer(ev.InstanceRemoved(self.now, instance))

    def join(self) -> InstanceId:
        """A server that nobody knew; it is down yet."""
        instance = self.next_instance
        self.next_instance = InstanceId(instance + 1)
        self.servers[instance] = Server()
        return instance

    def press(self, instance: InstanceId, *, pressed: bool) -> None:
        self.servers[instance].pressed = pressed
        self.deliver(ev.KvPressureReported(self.now, instance, pressed))

    def finish_push(self, key: tuple[InstanceId, int]) -> None:
        order = self.pushes.pop(key)
        instance = order.instance
        if self.settings.adapters:
            self.servers[instance].adapters[order.version] = self.servers[instance].doubtful.pop(order.version)
        else:
            self._load(instance, order.version)
            self.servers[instance].version = order.version
        self.answer(ev.WeightPushFinished(self.now, instance, order.attempt, order.version))

    def fail_push(self, key: tuple[InstanceId, int]) -> None:
        """The push failed, or its answer was lost: what the server holds is unknown."""
        order = self.pushes.pop(key)
        instance = order.instance
        if order.attempt % 2 and not self.settings.adapters:
            self._load(instance, order.version)
        self.answer(ev.WeightPushFailed(self.now, instance, order.attempt, "injected"))
        self.late.append(ev.WeightPushFinished(self.now, instance, order.attempt, order.version))

    def finish_unload(self, key: tuple[InstanceId, int]) -> None:
        order = self.unloads.pop(key)
        del self.servers[order.instance].doubtful[order.version]
        self.answer(ev.VersionUnloaded(self.now, order.instance, order.attempt))

    def fail_unload(self, key: tuple[InstanceId, int]) -> None:
        """The unload failed, or its answer was lost."""
        order = self.unloads.pop(key)
        self.answer(ev.VersionUnloadFailed(self.now, order.instance, order.attempt, "injected"))
        self.late.append(ev.VersionUnloaded(self.now, order.instance, order.attempt))

    # -- what can happen: trainer, time, restarts ---------------------------------------------------------------------

    def ready(self) -> None:
        self.trainer_step = self.ready_at
        self.deliver(ev.TrainerReady(self.now, self.ready_at))

    def train(self) -> None:
        """One micro-batch, or the optimizer update after the last one."""
        if not self.update_due:
            wave = self.waves.popleft()
            self.update_due = wave.last
            self.deliver(ev.MicroBatchTrained(self.now, wave.step, wave.index))
            return
        step = self.trainer_step
        assert step is not None
        self.update_due = False
        self.num_waves = 0
        self.trainer_step = step + 1
        self.unpublished.append(step + 1)
        self.deliver(ev.StepTrained(self.now, step))
        self.trained = max(self.trained, step + 1)

    def may_train(self) -> bool:
        """A publication holds up the one after it."""
        return bool(self.update_due or self.waves) and len(self.unpublished) < 2

    def publish(self) -> None:
        version = self.unpublished.pop(0)
        if not self.published or version > self.published[-1]:
            self.published.append(version)
        self.deliver(ev.VersionPublished(self.now, version, 1, {}))

    def save_checkpoint(self) -> None:
        assert self.trainer_step is not None
        self.checkpoint = max(self.checkpoint, min(self.trainer_step, self.trained))
        self.deliver(ev.CheckpointSaved(self.now, self.checkpoint, ""))

    def lose_trainer(self, *, back: int) -> None:
        """The trainer dies, ready or not; the core has it started again."""
        self.end_trainer(back=back)
        self.starting = False
        self.answer(ev.TrainerLost(self.now, self.trainer_incarnation, "injected"))
        assert self.starting or self.outcome is not None or self.state.stopping

    def end_trainer(self, *, back: int) -> None:
        """The next one will report a step between the last checkpoint and the step that this one was at."""
        self.waves.clear()
        self.num_waves = 0
        self.update_due = False
        self.trainer_step = None
        self.ready_at = max(self.checkpoint, self.trained - back)
        self.unpublished = [self.ready_at]

    def restart_controller(
        self, *, back: int, replays: bool = False, more_steps: int = 0, max_episodes: int | None = None
    ) -> None:
        if max_episodes is None:
            max_episodes = self.settings.max_episodes
        longer = self.settings.steps + more_steps
        self.settings = msgspec.structs.replace(self.settings, steps=longer, max_episodes=max_episodes)
        for t in list(self.requests):
            self._void_request(t)
        for t, order in self.grades.items():
            self.late.append(ev.TrajectoryGraded(self.now, t, order.attempt, 1.0))
        self.grades.clear()
        for t, call in self.calls.items():
            self.late.append(ev.CallFinished(self.now, t, call.attempt, self.tokens[t]))
        self.intents = {t for t in self.calls if replays and not (t >= 0 and self._group(t) in self.left)}
        counts = {t: self.tokens[t] for t in self.state.trajectories if t in self.tokens and t not in self.calls}
        repeatable = tuple(self.calls) if replays else ()
        self.calls.clear()
        for instance in self.servers:
            self._void(instance)
        self.fetch = None
        self.barred.clear()
        self.dismissed.clear()
        self.end_trainer(back=back)
        self.starting, self.trainer_incarnation = True, 0
        self.epoch += 1
        self.restarted_at = len(self.journal)
        self.next_instance = InstanceId(max(self.servers) + 1)  # of those that have left it knows nothing, nor hears
        removed = [*self.echoes_of_the_removed(), *(e for e in self.late if isinstance(e, ev.TrainerLost))]
        self.late = deque([e for e in self.late if e not in removed], maxlen=self.late.maxlen)
        self.deliver(
            ev.ControllerRestarted(
                self.now,
                self.epoch,
                counts,
                steps=longer if more_steps else 0,
                max_episodes=max_episodes,
                replayable=repeatable,
            )
        )
        assert not self.intents or self.outcome is not None

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.deliver(ev.Ticked(self.now))

    def echoes(self) -> list[ev.Event]:
        """Completions that could be mistaken for the completion of a command in flight; all completions if none
        could."""
        open_ones = self.requests.keys() | self.grades.keys() | self.calls.keys()
        ordered = {i for i, _ in (*self.pushes, *self.unloads)}
        return [
            e
            for e in self.late
            if getattr(e, "trajectory", None) in open_ones or getattr(e, "instance", None) in ordered
        ] or list(self.late)

    def echoes_of_the_removed(self) -> list[ev.Event]:
        return [e for e in self.late if getattr(e, "instance", 0) not in self.servers]

    def repeat(self, event: ev.Event) -> None:
        """A completion comes once more, or too late."""
        before = self.state.counters.late_completions
        self.deliver(msgspec.structs.replace(event, at=self.now))
        assert self.state.counters.late_completions == before + 1 or self.outcome is not None

    # -- a fair scheduler ---------------------------------------------------------------------------------------------

    def possible(self, *, stalled: Container[int] = ()) -> list[Callable[[], None]]:
        """Everything that is bound to happen, one call each; answers of `stalled` versions take longer."""
        acts: list[Callable[[], None]] = []
        if self.fetch is not None:
            acts.append(self.bring_prompts)
        acts += [lambda t=t: self.advance(t) for t, r in self.requests.items() if r.order.version not in stalled]
        acts += [lambda t=t: self.stop(t) for t, r in self.requests.items() if r.stopping]
        acts += [lambda t=t: self.any_result(t) for t in self.calls]
        acts += [lambda t=t: self.grade(t, float(t % self.settings.group_size)) for t in self.grades]
        acts += [lambda key=key: self.finish_push(key) for key in self.pushes]
        acts += [lambda key=key: self.finish_unload(key) for key in self.unloads]
        for i, server in self.servers.items():
            if server.condemned:
                acts.append(lambda i=i: self.lose(i))
            if not server.up and i not in self.given_up and i not in self.dismissed:
                acts.append(lambda i=i: self.come_up(i, slots=1 + i % 4, kv_tokens=300))
            if server.up and server.pressed:
                acts.append(lambda i=i: self.press(i, pressed=False))
        acts += [lambda i=i: self.let_go(i) for i in self.dismissed]
        if self.trainer_step is None and self.starting:
            acts.append(self.ready)
        if self.may_train():
            acts.append(self.train)
        if self.unpublished:
            acts.append(self.publish)
        return acts

    def mishaps(self) -> list[Callable[[], None]]:
        """Everything that may go wrong at any time, one call each."""
        acts: list[Callable[[], None]] = []
        acts += [lambda key=key: self.fail_push(key) for key in self.pushes]
        acts += [lambda key=key: self.fail_unload(key) for key in self.unloads]
        acts += [lambda t=t: self.fail(t, server_gone=t % 2 == 1) for t in self.requests]
        acts += [lambda t=t: self.stop(t) for t in self.requests]
        acts += [lambda t=t: self.end_call(t, num_tokens=0, failed="injected") for t in self.calls]
        acts += [lambda i=i: self.press(i, pressed=True) for i, s in self.servers.items() if s.up and not s.pressed]
        acts += [lambda i=i: self.lose(i) for i, s in self.servers.items() if s.up]
        acts += [lambda e=e: self.repeat(e) for e in self.echoes()]
        return acts

    def work(self, num_events: int, *, mishap_share: float = 0.0, stalled: Container[int] = ()) -> None:
        """Let this many things happen, in any order; time passes, and faster when there is nothing else to wait for."""
        for _ in range(num_events):
            if self.outcome is not None:
                return
            acts = self.possible(stalled=stalled)
            mishaps = self.mishaps() if self.random.random() < mishap_share else []
            if mishaps:
                self.random.choice(mishaps)()
            elif acts and self.random.random() < 0.9:
                self.now += 0.1 * self.random.random()
                self.random.choice(acts)()
            else:
                self.tick(0.3 if acts else 5.0)

    def conclude(self) -> None:
        """From here on nothing fails, although servers may be missing: the job must end, and it can be replayed."""
        if not self.sound:
            return
        for i in list(self.servers)[1 + self.random.randrange(len(self.servers)) :]:
            self.given_up.add(i)
            if self.servers[i].up and self.outcome is None:
                self.lose(i)
        kept = self.servers.keys() - self.given_up
        if self.outcome is None and kept <= self.barred:
            if kept <= self.dismissed:
                self.join()
            else:
                self.recall(min(kept - self.dismissed))
        self.work(MAX_FAIR_EVENTS)
        assert self.outcome is not None, f"no end: {culprit(self.state)}"
        replay(self.first_settings, self.journal)
