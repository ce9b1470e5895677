"""The controller as a client of bench/episodes.py, like that of bench/streams.py, with or without an environment.

With one, renderer, pool and host are the real ones. The tokenizer is a small one with the special tokens of Qwen3.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
from servers.streams import GROUP_SIZE, RUN_ID, Case

from clients.controller import Ones, Prompts, Servers, Watcher, job_of
from dora.app.build import make_controller
from dora.app.episodes import EpisodeInputs
from dora.app.opening import Opened
from dora.app.prepare import Job, prepare
from dora.config.schema import EnvironmentConfig
from dora.controller.effects import Graders
from dora.controller.episodes import Conversations
from dora.controller.evaluations import Evaluations
from dora.core import commands as cmd
from dora.core import events as ev
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import open_renderer
from dora.journal.run_folder import RunFolder
from dora.log import configure_logging
from dora.tasks.prompts import Conversation, Prompt
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from tests.environments.tokenizers_of_families import make_folder, special_tokens

ROW = {"prompt": "Where is k3?"}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "k3", "count": 7}}\n</tool_call><|im_end|>'


class Load(msgspec.Struct):
    """So many answers under way, each of a turn or, with an environment, of several."""

    streams: int  # at once
    rounds: int  # answers after one another, or turns of each episode
    turn_tokens: int
    call_s: float = 0.0  # of each call; 0: no environment


class Lag(msgspec.Struct):
    """How late a wait of 10 ms ends, 99th percentile, ms."""

    by_clock: float
    own: float  # as far as the loop was at work: beside other work on the machine, the rest is theirs
    cpu_s: float  # a second, of the whole process meanwhile


class Measured(msgspec.Struct):
    """What the controller's process took, between the first round and the last."""

    turns: int
    cpu_s: float
    wall_s: float
    lag: Lag
    idle: Lag  # of the same loop before anything was under way
    kb_waiting: float = 0.0  # for each episode with a call under way
    kb_tokens: float = 0.0  # the part of it that is the tokens of the record


class Meter(Watcher):
    """Counts turns: from the end of the first round to the beginning of the last."""

    def __init__(self, load: Load) -> None:
        super().__init__(0)
        self.load = load
        self.counted = ev.CallFinished if load.call_s else ev.GenerationFinished
        self.num_turns = 0
        self.num_calling = 0
        self.begun = self.ended = (0, 0.0, 0.0)
        self.under_way = asyncio.Event()
        self.over = asyncio.Event()
        self.all_call = asyncio.Event()

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None:
        assert not isinstance(event, ev.GenerationFailed | ev.InstanceLost), event
        if isinstance(event, ev.CallStarted):
            self.num_calling += 1
            if self.num_calling == self.load.streams:
                self.all_call.set()
        if isinstance(event, ev.CallFinished):
            assert not event.failed, event
            self.num_calling -= 1
        if isinstance(event, self.counted):
            self.num_turns += 1
            if self.num_turns == self.load.streams:
                self.begun = self._reading()
                self.under_way.set()
            elif self.num_turns == self.load.streams * (self.load.rounds - 1):
                self.ended = self._reading()
                self.over.set()

    def _reading(self) -> tuple[int, float, float]:
        return self.num_turns, time.process_time(), time.perf_counter()


class Same(Prompts):
    """The same prompt again and again."""

    def __init__(self, made: Prompt) -> None:
        self.made = made

    def at(self, position: int, *, known: Conversation | None = None) -> Prompt:
        return replace(self.made, position=position)


def tokenizer_in(folder: Path) -> Tokenizer:
    special, eos = special_tokens("qwen3")
    return load_tokenizer(make_folder(folder, special, eos=eos))


