"""Decision core: events per second on one core, cost per event and memory at 100, 1,000 and 10,000 instances.

Run: python bench/core.py [--full]. A simulated fleet (regime A of docs/SIMULATION.md: long-tailed lengths, correlated
siblings; 24 slots per instance, 30 ms per token, G = 16, K = 3, consolidation on, every instance reports its residents'
token counts once a second, 1 % of pushes fail) drives a State in a separate process, which records the events
in a file. Each round then replays the file into a fresh State and times only `handle`; the commands must be
the recorded ones. Figures are CPU seconds, from the fastest round of every slice of 500 events, because the machine is
shared. Ceiling: the least that any core in Python must do with these events: dispatch on the type through one dict, and
read every reported count.

The rates are for N = 2 groups per instance and 50,000 events from version 2 on (with --full from version 4 on: more
live versions, more moves under way). The cost per event is compared for N = 1 and 20 events per instance from version 1
on, because 10,000 instances take minutes to reach a later version. Garbage collection is off, since reference counting
frees what the core drops (tests/sim/test_world.py); one more round has it on. Memory is the total size of all objects
reachable from the State at the end, per live trajectory: queued, generating or being graded. It includes
groups that are graded and not yet trained.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import msgspec
from result import Report, number, parser

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import FIRST_VERSION, InstanceId, StepId, TrajectoryId, VersionId
from dora.core.phases import GroupPhase
from dora.core.state import State
from dora.core.strategies import Settings, rules_of

SLOTS = 24
TOKEN_S = 0.03
PUSH_S = 3.0
MAX_NEW_TOKENS = 4096
RANKS = 64
#: Tokens per second of all trainer ranks: about what the fleet generates.
TRAINER_TOKENS_S_PER_INSTANCE = 700
SLICE = 500


class Case(NamedTuple):
    """What is recorded, and what of it is timed."""

    num_instances: int
    groups_per_instance: int
    version: int  #: timing starts when it is published
    num_events: int

    @property
    def settings(self) -> Settings:
        return Settings(
            rules=rules_of("dora", max_staleness=3),
            steps=10_000,
            groups_per_step=self.groups_per_instance * self.num_instances,
            group_size=16,
            max_new_tokens=MAX_NEW_TOKENS,
            num_ranks=RANKS,
            micro_batch_tokens=32_768 * self.num_instances // 1000,
        )


class Frame(msgspec.Struct):
    """A slice of the recorded run."""

    events: list[ev.AnyEvent]
    orders: list[list[cmd.AnyCommand]]  #: of a slice that is timed
    warm: bool  #: to be timed


class Fleet:
    """Carries out commands in virtual time; `slices` yields what happened and what was ordered."""

    def __init__(self, config: Settings, *, num_instances: int, seed: int = 0) -> None:
        self.state = State(config)
        self.config = config
        self.random = random.Random(seed)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], ev.Event | None]]] = []
        self.order = count()
        self.running: dict[TrajectoryId, tuple[int, float, int]] = {}  # attempt, began at, tokens before
        self.residents: list[dict[TrajectoryId, None]] = [{} for _ in range(num_instances)]
        self.totals: dict[TrajectoryId, int] = {}
        self.difficulty: dict[int, float] = {}
        self.trainer_free = 0.0
        self.trainer_tokens_s = TRAINER_TOKENS_S_PER_INSTANCE * num_instances

    def slices(self) -> Iterator[list[tuple[ev.Event, list[cmd.Command]]]]:
        self.at(0.0, lambda: ev.TrainerReady(self.now, StepId(0)))
        self.at(0.0, lambda: ev.VersionPublished(self.now, FIRST_VERSION, 1, {}))
        self.at(1.0, self.tick)
        for i in range(len(self.residents)):
            up = ev.InstanceUp(0.0, InstanceId(i), 1, SLOTS, 373_000)
            self.at(0.0, lambda up=up: up)  # type: ignore[misc]
            self.at(1.0 + i / len(self.residents), partial(self.progress, i))
        while True:
            recorded: list[tuple[ev.Event, list[cmd.Command]]] = []
            while len(recorded) < SLICE:
                self.now, _, make = heapq.heappop(self.heap)
                event = make()
                if event is None:
                    continue
                orders = handle(self.state, event)
                recorded.append((event, orders))
                for order in orders:
                    handler = getattr(self, "on_" + type(order).__name__, None)
                    if handler is not None:
                        handler(order)
            yield recorded

    def at(self, delay: float, make: Callable[[], ev.Event | None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.order), make))

    def tick(self) -> ev.Event:
        self.at(1.0, self.tick)
        return ev.Ticked(self.now)

    def produced(self, t: TrajectoryId) -> int:
        _, began, before = self.running[t]
        return min(self.totals[t], before + int((self.now - began) / TOKEN_S))

    def progress(self, i: int) -> ev.Event | None:
        self.at(1.0, partial(self.progress, i))
        if not self.residents[i]:
            return None
        return ev.ProgressReported(self.now, InstanceId(i), {t: self.produced(t) for t in self.residents[i]})

    def length(self, t: TrajectoryId) -> int:
        """Regime A of docs/SIMULATION.md: log-normal with a Pareto tail; siblings share .22 of the log-variance."""
        z_prompt = self.difficulty.setdefault(t // self.config.group_size, self.random.gauss(0, 1))
        z = math.sqrt(0.22) * z_prompt + math.sqrt(0.78) * self.random.gauss(0, 1)
        u = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        tokens = 465 * math.exp(0.629 * z) if u < 0.9 else 1041 * (0.1 / max(1e-9, 1 - u)) ** (1 / 2.7)
        return max(1, min(MAX_NEW_TOKENS, int(tokens)))

    def on_FetchPrompts(self, order: cmd.FetchPrompts) -> None:
        self.at(0.01, lambda: ev.PromptsArrived(self.now, order.first, (200,) * order.count, False))

    def on_Generate(self, order: cmd.Generate) -> None:
        t = order.trajectory
        if t not in self.totals:
            self.totals[t] = self.length(t)
        self.running[t] = (order.attempt, self.now, order.num_tokens)
        self.residents[order.instance][t] = None
        left_s = (self.totals[t] - order.num_tokens) * TOKEN_S
        self.at(left_s, partial(self.end, order, ev.GenerationFinished))

    def on_StopRequest(self, order: cmd.StopRequest) -> None:
        self.at(0.03, partial(self.end, order, ev.GenerationStopped))

    def end(self, order: cmd.Generate | cmd.StopRequest, fact: type[ev.Event]) -> ev.Event | None:
        t = order.trajectory
        if t not in self.running or self.running[t][0] != order.attempt:
            return None
        num_tokens = self.produced(t) if fact is ev.GenerationStopped else self.totals[t]
        before = self.running.pop(t)[2]
        del self.residents[order.instance][t]
        spans = ((self.state.trajectories[t].version, before, num_tokens),)
        if fact is ev.GenerationStopped:
            return ev.GenerationStopped(self.now, t, order.attempt, num_tokens, spans)
        return ev.GenerationFinished(self.now, t, order.attempt, num_tokens, num_tokens == MAX_NEW_TOKENS, spans)

    def on_GradeTrajectory(self, order: cmd.GradeTrajectory) -> None:
        ease = 1 - 0.8 * 0.5 * (1 + math.erf(self.difficulty[order.trajectory // 16] / math.sqrt(2)))
        reward = float(self.random.random() < ease)
        self.at(0.01, lambda: ev.TrajectoryGraded(self.now, order.trajectory, order.attempt, reward))

    def on_PushWeights(self, order: cmd.PushWeights) -> None:
        if self.random.random() < 0.01:
            self.at(PUSH_S, lambda: ev.WeightPushFailed(self.now, order.instance, order.attempt, "injected"))
        else:
            self.at(PUSH_S, lambda: ev.WeightPushFinished(self.now, order.instance, order.attempt, order.version))

    def on_TrainMicroBatch(self, order: cmd.TrainMicroBatch) -> None:
        tokens = sum(200 + self.totals[t] for rank in order.ranks for t in rank)
        self.trainer_free = max(self.trainer_free, self.now) + tokens / self.trainer_tokens_s
        delay = self.trainer_free - self.now
        self.at(delay, lambda: ev.MicroBatchTrained(self.now, order.step, order.index))
        if order.last and order.step % 10 == 9:
            self.at(delay + 2.0, lambda: ev.CheckpointSaved(self.now, StepId(order.step + 1), ""))
        if order.last:
            self.at(delay + 0.5, lambda: ev.StepTrained(self.now, order.step))
            self.at(delay + 1.0, lambda: ev.VersionPublished(self.now, VersionId(order.step + 1), 1, {}))


def ceiling_handler(event: ev.ProgressReported) -> None:
    for _id, _num_tokens in event.num_tokens.items():
        pass


def ignore(event: ev.Event) -> None:
    pass


def time_ceiling(events: Sequence[ev.Event]) -> float:
    handlers: dict[type[ev.Event], Callable[..., None]] = dict.fromkeys(Counter(map(type, events)), ignore)
    handlers[ev.ProgressReported] = ceiling_handler
    begun = time.process_time()
    for event in events:
        handlers[type(event)](event)
    return time.process_time() - begun


def record(path: Path, case: Case) -> None:
    """Frames of (length, then events and commands in msgpack), each of SLICE events; `warm` says that it is timed."""
    fleet = Fleet(case.settings, num_instances=case.num_instances)
    left = case.num_events
    with path.open("wb") as file:
        for recorded in fleet.slices():
            warm = (fleet.state.window.newest or 0) >= case.version
            events = cast("list[ev.AnyEvent]", [e for e, _ in recorded])
            orders = cast("list[list[cmd.AnyCommand]]", [c for _, c in recorded] if warm else [])
            raw = msgspec.msgpack.encode(Frame(events, orders, warm=warm))
            file.write(len(raw).to_bytes(8, "little") + raw)
            left -= len(recorded) if warm else 0
            if left <= 0:
                return


def frames(path: Path) -> Iterator[Frame]:
    decoder = msgspec.msgpack.Decoder(Frame)
    with path.open("rb") as file:
        while size := file.read(8):
            yield decoder.decode(file.read(int.from_bytes(size, "little")))


def time_core(state: State, frame: Frame) -> float:
    begun = time.process_time()
    orders = [handle(state, event) for event in frame.events]
    elapsed = time.process_time() - begun
    assert not frame.warm or orders == frame.orders, "the replay gave other commands than the recorded run"
    return elapsed


def replay(path: Path, config: Settings) -> tuple[list[float], list[float], State]:
    """Seconds of the core and of the ceiling for each timed slice, and the state at the end."""
    state = State(config)
    core_s, ceiling_s = [], []
    for frame in frames(path):
        elapsed = time_core(state, frame)
        if frame.warm:
            core_s.append(elapsed)
            ceiling_s.append(time_ceiling(frame.events))
    return core_s, ceiling_s, state


def describe(path: Path, state: State) -> int:
    """Print the mix; returns the number of timed events."""
    facts: Counter[str] = Counter()
    at = []
    for frame in frames(path):
        if frame.warm:
            facts.update(type(e).__name__ for e in frame.events)
            at += [frame.events[0].at, frame.events[-1].at]
    timed = facts.total()
    trained = state.ledger.counts[GroupPhase.TRAINED]
    print(
        f"  {timed:,} events over {at[-1] - at[0]:.0f} s of the run; then {len(state.window.live())} live versions, "
        f"{trained:,} groups trained, {state.counters.migrations:,} moves"
    )
    print("  " + ", ".join(f"{name} {n / timed:.1%}" for name, n in facts.most_common() if n > timed / 500), flush=True)
    return timed


def reachable_bytes(root: Any) -> int:
    """Of all objects that only `root` leads to; classes, functions and modules are the program's."""
    seen: set[int] = set()
    found, total = [root], 0
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, (type, FunctionType, ModuleType)):
            seen.add(id(one))
            total += sys.getsizeof(one)
            found += gc.get_referents(one)
    return total


