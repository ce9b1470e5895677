"""`api.InferenceEngine` for SGLang, on top of `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dora.adapter_files import Proof
from dora.core.strategies import Pause
from dora.engine.api import (
    AdapterNeeds,
    Capabilities,
    GenerateRequest,
    GenerateResult,
    KvUse,
    OnStage,
    OnTokens,
    no_stage,
)
from dora.engine.paths import map_path
from dora.engine.sglang import adapters
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.distributed import Distributed
from dora.engine.sglang.probe import probe
from dora.engine.sglang.push import DISK, Transfer, push, take_over
from dora.engine.sglang.senders import Senders
from dora.engine.sglang.target import PushTarget
from dora.errors import RemoteError


@dataclass(frozen=True, slots=True)
class SglangEngine:
    """All servers of one client."""

    client: EngineClient
    transfer: Transfer = DISK  # how pushes transfer weights
    path_map: Mapping[str, str] = field(default_factory=dict)  # see `engine.path_map`

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        return await self.client.generate(url, request, on_tokens)

    async def stop(self, url: str, request_id: str) -> None:
        await self.client.abort(url, request_id)

    async def is_alive(self, url: str, *, timeout_s: float) -> bool:
        try:
            await self.client.health(url, timeout_s=timeout_s)
        except RemoteError:
            return False
        return True

    async def examine(self, url: str, *, timeout_s: float) -> Capabilities:
        return await probe(self.client, url, timeout_s=timeout_s)

    async def label(self, url: str) -> str:
        return await self.client.weight_version(url)

    async def kv_use(self, url: str) -> KvUse:
        loads = await self.client.loads(url)
        return KvUse(loads.used_tokens, loads.max_total_tokens)

    async def resume(self, url: str) -> None:
        await self.client.resume(url)

    async def take_over(self, url: str, *, timeout_s: float) -> str:
        return await take_over(PushTarget(self.client, url), timeout_s=timeout_s)

    async def push(
        self,
        url: str,
        *,
        folder: Path,
        label: str,
        timeout_s: float,
        live: Pause | None,
        on_stage: OnStage = no_stage,
    ) -> None:
        await push(
            PushTarget(self.client, url),
            folder=folder,
            label=label,
            timeout_s=timeout_s,
            transfer=self.transfer,
            live=live,
            on_stage=on_stage,
        )

    async def require_adapters(self, url: str, needs: AdapterNeeds) -> None:
        await adapters.require_adapters(self.client, url, needs)

    async def clear_adapters(self, url: str, *, timeout_s: float) -> None:
        await adapters.clear(self.client, url, timeout_s=timeout_s)

    async def load_adapter(self, url: str, *, name: str, folder: Path, proof: Proof, timeout_s: float) -> None:
        seen = map_path(folder, self.path_map)
        await adapters.load(self.client, url, name=name, folder=seen, proof=proof, timeout_s=timeout_s)

    async def unload_adapter(self, url: str, *, name: str, proof: Proof | None, timeout_s: float) -> None:
        await adapters.unload(self.client, url, name=name, proof=proof, timeout_s=timeout_s)

    @asynccontextmanager
    async def sending(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, dtype: str, on_gpu: bool
    ) -> AsyncIterator[SglangEngine]:
        senders = Senders(argv, env=env, log=log)
        try:
            transfer = Distributed(senders, otherwise=self.transfer, dtype=dtype, use_nccl=on_gpu)
            yield SglangEngine(self.client, transfer, self.path_map)
        finally:
            await senders.close()

    def set_key(self, url: str, key: str) -> None:
        self.client.keys[url] = key
