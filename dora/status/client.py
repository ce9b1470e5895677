"""Client of a run's status server: reads the status and sends requests about instances."""

from __future__ import annotations

import secrets
from typing import Final

import aiohttp
import msgspec

from dora.errors import ConfigError, ProtocolError, RemoteError, one_line
from dora.observe.snapshot import Snapshot, decode
from dora.status.page_server import InstanceReply
from dora.status.server import InstanceRequest, RunRequest

#: Maximum size of a status: 64 servers, 4,096 groups of a step and 4,000 evaluations take 1.5 MB.
MAX_STATUS_BYTES: Final = 4 << 20


async def fetch(url: str, *, timeout_s: float = 10.0) -> Snapshot:
    """Return the status of the run at `url`; ConfigError if nothing answers there."""
    status, body = await _send("GET", url, "/status", timeout_s=timeout_s)
    if status != 200:
        raise RemoteError(f"{_base(url)}/status: answered {status}; is this a run's status address?")
    return decode(body)


async def ask(
    url: str, verb: str, instance: str | None = None, *, token: str, by: str = "", timeout_s: float = 120.0
) -> str:
    """Add, drain or remove an instance or, without one, evaluate or stop; return the run's answer. ConfigError if it
    refuses."""
    path = f"/run/{verb}" if instance is None else f"/instances/{verb}"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    id = secrets.token_hex(8)
    asked = RunRequest(id=id, by=by) if instance is None else InstanceRequest(id=id, by=by, instance=instance)
    body = msgspec.json.encode(asked)
    status, answer = await _send("POST", url, path, timeout_s=timeout_s, headers=headers, body=body)
    reply = reply_text(answer, address=_base(url) + path, status=status)
    if status != 200:
        raise ConfigError(reply)
    return reply


def reply_text(body: bytes, *, address: str, status: int) -> str:
    """Return the sentence in the body of a reply; ProtocolError if there is none."""
    try:
        return one_line(msgspec.json.decode(body, type=InstanceReply).said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"{address}: answered {status}; is this a run's status address?") from err


async def _send(
    method: str, url: str, path: str, *, timeout_s: float, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, bytes]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: not an address; write it as http://HOST:PORT")
    address = _base(url) + path
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(method, address, headers=headers, data=body or None) as answer,
        ):
            body = await answer.content.read(MAX_STATUS_BYTES + 1)
            while len(body) <= MAX_STATUS_BYTES and (more := await answer.content.read(MAX_STATUS_BYTES)):
                body += more
            if len(body) > MAX_STATUS_BYTES:
                raise RemoteError(f"{address}: answered more than {MAX_STATUS_BYTES:,} bytes; is this a run's address?")
            return answer.status, body
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL, UnicodeError) as err:
        why = (err.os_error.strerror or err.os_error) if isinstance(err, aiohttp.ClientConnectorError) else err
        raise ConfigError(f"{address}: no answer ({why}); is the run alive, and is this its status address?") from err
    except TimeoutError as err:
        raise RemoteError(f"{address}: no answer within {timeout_s:g} s") from err
    except aiohttp.ClientError as err:
        raise RemoteError(f"{address}: {err}") from err


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/status")
