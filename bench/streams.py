"""Client streams: the controller's path of answers (HTTP, parse, tokens kept, journal, core) against bare readers.

The controller is the real one: Controller, core, effects, EngineClient, journal and token log on disk; only trainer,
graders and fleet do nothing. The server (servers/streams.py) is a separate process whose chunks, in SGLang's exact
form, are rendered before the start. The streams begin together, and the server stays at most half a round ahead, so
that each chunk is a separate read, as with a server that decodes step by step. The peers, each in its own process, are
two bare readers on uvloop and the same controller with httpx (`aiter_lines`, `json.loads`). One reader counts bytes in
its protocol's callback, the least that any client can do (converting the JSON of 16 tokens to Python's numbers takes as
long again); the other awaits asyncio's streams. Ratios compare tokens per CPU second of the client process, which other
work on the machine affects least. The next row has the ratio by the wall clock, with the CPU share of both sides; the
side that is closer to a whole core is the bottleneck. Answers have 512 tokens, as in regime A of docs/SIMULATION.md
(median 465, mean 587), so that opening a stream counts as much as there; --full adds 4,096. The last part holds 10,000
streams open at the pace of a fleet of 40 unsynchronized instances, 16 tokens every 0.5 s. RLIMIT_NOFILE is raised to
its hard limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import uvloop
from result import FOLDER, Report, parser
from servers.streams import CREDIT, END, HEAD, LABEL, PROMPT_TOKENS, RUN_ID, SLOTS, Case, rendered, serve

GROUP_SIZE = 8


class Found(msgspec.Struct):
    """What one client process measured."""

    wall_s: float
    cpu_s: float
    server_cpu_s: float = 0.0
    lag_p99_ms: float = 0.0
    kb_per_stream: float = 0.0


# --- the clients


class Credit:
    """Tells the server what has been taken, in eighths of a round; of a round, `sizes` has an entry for each."""

    def __init__(self, transport: asyncio.WriteTransport, case: Case, *, sizes: list[int], before: int = 0) -> None:
        self.transport = transport
        self.taken = -before * case.streams
        self.steps = iter([size * (case.streams // 8) for size in sizes for _ in range(8)])
        self.next = next(self.steps)

    @classmethod
    async def open(cls, port: int, case: Case, *, sizes: list[int], before: int = 0) -> Credit:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", port)
        transport.write(CREDIT)
        return cls(transport, case, sizes=sizes, before=before)

    def add(self, units: int) -> None:
        self.taken += units
        while self.taken >= self.next:
            self.transport.write(b"+")
            self.next += next(self.steps, 2**62)


class Stopwatch:
    def __init__(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def found(self) -> Found:
        return Found(time.perf_counter() - self.begun[0], time.process_time() - self.begun[1])


def request_of(number: int, case: Case) -> Any:
    from dora.engine.api import GenerateRequest

    return GenerateRequest(
        id=f"{number:08}",
        tokens=[*range(PROMPT_TOKENS)],
        max_new_tokens=case.tokens,
        temperature=1.0,
        stop_tokens=[2],
        seed=number,
        label=LABEL,
    )


def raw_requests(case: Case) -> Iterator[bytes]:
    from dora.engine.sglang.client import EngineClient

    for number in range(case.streams):
        body = EngineClient.encode(request_of(number, case))
        yield b"POST /generate HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class ByteCounter(asyncio.Protocol):
    """The least that a client on uvloop can do."""

    def __init__(self, request: bytes, taken: Callable[[int], None]) -> None:
        self.request, self.taken = request, taken
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.taken(len(data))
        if data.endswith(END):
            self.transport.close()
            self.ended.set_result(None)


async def read_callbacks(port: int, case: Case) -> Found:
    credit = await Credit.open(port, case, sizes=list(map(len, rendered(case))), before=len(HEAD))
    watch, loop, counters = Stopwatch(), asyncio.get_running_loop(), []
    for request in raw_requests(case):
        _, counter = await loop.create_connection(partial(ByteCounter, request, credit.add), "127.0.0.1", port)
        counters.append(counter)
    await asyncio.gather(*(counter.ended for counter in counters))
    return watch.found()


async def read_streams(port: int, case: Case) -> Found:
    credit = await Credit.open(port, case, sizes=list(map(len, rendered(case))), before=len(HEAD))

    async def one(request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        data = b""
        while not data.endswith(END):
            data = await reader.read(2**16)
            credit.add(len(data))
        writer.close()

    watch = Stopwatch()
    await asyncio.gather(*map(one, raw_requests(case)))
    return watch.found()


class Watcher:
    """The controller's observer: times the streams, from the first order to the last answer."""

    def __init__(self, num_streams: int) -> None:
        self.left = num_streams
        self.watch: Stopwatch | None = None
        self.found = Found(0.0, 0.0)

    def on_event(self, event: Any, commands: list[Any]) -> None:
        if self.watch is None and any(type(command).__name__ == "Generate" for command in commands):
            self.watch = Stopwatch()
        if type(event).__name__ == "GenerationFinished":
            self.left -= 1
            if self.left == 0 and self.watch is not None:
                self.found = self.watch.found()
        assert type(event).__name__ not in ("GenerationFailed", "InstanceLost"), event

    def on_lag(self, seconds: float) -> None: ...

    def on_evaluation(self, version: int) -> None: ...


