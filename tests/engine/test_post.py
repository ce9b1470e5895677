"""One streamed POST: the body comes through whole in each of HTTP's framings, and nothing but the body."""

from __future__ import annotations

import gc
import socket
import weakref
from itertools import pairwise

import pytest
from scripted_server import ScriptedServer

from dora.engine import post as module
from dora.engine.errors import ServerGone
from dora.engine.post import Post, open_post
from dora.errors import ProtocolError

EVENTS = b"data: {}\n\ndata: [DONE]\n\n"
STREAM = b"Content-Type: text/event-stream; charset=utf-8\r\n"
CHUNKS = b"A\r\n" + EVENTS[:10] + b"\r\ne\r\n" + EVENTS[10:] + b"\r\n0\r\n\r\n"
CHUNKED = STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS
COUNTED = STREAM + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS
UNTIL_CLOSE = STREAM + b"\r\n" + EVENTS
OK = b"HTTP/1.1 200 OK\r\n"
OTHER_ANSWER = b"HTTP/1.1 503 No\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\nno!"


class Server:
    """The far end of a `Post`, without a socket."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.post = Post("http://server", b"", on_events=self.received.extend)

    async def says(self, *pieces: bytes) -> None:
        """Feed all of it, then end the connection."""
        for piece in pieces:
            self.post.data_received(piece)
        self.post.connection_lost(None)
        await self.post.ended


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(OK + CHUNKED, id="chunked"),
        pytest.param(OK + COUNTED, id="with its length"),
        pytest.param(b"HTTP/1.0 200 OK\r\n" + UNTIL_CLOSE, id="until the connection closes"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK + CHUNKED, id="behind an interim answer"),
        pytest.param(OK + CHUNKED + OTHER_ANSWER, id="with another answer behind it"),
        pytest.param(OK.lower().replace(b"http", b"HTTP") + CHUNKED.lower(), id="in small letters"),
    ],
)
async def test_a_stream_comes_through_whole_in_every_framing_at_every_split(answer: bytes) -> None:
    for at in range(len(answer) + 1):
        server = Server()
        await server.says(answer[:at], answer[at:])
        assert (server.post.status, server.post.is_stream) == (200, True)
        assert bytes(server.received).upper() == EVENTS.upper()
    server = Server()
    await server.says(*(answer[a:b] for a, b in pairwise(range(len(answer) + 1))))
    assert bytes(server.received).upper() == EVENTS.upper()


async def test_the_memory_of_an_answer_is_freed_without_garbage_collection() -> None:
    server = Server()
    gc.disable()
    try:
        await server.says(OK + CHUNKED)
        answer = weakref.ref(server.post)
        del server.post
        assert answer() is None
    finally:
        gc.enable()


async def test_the_received_part_of_a_truncated_body_is_delivered() -> None:
    for end in range(len(CHUNKED)):
        server = Server()
        if end < len(CHUNKED) - len(CHUNKS):
            with pytest.raises(ServerGone, match=r"^http://server: the connection broke off"):
                await server.says(OK + CHUNKED[:end])
        else:
            await server.says(OK + CHUNKED[:end])
        assert EVENTS.startswith(server.received)


async def test_an_error_is_kept_and_never_parsed_as_events() -> None:
    server = Server()
    await server.says(OTHER_ANSWER)
    assert (server.post.status, server.post.error, server.received) == (503, b"no!", b"")


async def test_an_error_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ERROR_BYTES", 1_000)
    server = Server()
    await server.says(b"HTTP/1.1 500 No\r\n\r\n", *[b"x" * 100] * 20)
    assert len(server.post.error) == 1_000


async def test_an_answer_that_is_not_a_stream_ends_with_its_headers() -> None:
    server = Server()
    server.post.data_received(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    assert server.post.ended.done()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"220 mail.example ESMTP\r\n", id="another protocol"),
        pytest.param(OK + STREAM + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", id="a broken chunk"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", id="an upgrade"),
    ],
)
async def test_what_is_not_http_is_a_protocol_error_that_names_the_server(answer: bytes) -> None:
    server = Server()
    with pytest.raises(ProtocolError, match=r"^http://server: not an HTTP answer"):
        await server.says(answer)


async def test_an_https_url_is_never_spoken_to_in_plain_text(server: ScriptedServer) -> None:
    url = server.url.replace("http:", "https:")
    with pytest.raises(ServerGone, match=rf"^{url}: cannot connect \(.*\); is the server running\?$"):
        await open_post(url, "/generate", body=b"{}", headers={}, on_events=bytes, timeout_s=10)
    assert server.calls == []


async def test_a_connection_attempt_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects, nobody begins TLS
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerGone, match=rf"^{url}: connection timed out; is the server running\?$"):
            await open_post(url, "/generate", body=b"{}", headers={}, on_events=bytes, timeout_s=0.1)
