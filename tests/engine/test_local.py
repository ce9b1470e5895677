"""A host that has no open files left: no server is blamed, and a run that cannot continue ends with a clear error."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog
import uvloop

from dora.engine import local
from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient
from dora.errors import RunFailed

#: A server with open files of its own: it says its port, then answers everything.
SERVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
META = b'"output_token_logprobs": [[-0.5, 7, null]], "completion_tokens": 1, "finish_reason": {"type": "stop"}'
class Handler(BaseHTTPRequestHandler):
    def do_GET(self, body=b""):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET(b'data: {"meta_info": {' + META + b', "weight_version": "a/0"}}\\n\\n')
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
REQUEST = GenerateRequest("r", [1], max_new_tokens=4, temperature=1.0, stop_tokens=[], seed=0, label="a/0")
Call = Callable[[EngineClient, str], Awaitable[object]]


@contextmanager
def no_open_file_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def generate(client: EngineClient, url: str) -> object:
    return await client.generate(url, REQUEST, lambda ids, logprobs: None)


async def ask_for_health(client: EngineClient, url: str) -> object:
    return await client.health(url, timeout_s=5.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.kill()


async def without_open_files(call: Call, url: str, *, for_long: bool = False) -> list[str]:
    """Make one call while no open file is left, until one is free unless `for_long`; return what was logged."""
    async with EngineClient(max_connections=4) as client, asyncio.timeout(20):
        with structlog.testing.capture_logs() as logged:
            with no_open_file_left():
                working = asyncio.ensure_future(call(client, url))
                while not logged or (for_long and not working.done()):  # noqa: ASYNC110 - a log can only be read
                    await asyncio.sleep(0.001)
            await working
    return [line["event"] for line in logged]


@pytest.mark.parametrize("call", [generate, ask_for_health])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_call_waits_while_this_host_has_no_open_file_left_and_says_so_once(
    url: str, call: Call, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PAUSE_S", 0.01)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(without_open_files(call, url)) == ["no_connection_left"]


@pytest.mark.parametrize("call", [generate, ask_for_health])
def test_a_run_whose_host_has_no_open_file_left_for_long_fails_and_names_the_limit(
    url: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PAUSE_S", 0.01)
    monkeypatch.setattr(local, "LIMIT_S", 0.1)
    with pytest.raises(RunFailed, match=r"\(Too many open files\); raise the limits of this host .*ulimit -n"):
        asyncio.run(without_open_files(call, url, for_long=True))


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_errors_of_a_server_or_the_network_are_not_local(number: int) -> None:
    assert not local.is_local(OSError(number, ""))
