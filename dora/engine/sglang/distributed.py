"""The `distributed` transfer: a sender process broadcasts the weights to the ranks of one server.

Each push has its own process group of the sender and the server's tensor-parallel ranks. So any version can go to any
server at any time, a dead server affects no other push, and no state survives that a restart would have to repair.
Invariant: an update returns only when every bucket was received; on any failure the sender is killed before the server
is called again, because a server in a collective does not answer.

The weights are verified when the server serves again: on the first server of a version by the log-probs of a short
prompt, which a sender computes from the version's folder; on later ones by comparing checksums with the first, or by
log-probs if either has no checksum. The label follows; only live requests need it before they continue.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from dora.engine.names import UNCONFIRMED
from dora.engine.sglang.closeness import require_close
from dora.engine.sglang.orders import Listening, Scored, ScoreOrder, Send, Sent
from dora.engine.sglang.push import Transfer
from dora.engine.sglang.senders import Senders
from dora.engine.sglang.target import PushTarget, ServerShape
from dora.errors import RemoteError

BUCKET_BYTES: Final = 256 * 2**20  # memory that the server needs besides its weights
#: Number of versions whose expected values are kept; there are never so many live versions.
REMEMBERED: Final = 64

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Distributed:
    """The `Transfer` of a run. Servers that cannot join a process group use `otherwise`."""

    def __init__(
        self, senders: Senders, *, otherwise: Transfer, dtype: str, use_nccl: bool, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`dtype`: data type of the published weights. `use_nccl`: the senders have a GPU (torch's first), so servers
        on GPUs use NCCL; all other servers use gloo."""
        self._senders = senders
        self._otherwise = otherwise
        self._dtype = dtype
        self._use_nccl = use_nccl
        self._bucket_bytes = bucket_bytes
        self._shapes: dict[str, ServerShape] = {}
        self._scoring = asyncio.Lock()
        self._scores: dict[Path, Scored] = {}
        self._checksums: dict[tuple[Path, ServerShape], str] = {}

    async def update(self, server: PushTarget, folder: Path, label: str, *, live: bool, timeout_s: float) -> None:
        shape = await self._shape(server)
        if not shape.can_join:
            return await self._otherwise.update(server, folder, label, live=live, timeout_s=timeout_s)
        group = f"dora-{uuid.uuid4().hex}"
        order = Send(
            folder=str(folder),
            group=group,
            address=await _address_towards(server.url),
            world_size=1 + shape.num_ranks,
            backend="nccl" if self._use_nccl and shape.device == "cuda" else "gloo",
            bucket_bytes=self._bucket_bytes,
            timeout_s=timeout_s,
        )
        try:
            async with self._senders.lend() as sender:
                rendezvous = await sender.ask(order, Listening, timeout_s=timeout_s)
                try:
                    await _receive(server, order, rendezvous, gated=shape.has_update_gate)
                except RemoteError as err:
                    raise RemoteError(f"{err}; {await sender.failure()}") from err
                await sender.receive(Sent, timeout_s=timeout_s)
        except BaseException:
            self._shapes.pop(server.url, None)  # the URL may belong to another server by now
            if shape.has_update_gate:
                with suppress(RemoteError):  # the gate is not open, or the server is gone; report the first failure
                    await server.end_update()
            with suppress(RemoteError):
                await server.leave_group(group)
            raise
        await server.leave_group(group)
        if live:
            await server.set_label(label)
        return None

    async def verify(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        shape = await self._shape(server)
        if not shape.can_join:
            return
        try:
            await self._compare(server, folder, shape, timeout_s=timeout_s)
        except BaseException:
            with suppress(RemoteError):  # with live requests it has the label already
                await server.set_label(UNCONFIRMED)
            raise
        await server.set_label(label)

    async def _compare(self, server: PushTarget, folder: Path, shape: ServerShape, *, timeout_s: float) -> None:
        """Compare the weights with the first server's by their checksum, or with the folder's by log-probs."""
        checksum = await server.weights_checksum(timeout_s=timeout_s)
        known = self._checksums.get((folder, shape))
        if checksum is not None and known is not None:
            if checksum != known:
                raise RemoteError(f"the weights have checksum {checksum}, but {known} on the first server")
            return
        await self._compare_logprobs(server, folder, timeout_s=timeout_s)
        if checksum is not None:
            _remember(self._checksums, (folder, shape), checksum)

    async def _shape(self, server: PushTarget) -> ServerShape:
        """Return the server's shape, queried once and again after a failure."""
        if server.url not in self._shapes:
            self._shapes[server.url] = await server.shape()
        return self._shapes[server.url]

    async def _compare_logprobs(self, server: PushTarget, folder: Path, *, timeout_s: float) -> None:
        expected = await self._score(folder, timeout_s=timeout_s)
        found = await server.prompt_logprobs(expected.token_ids, timeout_s=timeout_s)
        require_close(found, expected.logprobs, dtype=self._dtype, under=str(folder))

    async def _score(self, folder: Path, *, timeout_s: float) -> Scored:
        """Return the expected log-probs under these weights, computed once."""
        async with self._scoring:  # parallel pushes of a new version wait for one computation
            if folder not in self._scores:
                async with self._senders.lend() as sender:
                    scored = await sender.ask(ScoreOrder(folder=str(folder)), Scored, timeout_s=timeout_s)
                _remember(self._scores, folder, scored)
            return self._scores[folder]


async def _receive(server: PushTarget, order: Send, rendezvous: Listening, *, gated: bool) -> None:
    """Have the server join the group and receive all buckets. The sender sends a bucket when the previous one
    arrived."""
    timeout_s = order.timeout_s
    await server.join_group(
        order.group,
        address=order.address,
        port=rendezvous.port,
        world_size=order.world_size,
        backend=order.backend,
        timeout_s=timeout_s,
    )
    if gated:
        await server.begin_update()
    for bucket in rendezvous.buckets:
        await server.receive(
            order.group,
            names=bucket.names,
            dtypes=bucket.dtypes,
            shapes=bucket.shapes,
            timeout_s=timeout_s,
        )
    if gated:
        await server.end_update()


def _remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    known[key] = value
    while len(known) > REMEMBERED:
        del known[next(iter(known))]


async def _address_towards(url: str) -> str:
    """Return this host's address as the server at `url` sees it: loopback on the same host. Nothing is sent."""
    parts = urlsplit(url)
    try:
        loop = asyncio.get_running_loop()
        [(family, _, _, _, peer), *_] = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            address: str = probe.getsockname()[0]
    except OSError as err:
        raise RemoteError(f"{url}: no route to it ({err})") from err
    return address
