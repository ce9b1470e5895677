"""Text of others that would control a terminal, and the rule for what is shown of it."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from dora.cli.output import say, tell
from dora.errors import DoraError

FORGED = "audit: C1, C2 and C3 hold"
HOSTILE = f"\x1b[2J\x1b]0;title\x07\x9b31m\r\n\u2028\u202e\x00\x08\t[/red][bold]{FORGED}\n{FORGED}"
#: The same for where no line may end and no NUL may be, such as a header.
HOSTILE_LINE = HOSTILE.replace("\r\n", "\r").replace("\n", "\r").replace("\x00", "")


def require_harmless(shown: str) -> None:
    """No control character, and no line that text of others has made."""
    assert all(line.isprintable() for line in shown.split("\n")), repr(shown)
    assert FORGED not in {line.strip().removeprefix("dora: ") for line in shown.split("\n")}


def show(outcome: object) -> None:
    """Print an error as the command line does, and anything else as a result."""
    if isinstance(outcome, DoraError):
        tell(*str(outcome).split("\n"))
    else:
        say(str(outcome))


def hostile_answers() -> list[bytes]:
    """Answers to any HTTP request, with such text in each part of the head, and in place of a body or of an answer."""
    found = []
    for text in (HOSTILE_LINE.encode(), f"\x9b31m\u202e\u2028{FORGED}".encode()):
        ok = b"HTTP/1.1 200 OK\r\n"
        heads = (
            b"HTTP/1.1 400 " + text, b"HTTP/1.1 " + text, text,
            *(ok + name + b": " + text for name in (b"Content-Type", b"Content-Length", b"Content-Encoding", text)),
            ok + b"Set-Cookie: " + text + b"=" + text + b"; Path=" + text,
            *(b"HTTP/1.1 307 Moved\r\nLocation: " + scheme + text for scheme in (b"http://", b"x:", b"/")),
            ok + b"Transfer-Encoding: chunked\r\n\r\n" + text,
        )  # fmt: skip
        found += [head + b"\r\n\r\n" for head in heads]
        found += [b"HTTP/1.1 %d X\r\nConnection: close\r\n\r\n" % status + HOSTILE.encode() for status in (200, 400)]
    return found


def as_json(body: object, *, status: int = 200, kind: str = "application/json") -> bytes:
    """An answer with this body, which is sent as it is if it is bytes."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


class Answering(socketserver.ThreadingTCPServer):
    """A server that answers every request with the same bytes, and closes the connection."""

    answer = b""
    block_on_close = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Request(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        size = 0
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        self.rfile.read(size)
        self.wfile.write(cast(Answering, self.server).answer)


@contextmanager
def answering() -> Iterator[Answering]:
    with Answering(("127.0.0.1", 0), _Request) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
