"""The probe of a server's capabilities, made once when it joins the run.

A server that cannot prove C1 (it returns no log-probs, or no version of its weights) is refused, and so is one that
speculates with losses. The probe decides, not the version string, which means nothing in a build from source, a patched
server or the embedded engine. The probe changes nothing on the server and does not disturb other users.
"""

from __future__ import annotations

import asyncio
import uuid

from dora.engine.api import Capabilities, GenerateRequest
from dora.engine.errors import RequestRefused
from dora.engine.sglang.answers import ServerInfo, read_server_info
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.routing import routing_doubt
from dora.engine.sglang.speculation import require_lossless, slots_doubt
from dora.errors import ConfigError, ProtocolError, RemoteError


async def probe(client: EngineClient, url: str, *, timeout_s: float) -> Capabilities:
    """Read the server's arguments and load, and generate one token with everything that a rollout needs."""
    try:
        async with asyncio.timeout(timeout_s):
            arguments = await client.server_info(url)
            info = read_server_info(arguments, ServerInfo, url=url)
            loads = await client.loads(url)
            label = await client.weight_version(url)
            await _generate_one_token(client, url, server=info.version)
            speculation = await require_lossless(client, url, arguments, timeout_s=timeout_s)
    except TimeoutError as err:
        raise RemoteError(f"{url}: the probe did not end within {timeout_s:g} s") from err
    return Capabilities(
        release=info.version,
        slots=loads.max_running,
        kv_tokens=loads.max_total_tokens,
        # SGLang's limit of an input. It also limits prompt + answer, since any part of an answer may become input of
        # a resumed request. SGLang reserves a few tokens of the context and cuts an answer that would need them.
        context_tokens=info.max_req_input_len,
        label=label,
        model_path=info.model_path or "",
        speculation=speculation.algorithm,
        slots_doubt=slots_doubt(speculation, slots=loads.max_running),
        not_from_disk="an update from disk overwrites its draft model" if speculation.has_draft_model else "",
        routing_doubt=routing_doubt(arguments, url=url),
    )


async def _generate_one_token(client: EngineClient, url: str, *, server: str) -> None:
    """ConfigError if the answer lacks what DORA needs."""
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
        raise ConfigError(f"{url}: the answer contains no version of the weights: {needed}")
