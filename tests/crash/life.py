"""One controller's life in a world of files: the application's own resume and assembly, around models of the rest.

Processes, sockets, signals and the terminal are left out; everything that reads or writes the run folder is the
application's own (dora/app/opening.py, resume.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from dora import files
from dora.app import resume as resuming
from dora.app.build import make_controller
from dora.app.episodes import EpisodeInputs
from dora.app.inputs import open_inputs
from dora.app.job import STOP_TIMEOUT_S
from dora.app.opening import Opened
from dora.app.prepare import Job, prepare
from dora.app.trust import write_config
from dora.config.load import load
from dora.controller.effects import Graders as GraderPools
from dora.controller.fleet import Fleet, FleetLimits
from dora.controller.loop import Outcome
from dora.controller.trainer_link import TrainerLink
from dora.core.invariants import check as check_invariants
from dora.engine.engines import adapter_needs
from dora.engine.sglang.engine import SglangEngine
from dora.errors import DoraError, RunFailed
from dora.journal.run_folder import RunFolder
from dora.seed.policy import path as seed_path
from dora.tasks.tokenizer import load_tokenizer
from dora.transport.messages import TrainerFailed
from tests.crash.disk import Disk, Step, Tree
from tests.crash.environment import Converse, Hosts, NumberRenderer
from tests.crash.loop import run
from tests.crash.models import TORN, Adapter, End, Engines, Faults, Graders, Held, RanksModel, Server, make_model

RUN_ID = "test-20260101-000000-abcd"
INSTANCES = 2
FULL_S = 90.0  #: time for which a disk is full, after FULL_FROM_S
FULL_FROM_S = 1.0
FAULTS = Faults()
LOST_UNTIL_S = 12.0  #: the end of most runs
#: Share of the kept servers that come from elsewhere.
FOREIGN = 0.1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Turn logging off: it would take longer than the run."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        yield
    finally:
        structlog.configure(**before)


@dataclass(frozen=True)
class Plan:
    """A kind of run."""

    name: str
    overrides: tuple[str, ...] = ()
    rollout_only: bool = False
    more_steps: int = 0  # number of steps that a resume adds
    interrupted_at: float | None = None  # seconds; the first controller is stopped then
    fails_at: float | None = None  # seconds; the first trainer fails for good then
    losses: int = 0  # of the ranks of each controller, at any time
    calls: bool = False  # episodes have several turns
    can_replay: bool = False  # episodes of a lost host are repeated
    keeps_servers: bool = False  # they outlive their controller, in whatever state they are
    servers: int = INSTANCES
    fills: str = ""  # a part of the path of each file for which the first controller's disk has no room for a while
    faults: Faults = FAULTS


@dataclass(frozen=True)
class Seen:
    """Something that left the controller, and how many bytes of the journal were on the disk then."""

    what: str  # "wave <step>/<index>", "push <label>" or "call <episode>/<turn>"
    journal_bytes: int
    num_steps: int  # of the disk, before


@dataclass(frozen=True)
class Change:
    """A change of what a server holds."""

    url: str
    held: Held | None  # None: it has ended
    num_steps: int  # of the disk, before


@dataclass
class Life:
    """The result of one life."""

    disk: Disk
    kept: Mapping[str, Held] = field(default_factory=dict)  # servers that an earlier life left
    changes: list[Change] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    outcome: Outcome | None = None
    refusal: DoraError | None = None  # it ended with an error for the user
    said: str = ""

    def servers_at(self, point: int, *, rng: random.Random) -> dict[str, Held]:
        """What each server holds some time after a crash at this point.

        A load that was under way may still end, or stop halfway. Some servers come from elsewhere: their label has
        another digest, or names another run.
        """
        held: dict[str, Held | None] = {**self.kept}
        later: dict[str, list[Held | None]] = {}
        for change in self.changes:
            if change.num_steps <= point:
                held[change.url] = change.held
            else:
                later.setdefault(change.url, []).append(change.held)
        kept = {url: one for url, one in held.items() if one is not None}
        for url, one in kept.items():
            ends, label = later.get(url, [None]), one.label
            if one.policy == TORN and ends[0] is not None and rng.random() < 0.5:
                kept[url] = ends[0]
            elif rng.random() < FOREIGN:
                label = rng.choice([label[:-1] + ("1" if label[-1] == "0" else "0"), f"other-{label}"])
                kept[url] = one._replace(label=label, policy=TORN)
            adapters = {
                name: _end_of(name, ends) or adapter if adapter.policy == TORN and rng.random() < 0.5 else adapter
                for name, adapter in one.adapters.items()
            }
            kept[url] = kept[url]._replace(adapters=adapters)
        return kept


def _end_of(name: str, ends: Sequence[Held | None]) -> Adapter | None:
    """Return what the load or unload of an adapter, which was under way, has led to; None if it never ended."""
    known = (held.adapters[name] for held in ends if held is not None and name in held.adapters)
    return next((adapter for adapter in known if adapter.policy != TORN), None)


class World:
    """A folder with a model, run folders and live versions."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan
        make_model(path / "model", like=seed_path())
        self.folder = RunFolder(path / "runs" / RUN_ID)
        self.config = load(None, self._overrides(), environ={})
        tokenizer = load_tokenizer(path / "model")
        self.inputs = open_inputs(self.config, converse=Converse(tokenizer) if plan.calls else None)
        for name in ("runs", "memory"):
            (path / name).mkdir()
        self.said = ""  # by the last life

    def _overrides(self) -> list[str]:
        return [
            f"run.folder={self.path / 'runs'}",
            f"model.path={self.path / 'model'}",
            f"weights.memory_folder={self.path / 'memory'}",
            "run.steps=4",
            "rollout.groups_per_step=2",
            "rollout.group_size=2",
            "rollout.max_staleness=1",
            "rollout.max_new_tokens=10",
            "rollout.max_top_up=100",
            f"engine.instances={self.plan.servers}",
            "engine.slots=3",
            "trainer.micro_batch_tokens=40",
            "trainer.checkpoint_every=2",
            "eval.sets.0.prompts=2",
            "log.trajectories_per_step=1",
            *(["environment.name=tests.crash:Model"] if self.plan.calls else []),
            *self.plan.overrides,
        ]

    def begin(self, *, seed: str) -> Life:
        """Start a new run; return at its end or interruption."""
        tree = Tree()
        for path in (self.folder.checkpoints, self.folder.versions, self.folder.rollouts):
            tree.folder(path.relative_to(self.path).parts)
        tree.folder(("memory",))
        tree.sync_all()
        tree.lay_out(self.path)
        disk = Disk(self.path, tree)
        if self.plan.fills:
            disk.before = partial(self._fill, disk)
        return self._live(disk, seed=seed, is_new=True, kept={})

    def _fill(self, disk: Disk, step: Step) -> None:
        """Refuse a step that needs space in the run folder while there is none."""
        needs = step.kind in ("write", "wrote", "make_folder") or (step.kind == "append" and step.data)
        place = "/".join(step.path)
        is_full = FULL_FROM_S <= step.at < FULL_FROM_S + FULL_S
        if needs and is_full and place.startswith("runs/") and self.plan.fills in place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def resume(
        self,
        tree: Tree,
        *,
        seed: str,
        before: Callable[[Step], None] | None = None,
        kept: Mapping[str, Held] | None = None,
    ) -> Life:
        """Resume a world as `dora run --resume` does; `before` is called with each file operation. `kept`: what the
        servers hold that an earlier life left."""
        tree.lay_out(self.path)
        disk = Disk(self.path, tree)
        disk.before = before or disk.before
        return self._live(disk, seed=seed, is_new=False, kept=kept or {})

    def _live(self, disk: Disk, *, seed: str, is_new: bool, kept: Mapping[str, Held]) -> Life:
        life = Life(disk, kept)
        rng = random.Random(f"life {seed}")
        with quiet(), files.observed(disk.observe):
            try:
                life.outcome = run(self._drive(life, seed=seed, rng=rng, is_new=is_new), rng=rng)
            except DoraError as err:
                life.refusal = err
        self.said = life.said
        return life

    async def _drive(self, life: Life, *, seed: str, rng: random.Random, is_new: bool) -> Outcome:
        job = self._new_job() if is_new else self._resumed_job()
        loop = asyncio.get_running_loop()
        life.disk.clock = loop.time

        def tell(line: str) -> None:
            life.said += f"dora: {line}\n"

        def now() -> float:
            return job.started_at + loop.time()

        def note(what: str) -> None:
            synced = life.disk.synced_bytes(self.folder.journal)
            life.seen.append(Seen(what, synced, len(life.disk.steps)))

        engines = Engines(
            seed=seed,
            faults=self.plan.faults,
            pushed=lambda label: note(f"push {label}"),
            changed=lambda url, held: life.changes.append(Change(url, held, len(life.disk.steps))),
            kept=life.kept,
            room=job.settings.rules.max_staleness + 3,
        )
        graders: Any = Graders(faults=self.plan.faults)
        hosts: Any = Hosts(rng, self.plan.can_replay, lambda episode, turn: note(f"call {episode}/{turn}"))
        renderer: Any = NumberRenderer()
        converse: Any = None
        async with AsyncExitStack() as stack:
            opened = Opened(job, self.folder, stack, now=now, tell=tell, can_replay=self.plan.can_replay)
            fleet = self._fleet(opened, engines)
            recorder = opened.recorder(fleet)
            end: Any = End(job.config.trainer.ranks)
            trainer: Any
            ranks = None
            if job.rollout_only:
                trainer = opened.rollout_writer(recorder)
            else:
                arrived = lambda batch: note(f"wave {batch.step}/{batch.index}")  # noqa: E731
                ranks = RanksModel(end, opened, rng=rng, arrived=arrived)
                trainer = opened.trainer_link(end, recorder, ranks=ranks, num_ranks=job.config.trainer.ranks)
                for _ in range(self.plan.losses):
                    loop.call_later(rng.uniform(0.0, LOST_UNTIL_S), ranks.lose)
            controller = make_controller(
                opened,
                engine=SglangEngine(engines),  # type: ignore[arg-type]
                fleet=fleet,
                graders=GraderPools(graders, [graders], job.inputs.evaluations),
                trainer=trainer,
                recorder=recorder,
                episodes=EpisodeInputs(hosts, renderer, converse) if self.plan.calls else None,
            )
            if is_new and self.plan.interrupted_at is not None:
                loop.call_later(self.plan.interrupted_at * rng.uniform(0.2, 2), controller.interrupt)
            if is_new and self.plan.fails_at is not None:
                failure = TrainerFailed(rank=0, reason="out of memory", is_final=True)
                loop.call_later(self.plan.fails_at * rng.uniform(0.2, 2), end.outbox.put_nowait, (0, failure))
            outcome = await controller.run(opened.first)
            recorder.end(outcome)
            check_invariants(job.state)
            if isinstance(trainer, TrainerLink) and outcome.finished:
                await trainer.stop(outcome.reason)
                assert ranks is not None
                await asyncio.wait({ranks.tasks[-1]}, timeout=STOP_TIMEOUT_S)  # ranks that are not ready get no Stop
                for model in ranks.tasks:
                    model.cancel()
            if outcome.finished and opened.store.stranded(job.state.window.entries):
                raise RunFailed("the last version is in memory alone")
            if outcome.finished and (line := opened.lost_versions()):
                tell(line)
        return outcome

    def _new_job(self) -> Job:
        write_config(self.folder, self.config, run_id=self.folder.run_id)
        return prepare(self.config, self.inputs, rollout_only=self.plan.rollout_only)

    def _resumed_job(self) -> Job:
        """Resume as run_job does."""
        more = [f"run.steps={self.config.run.steps + self.plan.more_steps}"] if self.plan.more_steps else []
        folder = RunFolder.open(self.folder.root)
        config = load(folder.config, more, environ={})
        return prepare(config, self.inputs, recorded=resuming.take_up(folder, config))

    def _fleet(self, opened: Opened, engines: Engines) -> Fleet:
        servers: Sequence[Any] = [Server(f"http://engine-{i}", engines) for i in range(self.plan.servers)]
        config = opened.job.config
        return Fleet(
            list(servers),
            engine=SglangEngine(engines),  # type: ignore[arg-type]
            limits=FleetLimits(
                streams=64,
                slots=config.slots,
                kv_tokens=config.kv_tokens,
                context_tokens=config.longest_request,
                model=self.path / "model",
                path_map={},
                adapters=adapter_needs(config),
            ),
            inbox=opened.inbox,
            in_flight=opened.in_flight,
            rows=opened.job.state.instances,
            removed=opened.job.state.removed,
            version_of=opened.published.version_of,
            now=opened.now,
        )