def turn_of(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """A turn with text, a call and its end."""
    call = tokenizer.encode(CALL, special_tokens=False)
    text = tokenizer.encode("look up the value of the key in the table, " * num_tokens, special_tokens=False)
    assert len(call) <= num_tokens, f"a call takes {len(call)} tokens"
    return [*text[: num_tokens - len(call)], *call]


async def prompt_of(converse: Conversations) -> Prompt:
    conversation = await asyncio.to_thread(converse, ROW, "bench", "bench")
    assert not conversation.failed, conversation.failed
    return Prompt(0, "bench", "", tuple(conversation.tokens), "", {}, row=ROW, where="bench", conversation=conversation)


def job_for(load: Load, tokenizer: Tokenizer, *, root: Path) -> Job:
    """One step of all answers; those of an environment are episodes."""
    answers = load.streams if load.call_s else load.streams * load.rounds
    room = (load.turn_tokens + 128) * load.rounds if load.call_s else load.turn_tokens + 1
    evaluations = Evaluations([])
    job = job_of(Case(answers, "incremental", 16, room), root=root, evaluations=evaluations)
    here = Path(__file__).parent / "look_up.py"
    options = {"turns": load.rounds, "call_s": load.call_s}
    environment = EnvironmentConfig(
        name=f"{here}:LookUp", options=options, episodes_per_host=load.streams + GROUP_SIZE, max_turns=load.rounds + 1
    )
    config = job.config.model_copy(update={"environment": environment})
    return prepare(config, replace(job.inputs, tokenizer=tokenizer), rollout_only=True)


def pin(cores: set[int]) -> None:
    """Hosts inherit the cores of the thread that starts them."""
    os.sched_setaffinity(0, cores)


async def run_load(port: int, load: Load) -> Measured:
    """The whole run."""
    began, meter, evaluations = time.perf_counter(), Meter(load), Evaluations([])
    first, *others = sorted(os.sched_getaffinity(0))

    def now() -> float:
        return time.perf_counter() - began

    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer = tokenizer_in(root / "tokenizer")
        job = job_for(load, tokenizer, root=root)
        pin(set(others) or {first})
        pool = await stack.enter_async_context(EnvironmentPool(job.config.environment))
        pin({first})
        renderer = open_renderer(tokenizer, settings={"name": "qwen3"})
        episodes = EpisodeInputs(pool, renderer, Conversations(pool, renderer))
        made = await prompt_of(episodes.converse)  # answers without an environment get the same tokens
        job = replace(job, inputs=replace(job.inputs, stream=Same(made)))
        folder = RunFolder(root / RUN_ID)
        folder.rollouts.mkdir(parents=True)
        configure_logging(folder.log, level="info", run=RUN_ID, role="controller")
        opened = Opened(job, folder, stack, now=now, tell=print)
        client = await stack.enter_async_context(EngineClient(max_connections=load.streams))
        case = Case(load.streams, "incremental", 16, load.turn_tokens)
        controller = make_controller(
            opened,
            engine=SglangEngine(client),
            fleet=Servers(f"http://127.0.0.1:{port}", case, inbox=opened.inbox, now=now),
            graders=Graders(Ones(), [], evaluations),
            trainer=opened.rollout_writer(meter),
            recorder=meter,
            episodes=episodes if load.call_s else None,
        )
        idle = await measure_lag(lambda: asyncio.sleep(2.0))
        gc.collect()
        memory = asyncio.create_task(waiting_kb(meter, opened.trajectories.records), name="memory")
        lag = asyncio.create_task(measure_lag(meter.over.wait, after=meter.under_way), name="lag")
        await controller.run(opened.first)
        if not meter.all_call.is_set():
            memory.cancel()
        kb_waiting, kb_tokens = await memory if meter.all_call.is_set() else (0.0, 0.0)
        turns, cpu_s, wall_s = (b - a for a, b in zip(meter.begun, meter.ended, strict=True))
        return Measured(int(turns), cpu_s - idle.cpu_s * wall_s, wall_s, await lag, idle, kb_waiting, kb_tokens)


async def measure_lag(ended: Callable[[], Awaitable[Any]], *, after: asyncio.Event | None = None) -> Lag:
    """The lag of the event loop until `ended`."""
    if after is not None:
        await after.wait()
    loop, lags = asyncio.get_running_loop(), []
    begun, cpu_begun = loop.time(), time.process_time()
    end = asyncio.ensure_future(ended())
    while not end.done():
        at, worked = loop.time() + 0.01, time.thread_time()
        await asyncio.sleep(0.01)
        late = loop.time() - at
        lags.append((late, min(late, time.thread_time() - worked)))
    by_clock, own = (sorted(values)[len(lags) * 99 // 100] * 1e3 for values in zip(*lags, strict=True))
    return Lag(by_clock, own, (time.process_time() - cpu_begun) / (loop.time() - begun))


async def waiting_kb(meter: Meter, records: Any) -> tuple[float, float]:
    """The memory that each episode has added to the process when all of them call, and the part that is tokens."""
    process = psutil.Process()
    before = process.memory_info().rss
    await meter.all_call.wait()
    gc.collect()
    added = process.memory_info().rss - before
    tokens = sum(len(r.tokens) * (r.tokens.itemsize + r.logprobs.itemsize) for r in records.values())
    return added / meter.load.streams / 1e3, tokens / meter.load.streams / 1e3
