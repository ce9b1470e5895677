"""Reproducible runs of the core: random jobs, random environments, the shipped workloads and recorded journals.

Each is a function of its name alone. `play(name, tell)` calls `tell` with every event, its commands and the state
after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dora.core import events as ev
from dora.core.commands import Command
from dora.core.core import handle
from dora.core.state import State
from dora.core.strategies import Settings, rules_of
from dora.journal.codec import Handled
from dora.journal.reader import Journal
from dora.sim.workload import load
from dora.sim.world import World as Simulation
from tests.core.outside import Outside
from tests.core.test_sweep import world
from tests.core.world import draw_orchestration

#: Called after every event.
Tell = Callable[[ev.Event, Sequence[Command], State], None]

WORLDS: Final = 1500
OUTSIDES: Final = 1500
CALLS: Final = 300
JOURNALS: Final = Path(__file__).parent / "journals"
WORKLOADS: Final = Path(__file__).parents[2] / "launch" / "workloads"
#: Events of a workload: a few steps of all but the largest.
SIMULATED_EVENTS: Final = 60_000


def names() -> list[str]:
    """Return the names of all runs."""
    return [
        *(f"journal:{path.stem}" for path in sorted(JOURNALS.glob("*.msgpack"))),
        *(f"workload:{path.stem}:{s}" for path in sorted(WORKLOADS.glob("*.toml")) for s in _strategies_for(path)),
        *(f"world:{seed}" for seed in range(WORLDS)),
        *(f"outside:{seed}" for seed in range(OUTSIDES)),
        *(f"calls:{seed}" for seed in range(CALLS)),
    ]


def _strategies_for(path: Path) -> tuple[str, ...]:
    return ("dora", "partial") if path.stem == "paper-64" else ("dora",)


def play(name: str, tell: Tell) -> None:
    """Play one run."""
    kind, _, rest = name.partition(":")
    plays = {"journal": _journal, "workload": _workload, "world": _world, "outside": _outside, "calls": _calls}
    plays[kind](rest, tell)


def _journal(stem: str, tell: Tell) -> None:
    journal = Journal(JOURNALS / f"{stem}.msgpack")
    state = State(journal.header.settings)
    for record in journal.records():
        if isinstance(record, Handled):
            tell(record.event, handle(state, record.event), state)


def _workload(case: str, tell: Tell) -> None:
    stem, _, strategy = case.partition(":")
    workload = load(WORKLOADS / f"{stem}.toml").with_changes(job={"strategy": strategy})
    simulation = Simulation(workload, seed=1, sink=lambda event, orders: tell(event, orders, simulation.state))
    simulation.run(max_events=SIMULATED_EVENTS)


def _calls(seed: str, tell: Tell) -> None:
    _world(seed, tell, calls=True)


def _world(seed: str, tell: Tell, *, calls: bool = False) -> None:
    drawn = world(int(seed), calls=calls)
    drawn.checked = False
    drawn.sink = lambda event, orders: tell(event, orders, drawn.state)
    drawn.run()


# -- a random environment ----------------------------------------------------------------------------------------------


def _outside(seed: str, tell: Tell) -> None:
    r = random.Random(f"identity {seed}")
    job = _job(r)
    num_servers = r.choice([1, 2, 4, 6, 6])
    prompts = r.choice([None, None, r.randint(0, 24)])
    outside = Outside(job, seed=int(seed), num_servers=num_servers, prompts=prompts, checked=False)
    outside.sink = lambda event, orders: tell(event, orders, outside.state)
    for instance in list(outside.servers)[: r.choice([0, 3, 6, 6])]:
        outside.come_up(instance, slots=1 + instance % 3, kv_tokens=300)
    for _ in range(r.randint(10, 50)):
        if outside.outcome is not None:
            break
        r.choice(list(_happenings(outside, r)))()
    outside.conclude()


def _job(r: random.Random) -> Settings:
    name = r.choice(["dora"] * 4 + ["sync", "periodic", "one_step_off", "partial", "partial_bounded", "partial_sync"])
    if r.random() < 0.1:
        rules = rules_of("oversample", max_staleness=0, oversample=r.choice([1.5, 3.0]))
    else:
        rules = rules_of(name, max_staleness=r.randint(0, 4))
    return Settings(
        rules=rules,
        steps=r.randint(3, 8),
        groups_per_step=r.choice([1, 3, 6]),
        group_size=r.choice([2, 2, 3]),
        max_new_tokens=40,
        num_ranks=r.randint(1, 2),
        micro_batch_tokens=r.choice([16, 64]),
        filter_zero_variance=r.random() < 0.5,
        max_top_up=r.choice([0.5, 10.0]),
        orchestration=draw_orchestration(r),
        watchdog_s=30.0,
        no_progress_s=1e9,
        max_attempts=r.randint(1, 3),
        eval_prompt_tokens=tuple(r.randint(1, 5) for _ in range(r.choice([0, 0, 1, 4]))),
        eval_every=r.randint(0, 2),
        max_eval_share=r.choice([0.1, 0.5]),
    )


def _happenings(o: Outside, r: random.Random) -> Iterator[Callable[[], Any]]:
    """Yield everything that may happen next, with all its random choices made."""
    yield lambda: o.work(r.randint(1, 120))
    yield lambda: o.work(r.randint(1, 60), mishap_share=r.choice([0.03, 0.1, 0.3]))
    yield lambda: o.tick(r.choice([0.0, 0.2, 1.0, 4.0, 31.0, 70.0]))
    if o.requests:
        yield from _of_requests(o, r)
    if o.grades:
        yield lambda: o.grade(r.choice(list(o.grades)), r.choice([None, 0.0, 1.0]))
    yield from _of_servers(o, r)
    if o.unpublished:
        yield o.publish
    if o.may_train():
        yield o.train
    if o.trainer_step is not None:
        yield o.save_checkpoint
        yield lambda: o.end_trainer(back=r.randint(0, 3))
    if len(o.journal) > o.restarted_at + 25:
        yield lambda: o.restart_controller(back=r.randint(0, 3))
    if o.late:
        yield lambda: o.repeat(r.choice(o.echoes()))
    if gone := o.echoes_of_the_removed():
        yield lambda: o.repeat(r.choice(gone))


def _of_requests(o: Outside, r: random.Random) -> Iterator[Callable[[], Any]]:
    oldest = min(request.order.version for request in o.requests.values())
    one = r.choice(list(o.requests))
    instance = o.requests[one].order.instance
    yield lambda: o.work(r.randint(20, 120), stalled=(oldest,))
    yield lambda: (o.produce(one, r.randint(1, 20)), o.report(instance))
    yield lambda: o.produce(one, r.randint(0, 20))
    yield lambda: o.finish(one)
    yield lambda: o.stop(one)
    how = r.choice(["broken", "refused", "refused for good"])
    yield lambda: o.fail(one, server_gone=how == "broken", final=how == "refused for good")
    yield lambda: o.deliver(ev.PrefillReported(o.now, instance))


def _of_servers(o: Outside, r: random.Random) -> Iterator[Callable[[], Any]]:
    up = [i for i, server in o.servers.items() if server.up]
    down = [i for i in o.servers if i not in up and i not in o.dismissed]
    if down:
        yield lambda: o.come_up(r.choice(down), slots=r.randint(1, 4), kv_tokens=r.choice([30, 100, 400]))
    if up:
        one = r.choice(up)
        yield lambda: o.lose(one)
        yield lambda: o.press(one, pressed=not o.servers[one].pressed)
    yield lambda: o.drain(r.choice(list(o.servers)), leave=r.random() < 0.5)
    if o.barred:
        yield lambda: o.recall(r.choice(sorted(o.barred)))
    if o.dismissed:
        yield lambda: o.let_go(r.choice(sorted(o.dismissed)))
    if len(o.servers) < 8:
        yield o.join
    if o.pushes:
        yield lambda: o.finish_push(r.choice(list(o.pushes)))
        yield lambda: o.fail_push(r.choice(list(o.pushes)))


#: Fields that were added since the digests were recorded, with their defaults; the last one is a request of nobody.
LATER: Final = (
    b',"replayable":[]', b',"replays":0', b',"max_episodes":0', b',"version":null,"digest":""', b',"turn_tokens":0',
    b',"fork":""', b',"request":{"id":"","by":""}', b',"judged":null', b',"visits":[]', b',"limits":null',
)  # fmt: skip


def encoded(event: ev.Event, commands: Sequence[Command]) -> bytes:
    """Return the bytes of the journal's record, without fields that were added since the digests were recorded."""
    record = msgspec.json.encode(Handled(event, tuple(commands)))
    for later in LATER:
        record = record.replace(later, b"")
    return record
