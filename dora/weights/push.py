"""One weight push: drained, paused, flushed, updated, flushed again, read back, continued, verified. With `live` it
reaches a server in the middle of its requests, which go on under the new weights: nothing is drained.

Invariant: a push either returns (the server has said that it holds `label`, and serves again) or raises `PushFailed`,
which tells the stage, and whether the weights may have changed or the server may have stayed paused (`doubtful`).
A doubtful server gets no work until a push is confirmed. The order works in every dialect of SGLang (sglang.md §3.3);
how the weights travel in the update is the `Transport`'s affair: `Disk` here, or `distributed.Distributed`. Called by
the controller, which has stopped dispatch to the server and suspended its health probes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, Literal, Protocol

from dora.core.strategies import Pause
from dora.errors import RemoteError

Stage = Literal["drain", "pause", "flush", "update", "flush after update", "read back", "continue", "verify"]

#: A server frees an ended request a moment after its last chunk; one that still holds work then, holds real work.
DRAIN_TIMEOUT_S: Final = 5.0
DRAIN_POLL_S: Final = 0.02


class ServerShape(Protocol):
    """What a transport must know of a server; equal for servers whose checksums can be compared."""

    @property
    def release(self) -> str:
        """Of SGLang, as it says."""

    @property
    def device(self) -> str:
        """cpu or cuda."""

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel ranks, each a member of a process group."""

    @property
    def can_join(self) -> bool:
        """It takes part in a process group (data-parallel servers do not)."""

    @property
    def has_update_gate(self) -> bool:
        """Updates that bring their tensors go between begin and end (SGLang 0.5.21 and later)."""


class PushTarget(Protocol):
    """The calls of a push, bound to one server; each raises `RemoteError` and has a deadline of its own."""

    @property
    def url(self) -> str: ...

    async def is_empty(self) -> bool: ...

    async def pause(self, mode: Pause) -> None:
        """Stop decoding; `retract` also drops the KV of all requests, none loses a token."""

    async def resume(self) -> None: ...

    async def flush_cache(self) -> bool:
        """False if a request is resident."""

    async def weight_version(self) -> str: ...

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        """From a folder that the server reads itself."""

    async def shape(self) -> ServerShape: ...

    async def join_group(
        self, group: str, *, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Returns when all ranks have met. The sender is rank 0, the server's ranks come after it."""

    async def leave_group(self, group: str) -> None: ...

    async def begin_update(self) -> None: ...

    async def end_update(self) -> None: ...

    async def receive(
        self,
        group: str,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        label: str | None,
        timeout_s: float,
    ) -> None:
        """Take these tensors from the group, in this order; `label` (if any) is that of the weights from now on."""

    async def prompt_logprobs(self, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
        """Log-prob of each token after the first, given those before it."""

    async def weights_checksum(self, *, timeout_s: float) -> str | None:
        """Of all weights that the server holds; None if it cannot tell."""


class Transport(Protocol):
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


class PushFailed(RemoteError):
    """The server is not confirmed to hold the label; `doubtful`: it may hold other weights, or be paused."""

    def __init__(self, stage: Stage, reason: str, *, doubtful: bool) -> None:
        super().__init__(f"weight push failed at '{stage}': {reason}")
        self.stage = stage
        self.reason = reason
        self.doubtful = doubtful


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
    transport: Transport = DISK,
    live: Pause | None = None,
) -> None:
    """Give the weights in `folder` to an empty server, or with `live` to one whose requests go on under them."""
    progress = _Progress()
    update = partial(transport.update, server, folder, label, timeout_s=timeout_s)
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
            await transport.verify(server, folder, timeout_s=timeout_s)
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
    server: PushTarget, update: Callable[[], Awaitable[None]], *, label: str, live: Pause | None, progress: _Progress
) -> None:
    await server.pause(live or "in_place")
    progress.stage = "flush"
    if live is None and not await server.flush_cache():
        raise RemoteError("a request is resident; drain again")
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
