"""One streamed POST on its own connection, for `EngineClient.generate`.

An aiohttp session takes 15 us of CPU per chunk (a queue, a future, a task step). Here the socket callback runs the HTTP
parser, which passes the body on: 0.3 us (bench/streams.py). Invariant: the body is passed on as it arrives, without
queueing. `ended` is done when the answer or the connection ends; if the receiver of the body raised an error, `ended`
holds that error.
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

MAX_ERROR_BYTES: Final = 2**20  # the rest of a longer error answer is dropped
_PORTS: Final = {"http": 80, "https": 443}


class Post(asyncio.Protocol):
    """Sends `request` once connected, and reads one answer."""

    def __init__(self, source: str, request: bytes, *, on_events: Callable[[bytes], None]) -> None:
        self.status = 0  #: 0 until the headers have arrived
        self.content_type = ""
        self.error = bytearray()  #: body of an answer that is not an event stream
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._source = source  # URL of the server, for error messages
        self._request = request
        self._on_events = on_events
        self._take: Callable[[bytes], object] = self._keep
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    def abort(self) -> None:
        """Close the connection at once; the server then drops the request."""
        if self._transport is not None:
            self._transport.abort()

    # --- callbacks of the socket

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
        self._parser = self._transport = None  # break the reference cycles, so that the answer is freed now

    # --- callbacks of the HTTP parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status and name.lower() == b"content-type":
            self.content_type = value.partition(b";")[0].strip().lower().decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.status or status < 200:
            return  # a second answer, or an informational one (1xx)
        self.status = status
        if self.is_stream:
            self._take = self._on_events
        elif status == 200:
            self._end()

    def on_body(self, body: bytes) -> None:
        try:
            self._take(body)
        except Exception as err:  # noqa: BLE001  raised to the caller, who awaits `ended`
            self._end(err)

    def on_message_complete(self) -> None:
        if self.status:
            self._end()

    def _keep(self, body: bytes) -> None:
        if len(self.error) < MAX_ERROR_BYTES:
            self.error += body

    def _end(self, error: Exception | None = None) -> None:
        self._take = bytes  # drop any further data
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
    """Connect to the server at `url` within `timeout_s` and send the request; the answer has no time limit.

    ServerGone if the server is unreachable, NoConnectionLeft if this host cannot open a connection.
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
        raise ServerGone(f"{url}: connection timed out; is the server running?") from err
    except OSError as err:
        if is_local(err):
            raise NoConnectionLeft(err.strerror or str(err)) from err
        raise ServerGone(f"{url}: cannot connect ({err.strerror or err}); is the server running?") from err
    return post


def _split(url: str) -> tuple[SplitResult, str, int]:
    """Split a server's URL; also return its host and port."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        (parts.hostname or "").encode("idna")
    except (KeyError, ValueError):  # a UnicodeError is a ValueError
        port = 0
    if not port or parts.scheme not in _PORTS or not parts.hostname or not url.isascii():
        raise ConfigError(f"{url}: not a server URL; write it as http://HOST:PORT")
    return parts, parts.hostname, port


def _head(parts: SplitResult, path: str, *, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
