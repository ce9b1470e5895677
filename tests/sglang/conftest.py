"""Two servers that must behave alike, real SGLang on this machine's CPU and `dora serve`, and a plain HTTP client.

The tests of this folder run on both, one server of each kind per module. The real one needs its environment: it is
used, and built first where it is missing (launch/sglang-cpu/build.py), if DORA_SGLANG=1 asks for it. It is 0.5.20, or
the release that DORA_SGLANG_RELEASE names; the embedded engine then speaks the dialect of that release.
The client here shares no code with `dora.engine`, so that the two cannot share a misunderstanding.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import aiohttp
import msgspec
import psutil
import pytest

from dora.embedded.dialect import DEFAULT_DIALECT, Dialect, dialect_of
from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient
from tests.embedded.conftest import (  # noqa: F401 - fixtures
    CONTEXT,
    EOS,
    VOCAB,
    model_a,
    model_b,
    model_of_other_shape,
    reference_a,
    reference_b,
)

Kind = Literal["embedded", "sglang"]

LAUNCH = Path(__file__).parents[2] / "launch" / "sglang-cpu"
#: The release under test, and the embedded engine's dialect for it.
DIALECT = dialect_of(os.environ.get("DORA_SGLANG_RELEASE", DEFAULT_DIALECT))
SLOTS = 4
QUEUE = 4
KV_TOKENS = SLOTS * CONTEXT
START_LABEL = "start"
SETTLE_S = 20.0  # until a server has ended aborted requests
PROMPT = [5, 6, 7, 8, 9, 10]
#: A request that runs until it is aborted.
LONG = {"max_new_tokens": CONTEXT - 100, "ignore_eos": True}


def launch_module(name: str) -> ModuleType:
    """A script of launch/sglang-cpu/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"sglang_cpu_{name}", LAUNCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Server:
    kind: Kind
    url: str
    launcher: subprocess.Popen[str]

    def main_process(self) -> psutil.Process:
        """The one that listens."""
        launcher = psutil.Process(self.launcher.pid)
        return launcher if self.kind == "embedded" else launcher.children()[0]

    def model_process(self) -> psutil.Process:
        """The one that runs the model."""
        if self.kind == "embedded":
            return self.main_process()
        [scheduler] = [one for one in self.main_process().children() if "scheduler" in " ".join(one.cmdline())]
        return scheduler


def _command(
    kind: Kind, model: Path, logs: Path, *, incremental: bool, dialect: Dialect, more: Sequence[str]
) -> list[str]:
    shared = [
        *("--slots", str(SLOTS), "--kv-tokens", str(KV_TOKENS)),
        *("--max-queued-requests", str(QUEUE), "--weight-version", START_LABEL),
        *more,
    ]
    if kind == "sglang":
        serve = [sys.executable, str(LAUNCH / "serve.py"), str(model), "--logs", str(logs)]
        return [*serve, *([] if incremental else ["--cumulative"]), *shared]
    serve = [sys.executable, "-m", "dora", "serve", "--model", str(model), "--port", "0", "--dialect", dialect.version]
    return [*serve, *(["--incremental-streaming-output"] if incremental else []), "--skip-tokenizer-init", *shared]


@contextmanager
def serving(
    kind: Kind,
    model: Path,
    logs: Path,
    *,
    incremental: bool = True,
    dialect: Dialect = DIALECT,
    more: Sequence[str] = (),
) -> Iterator[Server]:
    """A healthy server of `kind`, which is ended at the end if it is still running. `dialect`: of the embedded engine;
    `more`: flags."""
    command = _command(kind, model, logs, incremental=incremental, dialect=dialect, more=more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            line = launcher.stdout.readline()  # the launcher has a limit of its own
            assert line.startswith("ready http://127.0.0.1:"), launcher.communicate(timeout=30)
            yield Server(kind, line.split()[1], launcher)
        finally:
            launcher.terminate()
            launcher.communicate(timeout=60)


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.deep])]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if kind == "sglang" and os.environ.get("DORA_SGLANG") != "1":
        pytest.skip("the real server is asked for by DORA_SGLANG=1, which builds its environment where it is missing")
    return kind


