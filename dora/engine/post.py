"""One streamed POST on a connection of its own: how `EngineClient.generate` reads answers.

aiohttp's session costs 15 us of CPU for every chunk (a queue, a future, a step of a task); here the socket's callback
runs the HTTP parser, which hands the body on, 0.3 us (bench/streams.py). Invariant: the body is handed on as it
arrives, nothing waits in a queue, and `ended` is done once the answer or the connection has ended, whichever comes
first; it holds the error that the receiver of the body raised, if it did.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from dora.engine.errors import ServerGone
from dora.engine.local import NoConnectionLeft, is_local
from dora.errors import ConfigError, ProtocolError

#: Kept of an answer that is no stream: an error, which is never so long.
MAX_ERROR_BYTES: Final = 2**20
_PORTS: Final = {"http": 80, "https": 443}


class Post(asyncio.Protocol):
    """Sends `request` once the connection is there, and reads one answer."""

    def __init__(self, source: str, request: bytes, *, on_events: Callable[[bytes], None]) -> None:
        self.status = 0  #: 0: no answer yet
        self.content_type = ""
        self.error = bytearray()  #: the body of an answer that is no stream of events
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._source = source  # url of the server, for messages
        self._request = request
        self._on_events = on_events
        self._take: Callable[[bytes], object] = self._keep
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    def abort(self) -> None:
        """Close the connection now; the server then drops the request."""
        if self._transport is not None:
            self._transport.abort()

    # -- what the socket says -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as err:
            self._end(ProtocolError(f"{self._source}: not an HTTP answer ({err})"))

    def connection_lost(self, exc: Exception | None) -> None:
        reason = exc or "no answer"
        self._end(None if self.status else ServerGone(f"{self._source}: the connection broke off ({reason})"))
        self._parser = self._transport = None  # both refer to this: in a cycle, the answer would stay for long

    # -- what the HTTP parser says ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status and name.lower() == b"content-type":
            self.content_type = value.partition(b";")[0].strip().lower().decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.status or status < 200:
            return  # something behind the answer, or before it
        self.status = status
        if self.is_stream:
            self._take = self._on_events
        elif status == 200:
            self._end()

    def on_body(self, body: bytes) -> None:
        try:
            self._take(body)
        except Exception as err:  # noqa: BLE001  belongs to the caller, who awaits `ended`
            self._end(err)

    def on_message_complete(self) -> None:
        if self.status:
            self._end()

    def _keep(self, body: bytes) -> None:
        if len(self.error) < MAX_ERROR_BYTES:
            self.error += body

    def _end(self, error: Exception | None = None) -> None:
        self._take = bytes  # what may still come is dropped
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)


async def open_post(
    url: str,
    path: str,
    *,
    body: bytes,
    headers: Mapping[str, str],
    on_events: Callable[[bytes], None],
    timeout_s: float,
) -> Post:
    """Connect to the server at `url` within `timeout_s` and send; the answer takes the time that it takes.

    ServerGone if the server cannot be reached, NoConnectionLeft if this host cannot open a connection.
    """
    parts, host, port = _split(url)
    request = _head(parts, path, headers={**headers, "Content-Length": str(len(body))}) + body
    try:
        async with asyncio.timeout(timeout_s):
            _, post = await asyncio.get_running_loop().create_connection(
                lambda: Post(url, request, on_events=on_events),
                host,
                port,
                ssl=_tls() if parts.scheme == "https" else None,
            )
    except TimeoutError as err:
        raise ServerGone(f"{url}: no connection in time; is the server running?") from err
    except OSError as err:
        if is_local(err):
            raise NoConnectionLeft(err.strerror or str(err)) from err
        raise ServerGone(f"{url}: cannot connect ({err.strerror or err}); is the server running?") from err
    return post


def _split(url: str) -> tuple[SplitResult, str, int]:
    """A server's url, with its host and port."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (KeyError, ValueError):
        port = 0
    if not port or parts.scheme not in _PORTS or not parts.hostname or not url.isascii():
        raise ConfigError(f"{url}: not a server url; write it as http://HOST:PORT")
    return parts, parts.hostname, port


def _head(parts: SplitResult, path: str, *, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