class Idle:
    """The fleet, the trainer, the graders, the store, the prompts and the tokenizer of a run that only streams."""

    eos_ids = (2,)

    emit: Callable[[Any], None]  # set once there is a controller

    def __init__(self, url: str, case: Case, now: Callable[[], float]) -> None:
        self.urls = dict.fromkeys(range(-(-case.streams // SLOTS)), url)
        self.now = now

    async def run(self) -> None:
        from dora.core.events import InstanceUp

        for instance in self.urls:
            self.emit(InstanceUp(self.now(), instance, 1, SLOTS, 2**30))  # type: ignore[arg-type]
        await asyncio.Event().wait()

    def loops(self) -> list[Any]:
        return []

    def at(self, position: int) -> Any:
        from dora.tasks.prompts import Prompt

        return Prompt(position, "bench", "", tuple(range(PROMPT_TOKENS)), "", {})

    def decode(self, tokens: list[int]) -> str:
        return ""

    async def grade(self, request: Any) -> Any:
        from dora.tasks.pool import Graded

        return Graded(1.0)

    def train(self, wave: list[Any]) -> None:
        from dora.core import events as ev

        step, index, last = wave[0].step, wave[0].index, wave[0].last
        self.emit(ev.MicroBatchTrained(self.now(), step, index))
        if last:
            self.emit(ev.StepTrained(self.now(), step))
            self.emit(ev.VersionPublished(self.now(), step + 1, 0, {}))

    def folder(self, version: int) -> Path:
        return Path("/versions") / str(version)

    def release(self, version: int) -> None: ...


async def run_controller(port: int, case: Case, *, client_type: Callable[..., Any]) -> Found:
    """A job of one step whose groups are the streams."""
    from dora.controller.loop import Controller
    from dora.core import events as ev
    from dora.core.state import State
    from dora.core.strategies import Settings, rules_of
    from dora.journal.tokens import TokenWriter
    from dora.journal.writer import JournalWriter
    from dora.log import configure_logging

    settings = Settings(
        rules=rules_of("periodic", max_staleness=0),
        steps=1,
        groups_per_step=case.streams // GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_new_tokens=case.tokens,
        num_ranks=1,
        micro_batch_tokens=2**40,
        filter_zero_variance=False,
        max_parallel_pushes=64,
    )
    began, watcher = time.perf_counter(), Watcher(case.streams)
    credit = await Credit.open(port, case, sizes=[case.per_chunk] * (case.tokens // case.per_chunk))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configure_logging(folder / "log", level="info", run=RUN_ID, role="controller")
        idle = Idle(f"http://127.0.0.1:{port}", case, lambda: time.perf_counter() - began)
        log = TokenWriter(folder / "tokens")
        with log, JournalWriter(folder / "journal", tokens=log) as journal:
            async with client_type(max_connections=case.streams) as client:
                io = io_of(case, idle, client=client, trajectories=credited_records(log, credit.add))
                state = State(settings)
                controller = Controller(state, io=io, journal=journal, trainer=idle, observer=watcher)
                idle.emit = controller.emit_soon
                probe = asyncio.create_task(watch_loop(case, io.trajectories), name="lag")
                await controller.run([ev.TrainerReady(0.0, 0), ev.VersionPublished(0.0, 0, 0, {})])
                found = watcher.found
                found.lag_p99_ms, found.kb_per_stream = await probe
    return found


def credited_records(log: Any, taken: Callable[[int], None]) -> Any:
    """The records of a run, which tell how many tokens have been kept."""
    from dora.controller.trajectories import Trajectories

    append = Trajectories.append

    class Records(Trajectories):
        def append(self, trajectory: Any, attempt: int, tokens: Any, logprobs: Any) -> None:
            append(self, trajectory, attempt, tokens, logprobs)
            taken(len(tokens))

    return Records(log, group_size=GROUP_SIZE)


def io_of(case: Case, idle: Any, *, client: Any, trajectories: Any) -> Any:
    from dora.controller.effects import Io
    from dora.controller.evaluations import Evaluations
    from dora.engine.sglang.engine import SglangEngine

    return Io(
        run_id=RUN_ID,
        seed=0,
        group_size=GROUP_SIZE,
        max_new_tokens=case.tokens,
        temperature=1.0,
        push_timeout_s=60.0,
        keep_versions=0,
        live=None,
        engine=SglangEngine(client),
        fleet=idle,
        store=idle,
        trajectories=trajectories,
        stream=idle,
        tokenizer=idle,
        graders=idle,
        eval_graders=[],
        evaluations=Evaluations([]),
        now=idle.now,
    )


async def watch_loop(case: Case, records: Any) -> tuple[float, float]:
    """From the first token to the last: how late a wait of 10 ms ends (99th percentile, ms), and the KB of memory that
    each stream has added to the process."""
    loop, lags, process = asyncio.get_running_loop(), [], psutil.Process()
    before = process.memory_info().rss
    while records.num_tokens < case.streams * case.tokens:
        at = loop.time() + 0.01
        await asyncio.sleep(0.01)
        if records.num_tokens:
            lags.append(loop.time() - at)
    return sorted(lags)[len(lags) * 99 // 100] * 1e3, (process.memory_info().rss - before) / case.streams / 1e3


def httpx_client(**options: Any) -> Any:
    """EngineClient, but its streams are read with httpx, as httpx's own documentation does it."""
    import httpx

    from dora.engine.api import GenerateResult
    from dora.engine.sglang.client import EngineClient

    class HttpxClient(EngineClient):
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        session = httpx.AsyncClient(limits=unlimited, timeout=None, trust_env=False)

        async def generate(self, url: str, request: Any, on_tokens: Any) -> Any:
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

    return HttpxClient(**options)


def client(port: int, kind: str, case: Case) -> Found:
    """One measurement, in this process."""
    from dora.engine.sglang.client import EngineClient

    measure = {
        "callbacks": lambda: read_callbacks(port, case),
        "reader": lambda: read_streams(port, case),
        "controller": lambda: run_controller(port, case, client_type=EngineClient),
        "httpx": lambda: run_controller(port, case, client_type=httpx_client),
    }[kind]
    return uvloop.run(measure())


# --- the report


def measured(kind: str, case: Case) -> Found:
    """A server and a client, each in a process of its own."""
    command = [sys.executable, __file__, "--case", msgspec.json.encode(case).decode()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}
    with subprocess.Popen([*command, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            before = psutil.Process(server.pid).cpu_times()
            done = subprocess.run(
                [*command, "--client", kind, "--port", port], stdout=subprocess.PIPE, env=env, check=True
            )
            found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)
            after = psutil.Process(server.pid).cpu_times()
            found.server_cpu_s = after.user + after.system - before.user - before.system
        finally:
            server.kill()
    return found


def best(kind: str, case: Case) -> Found:
    """The run of two with less CPU: other work on the machine only adds. httpx, which takes long, has one."""
    return min((measured(kind, case) for _ in range(1 if kind == "httpx" else 2)), key=lambda found: found.cpu_s)


NAMES = {
    "callbacks": "a bare uvloop reader that counts bytes in its callback",
    "reader": "a bare uvloop reader of asyncio's streams",
    "httpx": "the same controller over httpx",
}
BARS = {("callbacks", 256): 0.5, ("callbacks", 1000): 0.5, ("httpx", 256): 2.5, ("httpx", 1000): 8.0}


def compare(report: Report, case: Case, *, peers: list[str], barred: bool) -> None:
    """Rows of one case: the controller against each peer, in one go."""
    ours = best("controller", case)
    tokens = case.streams * case.tokens
    for peer in peers:
        theirs = best(peer, case)
        bar = BARS.get((peer, case.streams), 0.0) if barred else 0.0
        report.row(
            str(case),
            tokens / ours.cpu_s,
            "tokens per CPU second",
            against=NAMES[peer],
            ratio=theirs.cpu_s / ours.cpu_s,
            bar=f"ratio >= {bar:g}" if bar else "",
        )
        report.row(
            f"the same by the clock; client {ours.cpu_s / ours.wall_s:.0%} of a core, server "
            f"{ours.server_cpu_s / ours.wall_s:.0%} (there {theirs.cpu_s / theirs.wall_s:.0%} and "
            f"{theirs.server_cpu_s / theirs.wall_s:.0%})",
            tokens / ours.wall_s,
            "tokens/s",
            against=NAMES[peer],
            ratio=theirs.wall_s / ours.wall_s,
        )


def hold_open(report: Report, num_streams: int, *, seconds: float) -> None:
    case = Case(num_streams, "incremental", 16, int(seconds / 0.5) * 16, 0.5)
    found = measured("controller", case)
    what = f"{num_streams:,} streams held open for {found.wall_s:.0f} s at 32 tokens/s each"
    report.row(f"{what}: event-loop lag, 99th percentile", found.lag_p99_ms, "ms", bar="figure <= 50")
    report.row(f"{what}: memory of the process", found.kb_per_stream, "KB a stream", bar="figure <= 100")
    report.row(f"{what}: CPU", found.cpu_s / found.wall_s, "of a core")


def measure(report: Report, *, full: bool) -> None:
    peers = ["callbacks", "reader", "httpx"]
    if find_spec("httpx") is None:
        peers.remove("httpx")
        report.skip("against httpx", "httpx is not installed; pip install 'dora-rl[bench]'")
    for streams in (256, 1000):
        compare(report, Case(streams, "incremental", 16, 512), peers=peers, barred=True)
        if full:
            compare(report, Case(streams, "incremental", 16, 4096), peers=peers, barred=False)
    others = [("incremental", 1, 128), ("incremental", 64, 4096)]
    others += [("cumulative", 1, 128), ("cumulative", 16, 512), ("cumulative", 64, 1024)]
    for streams in (256, 1000, 10_000) if full else (256,):
        for form, per_chunk, tokens in others:
            case = Case(streams, form, per_chunk, tokens)
            compare(report, case, peers=peers if full and streams < 10_000 else ["callbacks"], barred=False)
    if full:  # httpx looks through all its connections at each opening and closing: hours
        compare(report, Case(10_000, "incremental", 16, 512), peers=["callbacks", "reader"], barred=False)
    hold_open(report, 10_000, seconds=30.0 if full else 10.0)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    arguments = parser(__doc__)
    arguments.add_argument("--case", help=argparse.SUPPRESS)
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--client", help=argparse.SUPPRESS)
    arguments.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.case:
        case = Case(*msgspec.json.decode(options.case))
        if options.serve:
            uvloop.run(serve(case))
        print(msgspec.json.encode(client(options.port, options.client, case)).decode())
        return
    report = Report(__doc__, full=options.full, sizes=f"Prompts of {PROMPT_TOKENS} tokens, groups of {GROUP_SIZE}")
    measure(report, full=options.full)
    report.print()


if __name__ == "__main__":
    main()
