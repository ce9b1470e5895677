"""A node that has files, or receives them, and a connection to it.

Invariant: a source is not believed. Bytes are returned only if they are those that were asked for and have the checksum
that came with them; with TLS, the key is sent only after the certificate was verified.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from errno import ENOENT
from http.client import HTTPException, parse_headers
from socket import SHUT_RDWR, create_connection, socket
from ssl import SSLContext, SSLSocket
from typing import Final
from urllib.parse import urlsplit

import xxhash

PIECE_CHECKSUM: Final = "X-Piece-Checksum"  # header: XXH3, 128 bits, hex
_MAX_STATUS_BYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class VersionSource:
    """A node that has a version or a checkpoint, or receives it."""

    url: str  # http://host:port, or https:// with TLS
    key: str = field(repr=False)


class SourceLink:
    """A connection to a source, open from piece to piece. Calls block; `break_off` ends them from another thread.

    OSError, HTTPException or ValueError if something fails, after which the connection is of no more use.
    """

    def __init__(self, source: VersionSource, *, idle_s: float, tls: SSLContext | None) -> None:
        address, scheme = urlsplit(source.url), "https" if tls else "http"
        if address.scheme != scheme or not address.hostname or not address.port:
            raise HTTPException(f"an address is {scheme}://host:port")
        self.source = source
        self._host, self._port, self._tls, self._idle_s = address.hostname, address.port, tls, idle_s
        self._head = f"Host: {address.netloc}\r\nAuthorization: Bearer {source.key}\r\n"
        self._socket: socket | None = None
        self._asked: deque[tuple[str, int]] = deque()  # path and first byte of the pieces to come
        self._is_broken_off = False

    def _connect(self) -> socket:
        opened = create_connection((self._host, self._port), timeout=self._idle_s)
        if self._tls is not None:
            opened = self._tls.wrap_socket(opened, server_hostname=self._host, do_handshake_on_connect=False)
        self._stream = opened.makefile("rb")
        self._socket = opened
        if self._is_broken_off:
            raise TimeoutError
        if isinstance(opened, SSLSocket):
            opened.do_handshake()
        opened.settimeout(None)  # what takes too long is broken off
        return opened

    def break_off(self) -> None:
        self._is_broken_off = True
        if self._socket is not None:
            with suppress(OSError):  # it is not connected any more
                socket.shutdown(self._socket, SHUT_RDWR)  # that of SSLSocket would let a thread go on without TLS

    def close(self) -> None:
        if self._socket is not None:
            self._stream.close()
            self._socket.close()

    def ask(self, path: str, *, start: int, num_bytes: int) -> None:
        """Ask for a piece, unless it was asked for ahead. Pieces come in the order in which they are asked for."""
        if (path, start) not in self._asked:
            link = self._socket or self._connect()
            asked = f"GET {path} HTTP/1.1\r\n{self._head}Range: bytes={start}-{start + num_bytes - 1}\r\n\r\n"
            link.sendall(asked.encode("ascii"))
            self._asked.append((path, start))

    def receive(self, buffer: memoryview) -> tuple[memoryview, int]:
        """Return the next piece, verified, which fills the buffer or ends the file, and the file's size."""
        _, start = self._asked.popleft()
        status = self._stream.readline(_MAX_STATUS_BYTES).decode("ascii")[9:12]
        headers = parse_headers(self._stream)
        if status == "404":
            raise FileNotFoundError(ENOENT, "it does not have the file")
        if status not in ("206", "416"):
            raise HTTPException("the key is refused" if status == "401" else f"HTTP status {status}")
        given = headers.get("Content-Range", "")
        size = int(given.rpartition("/")[2])
        stop = max(start, min(start + len(buffer), size))
        expected = f"bytes {start}-{stop - 1}/{size}" if stop > start else f"bytes */{size}"
        if (given, headers.get("Content-Length")) != (expected, str(stop - start)) or "Transfer-Encoding" in headers:
            raise HTTPException("other bytes than those asked for")
        piece = buffer[: stop - start]
        is_whole = self._stream.readinto(piece) == len(piece)
        if not is_whole or xxhash.xxh3_128_hexdigest(piece) != headers.get(PIECE_CHECKSUM):
            raise HTTPException("a damaged piece")
        return piece, size
