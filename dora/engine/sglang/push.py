"""One weight push: drained, flushed, paused, updated, flushed again, read back, continued, verified. With `live` it
reaches a server in the middle of its requests, which go on under the new weights: nothing is drained.

Invariant: a push either returns (the server has said that it holds `label`, and serves again) or raises `PushFailed`,
which tells the stage, and whether the weights may have changed or the server may have stayed paused (`doubtful`).
A doubtful server gets no work until a push is confirmed. The order works in every release of SGLang since 0.5.18;
how the weights travel in the update is the `Transfer`'s affair: `Disk` here, or `distributed.Distributed`. While
it lasts, nothing else is sent to the server, a question for its health neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

from dora.core.strategies import Pause
from dora.engine.errors import PushFailed
from dora.engine.paths import map_path
from dora.engine.sglang.target import PushTarget
from dora.errors import RemoteError

Stage = Literal["drain", "pause", "update", "flush after update", "read back", "continue", "verify"]

#: A server frees an ended request a moment after its last chunk; one that still holds work then, holds real work.
DRAIN_TIMEOUT_S: Final = 5.0
DRAIN_POLL_S: Final = 0.02


class Transfer(Protocol):
    """How the weights of a version come to a server."""

    async def update(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        """Replace the weights of a paused, empty server by those in `folder`; whatever is raised, they may have
        changed."""

    async def verify(self, server: PushTarget, folder: Path, *, timeout_s: float) -> None:
        """Raises `RemoteError` if the server, which serves again, does not hold the weights in `folder`."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The server reads the version's folder itself, at the path where it sees it."""

    path_map: Mapping[str, str] = field(default_factory=dict)  # prefix here -> prefix there, see `map_path`

    async def update(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        await server.update_weights(map_path(folder, self.path_map), label, timeout_s=timeout_s)

    async def verify(self, server: PushTarget, folder: Path, *, timeout_s: float) -> None:
        """It has read the folder whole, or said that it has not: the label is proof."""


#: Servers that see the version store at the same path.
DISK: Final = Disk()


@dataclass(slots=True)
class _Progress:
    """How far the push came, for the report of a failure."""

    stage: Stage = "drain"
    doubtful: bool = False  # from the moment the update is sent, and if the server did not continue
    also: str = ""  # what went wrong after the first failure


async def push(
    server: PushTarget,
    *,
    folder: Path,
    label: str,
    timeout_s: float,
    transfer: Transfer = DISK,
    live: Pause | None = None,
) -> None:
    """Give the weights in `folder` to an empty server, or with `live` to one whose requests go on under them."""
    progress = _Progress()
    update = partial(transfer.update, server, folder, label, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            if live is None:
                await _wait_until_empty(server)
            progress.stage = "pause"
            try:
                await _replace_weights(server, update, label=label, live=live, progress=progress)
            except BaseException:  # cancelled too: a server left paused would hang all later requests
                await _resume_after_failure(server, progress)
                raise
            progress.stage = "continue"
            await server.resume()
            progress.stage = "verify"
            await transfer.verify(server, folder, timeout_s=timeout_s)
    except TimeoutError as err:
        reason = f"the push did not end within {timeout_s:g} s{progress.also}"
        raise PushFailed(progress.stage, reason, doubtful=progress.doubtful) from err
    except RemoteError as err:
        raise PushFailed(progress.stage, f"{err}{progress.also}", doubtful=progress.doubtful) from err


async def _wait_until_empty(server: PushTarget) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            # The count of requests lags behind (docs/SGLANG.md); only a flush that is granted proves that none is left.
            while not (await server.is_empty() and await server.flush_cache()):  # noqa: ASYNC110 - it can only be polled
                await asyncio.sleep(DRAIN_POLL_S)
    except TimeoutError as err:
        raise RemoteError(f"the server still holds requests after {DRAIN_TIMEOUT_S:g} s") from err


async def _replace_weights(
    server: PushTarget, update: Callable[[], Awaitable[None]], *, label: str, live: Pause | None, progress: _Progress
) -> None:
    await server.pause(live or "in_place")
    progress.stage, progress.doubtful = "update", True
    await update()
    progress.stage = "flush after update"
    if live != "in_place" and not await server.flush_cache() and live is None:
        # (SGLang before 0.5.21 refuses while retracted requests wait; what it keeps has the old version's key.)
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
