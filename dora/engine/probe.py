"""What a server can do, found out once when it joins the run, and whether it lives.

A server that cannot prove C1 (no log-probs, or no word on the version of its weights) is refused in one line. What was
probed counts, not the version string: a build from source, a patched server or the embedded engine may carry any.
Nothing that is asked changes the server or disturbs its other users; so the begin/end gate is found by a method that
its route does not take (`EngineClient.has_route`), never by opening it. Called by `dora check` and by the controller
when an instance comes up.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from dora.engine import protocol
from dora.engine.client import EngineClient, GenerateRequest
from dora.engine.errors import RequestRefused
from dora.engine.stream import GenerateResult
from dora.errors import ConfigError, ProtocolError, RemoteError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the controller needs to know of a server before it sends work."""

    server_version: str  # as the server says; "unknown" if it does not
    is_incremental: bool  # streams new tokens only; a hint, the parser decides per chunk
    max_total_tokens: int  # KV room
    max_running: int  # slots
    context_length: int | None  # longest prompt + answer that it takes, however cut; None: the server does not say
    label: str  # of the weights it holds now
    model_path: str  # the folder it was started with, as it sees it; "" if it does not say
    has_spans: bool  # answers tell the version of each token, not of the last alone (SGLang 0.5.20 and later)
    has_update_gate: bool  # distributed updates need begin_ and end_weight_update around them (0.5.21 and later)
    has_weights_checker: bool  # tells checksums of the weights it holds


async def probe(client: EngineClient, url: str, *, timeout_s: float) -> Capabilities:
    """Ask for the server's arguments and load, and generate one token with everything a rollout needs."""
    try:
        async with asyncio.timeout(timeout_s):
            info = await client.server_info(url)
            loads = await client.loads(url)
            label = await client.weight_version(url)
            result = await _generate_one_token(client, url, server=_version(info))
            has_update_gate = await client.has_route(url, protocol.BEGIN_WEIGHT_UPDATE)
            has_weights_checker = await client.has_route(url, protocol.WEIGHTS_CHECKER)
    except TimeoutError as err:
        raise RemoteError(f"{url}: the server did not answer all questions within {timeout_s:g} s") from err
    return Capabilities(
        server_version=_version(info),
        is_incremental=bool(info.get("incremental_streaming_output")),
        max_total_tokens=loads.max_total_tokens,
        max_running=loads.max_running,
        # Inputs must be shorter than this, and so must prompt + answer: any of it may come back as an input. SGLang
        # keeps a few tokens of the context for itself and cuts an answer that would need them.
        context_length=info.get("max_req_input_len"),
        label=label,
        model_path=str(info.get("model_path") or ""),
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
    rid = f"probe-{uuid.uuid4().hex}"
    request = GenerateRequest(
        rid=rid, input_ids=[0], max_new_tokens=1, temperature=1.0, stop_token_ids=[], seed=0, extra_key=rid
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


def _version(info: dict[str, Any]) -> str:
    return str(info.get("version", "unknown"))
