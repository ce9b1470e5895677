"""Decision core: events per second on one core, on the event mix of a recorded run with consolidation on.

Run: python bench/core.py [--instances 100 1000] [--events 300000] [--rounds 5]. A virtual-time fleet (regime A of
workloads.md: long-tailed lengths, siblings correlate; 24 slots an instance, 30 ms a token, N = 2 groups per instance,
G = 16, K = 3, every instance reports its residents' token counts once a second, 1 % of pushes fail) drives a
ControllerState and so records its events into a file, in a process of its own. Each round then reads the file into a
fresh ControllerState and times nothing but its `handle`; the commands must be the recorded ones. Timing starts once
version 4 is published: several versions alive, moves under way. CPU seconds, and of every slice of 500 events the
fastest round: others use the machine too. Ceiling: the least any core written in Python must do with these events:
dispatch on the type through one dict and look at every reported count, to no effect.
"""

from __future__ import annotations

import argparse
import heapq
import math
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.groups import GroupPhase
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.state import ControllerState
from dora.core.strategies import Settings, rules_of

SLOTS = 24
TOKEN_S = 0.03
PUSH_S = 3.0
MAX_NEW_TOKENS = 4096
RANKS = 64
#: Tokens per second of all trainer ranks: about what the fleet generates.
TRAINER_TOKENS_S_PER_INSTANCE = 700
SLICE = 500
#: Timing starts when this version is published.
WARM_VERSION = 4


class Frame(msgspec.Struct):
    """A slice of the recorded run."""

    events: list[ev.AnyEvent]
    orders: list[list[cmd.AnyCommand]]
    warm: bool  #: to be timed


