"""The bare readers of bench/streams.py, and what all of its clients share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import msgspec
from servers.streams import CREDIT, END, HEAD, LABEL, PROMPT_TOKENS, Case, rendered

from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient


class Found(msgspec.Struct):
    """What one client process measured."""

    wall_s: float
    cpu_s: float
    server_cpu_s: float = 0.0
    lag_p99_ms: float = 0.0
    kb_per_stream: float = 0.0


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


def raw_requests(case: Case) -> Iterator[bytes]:
    """What EngineClient would send."""
    for number in range(case.streams):
        body = EngineClient.encode(
            GenerateRequest(
                id=f"{number:08}",
                tokens=[*range(PROMPT_TOKENS)],
                max_new_tokens=case.tokens,
                temperature=1.0,
                stop_tokens=[2],
                seed=number,
                label=LABEL,
            )
        )
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
