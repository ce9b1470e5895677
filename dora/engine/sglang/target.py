"""The calls of a push to one server, or of its take-over, each one request of the client.

Invariant: a bucket is requested only in a group that the server has joined and not left; anything else crashes SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.core.strategies import Pause
from dora.engine.sglang import protocol
from dora.engine.sglang.answers import ServerInfo, read_server_info
from dora.engine.sglang.client import EngineClient
from dora.errors import RemoteError

#: In updates by tensors: the draft model of speculative decoding keeps its weights. A server without one ignores it.
MODEL_ALONE: Final = {"selector": "target"}


@dataclass(frozen=True, slots=True)
class ServerShape:
    """The properties of a server that a transfer needs; equal if the checksums of two servers are comparable."""

    release: str
    device: str  # cpu or cuda
    num_ranks: int  # tensor-parallel ranks, each a member of a process group
    can_join: bool  # whether it can join a process group (data-parallel servers cannot)
    has_update_gate: bool  # distributed updates need begin and end calls around them (SGLang 0.5.21 and later)


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The calls of a push to one server. Each has a timeout and raises `RemoteError`."""

    client: EngineClient
    url: str
    groups: set[str] = field(default_factory=set, compare=False)  # joined and not left

    async def is_empty(self) -> bool:
        return (await self.client.loads(self.url)).is_empty

    async def pause(self, mode: Pause) -> None:
        """Stop decoding; `retract` also drops the KV of all requests. No tokens are lost."""
        await self.client.pause(self.url, mode)

    async def resume(self) -> None:
        await self.client.resume(self.url)

    async def abort_all(self) -> None:
        await self.client.abort_all(self.url)

    async def flush_cache(self, *, timeout_s: float | None = None) -> bool:
        """Return False if the server holds a request."""
        return await self.client.flush_cache(self.url, timeout_s=timeout_s)

    async def set_label(self, label: str) -> None:
        await self.client.set_label(self.url, label)

    async def weight_version(self) -> str:
        return await self.client.weight_version(self.url)

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        """Have the server load `folder`."""
        await self.client.update_weights_from_disk(self.url, folder, label, timeout_s=timeout_s)

    async def shape(self) -> ServerShape:
        info = read_server_info(await self.client.server_info(self.url), ServerInfo, url=self.url)
        return ServerShape(
            release=info.version,
            device=info.device,
            num_ranks=info.tp_size,
            can_join=info.dp_size == 1 and await self.client.has_route(self.url, protocol.INIT_WEIGHTS_UPDATE_GROUP),
            has_update_gate=await self.client.has_route(self.url, protocol.BEGIN_WEIGHT_UPDATE),
        )

    async def join_group(
        self, group: str, *, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Return when all ranks have joined. The sender is rank 0; the server's ranks follow."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self.client.update(self.url, protocol.INIT_WEIGHTS_UPDATE_GROUP, body, timeout_s=timeout_s)
        self.groups.add(group)

    async def leave_group(self, group: str) -> None:
        self.groups.discard(group)
        await self.client.update(self.url, protocol.DESTROY_WEIGHTS_UPDATE_GROUP, {"group_name": group})

    async def begin_update(self) -> None:
        await self.client.update(self.url, protocol.BEGIN_WEIGHT_UPDATE, MODEL_ALONE)

    async def end_update(self) -> None:
        await self.client.update(self.url, protocol.END_WEIGHT_UPDATE, {})

    async def receive(
        self,
        group: str,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> None:
        """Have the server receive these tensors from the group, in this order."""
        if group not in self.groups:
            raise RemoteError(f"{self.url}: has not joined group '{group}'; a bucket in it would crash SGLang")
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "flush_cache": False,
            "abort_all_requests": False,
            **MODEL_ALONE,
        }
        await self.client.update(self.url, protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED, body, timeout_s=timeout_s)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
        """Return the log-probs of all tokens but the first."""
        return await self.client.prompt_logprobs(self.url, token_ids, timeout_s=timeout_s)

    async def weights_checksum(self, *, timeout_s: float) -> str | None:
        """Return the checksum of all weights; None if the server does not support it."""
        return await self.client.weights_checksum(self.url, timeout_s=timeout_s)
