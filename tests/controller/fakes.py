"""Stand-ins at the four outside borders (engine, transport, reward, weights), and a controller between them.

Each does its part at once unless a test tells it to freeze, fail or answer late. Everything else is real: the core, the
loop, the effects, the fleet's keepers, the token log and the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.config.schema import TaskConfig
from dora.controller.effects import Io
from dora.controller.evaluations import EvalSet, Evaluations
from dora.controller.fleet import Fleet, Limits
from dora.controller.loop import Controller
from dora.controller.trajectories import Trajectories
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.core.state import ControllerState
from dora.core.strategies import Pause, Settings, rules_of
from dora.engine.client import GenerateRequest, Loads, OnTokens
from dora.engine.errors import ServerGone
from dora.engine.stream import GenerateResult
from dora.journal.codec import FORMAT, Header
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from dora.seed.policy import path as seed_path
from dora.tasks.pool import Graded, GradingFailed
from dora.tasks.prompts import Prompt, open_stream
from dora.tasks.rewards import GradeRequest
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from dora.transport.messages import MicroBatch
from dora.weights.push import DISK

RUN_ID = "test-run"
MAX_NEW_TOKENS = 16
ANSWER_TOKENS = 6
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
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.callbacks: dict[str, OnTokens] = {}  # by request id
        self.frozen: set[str] = set()  # urls that stop answering in the middle of an answer
        self.frozen_pushes: set[str] = set()
        self.aborts: list[str] = []
        self.given_up: list[str] = []  # request ids whose connection we closed
        self.bug: Exception | None = None
        self.used_tokens: dict[str, int] = {}  # KV by url; others hold none
        self.thaw = asyncio.Event()  # frozen answers go on

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        if self.bug is not None:
            raise self.bug
        if not request.extra_key.startswith(RUN_ID):  # the probe
            return GenerateResult("length", ((self.labels[url], 0, 1),), 1, 0, 1, 0)
        await self.begin.wait()
        self.requests.append((url, request))
        self.callbacks[request.rid] = on_tokens
        for number in range(ANSWER_TOKENS):
            if url in self.frozen and number == ANSWER_TOKENS // 2:
                await self._freeze(request.rid)
            on_tokens([self.eos if number == ANSWER_TOKENS - 1 else TOKEN], [-0.5])
            await asyncio.sleep(0)
        spans = ((self.labels[url], 0, ANSWER_TOKENS),)
        return GenerateResult("stop", spans, ANSWER_TOKENS, 0, len(request.input_ids), 0)

    async def _freeze(self, rid: str) -> None:
        try:
            await self.thaw.wait()
        except asyncio.CancelledError:
            self.given_up.append(rid)
            raise

    async def abort(self, url: str, rid: str) -> None:
        self.aborts.append(rid)

    async def loads(self, url: str) -> Loads:
        used_tokens = self.used_tokens.get(url, 0)
        return Loads(num_running=0, num_waiting=0, used_tokens=used_tokens, max_total_tokens=4096, max_running=8)

    async def server_info(self, url: str) -> dict[str, Any]:
        return {"version": "fake"}

    async def weight_version(self, url: str) -> str:
        return self.labels.setdefault(url, "default")

    async def has_route(self, url: str, path: str) -> bool:
        return False

    async def health(self, url: str, *, timeout_s: float) -> None:
        return

    def push_endpoint(self, url: str) -> FakePush:
        return FakePush(self, url)


@dataclass
class FakePush:
    """One server as a target of pushes."""

    engines: FakeEngines
    url: str

    async def is_empty(self) -> bool:
        return True

    async def pause(self, mode: Pause) -> None:
        return

    async def resume(self) -> None:
        return

    async def flush_cache(self) -> bool:
        return True

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        if self.url in self.engines.frozen_pushes:
            self.engines.frozen_pushes.discard(self.url)
            await asyncio.Event().wait()
        self.engines.labels[self.url] = label
        self.engines.pushed.add(self.url)
        if len(self.engines.pushed) == self.engines.count:
            self.engines.begin.set()

    async def weight_version(self) -> str:
        return self.engines.labels[self.url]


class FakeServer:
    """A process that is up at once and lives until it is told to die."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.starts = 0
        self.kills = 0
        self.stops = 0
        self.failures: list[Exception] = []  # of the next starts
        self._gone = asyncio.Event()

    async def start(self) -> str:
        self.starts += 1
        if self.failures:
            raise self.failures.pop(0)
        self._gone = asyncio.Event()
        return self.url

    async def ended(self) -> str:
        await self._gone.wait()
        return f"{self.url} died"

    async def kill(self) -> None:
        self.kills += 1
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

    def folder(self, version: int) -> Path:
        return Path(f"/versions/{version}")

    def copy_durable(self, version: int) -> None:
        self.copied.append(version)

    def release(self, version: int) -> None:
        self.released.append(version)

    def release_durable(self, version: int) -> None:
        raise AssertionError("all durable versions are kept")


