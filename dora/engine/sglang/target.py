"""One server as a push sees it: each stage of a push is a call here, and each call one request of the client.

Invariant: a bucket is asked for only in a group that the server has joined and not left; any other ends a real server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.strategies import Pause
from dora.engine.sglang import protocol
from dora.engine.sglang.answers import read_server_info
from dora.engine.sglang.client import EngineClient
from dora.errors import RemoteError


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What a transfer must know of a server; equal for servers whose checksums can be compared."""

    release: str
    device: str  # cpu or cuda
    num_ranks: int  # tensor-parallel ranks, each a member of a process group
    can_join: bool  # it takes part in a process group (data-parallel servers do not)
    has_update_gate: bool  # updates that bring their tensors go between begin and end (SGLang 0.5.21 and later)


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The calls of a push, bound to one server; each raises `RemoteError` and has a deadline of its own."""

    client: EngineClient
    url: str
    groups: set[str] = field(default_factory=set, compare=False)  # joined and not left

    async def is_empty(self) -> bool:
        return (await self.client.loads(self.url)).is_empty

    async def pause(self, mode: Pause) -> None:
        """Stop decoding; `retract` also drops the KV of all requests, none loses a token."""
        await self.client.pause(self.url, mode)

    async def resume(self) -> None:
        await self.client.resume(self.url)

    async def flush_cache(self) -> bool:
        """False if a request is resident."""
        return await self.client.flush_cache(self.url)

    async def weight_version(self) -> str:
        return await self.client.weight_version(self.url)

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        """From a folder that the server reads itself."""
        await self.client.update_weights_from_disk(self.url, folder, label, timeout_s=timeout_s)

    async def shape(self) -> ServerShape:
        info = read_server_info(await self.client.server_info(self.url), url=self.url)
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
        """Returns when all ranks have met. The sender is rank 0, the server's ranks come after it."""
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
        await self.client.update(self.url, protocol.BEGIN_WEIGHT_UPDATE, {})

    async def end_update(self) -> None:
        await self.client.update(self.url, protocol.END_WEIGHT_UPDATE, {})

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
        if group not in self.groups:
            raise RemoteError(f"{self.url}: not in the group '{group}'; a bucket for it would end a real server")
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "weight_version": label,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self.client.update(self.url, protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED, body, timeout_s=timeout_s)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
        """Log-prob of each token after the first, given those before it."""
        return await self.client.prompt_logprobs(self.url, token_ids, timeout_s=timeout_s)

    async def weights_checksum(self, *, timeout_s: float) -> str | None:
        """Of all weights that the server holds; None if it cannot tell."""
        return await self.client.weights_checksum(self.url, timeout_s=timeout_s)
