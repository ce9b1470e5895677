"""The checks on every HTTP port of DORA: the bearer key, and protection from web pages.

A page in a browser on this machine can send requests to the machine's ports, loopback included. It cannot choose
`Host`, `Origin` or `Sec-Fetch-Site`, nor send a JSON `Content-Type` without permission, so these four headers reveal
it. Invariant: a refused request reaches no handler, and bytes that are not a request are not logged, because a stranger
could otherwise fill the disk.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

#: (status, text) -> the answer, in the server's own shape.
Refuse = Callable[[int, str], web.Response]

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::\d+)?")
_READS: Final = frozenset({"GET", "HEAD"})
#: Values of `Sec-Fetch-Site` if the user typed the address, or the page came from this port.
_OWN_SITES: Final = frozenset({None, "none", "same-origin"})


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for a malformed request: it is answered with 400, and its traceback would contain all its bytes."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


#: aiohttp's log of connections, for every server.
CONNECTION_LOG: Final = logging.getLogger("dora.connections")
CONNECTION_LOG.addFilter(_is_worth_logging)


def guard(*, name: str, open_reads: bool, refuse: Refuse) -> Middleware:
    """Return the middleware with the checks. `name`: the host that the server binds. `open_reads`: web pages may send
    GET requests, because these change nothing, and the page cannot read the answer."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal_of_host(request, name=name)
        if refusal is None and not (open_reads and request.method in _READS):
            refusal = _refusal_of_site(request.headers)
        if refusal is None and request.body_exists and request.content_type != "application/json":
            refusal = 415, "a body must be JSON: send Content-Type: application/json"
        return refuse(*refusal) if refusal is not None else await handler(request)

    return check


def knows(key: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request has `key` as its bearer token, compared in constant time."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(_bytes(given), _bytes(key))


def _bytes(text: str) -> bytes:
    """Encode a header or an environment variable, which may contain any bytes."""
    return text.encode("utf-8", "surrogateescape")


def _refusal_of_host(request: web.Request, *, name: str) -> tuple[int, str] | None:
    """Detect a web page whose host name now resolves to this machine (DNS rebinding): `Host` is then that name.

    Only connections on loopback are checked: other addresses may have names, proxies and port mappings that this
    process cannot know.
    """
    arrived_at = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if not arrived_at or not is_loopback(arrived_at[0]):
        return None
    found = _HOST.fullmatch(request.headers.get("Host", ""))
    host = found[1].strip("[]").lower() if found else ""
    if host in {"localhost", name.lower(), socket.gethostname().lower()} or is_loopback(host):
        return None
    return 421, "the Host header does not name this machine: use 127.0.0.1 or localhost"


def _refusal_of_site(headers: Mapping[str, str]) -> tuple[int, str] | None:
    host = headers.get("Host", "").lower()
    own = (None, f"http://{host}", f"https://{host}")
    if headers.get("Origin") not in own or headers.get("Sec-Fetch-Site") not in _OWN_SITES:
        return 403, "refused: the request comes from a web page of another site"
    return None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
