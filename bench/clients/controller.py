"""The controller as a client of bench/streams.py: that of a rollout-only run, as the application opens and makes it.

Only what surrounds it does nothing: fleet, graders, prompts, tokenizer and recorder. Each of these is a subclass of the
real one, so that mypy tells where the real one has changed. The model is an empty folder, and so is version 0.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from servers.streams import GROUP_SIZE, PROMPT_TOKENS, RUN_ID, SLOTS, Case

from clients.readers import Credit, Found, Stopwatch
from dora.app.build import make_controller
from dora.app.inputs import Inputs
from dora.app.opening import Opened
from dora.app.prepare import Job, prepare
from dora.config.schema import (
    Config,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    WeightsConfig,
)
from dora.controller.effects import Graders
from dora.controller.evaluations import Evaluations
from dora.controller.fleet import Fleet
from dora.controller.inbox import Inbox
from dora.controller.recorder import Recorder
from dora.controller.trajectories import Trajectories
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId
from dora.engine.api import GenerateRequest, GenerateResult, OnTokens
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.journal.run_folder import RunFolder
from dora.log import configure_logging
from dora.tasks.pool import Graded, GraderPool
from dora.tasks.prompts import Conversation, Prompt, PromptStream
from dora.tasks.rewards import GradeRequest
from dora.tasks.tokenizer import Tokenizer


class Watcher(Recorder):
    """Times the streams, from the first order to the last answer."""

    def __init__(self, num_streams: int) -> None:
        self.left = num_streams
        self.watch: Stopwatch | None = None
        self.found = Found(0.0, 0.0)

    def before(self, event: ev.Event) -> None:
        pass

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None:
        if self.watch is None and any(isinstance(command, cmd.Generate) for command in commands):
            self.watch = Stopwatch()
        if isinstance(event, ev.GenerationFinished):
            self.left -= 1
            if self.left == 0 and self.watch is not None:
                self.found = self.watch.found()
        assert not isinstance(event, ev.GenerationFailed | ev.InstanceLost), event

    def on_step(self, report: object) -> None: ...

    def on_lag(self, seconds: float) -> None: ...

    def on_evaluation(self, version: int, *, position: int) -> None: ...


class Servers(Fleet):
    """Instances that are up from the start, all at one address, and unsupervised."""

    def __init__(self, url: str, case: Case, *, inbox: Inbox, now: Callable[[], float]) -> None:
        self.urls = {InstanceId(i): url for i in range(-(-case.streams // SLOTS))}
        self.inbox = inbox
        self.now = now

    async def run(self) -> None:
        for instance in self.urls:
            await self.inbox.emit(ev.InstanceUp(self.now(), instance, 1, SLOTS, 2**30))


class Prompts(PromptStream):
    """The same prompt again and again."""

    def __init__(self) -> None: ...

    def at(self, position: int, *, known: Conversation | None = None) -> Prompt:
        return Prompt(position, "bench", "", tuple(range(PROMPT_TOKENS)), "", {})


class NoTokenizer(Tokenizer):
    """Answers have no text."""

    eos_ids = (2,)

    def __init__(self) -> None: ...

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return ""


class Ones(GraderPool):
    """Every answer is right."""

    def __init__(self) -> None: ...

    async def grade(self, request: GradeRequest) -> Graded:
        return Graded(1.0)


@dataclass(frozen=True)
class CreditedEngine(SglangEngine):
    """Tells how many tokens have been kept."""

    taken: Callable[[int], None] = field(kw_only=True)

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        def kept(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            on_tokens(tokens, logprobs)
            self.taken(len(tokens))

        return await self.client.generate(url, request, kept)


def job_of(case: Case, *, root: Path, evaluations: Evaluations) -> Job:
    """One step whose groups are the streams; no wave leaves before its end."""
    config = Config(
        run=RunConfig(steps=1),
        rollout=RolloutConfig(
            groups_per_step=case.streams // GROUP_SIZE,
            group_size=GROUP_SIZE,
            max_new_tokens=case.tokens,
            filter_zero_variance=False,
        ),
        trainer=TrainerConfig(micro_batch_tokens=2**40),
        eval=EvalConfig(sets=()),
        weights=WeightsConfig(memory_folder=root),
    )
    model = root / "model"
    model.mkdir()
    inputs = Inputs(model, None, None, NoTokenizer(), vocab_size=2**31, stream=Prompts(), evaluations=evaluations)
    return prepare(config, inputs, rollout_only=True)


async def run_controller(port: int, case: Case, *, over_httpx: bool = False) -> Found:
    """The whole run."""
    began, watcher, evaluations = time.perf_counter(), Watcher(case.streams), Evaluations([])
    credit = await Credit.open(port, case, sizes=[case.per_chunk] * (case.tokens // case.per_chunk))

    def now() -> float:
        return time.perf_counter() - began

    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = RunFolder(root / RUN_ID)
        folder.rollouts.mkdir(parents=True)
        configure_logging(folder.log, level="info", run=RUN_ID, role="controller")
        opened = Opened(job_of(case, root=root, evaluations=evaluations), folder, stack, now=now, tell=print)
        new_client = httpx_client if over_httpx else EngineClient
        client = await stack.enter_async_context(new_client(max_connections=case.streams))
        controller = make_controller(
            opened,
            engine=CreditedEngine(client, taken=credit.add),
            fleet=Servers(f"http://127.0.0.1:{port}", case, inbox=opened.inbox, now=now),
            graders=Graders(Ones(), [], evaluations),
            trainer=opened.rollout_writer(watcher),
            recorder=watcher,
        )
        probe = asyncio.create_task(watch_loop(case, opened.trajectories), name="lag")
        await controller.run(opened.first)
        found = watcher.found
        found.lag_p99_ms, found.kb_per_stream = await probe
    return found


async def watch_loop(case: Case, records: Trajectories) -> tuple[float, float]:
    """From the first token to the last: how late a wait of 10 ms ends (99th percentile, ms), and the KB of memory that
    each stream has added to the process."""
    loop, lags, process = asyncio.get_running_loop(), [], psutil.Process()
    before = process.memory_info().rss
    while (num_tokens := records.ledger.account.num_tokens) < case.streams * case.tokens:
        at = loop.time() + 0.01
        await asyncio.sleep(0.01)
        if num_tokens:
            lags.append(loop.time() - at)
    return sorted(lags)[len(lags) * 99 // 100] * 1e3, (process.memory_info().rss - before) / case.streams / 1e3


def httpx_client(*, max_connections: int) -> EngineClient:
    """EngineClient, but its streams are read with httpx, as httpx's own documentation does it."""
    import httpx

    class HttpxClient(EngineClient):
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        session = httpx.AsyncClient(limits=unlimited, timeout=None, trust_env=False)

        async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
            seen = 0
            async with self.session.stream("POST", f"{url}/generate", content=self.encode(request)) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        meta = json.loads(line[6:])["meta_info"]
                        new = meta["output_token_logprobs"][seen - meta["completion_tokens"] :]
                        seen += len(new)
                        on_tokens([token for _, token, _ in new], [logprob for logprob, _, _ in new])
            spans = tuple((span["version"], span["start"], span["end"]) for span in meta["weight_versions"])
            return GenerateResult(meta["finish_reason"]["type"], spans, seen, meta["cached_tokens"])

    return HttpxClient(max_connections=max_connections)
