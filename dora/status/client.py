"""Reading the status of a run in another process, and asking something of its fleet. Called by `dora status` and
`dora instances`."""

from __future__ import annotations

import aiohttp
import msgspec

from dora.errors import ConfigError, ProtocolError, RemoteError
from dora.status.server import Answer, Ask
from dora.status.snapshot import Snapshot, decode


async def fetch(url: str, *, timeout_s: float = 10.0) -> Snapshot:
    """The status that the endpoint at `url` gives; ConfigError if nobody answers there."""
    status, body = await _send("GET", url, "/status", timeout_s=timeout_s)
    if status != 200:
        raise RemoteError(f"{_base(url)}/status: answers {status}")
    return decode(body)


async def ask(url: str, verb: str, instance: str, *, token: str, timeout_s: float = 120.0) -> str:
    """Add, drain or remove an instance; what the run says to that. ConfigError if it refuses."""
    path = f"/instances/{verb}"
    headers = {"Authorization": f"Bearer {token}"}
    body = msgspec.json.encode(Ask(instance))
    status, answer = await _send("POST", url, path, timeout_s=timeout_s, headers=headers, body=body)
    try:
        said = msgspec.json.decode(answer, type=Answer).said
    except msgspec.DecodeError as err:
        raise ProtocolError(f"{_base(url)}{path}: answers {status}, and not as a run does") from err
    if status != 200:
        raise ConfigError(said)
    return said


async def _send(
    method: str, url: str, path: str, *, timeout_s: float, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, bytes]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: is not an http:// or https:// address")
    address = _base(url) + path
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(method, address, headers=headers, data=body or None) as answer,
        ):
            return answer.status, await answer.read()
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL) as err:
        why = (err.os_error.strerror or err.os_error) if isinstance(err, aiohttp.ClientConnectorError) else err
        raise ConfigError(f"{address}: nobody answers there ({why}); is a run alive, and is this its address?") from err
    except TimeoutError as err:
        raise RemoteError(f"{address}: no answer within {timeout_s:g} s") from err
    except aiohttp.ClientError as err:
        raise RemoteError(f"{address}: {err}") from err


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/status")
