"""A controller that dies without a word, at a chosen point: `python -m tests.sglang.dying POINT URL FOLDER LABEL`.

Points: `requests` (some run, and one waits at a pause), or a step of a push: `paused`, `unnamed`, `sent` (the update is
under way), `updated`, `resumed`; or, over a process group, `joined` (an update gate is open) and `received` (a bucket).
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.distributed import Distributed
from dora.engine.sglang.push import DISK, Transfer, push
from dora.engine.sglang.senders import Senders
from dora.engine.sglang.target import PushTarget

BUCKET_BYTES = 4096
PUSH_S = 60.0


def die() -> NoReturn:
    """End as kill -9 does: nothing is cleaned up."""
    os._exit(0)


@dataclass(frozen=True)
class Dying(PushTarget):
    """The server of a push."""

    point: str = ""

    def _at(self, point: str) -> None:
        if point == self.point:
            die()

    async def pause(self, mode: Any) -> None:
        await super().pause(mode)
        self._at("paused")

    async def set_label(self, label: str) -> None:
        await super().set_label(label)
        self._at("unnamed")

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        update = asyncio.create_task(super().update_weights(folder, label, timeout_s=timeout_s))
        if self.point == "sent":
            await asyncio.wait({update}, timeout=0.02)
            die()
        await update
        self._at("updated")

    async def resume(self) -> None:
        await super().resume()
        self._at("resumed")

    async def receive(self, group: str, **bucket: Any) -> None:
        self._at("joined")
        await super().receive(group, **bucket)
        self._at("received")


async def leave_requests(client: EngineClient, url: str) -> NoReturn:
    """Two run, and one waits at the pause."""
    running = [asyncio.Event() for _ in range(2)]
    for number, begun in enumerate(running):
        asyncio.create_task(generate(client, url, number, begun))  # noqa: RUF006 - nothing outlives this process
    await asyncio.gather(*(begun.wait() for begun in running))
    await client.pause(url, "in_place")
    held = asyncio.create_task(generate(client, url, 2, asyncio.Event()))
    await asyncio.wait({held}, timeout=0.2)
    die()


async def generate(client: EngineClient, url: str, number: int, begun: asyncio.Event) -> None:
    request = GenerateRequest(f"dead-{number}", [5, 6, 7], 1000, 1.0, [], 1, "dead", ignore_end=True)
    await client.generate(url, request, lambda token_ids, logprobs: begun.set())


async def main(point: str, url: str, folder: str, label: str) -> None:
    async with EngineClient(max_connections=8) as client:
        if point == "requests":
            await leave_requests(client, url)
        transfer: Transfer = DISK
        if point in ("joined", "received"):
            senders = Senders([sys.executable, "-m", "dora", "send"], env=dict(os.environ), log=Path(os.devnull))
            transfer = Distributed(senders, otherwise=DISK, dtype="float32", use_nccl=False, bucket_bytes=BUCKET_BYTES)
        server = Dying(client, url, point=point)
        await push(server, folder=Path(folder), label=label, timeout_s=PUSH_S, transfer=transfer)
    raise AssertionError(f"it never came to '{point}'")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
