"""Stand-ins at the four outside borders (engine, transport, reward, weights), and a controller between them.

Each does its part at once unless a test makes it freeze, fail or answer late. Everything else is real: the core, the
loop, the effects, the fleet's keepers, the token log and the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.config.schema import TaskConfig
from dora.controller.copies import Copies
from dora.controller.effects import (
    Dismiss,
    Effects,
    Fetch,
    GradeAnswer,
    Graders,
    Push,
    RequestIds,
    Sampling,
    SendWave,
    StopAttempt,
    StreamAttempt,
)
from dora.controller.evaluations import EvalSet, Evaluations
from dora.controller.fleet import Fleet, FleetLimits, Started
from dora.controller.holders import OwnStore
from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.lineage import Lineage
from dora.controller.loop import Controller
from dora.controller.orders import Orders
from dora.controller.published import Published
from dora.controller.reporters import Reporters
from dora.controller.run_tasks import RunTasks
from dora.controller.served import ServedWeights
from dora.controller.trajectories import Trajectories
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId, VersionId
from dora.core.state import State
from dora.core.strategies import Pause, Settings, rules_of
from dora.core.tables import Server
from dora.engine.api import Capabilities, GenerateRequest, GenerateResult, KvUse, OnStage, OnTokens, no_stage
from dora.engine.errors import RequestRefused, ServerGone
from dora.errors import RemoteError
from dora.journal.codec import FORMAT, Epoch, Header
from dora.journal.commits import Commits
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from dora.observe.visits import Visits
from dora.seed.policy import path as seed_path
from dora.tasks.pool import Graded, GradingFailed
from dora.tasks.prompts import Prompt, PromptStream, open_stream
from dora.tasks.rewards import GradeRequest
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from dora.transport.messages import MicroBatch

RUN_ID = "test-run"
CHAIN = "0" * 32  # before step 0
MAX_NEW_TOKENS = 16
ANSWER_TOKENS = 6
KV_TOKENS = 4096
TOKEN = 7

Loop = Coroutine[Any, Any, None]


class FakeEngines:
    """All servers of a run: an answer is ANSWER_TOKENS - 1 times TOKEN and a stop token, a token at a time.

    They begin together, once each holds weights, so that every one of them gets work.
    """

    def __init__(self, eos: int, *, count: int) -> None:
        self.eos = eos
        self.count = count
        self.pushed: set[str] = set()
        self.begin = asyncio.Event()
        self.labels: dict[str, str] = {}  # weight label by url
        self.taken_over: list[str] = []  # urls
        self.restless: set[str] = set()  # urls of servers that cannot be taken over
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.callbacks: dict[str, OnTokens] = {}  # by request id
        self.frozen: set[str] = set()  # urls that stop answering in the middle of an answer
        self.frozen_pushes: set[str] = set()
        self.stops: list[str] = []  # ids of requests
        self.given_up: list[str] = []  # request ids whose connection we closed
        self.bug: Exception | None = None
        self.used_tokens: dict[str, int] = {}  # KV by url; others hold none
        self.thaw = asyncio.Event()  # frozen answers go on
        self.ignored_stops = 0  # before one that has an effect: frozen answers go on
        self.refused: set[int] = set()  # numbers of the requests that are refused for good

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        if self.bug is not None:
            raise self.bug
        await self.begin.wait()
        self.requests.append((url, request))
        self.callbacks[request.id] = on_tokens
        if len(self.requests) - 1 in self.refused:
            raise RequestRefused(f"{url}: too long (400)", status=400, retryable=False)
        for number in range(ANSWER_TOKENS):
            if url in self.frozen and number == ANSWER_TOKENS // 2:
                await self._freeze(request.id)
            on_tokens([self.eos if number == ANSWER_TOKENS - 1 else TOKEN], [-0.5])
            await asyncio.sleep(0)
        spans = ((self.labels[url], 0, ANSWER_TOKENS),)
        return GenerateResult("stop", spans, ANSWER_TOKENS, 0)

    async def _freeze(self, request_id: str) -> None:
        try:
            await self.thaw.wait()
        except asyncio.CancelledError:
            self.given_up.append(request_id)
            raise

    async def stop(self, url: str, request_id: str) -> None:
        self.stops.append(request_id)
        if len(self.stops) > self.ignored_stops:
            self.thaw.set()

    async def kv_use(self, url: str) -> KvUse:
        return KvUse(self.used_tokens.get(url, 0), KV_TOKENS)

    async def examine(self, url: str, *, timeout_s: float) -> Capabilities:
        label = await self.label(url)
        return Capabilities("fake", slots=8, kv_tokens=KV_TOKENS, context_tokens=None, label=label, model_path="")

    async def label(self, url: str) -> str:
        return self.labels.setdefault(url, "default")

    async def is_alive(self, url: str, *, timeout_s: float) -> bool:
        return True

    async def resume(self, url: str) -> None:
        return

    async def take_over(self, url: str, *, timeout_s: float) -> str:
        if url in self.restless:
            raise RemoteError(f"{url}: was not at rest within {timeout_s:g} s")
        self.taken_over.append(url)
        return await self.label(url)

    async def push(
        self,
        url: str,
        *,
        folder: Path,
        label: str,
        timeout_s: float,
        live: Pause | None,
        on_stage: OnStage = no_stage,
    ) -> None:
        if url in self.frozen_pushes:
            self.frozen_pushes.discard(url)
            await self._never(timeout_s)
        self.labels[url] = label
        self.pushed.add(url)
        if len(self.pushed) == self.count:
            self.begin.set()

    async def _never(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        except TimeoutError as err:
            raise RemoteError(f"the push did not end within {timeout_s:g} s") from err

    def sending(self, argv: Sequence[str], **_: Any) -> AbstractAsyncContextManager[FakeEngines]:
        return nullcontext(self)

    def set_key(self, url: str, key: str) -> None:
        return


class FakeServer:
    """A process that is up at once and lives until it is told to die."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.starts = 0
        self.kills = 0
        self.stops = 0
        self.failures: list[Exception] = []  # of the next starts
        self.is_kept = False  # until it is killed
        self._gone = asyncio.Event()

    async def start(self) -> Started:
        self.starts += 1
        if self.failures:
            raise self.failures.pop(0)
        self._gone = asyncio.Event()
        return Started(self.url, self.is_kept)

    async def ended(self) -> str:
        await self._gone.wait()
        return f"{self.url} died"

    async def kill(self) -> None:
        self.kills += 1
        self.is_kept = False
        self._gone.set()

    async def stop(self) -> None:
        self.stops += 1
        self._gone.set()

    def die(self) -> None:
        self._gone.set()


