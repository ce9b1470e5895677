"""`api.InferenceEngine` for SGLang, on top of `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dora.core.strategies import Pause
from dora.engine.api import Capabilities, GenerateRequest, GenerateResult, KvUse, OnStage, OnTokens, no_stage
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

    @asynccontextmanager
    async def sending(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, dtype: str, on_gpu: bool
    ) -> AsyncIterator[SglangEngine]:
        senders = Senders(argv, env=env, log=log)
        try:
            transfer = Distributed(senders, otherwise=self.transfer, dtype=dtype, use_nccl=on_gpu)
            yield SglangEngine(self.client, transfer)
        finally:
            await senders.close()

    def set_key(self, url: str, key: str) -> None:
        self.client.keys[url] = key
