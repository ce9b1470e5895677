"""A TCP relay that cuts connections after a number of bytes, delays what it passes on, and opens some of them twice."""

from __future__ import annotations

import asyncio
import contextlib
import random


class CuttingRelay:
    """Relays connections to a port of this machine, badly, as its random numbers say."""

    def __init__(self, target: int, *, seed: int, max_delay_s: float = 0.01) -> None:
        self._target = target
        self._draw = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: list[tuple[asyncio.StreamWriter, ...]] = []
        self.is_cutting = True
        self.is_refusing = False
        self.num_cut = self.num_doubled = 0

    async def __aenter__(self) -> CuttingRelay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> None:
        while self._open:
            for writer in self._open.pop():
                writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        sinks = [far_writer]
        if self._draw.random() < 0.3:  # the same bytes once more, as if someone repeated them
            twin_reader, twin_writer = await asyncio.open_connection("127.0.0.1", self._target)
            sinks.append(twin_writer)
            self._start(self._swallow(twin_reader))
            self.num_doubled += 1
        ends = (writer, *sinks)
        self._open.append(ends)
        left = int(10 ** self._draw.uniform(2, 5))  # bytes, of both directions
        budget = [left]
        self._start(self._relay(reader, sinks, ends, budget))
        self._start(self._relay(far_reader, [writer], ends, budget))

    def _start(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, source, sinks, ends, budget: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                await asyncio.sleep(self._draw.uniform(0, self._max_delay_s))
                if self.is_cutting and len(data) >= budget[0]:
                    for sink in sinks:
                        sink.write(data[: budget[0]])
                    self.num_cut += 1
                    break
                budget[0] -= len(data)
                for sink in sinks:
                    sink.write(data)
        for writer in ends:
            writer.close()

    async def _swallow(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65_536):
                pass