class FakeStore:
    """A version store that holds every version."""

    def __init__(self) -> None:
        self.copied: list[int] = []
        self.released: list[int] = []
        self.dropped: list[int] = []

    def folder(self, version: int) -> Path:
        return Path(f"/versions/{version}")

    def durable(self) -> list[int]:
        return sorted(set(self.copied) - set(self.dropped))

    def copy_durable(self, version: int) -> None:
        self.copied.append(version)

    def release(self, version: int) -> None:
        self.released.append(version)

    def release_durable(self, version: int) -> None:
        self.dropped.append(version)


class FakeGraders:
    """Rewards 0 and 1 in turn, so that no group is without variance."""

    def __init__(self) -> None:
        self.count = 0
        self.asked: list[GradeRequest] = []
        self.failing: set[int] = set()  # numbers of the answers that cannot be judged
        self.frozen: set[int] = set()
        self.release = asyncio.Event()

    async def grade(self, request: GradeRequest) -> Graded | GradingFailed:
        number, self.count = self.count, self.count + 1
        self.asked.append(request)
        if number in self.frozen:
            await self.release.wait()
        return GradingFailed("timeout") if number in self.failing else Graded(float(number % 2))


class FakeTrainer:
    """Trains each wave at once and publishes after each step."""

    def __init__(self, emit: Callable[[ev.Event], None], now: Callable[[], float]) -> None:
        self.emit = emit
        self.now = now
        self.waves: list[list[MicroBatch]] = []
        self.checkpoints = 0
        self.dropped: list[str] = []
        self.frozen = False
        self.failing_loop: Loop | None = None

    def loops(self) -> list[tuple[str, Loop]]:
        return [("failing", self.failing_loop)] if self.failing_loop is not None else []

    async def drop_checkpoint(self, name: str) -> None:
        self.dropped.append(name)

    def train(self, wave: list[MicroBatch], *, position: int) -> None:
        self.waves.append(wave)
        if self.frozen:
            return
        step, index, last = wave[0].step, wave[0].index, wave[0].last
        self.emit(ev.MicroBatchTrained(self.now(), step, index))
        if last:
            chain = wave[0].chain
            self.emit(ev.StepTrained(self.now(), step, chain))
            self.emit(ev.VersionPublished(self.now(), step + 1, 1, {"model.safetensors": chain}, chain))

    async def checkpoint(self, *, timeout_s: float) -> bool:
        """Takes as long as a few pushes, so that an order that is carried out in the meantime shows."""
        self.checkpoints += 1
        self.waited_s = timeout_s
        for _ in range(50):
            await asyncio.to_thread(int)
        return True