def settings(num_instances: int) -> Settings:
    return Settings(
        rules=rules_of("dora", max_staleness=3),
        steps=10_000,
        groups_per_step=2 * num_instances,
        group_size=16,
        max_new_tokens=MAX_NEW_TOKENS,
        num_ranks=RANKS,
        micro_batch_tokens=32_768 * num_instances // 1000,
        max_parallel_pushes=max(4, num_instances // 16),
    )


class Fleet:
    """Carries out commands in virtual time; `slices` yields what happened and what was ordered."""

    def __init__(self, config: Settings, *, num_instances: int, seed: int = 0) -> None:
        self.state = ControllerState(config)
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
        self.at(0.0, lambda: ev.TrainerReady(self.now, 0))
        self.at(0.0, lambda: ev.VersionPublished(self.now, 0, 1, {}))
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
                orders = self.state.handle(event)
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
        """Regime A of workloads.md: log-normal with a Pareto tail; .22 of the log-variance is the prompt's."""
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
            self.at(delay + 2.0, lambda: ev.CheckpointSaved(self.now, order.step + 1, ""))
        if order.last:
            self.at(delay + 0.5, lambda: ev.StepTrained(self.now, order.step))
            self.at(delay + 1.0, lambda: ev.VersionPublished(self.now, order.step + 1, 1, {}))


def ceiling_handler(event: ev.ProgressReported) -> None:
    for _id, _num_tokens in event.num_tokens.items():
        pass


def ignore(event: ev.Event) -> None:
    pass


def time_ceiling(events: list[ev.Event]) -> float:
    handlers: dict[type[ev.Event], Callable[..., None]] = dict.fromkeys(Counter(map(type, events)), ignore)
    handlers[ev.ProgressReported] = ceiling_handler
    begun = time.process_time()
    for event in events:
        handlers[type(event)](event)
    return time.process_time() - begun


def record(path: Path, *, num_instances: int, num_events: int) -> None:
    """Frames of (length, then events and commands in msgpack), each of SLICE events; `warm` says that it is timed."""
    fleet = Fleet(settings(num_instances), num_instances=num_instances)
    left = num_events
    with path.open("wb") as file:
        for recorded in fleet.slices():
            warm = (fleet.state.window.newest or 0) >= WARM_VERSION
            frame = Frame([e for e, _ in recorded], [c for _, c in recorded], warm=warm)  # type: ignore[misc]
            raw = msgspec.msgpack.encode(frame)
            file.write(len(raw).to_bytes(8, "little") + raw)
            left -= len(recorded) if warm else 0
            if left <= 0:
                return


def frames(path: Path) -> Iterator[Frame]:
    decoder = msgspec.msgpack.Decoder(Frame)
    with path.open("rb") as file:
        while size := file.read(8):
            yield decoder.decode(file.read(int.from_bytes(size, "little")))


def time_core(state: ControllerState, frame: Frame) -> float:
    handle = state.handle
    begun = time.process_time()
    orders = [handle(event) for event in frame.events]
    elapsed = time.process_time() - begun
    assert orders == frame.orders, "the replay gave other commands than the recorded run"
    return elapsed


def replay(path: Path, config: Settings) -> tuple[list[float], list[float], ControllerState]:
    """Seconds of the core and of the ceiling for each timed slice, and the state at the end."""
    state = ControllerState(config)
    core_s, ceiling_s = [], []
    for frame in frames(path):
        elapsed = time_core(state, frame)
        if frame.warm:
            core_s.append(elapsed)
            ceiling_s.append(time_ceiling(frame.events))
    return core_s, ceiling_s, state


def describe(path: Path, config: Settings, state: ControllerState) -> int:
    """Print the mix; returns the number of timed events."""
    facts: Counter[str] = Counter()
    orders: Counter[str] = Counter()
    reported, at = 0, []
    for frame in frames(path):
        if frame.warm:
            facts.update(type(e).__name__ for e in frame.events)
            orders.update(type(c).__name__ for commands in frame.orders for c in commands)
            reported += sum(len(e.num_tokens) for e in frame.events if isinstance(e, ev.ProgressReported))
            at += [frame.events[0].at, frame.events[-1].at]
    timed = facts.total()
    resident = sum(len(i.residents) for i in state.instances.values())
    print(f"  {timed:,} events over {at[-1] - at[0]:.0f} s of the run, {orders['CloseStep']} steps; at its end:")
    print(
        f"  {state.ledger.counts[GroupPhase.TRAINED]:,} groups trained, {len(state.window.live())} live versions, "
        f"{state.counters.migrations:,} migrations, staleness {state.counters.staleness}, {resident:,} residents"
    )
    print("  facts:  " + ", ".join(f"{name} {n / timed:.1%}" for name, n in facts.most_common() if n > timed / 10_000))
    print(f"          ({reported / facts['ProgressReported']:.1f} counts in a progress report)")
    print("  orders: " + ", ".join(f"{name} {n:,}" for name, n in orders.most_common()))
    return timed


def measure(num_instances: int, *, num_events: int, rounds: int) -> None:
    config = settings(num_instances)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        args = ["--record", str(path), "--instances", str(num_instances), "--events", str(num_events)]
        subprocess.run([sys.executable, __file__, *args], check=True)
        results = [replay(path, config) for _ in range(rounds)]
        print(f"\n{num_instances} instances, N = {config.groups_per_step}, G = {config.group_size}, K = 3")
        timed = describe(path, config, results[0][2])
    best = sum(map(min, *(r[0] for r in results)))
    ceiling = sum(map(min, *(r[1] for r in results)))
    rates = ", ".join(f"{timed / sum(r[0]):,.0f}" for r in results)
    print(f"  core    {timed / best:>12,.0f} events/s, {best / timed * 1e6:.2f} us an event  (whole rounds: {rates})")
    print(f"  ceiling {timed / ceiling:>12,.0f} events/s; the core is at {ceiling / best:.1%} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        record(args.record, num_instances=args.instances[0], num_events=args.events)
        return
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one core")
    for num_instances in args.instances:
        measure(num_instances, num_events=args.events, rounds=args.rounds)


if __name__ == "__main__":
    main()
