"""One weight push (drain, flush, pause, update, flush again, continue, verify, read back), and a server's take-over.

With `live`, nothing is drained: running requests continue under the new weights. Invariants: a push either returns (the
server has reported `label` and serves again) or raises `PushFailed`, which names the stage and tells whether the
weights may have changed or the server may still be paused (`doubtful`). A doubtful server gets no work until a push is
confirmed. Before the weights change, the server's label becomes `UNCONFIRMED`; it becomes `label` once they are proved,
so that a later controller knows what the server holds, even if this one died at any point. This
order works in every release of SGLang since 0.5.18. The `Transfer` moves the weights: `Disk` here, or
`distributed.Distributed`. During a push, nothing else is sent to the server, not even a health check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

from dora.core.strategies import Pause
from dora.engine.api import OnStage, PushStage, no_stage
from dora.engine.errors import PushFailed, RequestRefused
from dora.engine.names import UNCONFIRMED, is_same_run
from dora.engine.paths import map_path
from dora.engine.sglang.protocol import UNREAD
from dora.engine.sglang.target import PushTarget
from dora.errors import RemoteError

Stage = Literal["drain", "pause", "update", "flush after update", "continue", "verify", "read back"]
_REPORTED: Final[Mapping[Stage, PushStage]] = {
    "drain": "drain",
    "pause": "drain",
    "update": "load",
    "flush after update": "verify",
    "continue": "verify",
    "verify": "verify",
    "read back": "verify",
}

#: A server frees a finished request shortly after its last chunk. A request that it still holds after this time is
#: running.
DRAIN_TIMEOUT_S: Final = 5.0
DRAIN_POLL_S: Final = 0.02


class Transfer(Protocol):
    """How the weights of a version reach a server."""

    async def update(self, server: PushTarget, folder: Path, label: str, *, live: bool, timeout_s: float) -> None:
        """Load the weights in `folder` into a paused server. After any error, they may have changed.

        The server gets its label if this proves the weights, or if requests continue under them (`live`).
        """

    async def verify(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        """Give the server, which serves again, its label; `RemoteError` if it does not hold the weights in `folder`."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The server reads the version's folder itself."""

    path_map: Mapping[str, str] = field(default_factory=dict)  # prefix on this host -> on the server; see `map_path`

    async def update(self, server: PushTarget, folder: Path, label: str, *, live: bool, timeout_s: float) -> None:
        await server.update_weights(map_path(folder, self.path_map), label, timeout_s=timeout_s)

    async def verify(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        """Nothing to do: the server takes the label only if it has read the whole folder."""


#: For servers that see the version store at the same path.
DISK: Final = Disk()


@dataclass(slots=True)
class _Progress:
    """The progress of a push, for error reports."""

    on_stage: OnStage
    stage: Stage = "drain"
    doubtful: bool = False  # once the update was sent, or if the server was not resumed
    also: str = ""  # a second failure, after the first

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        self.stage = stage
        self.on_stage(_REPORTED[stage])


async def push(
    server: PushTarget,
    *,
    folder: Path,
    label: str,
    timeout_s: float,
    transfer: Transfer = DISK,
    live: Pause | None = None,
    on_stage: OnStage = no_stage,
) -> None:
    """Push the weights in `folder` to an empty server or, with `live`, to one whose requests continue under them."""
    progress = _Progress(on_stage)
    progress.enter("drain")
    update = partial(transfer.update, server, folder, label, live=live is not None, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            if live is None:
                await _wait_until_empty(server)
            progress.enter("pause")
            try:
                await _replace_weights(server, update, label=label, live=live, progress=progress)
            except BaseException:  # including cancellation: a paused server would block all later requests
                await _resume_after_failure(server, progress)
                raise
            progress.enter("continue")
            await server.resume()
            progress.enter("verify")
            await transfer.verify(server, folder, label, timeout_s=timeout_s)
            progress.enter("read back")
            if (held := await server.weight_version()) != label:
                raise RemoteError(f"the server reports version '{held}', expected '{label}'")
    except TimeoutError as err:
        reason = f"the push did not end within {timeout_s:g} s{progress.also}"
        raise PushFailed(progress.stage, reason, doubtful=progress.doubtful) from err
    except RemoteError as err:
        raise PushFailed(progress.stage, f"{err}{progress.also}", doubtful=progress.doubtful) from err


async def _wait_until_empty(server: PushTarget) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            # The request counts lag behind (docs/SGLANG.md); only a successful flush proves that the server is empty.
            while not (await server.is_empty() and await server.flush_cache()):  # noqa: ASYNC110 - it can only be polled
                await asyncio.sleep(DRAIN_POLL_S)
    except TimeoutError as err:
        raise RemoteError(f"the server still holds requests after {DRAIN_TIMEOUT_S:g} s") from err


async def _replace_weights(
    server: PushTarget, update: Callable[[], Awaitable[None]], *, label: str, live: Pause | None, progress: _Progress
) -> None:
    await server.pause(live or "in_place")
    before = await server.weight_version()
    progress.enter("update")
    progress.doubtful = True
    await server.set_label(UNCONFIRMED)
    try:
        await update()
    except RequestRefused as err:
        if UNREAD in str(err) and not is_same_run(before, label):
            await server.set_label(before)  # the server belongs to others, who may continue with it
        raise
    progress.enter("flush after update")
    if live != "in_place" and not await server.flush_cache() and live is None:
        # (SGLang before 0.5.21 refuses while retracted requests are queued; what it keeps has the old version's key.)
        raise RemoteError("a request arrived during the push; it may have seen both versions")


async def take_over(server: PushTarget, *, timeout_s: float) -> str:
    """Bring a server to rest that may be in the middle of an earlier controller's push or requests; return its label.

    A flush is answered after an update that is under way, which may therefore end well, and takes its label then. If it
    does not, or if the push had more to do, the label is `UNCONFIRMED`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await server.resume()
            while not (await server.flush_cache(timeout_s=timeout_s) and await server.is_empty()):
                await server.abort_all()  # again: requests that the pause held back arrive late
                await asyncio.sleep(DRAIN_POLL_S)
            if (label := await server.weight_version()) == UNCONFIRMED:
                with suppress(RequestRefused):  # there is no gate, or it is closed
                    await server.end_update()
            return label
    except TimeoutError as err:
        raise RemoteError(f"{server.url}: was not at rest within {timeout_s:g} s") from err


async def _resume_after_failure(server: PushTarget, progress: _Progress) -> None:
    try:
        await server.resume()
    except RemoteError as err:
        progress.doubtful = True
        progress.also = f"; then it could not be resumed: {err}"