@pytest.fixture(scope="module")
def server(kind: Kind, model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    with serving(kind, model_a, tmp_path_factory.mktemp("logs")) as server:
        yield server


def request(rid: str, *, endless: bool = False) -> GenerateRequest:
    return GenerateRequest(
        id=rid,
        tokens=PROMPT,
        max_new_tokens=LONG["max_new_tokens"] if endless else 24,
        temperature=1.0,
        stop_tokens=[EOS],
        seed=1,
        label=START_LABEL,
        ignore_end=endless,
    )


class Tokens:
    """The tokens that the client delivers."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._news = asyncio.Event()

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self._news.set()

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(SETTLE_S):
            while len(self.token_ids) < num_tokens:
                self._news.clear()
                await self._news.wait()


@dataclass
class Stream:
    """One streamed call, read in the background."""

    events: list[Any] = field(default_factory=list)  # decoded; `[DONE]` is left out
    done: bool = False  # `[DONE]` was seen
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.get("output_ids", [])]

    @property
    def logprobs(self) -> list[float]:
        return [triple[0] for event in self.events for triple in event["meta_info"]["output_token_logprobs"]]

    @property
    def meta(self) -> dict[str, Any]:
        """Of the newest event."""
        meta: dict[str, Any] = self.events[-1]["meta_info"]
        return meta

    def take(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line[6:].strip() == b"[DONE]":
            self.done = True
        else:
            self.events.append(msgspec.json.decode(line[6:]))
        self._news.set()

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(SETTLE_S):
            while len(self.token_ids) < num_tokens:
                self._news.clear()
                await self._news.wait()


@dataclass(frozen=True)
class Wire:
    """Plain HTTP to one server."""

    server: Server
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status, and the body: decoded if it is JSON, else text."""
        async with self.http.post(path, json={} if body is None else body) as answer:
            return answer.status, _decoded(answer, await answer.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as answer:
            return answer.status, _decoded(answer, await answer.text())

    async def generate(self, *, sampling: dict[str, Any], **fields: Any) -> Any:
        """The 200 answer of a unary call."""
        status, answer = await self.post("/generate", ask(sampling, **fields))
        assert status == 200, answer
        return answer

    @asynccontextmanager
    async def stream(
        self, *, sampling: dict[str, Any], **fields: Any
    ) -> AsyncIterator[tuple[Stream, asyncio.Task[Any]]]:
        """A call that streams in the background, and the task that ends with it."""
        stream = Stream()

        async def read() -> Stream:
            async with self.http.post("/generate", json=ask(sampling, stream=True, **fields)) as answer:
                assert answer.status == 200
                assert answer.headers["Content-Type"].startswith("text/event-stream")
                async for line in answer.content:
                    stream.take(line)
            return stream

        task = asyncio.create_task(read(), name="stream")
        try:
            yield stream, task
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def round_trip(self) -> None:
        """Through the scheduler and back: a request that has just ended leaves the batch before the next call.

        A pause that comes sooner keeps it there, and an update that flushes then ends 0.5.20 (an assertion).
        """
        await self.get("/server_info")

    async def load(self) -> dict[str, Any]:
        _, answer = await self.get("/v1/loads")
        load: dict[str, Any] = answer["loads"][0]
        return load

    async def until_load(self, **wanted: int) -> None:
        """Wait until /v1/loads reports so; SGLang updates its counts only now and then."""

        async def says_so() -> bool:
            load = await self.load()
            return all(load[name] == value for name, value in wanted.items())

        await _poll(says_so)

    async def weight_version(self) -> str:
        _, info = await self.get("/model_info")
        label: str = info["weight_version"]
        return label

    async def update(self, folder: Path, label: str, **fields: Any) -> tuple[int, Any]:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": False, **fields}
        return await self.post("/update_weights_from_disk", body)

    async def settle(self, model: Path) -> None:
        """Back to an empty server that holds `model` under the label it started with."""
        await self.post("/continue_generation")
        await self.post("/abort_request", {"abort_all": True})

        async def is_empty() -> bool:
            return (await self.post("/flush_cache"))[0] == 200

        await _poll(is_empty)
        if await self.weight_version() != START_LABEL:
            await self.update(model, START_LABEL)
            await self.post("/flush_cache")


def spans_of(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The spans that the server reports; before 0.5.20, one span with the label at the end."""
    if DIALECT.has_spans:
        spans: list[dict[str, Any]] = meta["weight_versions"]
        return spans
    assert "weight_versions" not in meta
    return [{"version": meta["weight_version"], "start": 0, "end": meta["completion_tokens"]}]


def ask(sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling, **fields}


async def _poll(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SETTLE_S):
        while not await holds():  # noqa: ASYNC110 - another process's state can only be polled
            await asyncio.sleep(0.02)


def _decoded(answer: aiohttp.ClientResponse, text: str) -> Any:
    return msgspec.json.decode(text) if "json" in answer.content_type and text else text


@pytest.fixture
async def wire(server: Server, model_a: Path) -> AsyncIterator[Wire]:  # noqa: F811
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(force_close=True)  # SGLang closes a kept connection after a 500
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as http:
        wire = Wire(server, http)
        yield wire
        await wire.settle(model_a)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=64, vocab_size=VOCAB) as client:
        yield client
