"""Adapters on a server: what it must be to serve several at once, and their loads and unloads, with a proof of each.

0.5.23 is the first release whose adapters were read; others may count requests or unload differently. Its answers do
not say which adapter they come from, so an adapter has to prove itself: before its first request, and again before it
is unloaded, the server must compute the trainer's log-probs of a short prompt under its name.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dora.adapter_files import Proof
from dora.engine.api import AdapterNeeds
from dora.engine.errors import AdapterDisproved, RequestRefused
from dora.engine.names import ADAPTER_PREFIX
from dora.engine.sglang.answers import AdapterInfo, is_older, read_server_info
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.closeness import require_close
from dora.engine.sglang.launch import sglang_adapters
from dora.errors import ConfigError, RemoteError

FIRST_RELEASE: Final = (0, 5, 23)


async def load(client: EngineClient, url: str, *, name: str, folder: str, proof: Proof, timeout_s: float) -> None:
    """Load an adapter from its folder, as the server sees it, and have it prove itself."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.load_adapter(url, name, folder, timeout_s=timeout_s)
            await _prove(client, url, name=name, proof=proof, timeout_s=timeout_s)
    except TimeoutError as err:
        raise RemoteError(f"{url}: the load of {name} did not end within {timeout_s:g} s") from err


async def unload(client: EngineClient, url: str, *, name: str, proof: Proof | None, timeout_s: float) -> None:
    """Unload an adapter and, with `proof`, have it prove itself first."""
    if proof is not None:
        await _prove(client, url, name=name, proof=proof, timeout_s=timeout_s)
    try:
        await client.unload_adapter(url, name, timeout_s=timeout_s)  # answered after a load of it that is under way
    except RequestRefused:
        if name in await client.adapters(url):
            raise


async def clear(client: EngineClient, url: str, *, timeout_s: float) -> None:
    """Unload the adapters of earlier controllers; ConfigError if the server has adapters of others."""
    loaded = await client.adapters(url)
    if others := [name for name in loaded if not name.startswith(ADAPTER_PREFIX)]:
        raise ConfigError(f"{url}: has adapters of others: {', '.join(others)[:200]}; unload them")
    for name in loaded:
        await client.unload_adapter(url, name, timeout_s=timeout_s)


async def _prove(client: EngineClient, url: str, *, name: str, proof: Proof, timeout_s: float) -> None:
    found = await client.prompt_logprobs(url, proof.token_ids, timeout_s=timeout_s, adapter=name)
    try:
        require_close(found, proof.logprobs, dtype=proof.dtype, under="the version's adapter")
    except RemoteError as err:
        raise AdapterDisproved(f"{url}: {name} is another adapter: {err}") from err


async def require_adapters(client: EngineClient, url: str, needs: AdapterNeeds) -> None:
    """Raise ConfigError, one line for each problem, unless the adapters can run in one batch with requests that have
    none, and the server unloads none of them by itself."""
    info = read_server_info(await client.server_info(url), AdapterInfo, url=url)
    if is_older(info.version, FIRST_RELEASE):
        first = ".".join(map(str, FIRST_RELEASE))
        raise ConfigError(f"{url}: adapters need SGLang {first} or newer; this is {info.version}")
    if not info.enable_lora:
        raise ConfigError(f"{url}: serves no adapters; start it with {_flags(needs)}")
    problems = []
    if info.dp_size != 1:
        problems.append(f"{url}: adapters can be loaded only with --dp-size 1, this server has {info.dp_size}")
    if info.max_loaded_loras is not None:
        problems.append(f"{url}: would unload adapters by itself; start it without --max-loaded-loras")
    if not info.lora_strict_loading:
        problems.append(f"{url}: would serve a part of an adapter; start it with --lora-strict-loading")
    if (
        info.max_loras_per_batch <= needs.count
        or (info.max_lora_rank or 0) < needs.rank
        or not {*needs.targets} <= {*(info.lora_target_modules or ())}
    ):
        problems.append(f"{url}: has no room for these adapters; start it with {_flags(needs)}")
    if problems:
        raise ConfigError(*problems)


def _flags(needs: AdapterNeeds) -> str:
    return " ".join(sglang_adapters(needs))