class FakeGraders:
    """Rewards 0 and 1 in turn, so that no group is without variance."""

    def __init__(self) -> None:
        self.count = 0
        self.failing: set[int] = set()  # numbers of the answers that cannot be judged
        self.frozen: set[int] = set()
        self.release = asyncio.Event()

    async def grade(self, request: GradeRequest) -> Graded | GradingFailed:
        number, self.count = self.count, self.count + 1
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
        self.frozen = False
        self.failing_loop: Loop | None = None

    def loops(self) -> list[tuple[str, Loop]]:
        return [("failing", self.failing_loop)] if self.failing_loop is not None else []

    def train(self, wave: list[MicroBatch]) -> None:
        self.waves.append(wave)
        if self.frozen:
            return
        step, index, last = wave[0].step, wave[0].index, wave[0].last
        self.emit(ev.MicroBatchTrained(self.now(), step, index))
        if last:
            self.emit(ev.StepTrained(self.now(), step))
            self.emit(ev.VersionPublished(self.now(), step + 1, 1, {"model.safetensors": "0"}))

    async def checkpoint(self, *, timeout_s: float) -> bool:
        """Takes as long as a few pushes, in which an order that is carried out shows."""
        self.checkpoints += 1
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

    def on_event(self, event: ev.Event, commands: list[cmd.Command]) -> None:
        self.events.append(event)
        self.commands += commands
        self.hook(event, commands)

    def on_evaluation(self, version: int) -> None:
        self.evaluations.append(version)

    def on_lag(self, seconds: float) -> None:
        self.lags.append(seconds)

    def of(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in (*self.events, *self.commands) if isinstance(fact, kind)]


@dataclass
class Job:
    """A controller and what surrounds it."""

    controller: Controller
    io: Io
    engines: FakeEngines
    servers: list[FakeServer]
    graders: FakeGraders
    trainer: FakeTrainer
    store: FakeStore
    watcher: Watcher
    journal: JournalWriter
    tokens: TokenWriter
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


def make_io(*, settings: Settings, client: Any, fleet: Fleet, now: Callable[[], float], **parts: Any) -> Io:
    """The effects' surroundings: the seed's tokenizer and task, everything else given or fake."""
    tokenizer: Tokenizer = load_tokenizer(seed_path(), thinking=None)
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "seed": 0,
        "group_size": settings.group_size,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": 1.0,
        "push_timeout_s": 1.0,
        "transport": DISK,
        "live": None,
        "keep_versions": 0,
        "client": client,
        "fleet": fleet,
        "store": FakeStore(),
        "stream": open_stream(TaskConfig(), tokenizer=tokenizer, seed=0),
        "tokenizer": tokenizer,
        "graders": FakeGraders(),
        "eval_graders": [],
        "evaluations": Evaluations([]),
        "now": now,
    }
    return Io(**{**values, **parts})


def make_job(
    folder: Path, *, instances: int = 2, samples: int = 0, state: ControllerState | None = None, **changes: Any
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
    tokens = TokenWriter(folder / "tokens.bin")
    journal = JournalWriter(folder / "journal.msgpack", tokens=tokens)
    if state is None:
        journal.append(Header(FORMAT, RUN_ID, "2026-01-01T00:00:00+00:00", "test", settings))
    servers = [FakeServer(f"http://engine-{i}") for i in range(instances)]
    state = state or ControllerState(settings)
    watcher = Watcher()
    fleet = Fleet(
        list(servers),
        client=engines,  # type: ignore[arg-type]
        limits=Limits(instances=8, slots=2, kv_tokens=1024, context_tokens=128, model=Path(), path_map={}),
        emit=lambda event: controller.emit(event),
        fence=lambda instance: controller.fence(instance),
        now=now,
        rows=state.instances,
    )
    parts = {"graders": graders, "eval_graders": [graders], "evaluations": evaluations, "store": store}
    trajectories = Trajectories(tokens, group_size=settings.group_size)
    io = make_io(settings=settings, client=engines, fleet=fleet, now=now, trajectories=trajectories, **parts)
    trainer = FakeTrainer(lambda event: controller.emit_soon(event), now)
    controller = Controller(state, io=io, journal=journal, trainer=trainer, observer=watcher)
    first = [ev.TrainerReady(0.0, 0), ev.VersionPublished(0.0, 0, 1, {"model.safetensors": "0"})]
    return Job(controller, io, engines, servers, graders, trainer, store, watcher, journal, tokens, settings, first)


def prompt(position: int) -> Prompt:
    return Prompt(position, "made up", "a1b2=", (3, 4, 5), "03", {})


def gone(url: str) -> ServerGone:
    return ServerGone(f"{url}: the connection broke off")


def evaluation_ids(version: int, *, count: int) -> Sequence[TrajectoryId]:
    return [TrajectoryId(-(1 + version * count + i)) for i in range(count)]
