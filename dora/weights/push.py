"""One weight push: drained, paused, flushed, updated, flushed again, read back, continued.

Invariant: a push either returns (the server has said that it holds `label`, and serves again) or raises `PushFailed`,
which tells the stage, and whether the weights may have changed or the server may have stayed paused (`doubtful`).
A doubtful server gets no work until a push is confirmed. The order
works in every dialect of SGLang (sglang.md §3.3). Called by the controller, which has stopped dispatch to the server
and suspended its health probes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal, Protocol

from dora.errors import RemoteError

Stage = Literal["drain", "pause", "flush", "update", "flush after update", "read back", "continue"]

#: A server frees an ended request a moment after its last chunk; one that still holds work then, holds real work.
DRAIN_TIMEOUT_S: Final = 5.0
DRAIN_POLL_S: Final = 0.02


class PushTarget(Protocol):
    """The calls of a push, bound to one server; each raises `RemoteError` and has a deadline of its own."""

    async def is_empty(self) -> bool: ...

    async def pause(self) -> None:
        """Stop decoding without touching requests."""

    async def resume(self) -> None: ...

    async def flush_cache(self) -> bool:
        """False if a request is resident."""

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None: ...

    async def weight_version(self) -> str: ...


class PushFailed(RemoteError):
    """The server is not confirmed to hold the label; `doubtful`: it may hold other weights, or be paused."""

    def __init__(self, stage: Stage, reason: str, *, doubtful: bool) -> None:
        super().__init__(f"weight push failed at '{stage}': {reason}")
        self.stage = stage
        self.reason = reason
        self.doubtful = doubtful


@dataclass(slots=True)
class _Progress:
    """How far the push came, for the report of a failure."""

    stage: Stage = "drain"
    doubtful: bool = False  # from the moment the update is sent, and if the server did not continue
    also: str = ""  # what went wrong after the first failure


async def push(server: PushTarget, *, folder: str, label: str, timeout_s: float) -> None:
    """Give the weights in `folder` (as the server sees it, see `map_path`) to an empty server."""
    progress = _Progress()
    try:
        async with asyncio.timeout(timeout_s):
            await _wait_until_empty(server)
            progress.stage = "pause"
            try:
                await _replace_weights(server, folder=folder, label=label, timeout_s=timeout_s, progress=progress)
            except BaseException:  # cancelled too: a server left paused would hang all later requests
                await _resume_after_failure(server, progress)
                raise
            progress.stage = "continue"
            await server.resume()
    except TimeoutError as err:
        reason = f"the push did not end within {timeout_s:g} s{progress.also}"
        raise PushFailed(progress.stage, reason, doubtful=progress.doubtful) from err
    except RemoteError as err:
        raise PushFailed(progress.stage, f"{err}{progress.also}", doubtful=progress.doubtful) from err


def map_path(folder: Path, path_map: Mapping[str, str]) -> str:
    """`folder` as a server sees it: the longest prefix (in whole components) found in `path_map` is replaced."""
    path = PurePosixPath(folder)
    for prefix in sorted(path_map, key=lambda prefix: len(PurePosixPath(prefix).parts), reverse=True):
        if path.is_relative_to(prefix):
            return str(PurePosixPath(path_map[prefix]) / path.relative_to(prefix))
    return str(path)


async def _wait_until_empty(server: PushTarget) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while not await server.is_empty():  # noqa: ASYNC110 - another process's state can only be polled
                await asyncio.sleep(DRAIN_POLL_S)
    except TimeoutError as err:
        raise RemoteError(f"the server still holds requests after {DRAIN_TIMEOUT_S:g} s") from err


async def _replace_weights(
    server: PushTarget, *, folder: str, label: str, timeout_s: float, progress: _Progress
) -> None:
    await server.pause()
    progress.stage = "flush"
    if not await server.flush_cache():
        raise RemoteError("a request is resident; drain again")
    progress.stage, progress.doubtful = "update", True
    await server.update_weights(folder, label, timeout_s=timeout_s)
    progress.stage = "flush after update"
    if not await server.flush_cache():
        raise RemoteError("a request came in during the push; it may have seen both versions")
    progress.stage = "read back"
    if (held := await server.weight_version()) != label:
        raise RemoteError(f"the server says that it holds '{held}', not '{label}'")


async def _resume_after_failure(server: PushTarget, progress: _Progress) -> None:
    try:
        await server.resume()
    except RemoteError as err:
        progress.doubtful = True
        progress.also = f"; then it did not continue: {err}"
