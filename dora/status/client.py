"""Reading the status of a run in another process. Called by `dora status`."""

from __future__ import annotations

import aiohttp

from dora.errors import ConfigError, RemoteError
from dora.status.snapshot import Snapshot, decode


async def fetch(url: str, *, timeout_s: float = 10.0) -> Snapshot:
    """The status that the endpoint at `url` gives; ConfigError if nobody answers there."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: is not an http:// or https:// address")
    address = url.rstrip("/").removesuffix("/status") + "/status"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(address) as answer,
        ):
            body = await answer.read()
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL) as err:
        raise ConfigError(f"{address}: nobody answers there ({err}); is a run alive, and is this its address?") from err
    except TimeoutError as err:
        raise RemoteError(f"{address}: no answer within {timeout_s:g} s") from err
    except aiohttp.ClientError as err:
        raise RemoteError(f"{address}: {err}") from err
    if answer.status != 200:
        raise RemoteError(f"{address}: answers {answer.status}")
    return decode(body)
