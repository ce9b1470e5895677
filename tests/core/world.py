"""A virtual-time world around one State: carries out its commands, with lengths, delays and faults.

Invariant: it invents nothing the shell could not report, and `invariants.check` runs after every event unless told
otherwise. Same arguments, same events.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.invariants import check
from dora.core.on_run import culprit
from dora.core.orchestration import SWITCHES, Orchestration, orchestration_of
from dora.core.state import State
from dora.core.strategies import Settings, rules_of
from dora.core.versions import digest_of


def settings(strategy: str = "dora", *, max_staleness: int = 2, **changes: object) -> Settings:
    """Small settings, KV kept for whole answers, so that room is easily counted; any field may be changed."""
    values: dict[str, object] = {
        "rules": rules_of(strategy, max_staleness=max_staleness),
        "steps": 8,
        "groups_per_step": 4,
        "group_size": 2,
        "max_new_tokens": 64,
        "num_ranks": 2,
        "micro_batch_tokens": 256,
        "orchestration": Orchestration(kv_overcommit=False),
    }
    values.update(changes)
    return Settings(**values)  # type: ignore[arg-type]


def draw_orchestration(r: random.Random) -> Orchestration:
    """Placement rules at random, mostly those of `dora`."""
    return orchestration_of(
        r.choice(["dora", "dora", "paper"]),
        without=r.sample(list(SWITCHES), r.choice([0, 0, 1, 3])),
        refill=r.random() < 0.3,
    )


@dataclass
class Faults:
    """Probabilities per opportunity, and what may happen at all."""

    push_fails: float = 0.0
    request_fails: float = 0.0
    refused_for_good: float = 0.0  #: of the requests that fail
    instance_dies: float = 0.0  #: per tick and instance
    grading_fails: float = 0.0
    zero_variance: float = 0.0  #: per group
    controller_restarts: float = 0.0  #: per tick
    trainer_dies: float = 0.0  #: per tick
    late_completion: float = 0.0  #: a completion is delivered twice
    call_fails: float = 0.0
    call_ends: float = 0.0  #: the environment ends the episode
    replayable: float = 0.0  #: per call that is under way when the controller ends
    kept: float = 0.0  #: a server survives the controller's end, with its weights


@dataclass
class World:
    """Runs a job in virtual time."""

    settings: Settings
    seed: int = 0
    num_instances: int = 4
    slots: int = 4
    kv_tokens: int = 4096
    faults: Faults = field(default_factory=Faults)
    prompts: int | None = None  #: length of the source; None: endless
    train_s: float = 1.0
    push_s: float = 0.3
    store: int = 1000  #: pushes at once that are not slower for it
    token_s: float = 0.05
    calls: float = 0.0  #: share of turns that end with a call
    call_s: float = 0.5  #: mean time of a call
    checked: bool = True
    length: Callable[[random.Random], int] | None = None
    sink: Callable[[ev.Event, list[cmd.Command]], None] | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.state = State(self.settings)
        self.heap: list[tuple[float, int, Callable[[], ev.Event | None]]] = []
        self.count = 0
        self.now = 0.0
        self.journal: list[tuple[ev.Event, list[cmd.Command]]] = []
        self.running: dict[TrajectoryId, tuple[int, int, InstanceId, float]] = {}
        self.held: dict[InstanceId, int] = {}  #: version of each server of full weights
        self.adapters: dict[InstanceId, set[int]] = {}  #: versions that each server of adapters has
        self.decoding: dict[TrajectoryId, int] = {}  #: version of each request
        self.confirmed: set[InstanceId] = set()  #: servers with a push that has succeeded, and none since
        self.marks: dict[TrajectoryId, list[ev.Span]] = {}  #: spans of running requests that weights have ended
        self.totals: dict[TrajectoryId, int] = {}
        self.turns: dict[TrajectoryId, int] = {}  #: tokens when the turn under way ends
        self.calling: dict[TrajectoryId, int] = {}  #: tokens when the call under way began
        self.trained_lengths: dict[TrajectoryId, int] = {}
        self.incarnation = dict.fromkeys(range(self.num_instances), 0)
        self.alive: set[int] = set()
        self.micro_batches: dict[int, list[cmd.TrainMicroBatch]] = {}
        self.trainer_epoch = 0
        self.outcome: cmd.FinishRun | cmd.FailRun | None = None
        self.epoch = 0
        self.resume_step = 0

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, *, max_events: int = 200_000) -> cmd.FinishRun | cmd.FailRun:
        """Run to the end of the job; a world that falls silent has deadlocked."""
        self.at(0.0, lambda: ev.TrainerReady(self.now, 0))
        self.at(0.1, lambda: ev.VersionPublished(self.now, 0, 1, {}))
        for i in range(self.num_instances):
            self.at(0.0, self._up(i))
        self.at(1.0, self._tick)
        for _ in range(max_events):
            if self.outcome is not None:
                return self.outcome
            if not self.heap:
                raise AssertionError("deadlock: nothing will ever happen again")
            self.now, _, make = heapq.heappop(self.heap)
            event = make()
            if event is not None:
                self.deliver(event)
        raise AssertionError(f"no end after {max_events} events: {culprit(self.state)}")

    def at(self, delay: float, make: Callable[[], ev.Event | None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay, self.count, make))

    def deliver(self, event: ev.Event) -> None:
        orders = handle(self.state, event)
        self.journal.append((event, orders))
        if self.sink is not None:
            self.sink(event, orders)
        if self.checked:
            check(self.state)
            require_room(self.state, orders)
        for order in orders:
            handler = getattr(self, "_" + type(order).__name__, None)
            if handler is not None:
                handler(order)

    def chance(self, p: float) -> bool:
        return p > 0 and self.random.random() < p

    # -- work ---------------------------------------------------------------------------------------------------------

    def _FetchPrompts(self, order: cmd.FetchPrompts) -> None:
        left = order.count if self.prompts is None else max(0, min(order.count, self.prompts - order.first))
        dry = self.prompts is not None and order.first + left >= self.prompts
        epoch = self.epoch
        lengths = (0 if self.settings.own_prompts else 3,) * left
        self.at(
            0.01,
            lambda: ev.PromptsArrived(self.now, order.first, lengths, dry) if epoch == self.epoch else None,
        )

    def _Generate(self, order: cmd.Generate) -> None:
        t = order.trajectory
        self._draw_total(t)
        assert order.num_tokens <= self.totals[t]
        assert order.num_tokens or not self.settings.own_prompts, f"trajectory {t} has no prompt"
        assert self.running.get(t) is None, f"trajectory {t} runs twice"
        holds = self.adapters[order.instance] if self.settings.adapters else {self.held[order.instance]}
        assert order.version in holds
        self.decoding[t] = order.version
        assert t not in self.calling, f"trajectory {t} runs during its call"
        left = self.totals[t] - order.num_tokens
        called = left > 1 and self.chance(self.calls)
        self.turns[t] = order.num_tokens + (self.random.randint(1, left - 1) if called else left)
        self.running[t] = (order.attempt, order.num_tokens, order.instance, self.now)
        self.marks[t] = []
        attempt = order.attempt
        if self.chance(self.faults.request_fails):
            self.at(self.random.random(), lambda: self._end_request(t, attempt, failed=True))
        self.at((self.turns[t] - order.num_tokens) * self.token_s, lambda: self._end_request(t, attempt))

    def _draw_total(self, t: TrajectoryId) -> None:
        if t not in self.totals:
            draw = self.length or (
                lambda r: min(self.settings.max_new_tokens, 1 + int(r.expovariate(1 / 6)) ** 2 // 4 + 1)
            )
            self.totals[t] = draw(self.random)

    def produced(self, t: TrajectoryId) -> int:
        _, start, _, since = self.running[t]
        return min(self.turns[t], start + int((self.now - since) / self.token_s))

    def _end_request(
        self, t: TrajectoryId, attempt: int, *, failed: bool = False, stopped: bool = False
    ) -> ev.Event | None:
        if t not in self.running or self.running[t][0] != attempt:
            return None
        n = self.turns[t] if not (failed or stopped) else self.produced(t)
        spans = (*self.marks[t], self._span(t, end=n))
        del self.running[t]
        if failed:
            return ev.GenerationFailed(
                self.now, t, attempt, n, False, "refused", self.chance(self.faults.refused_for_good)
            )
        if stopped:
            return ev.GenerationStopped(self.now, t, attempt, n, spans)
        event: ev.Event = ev.GenerationFinished(self.now, t, attempt, n, n == self.settings.max_new_tokens, spans)
        if n < self.totals[t]:
            event = ev.CallStarted(self.now, t, attempt, n, spans)
            self.calling[t] = n  # unless its group is given up
        if self.chance(self.faults.late_completion):
            self.at(self.random.random(), lambda: event)
        return event

    def _CallEnvironment(self, order: cmd.CallEnvironment) -> None:
        t, epoch = order.trajectory, self.epoch
        assert t not in self.running
        is_first = self.settings.own_prompts and t not in self.totals
        if is_first:
            self._draw_total(t)
            self.calling[t] = 0
        before = self.calling[t]
        begins = self.settings.own_prompts and not before  # again, if the controller was restarted meanwhile
        ended = not begins and self.chance(self.faults.call_ends)
        failed = "injected" if self.chance(self.faults.call_fails) else ""

        def end() -> ev.Event | None:
            if epoch != self.epoch:
                return None
            del self.calling[t]
            n = self.random.randint(before, self.totals[t]) if not begins else 1
            if ended:
                self.totals[t] = n
            event = ev.CallFinished(self.now, t, order.attempt, n, ended, failed)
            if self.chance(self.faults.late_completion):
                self.at(self.random.random(), lambda: event)
            return event

        self.at(self.call_s * self.random.expovariate(1.0), end)

    def _span(self, t: TrajectoryId, *, end: int) -> ev.Span:
        """What the server's present weights have produced of it."""
        start = self.marks[t][-1][2] if self.marks[t] else self.running[t][1]
        return self.decoding[t] if self.settings.adapters else self.held[self.running[t][2]], start, end

    def _StopRequest(self, order: cmd.StopRequest) -> None:
        self.at(0.02, lambda: self._end_request(order.trajectory, order.attempt, stopped=True))

    def _GradeTrajectory(self, order: cmd.GradeTrajectory) -> None:
        t = order.trajectory
        if t >= 0:
            group = t // self.settings.group_size
            flat = random.Random(f"{self.seed} {group}").random() < self.faults.zero_variance
            reward: float | None = 1.0 if flat else float(t % self.settings.group_size % 2)
        else:
            reward = 1.0
        if self.chance(self.faults.grading_fails):
            reward = None
        epoch = self.epoch
        self.at(
            0.05 * self.random.random(),
            lambda: ev.TrajectoryGraded(self.now, t, order.attempt, reward) if epoch == self.epoch else None,
        )

    def _PushWeights(self, order: cmd.PushWeights) -> None:
        incarnation = self.incarnation[order.instance]
        fails = self.chance(self.faults.push_fails)
        self.confirmed.discard(order.instance)

        def end() -> ev.Event | None:
            if self.incarnation[order.instance] != incarnation or order.instance not in self.alive:
                return None
            if fails:
                return ev.WeightPushFailed(self.now, order.instance, order.attempt, "injected")
            if self.settings.adapters:
                self.adapters[order.instance].add(order.version)
                return ev.WeightPushFinished(self.now, order.instance, order.attempt, order.version)
            for t in [t for t, r in self.running.items() if r[2] == order.instance]:
                self.marks[t].append(self._span(t, end=self.produced(t)))
            self.held[order.instance] = order.version
            self.confirmed.add(order.instance)
            return ev.WeightPushFinished(self.now, order.instance, order.attempt, order.version)

        self.at(self.push_s * max(1.0, self.state.pushes / self.store), end)

    def _UnloadVersion(self, order: cmd.UnloadVersion) -> None:
        incarnation = self.incarnation[order.instance]
        fails = self.chance(self.faults.push_fails)
        users = [t for t, r in self.running.items() if r[2] == order.instance and self.decoding[t] == order.version]
        assert not users, f"version {order.version} is unloaded from instance {order.instance} under {users}"
        self.adapters[order.instance].discard(order.version)

        def end() -> ev.Event | None:
            if self.incarnation[order.instance] != incarnation or order.instance not in self.alive:
                return None
            if fails:
                return ev.VersionUnloadFailed(self.now, order.instance, order.attempt, "injected")
            return ev.VersionUnloaded(self.now, order.instance, order.attempt)

        self.at(0.05, end)

    def _ReleaseVersion(self, order: cmd.ReleaseVersion) -> None:
        holders = [i for i, versions in self.adapters.items() if i in self.alive and order.version in versions]
        assert not holders, f"version {order.version} is released while instances {holders} have it"

    def _TrainMicroBatch(self, order: cmd.TrainMicroBatch) -> None:
        epoch = self.trainer_epoch
        waves = self.micro_batches.setdefault(order.step, [])
        assert order.index == len(waves), "micro-batches of a step are numbered without a gap"
        waves.append(order)
        share = sum(len(r) for r in order.ranks) / (self.settings.groups_per_step * self.settings.group_size)
        self.trainer_free = max(getattr(self, "trainer_free", 0.0), self.now) + self.train_s * share

        def trained() -> ev.Event | None:
            return ev.MicroBatchTrained(self.now, order.step, order.index) if epoch == self.trainer_epoch else None

        def stepped() -> ev.Event | None:
            return ev.StepTrained(self.now, order.step) if epoch == self.trainer_epoch else None

        def published() -> ev.Event | None:
            if epoch != self.trainer_epoch:
                return None
            self.resume_step = order.step + 1
            for wave in self.micro_batches[order.step]:
                for rank in wave.ranks:
                    for t in rank:
                        assert t not in self.trained_lengths, f"trajectory {t} is trained twice"
                        self.trained_lengths[t] = self.totals[t]
            return ev.VersionPublished(self.now, order.step + 1, 1, {})

        delay = self.trainer_free - self.now
        self.at(delay, trained)
        if order.last:
            self.at(delay + 1e-3, stepped)
            self.at(delay + 2e-3, published)

    def _lose_trainer(self) -> ev.Event:
        self.trainer_epoch += 1
        return ev.TrainerLost(self.now, self.state.feed.incarnation, "injected")

    def _RestartTrainer(self, order: cmd.RestartTrainer) -> None:
        step, epoch = self._from_checkpoint(), self.trainer_epoch

        def ready() -> ev.Event | None:
            return ev.TrainerReady(self.now, step) if epoch == self.trainer_epoch else None

        def published() -> ev.Event | None:
            return ev.VersionPublished(self.now, step, 1, {}) if epoch == self.trainer_epoch else None

        self.at(order.after_s + 0.6, published)
        self.at(order.after_s + 0.7, ready)

    def _from_checkpoint(self) -> int:
        """Return the step at which a trainer that is started again begins."""
        for step in [step for step in self.micro_batches if step >= self.resume_step]:
            del self.micro_batches[step]
        self.trainer_free = self.now
        return self.resume_step

    def _CondemnInstance(self, order: cmd.CondemnInstance) -> None:
        self.at(0.05, lambda: self._lose(order.instance, order.incarnation))

    def _FinishRun(self, order: cmd.FinishRun) -> None:
        self.outcome = order

    def _FailRun(self, order: cmd.FailRun) -> None:
        self.outcome = order

    # -- the fleet and its faults -------------------------------------------------------------------------------------

    def _up(self, i: int, *, kept: bool = False) -> Callable[[], ev.Event | None]:
        def up() -> ev.Event | None:
            if i in self.alive:
                return None  # a restarted controller was faster
            self.incarnation[i] += 1
            self.alive.add(i)
            self.adapters[InstanceId(i)] = set()
            found = ev.InstanceUp(self.now, InstanceId(i), self.incarnation[i], self.slots, self.kv_tokens)
            if kept and i in self.confirmed:
                return msgspec.structs.replace(found, version=self.held[InstanceId(i)], digest=digest_of({}))
            self.confirmed.discard(InstanceId(i))
            return found

        return up

    def _lose(self, i: int, incarnation: int) -> ev.Event | None:
        if i not in self.alive or self.incarnation[i] != incarnation:
            return None
        self.alive.discard(i)
        counts = {t: self.produced(t) for t, r in self.running.items() if r[2] == i}
        for t in counts:
            del self.running[t]
        self.at(2.0 * self.random.random(), self._up(i))
        return ev.InstanceLost(self.now, InstanceId(i), incarnation, counts, "injected")

    def _tick(self) -> ev.Event:
        self.at(1.0, self._tick)
        for i in sorted(self.alive):
            counts = {t: self.produced(t) for t, r in self.running.items() if r[2] == i}
            self.at(0.0, lambda i=i, counts=counts: ev.ProgressReported(self.now, InstanceId(i), counts))  # type: ignore[misc]
            if self.chance(self.faults.instance_dies):
                incarnation = self.incarnation[i]
                self.at(self.random.random(), lambda i=i, n=incarnation: self._lose(i, n))  # type: ignore[misc]
        if self.chance(self.faults.controller_restarts):
            self.at(0.5, self._restart)
        if self.chance(self.faults.trainer_dies):
            self.at(0.5 * self.random.random(), self._lose_trainer)
        return ev.Ticked(self.now)

    def _restart(self) -> ev.Event:
        self.epoch += 1
        self.trainer_epoch += 1
        replayable = tuple(t for t in self.calling if self.chance(self.faults.replayable))
        self.calling = {t: self.calling[t] for t in replayable}
        counts = {t: self.produced(t) for t in self.running}
        self.running.clear()
        self.alive.clear()
        for i in range(self.num_instances):
            self.at(0.5, self._up(i, kept=self.chance(self.faults.kept)))
        step = self._from_checkpoint()
        self.at(0.7, lambda: ev.TrainerReady(self.now, step))
        self.at(0.6, lambda: ev.VersionPublished(self.now, step, 1, {}))
        return ev.ControllerRestarted(
            self.now, self.epoch, counts, max_episodes=self.settings.max_episodes, replayable=replayable
        )


