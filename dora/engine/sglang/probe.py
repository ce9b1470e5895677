"""What a server can do, found out once when it joins the run, and whether it lives.

A server that cannot prove C1 (no log-probs, or no word on the version of its weights) is refused in one line. What was
probed counts, not the version string: a build from source, a patched server or the embedded engine may carry any.
Nothing that is asked changes the server or disturbs its other users; so the begin/end gate is found by a method that
its route does not take (`EngineClient.has_route`), never by opening it.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

from dora.engine.api import Capabilities, GenerateRequest, GenerateResult
from dora.engine.errors import RequestRefused
from dora.engine.sglang import protocol
from dora.engine.sglang.answers import read_server_info
from dora.engine.sglang.client import EngineClient
from dora.errors import ConfigError, ProtocolError, RemoteError


@dataclass(frozen=True, slots=True)
class Probed(Capabilities):
    """What was found, with what only SGLang's releases differ in."""

    is_incremental: bool  # streams new tokens only; a hint, the parser decides per chunk
    has_spans: bool  # answers tell the version of each token, not of the last alone (SGLang 0.5.20 and later)
    has_update_gate: bool  # distributed updates need begin_ and end_weight_update around them (0.5.21 and later)
    has_weights_checker: bool  # tells checksums of the weights it holds


async def probe(client: EngineClient, url: str, *, timeout_s: float) -> Probed:
    """Ask for the server's arguments and load, and generate one token with everything a rollout needs."""
    try:
        async with asyncio.timeout(timeout_s):
            info = read_server_info(await client.server_info(url), url=url)
            loads = await client.loads(url)
            label = await client.weight_version(url)
            result = await _generate_one_token(client, url, server=info.version)
            has_update_gate = await client.has_route(url, protocol.BEGIN_WEIGHT_UPDATE)
            has_weights_checker = await client.has_route(url, protocol.WEIGHTS_CHECKER)
    except TimeoutError as err:
        raise RemoteError(f"{url}: the server did not answer all questions within {timeout_s:g} s") from err
    return Probed(
        release=info.version,
        slots=loads.max_running,
        kv_tokens=loads.max_total_tokens,
        # Inputs must be shorter than this, and so must prompt + answer: any of it may come back as an input. SGLang
        # keeps a few tokens of the context for itself and cuts an answer that would need them.
        context_tokens=info.max_req_input_len,
        label=label,
        model_path=info.model_path or "",
        is_incremental=info.incremental_streaming_output,
        has_spans=result.has_spans,
        has_update_gate=has_update_gate,
        has_weights_checker=has_weights_checker,
    )


async def is_alive(client: EngineClient, url: str, *, timeout_s: float) -> bool:
    """Whether the server answers its health check in time; not to be asked while it is paused."""
    try:
        await client.health(url, timeout_s=timeout_s)
    except RemoteError:
        return False
    return True


async def _generate_one_token(client: EngineClient, url: str, *, server: str) -> GenerateResult:
    name = f"probe-{uuid.uuid4().hex}"
    request = GenerateRequest(
        id=name, tokens=[0], max_new_tokens=1, temperature=1.0, stop_tokens=[], seed=0, label=name
    )
    needed = f"DORA needs log-probs and the version of the weights (SGLang 0.5.18 or newer); this is {server}"
    try:
        result = await client.generate(url, request, lambda token_ids, logprobs: None)
    except ProtocolError as err:
        raise ConfigError(f"{err}: {needed}") from err
    except RequestRefused as err:
        if err.retryable:
            raise
        raise ConfigError(f"{err}: {needed}") from err
    if not result.spans:
        raise ConfigError(f"{url}: the answer tells no version of the weights: {needed}")
    return result