class Watcher:
    """An observer that keeps what it is shown."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.commands: list[cmd.Command] = []
        self.evaluations: list[int] = []
        self.lags: list[float] = []
        self.hook: Callable[[ev.Event, list[cmd.Command]], None] = lambda event, commands: None

    def before(self, event: ev.Event) -> None:
        pass

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None:
        self.events.append(event)
        self.commands += commands
        self.hook(event, commands)

    def on_evaluation(self, version: int, *, position: int) -> None:
        self.evaluations.append(version)

    def on_lag(self, seconds: float) -> None:
        self.lags.append(seconds)

    def of(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in (*self.events, *self.commands) if isinstance(fact, kind)]


@dataclass
class Job:
    """A controller and what surrounds it."""

    controller: Controller
    inbox: Inbox
    io: Surroundings
    engines: FakeEngines
    servers: list[FakeServer]
    graders: FakeGraders
    trainer: FakeTrainer
    store: FakeStore
    watcher: Watcher
    journal: JournalWriter
    tokens: TokenWriter
    commits: Commits
    settings: Settings
    first: list[ev.Event] = field(default_factory=list)

    async def run(self, *, timeout_s: float = 30.0) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self.controller.run(self.first)

    def close(self) -> None:
        self.journal.close()
        self.tokens.close()


def settings_of(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "rules": rules_of("dora", max_staleness=1),
        "steps": 3,
        "groups_per_step": 2,
        "group_size": 2,
        "max_new_tokens": MAX_NEW_TOKENS,
        "num_ranks": 2,
        "micro_batch_tokens": 64,
    }
    return Settings(**{**values, **changes})


@dataclass
class Surroundings:
    """What the effects reach outside with."""

    engine: Any
    fleet: Fleet
    now: Callable[[], float]
    trajectories: Trajectories
    tokenizer: Tokenizer
    stream: PromptStream
    evaluations: Evaluations = field(default_factory=lambda: Evaluations([]))
    published: Published = field(default_factory=lambda: Published(RUN_ID))
    lineage: Lineage = field(default_factory=lambda: Lineage(base=CHAIN, settings=b"", trained={}))
    epoch: int = 0
    live: Pause | None = None
    keep_versions: int = 0
    store: Any = field(default_factory=FakeStore)
    graders: Any = field(default_factory=FakeGraders)
    fails_truncated: bool = False
    visits: Visits = field(default_factory=Visits)
    steps_taken: list[tuple[int, int]] = field(default_factory=list)  # tokens, steps
    unstopped: set[str] = field(default_factory=set)

    def steps(self, num_tokens: int, num_steps: int) -> None:
        self.steps_taken.append((num_tokens, num_steps))

    @property
    def ids(self) -> RequestIds:
        return RequestIds(RUN_ID, self.epoch, self.unstopped)

    @property
    def generate(self) -> StreamAttempt:
        sampling = Sampling(0, MAX_NEW_TOKENS, 1.0, self.tokenizer.eos_ids, self.evaluations)
        served = ServedWeights(self.published)
        return StreamAttempt(
            self.engine, self.fleet, self.trajectories, self.published, served, sampling, self.ids, self.now, self.steps
        )

    @property
    def grade(self) -> GradeAnswer:
        graders = Graders(self.graders, [self.graders], self.evaluations)
        return GradeAnswer(self.trajectories, self.tokenizer, graders, MAX_NEW_TOKENS, self.fails_truncated, self.now)

    @property
    def push(self) -> Push:
        return Push(self.engine, self.fleet, OwnStore(self.store), self.published, self.live, 1.0, self.now)

    @property
    def fetch(self) -> Fetch:
        return Fetch(self.stream, self.visits, self.trajectories, self.now)

    @property
    def effects(self) -> Effects:
        return {
            cmd.Generate: self.generate,
            cmd.GradeTrajectory: self.grade,
            cmd.PushWeights: self.push,
            cmd.DismissInstance: Dismiss(self.fleet, self.now),
            cmd.FetchPrompts: self.fetch,
        }


def make_fleet(
    servers: Sequence[Any],
    *,
    engine: Any,
    inbox: Inbox,
    in_flight: Any,
    rows: Mapping[InstanceId, Server],
    now: Callable[[], float],
    version_of: Callable[[str], VersionId],
    **limits: Any,
) -> Fleet:
    return Fleet(
        list(servers),
        engine=engine,
        limits=FleetLimits(
            **{
                "streams": 64,
                "slots": 2,
                "kv_tokens": 1024,
                "context_tokens": 128,
                "model": Path(),
                "path_map": {},
                **limits,
            }
        ),
        inbox=inbox,
        in_flight=in_flight,
        rows=rows,
        removed=(),
        version_of=version_of,
        now=now,
    )


def make_job(
    folder: Path,
    *,
    instances: int = 2,
    samples: int = 0,
    state: State | None = None,
    epoch: int = 0,
    io: dict[str, Any] | None = None,
    **changes: Any,
) -> Job:
    """A whole run on fakes, or with `state` the continuation of one; call it inside a running loop."""
    clock = asyncio.get_running_loop().time
    began = clock() - (state.now if state is not None else 0.0)

    def now() -> float:
        return clock() - began

    settings = settings_of(**changes)
    tokenizer = load_tokenizer(seed_path(), thinking=None)
    evaluations = Evaluations([EvalSet("heldout", [prompt(i) for i in range(samples)], 1, 0.0)] if samples else [])
    if samples:
        settings = settings_of(**changes, eval_prompt_tokens=evaluations.prompt_tokens)
    engines, graders, store = FakeEngines(tokenizer.eos_ids[0], count=instances), FakeGraders(), FakeStore()
    tokens = TokenWriter(folder / "tokens.bin", epoch=epoch)
    journal = JournalWriter(folder / "journal.msgpack")
    commits = Commits(journal=journal, tokens=tokens)
    if state is None:
        journal.append(Header(FORMAT, RUN_ID, "2026-01-01T00:00:00+00:00", "test", settings))
    journal.append(Epoch(epoch, 0.0, ""))
    servers = [FakeServer(f"http://engine-{i}") for i in range(instances)]
    state = state or State(settings)
    watcher = Watcher()
    trajectories = Trajectories(tokens, group_size=settings.group_size)
    inbox, in_flight = Inbox(), InFlight(trajectories, rows=state.instances)
    outside = {"published": Published(RUN_ID), **(io or {})}
    fleet = make_fleet(
        servers,
        engine=engines,
        inbox=inbox,
        in_flight=in_flight,
        rows=state.instances,
        version_of=outside["published"].version_of,
        now=now,
    )
    made = Surroundings(
        engine=engines,
        fleet=fleet,
        now=now,
        trajectories=trajectories,
        tokenizer=tokenizer,
        stream=open_stream(TaskConfig(), tokenizer=tokenizer, seed=0),
        evaluations=evaluations,
        epoch=epoch,
        graders=graders,
        store=store,
        **outside,
    )
    trainer = FakeTrainer(inbox.emit_soon, now)
    tasks = RunTasks()
    orders = Orders(
        effects=made.effects,
        stop=StopAttempt(made.engine, fleet, made.ids),
        train=SendWave(state.feed, trajectories, made.lineage, trainer, settings.group_size),
        copies=Copies(
            made.store,
            checkpoints=folder / "checkpoints",
            published=made.published,
            window=state.window,
            commits=commits,
            tasks=tasks,
            keep=made.keep_versions,
            holders=OwnStore(made.store),
            drop_elsewhere=trainer.drop_checkpoint,
        ),
        fleet=fleet,
        trajectories=trajectories,
        evaluations=evaluations,
        observer=watcher,
        inbox=inbox,
        in_flight=in_flight,
        commits=commits,
        tasks=tasks,
    )
    reporters = Reporters(
        state.instances,
        trajectories=trajectories,
        fleet=fleet,
        engine=made.engine,
        inbox=inbox,
        commits=commits,
        observer=watcher,
        now=now,
        watchdog_s=settings.watchdog_s,
    )
    controller = Controller(
        state,
        inbox=inbox,
        in_flight=in_flight,
        orders=orders,
        journal=journal,
        commits=commits,
        trainer=trainer,
        beside=(reporters, fleet),
        observer=watcher,
        now=now,
    )
    first = [ev.TrainerReady(0.0, 0), ev.VersionPublished(0.0, 0, 1, {"model.safetensors": "0"}, CHAIN)]
    return Job(
        controller=controller,
        inbox=inbox,
        io=made,
        engines=engines,
        servers=servers,
        graders=graders,
        trainer=trainer,
        store=store,
        watcher=watcher,
        journal=journal,
        tokens=tokens,
        commits=commits,
        settings=settings,
        first=first,
    )


def prompt(position: int) -> Prompt:
    return Prompt(position, "made up", "a1b2=", (3, 4, 5), "03", {})


def gone(url: str) -> ServerGone:
    return ServerGone(f"{url}: the connection broke off")


def evaluation_ids(version: int, *, count: int) -> Sequence[TrajectoryId]:
    return [TrajectoryId(-(1 + version * count + i)) for i in range(count)]