def require_room(state: State, orders: list[cmd.Command]) -> None:
    """Environments have room for all episodes after an event that has begun some."""
    begun = any(
        isinstance(o, cmd.AdmitGroup) or (isinstance(o, cmd.Generate) and o.trajectory < 0 and o.attempt == 1)
        for o in orders
    )
    most = state.settings.max_episodes
    if not (begun and most):
        return
    of_groups = sum(g.unfinished for g in state.ledger.groups.values())
    samples = sum(t.attempt > 0 for t in state.trajectories.values() if t.group is None)
    assert of_groups + samples <= most, f"{of_groups} episodes and {samples} samples in hosts with room for {most}"


def replay(config: Settings, journal: list[tuple[ev.Event, list[cmd.Command]]]) -> None:
    """The same events give the same commands."""
    state = State(config)
    for event, orders in journal:
        assert handle(state, event) == orders, f"replay differs at {event}"


def run(strategy: str = "dora", *, max_staleness: int = 2, seed: int = 0, **options: object) -> World:
    """Run a whole job; options that are Settings fields change the settings, others the world."""
    fields = set(Settings.__struct_fields__)
    changes = {k: v for k, v in options.items() if k in fields}
    rest = {k: v for k, v in options.items() if k not in fields}
    world = World(settings(strategy, max_staleness=max_staleness, **changes), seed=seed, **rest)  # type: ignore[arg-type]
    world.run()
    return world