class Measured(NamedTuple):
    """Of one case; seconds of an event."""

    core_s: float
    searched_s: float | None  #: with the search for garbage on
    ceiling_s: float
    live: int
    num_bytes: int


def fastest(rounds: Iterable[list[float]]) -> float:
    """Seconds of all slices, each from its fastest round."""
    slices: Iterable[tuple[float, ...]] = zip(*rounds, strict=True)
    return sum(map(min, slices))


def measure(case: Case, *, rounds: int, search: bool) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        subprocess.run([sys.executable, __file__, "--record", str(path), *map(str, case)], check=True)
        results = [replay(path, case.settings) for _ in range(rounds)]
        state = results[-1][2]
        print(f"{case.num_instances:,} instances, N = {case.settings.groups_per_step:,}, version {case.version} on")
        timed = describe(path, state)
        if search:
            gc.enable()
            searched_s = sum(replay(path, case.settings)[0]) / timed
            gc.disable()
    core_s = fastest(core_s for core_s, _, _ in results) / timed
    ceiling_s = fastest(ceiling_s for _, ceiling_s, _ in results) / timed
    return Measured(core_s, searched_s if search else None, ceiling_s, len(state.trajectories), reachable_bytes(state))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--record", nargs=5, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.record:
        record(Path(options.record[0]), Case(*map(int, options.record[1:])))
        return
    gc.disable()
    version, rounds = (4, 5) if options.full else (2, 2)
    report = Report(__doc__, full=options.full, sizes=f"Groups of 16, K = 3, the best of {rounds} rounds")
    for size, bar in ((100, ""), (1000, "figure >= 200000")):
        show(report, size, measure(Case(size, 2, version, 50_000), rounds=rounds, search=size == 1000), bar=bar)
    small, large = (measure(Case(size, 1, 1, 20 * size), rounds=rounds, search=False) for size in (1000, 10_000))
    report.row(
        "10,000 instances, early in a run",
        large.core_s * 1e6,
        "µs an event",
        against=f"1,000 instances, {number(small.core_s * 1e6)} µs",
        ratio=large.core_s / small.core_s,
        bar="ratio <= 1.5",
    )
    show_memory(report, 10_000, large)
    report.print()


def show(report: Report, size: int, measured: Measured, *, bar: str) -> None:
    report.row(
        f"{size:,} instances",
        1 / measured.core_s,
        "events/s",
        against=f"dispatch alone, {number(1 / measured.ceiling_s)} events/s",
        ratio=measured.ceiling_s / measured.core_s,
        bar=bar,
    )
    if measured.searched_s is not None:
        report.row(f"{size:,} instances, the search for garbage on, one round", 1 / measured.searched_s, "events/s")
    show_memory(report, size, measured)


def show_memory(report: Report, size: int, measured: Measured) -> None:
    report.row(f"{size:,} instances, {measured.live:,} live trajectories", measured.num_bytes / measured.live, "B each")


if __name__ == "__main__":
    main()
