"""Attacks on a port by a local user without keys: HTTP, raw bytes and ZeroMQ, bounded in number and time.

    python -m tests.chaos.attacks --seconds 30 PORT...

Loopback only. The last line is a JSON object: attack -> outcome -> count. An outcome is a status code, `closed` (by the
peer), `silence`, or `refused` (nothing listens any more).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import resource
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial

import zmq
import zmq.asyncio

HOST = "127.0.0.1"
SILENCE_S = 2.0
IDLE = 200  # silent connections to each port
SLOW = 20  # connections to each port that send a byte at a time
SMALL_MESSAGES = 10_000  # to each port, over ZeroMQ
PAUSE_S = 0.02  # between two short attacks on one port
MIB = 1 << 20

STATUS = ("/", "/status", "/metrics", "/healthz", "/instances/add", "/instances/drain", "/instances/remove")
ENGINE = (
    *("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"),
    *("/update_weight_version", "/begin_weight_update", "/end_weight_update", "/init_weights_update_group"),
    *("/update_weights_from_distributed", "/destroy_weights_update_group", "/weights_checker", "/flush_cache"),
    *("/health", "/health_generate", "/ready", "/model_info", "/server_info", "/v1/loads", "/get_load"),
)
#: Paths that may answer a GET or HEAD with 200 without a key.
OPEN = frozenset({"/", "/status", "/metrics", "/healthz", "/health", "/health_generate", "/ready"})
BODIES = {
    "JSON": b'{"instance": "0", "rid": "", "abort_all": true, "input_ids": [1], "model_path": "/etc", "mode": "abort"}',
    "garbage": b"\xff\xfe{]]\x00\x80",
}
HEADERS = {
    "no key": (),
    "a wrong key": (b"Authorization: Bearer \xc3\x28secret",),
    "a foreign host": (b"Host: evil.example",),
    "a foreign origin": (b"Origin: http://evil.example", b"Sec-Fetch-Site: cross-site"),
}


class Tally:
    """Counts by attack and outcome."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = defaultdict(Counter)
        self.breaches: list[str] = []

    def add(self, attack: str, outcome: str) -> None:
        self.found[attack][outcome] += 1


async def exchange(port: int, data: bytes, *, limit: int = 64) -> str:
    """Send, and read the first bytes of the answer."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(data)
        async with asyncio.timeout(SILENCE_S):
            with suppress(ConnectionError):
                await writer.drain()
            answer = await reader.read(limit)
    except TimeoutError:
        return "silence"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "closed"
    finally:
        if writer is not None:
            writer.transport.abort()
    if answer.startswith(b"HTTP/1."):
        return answer[9:12].decode("latin-1")
    return "closed" if not answer else "other bytes"


# -- HTTP --------------------------------------------------------------------------------------------------------------


def request(method: str, path: str, *headers: bytes, body: bytes = b"", kind: bytes = b"application/json") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), *headers]
    if not any(header.startswith(b"Host:") for header in headers):
        lines.append(b"Host: 127.0.0.1")
    if body:
        lines += [b"Content-Type: " + kind, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def requests() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield attack, method, path and bytes of every route with every method, header and body."""
    for path in (*STATUS, *ENGINE, "/nowhere", "/../../etc/passwd"):
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"):
            yield f"{method} on all routes", method, path, request(method, path)
        for name, headers in HEADERS.items():
            yield f"GET with {name}", "GET", path, request("GET", path, *headers)
            yield f"POST with {name}, no body", "POST", path, request("POST", path, *headers)
            for sort, body in BODIES.items():
                yield f"POST {sort} with {name}", "POST", path, request("POST", path, *headers, body=body)
        yield "POST of a form", "POST", path, request("POST", path, body=b"instance=0", kind=b"text/plain")


MALFORMED: dict[str, bytes] = {
    "a header of 1 MiB": b"GET /status HTTP/1.1\r\nX: " + b"a" * MIB + b"\r\n\r\n",
    "20,000 headers": b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    "a path of 256 KiB": b"GET /" + b"a" * (MIB // 4) + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "invalid UTF-8": b"GET /\xff\xfe%ff%00 HTTP/1.1\r\nHost: \xff\r\nAuthorization: \xff\xff\r\n\r\n",
    "a body that is announced and never comes": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{",
    "a body of 8 MiB": request("POST", "/generate", body=b" " * (8 * MIB)),
    "a negative length": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    "broken chunks": b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\nx",
    "two lengths": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\nabc",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "a websocket": request("GET", "/status", b"Upgrade: websocket", b"Connection: Upgrade"),
    "zeros": bytes(4096),
    "nothing but newlines": b"\r\n" * 4096,
    "random bytes": random.Random(1).randbytes(65_536),
    "100 requests in one write": request("GET", "/nowhere") * 100,
}


async def unread(port: int, seconds: float) -> str:
    """Request 2,000 pages and read none of them."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return "refused"
    writer.write(request("GET", "/status") * 2_000)
    await asyncio.sleep(seconds)
    writer.transport.abort()
    return "held"


# -- connections that stay ---------------------------------------------------------------------------------------------


async def hold(port: int, seconds: float, *, slowly: bool) -> str:
    """Hold a connection that sends nothing, or one byte of a header per second."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return "refused"
    until = time.monotonic() + seconds
    try:
        if slowly:
            writer.write(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        while (left := until - time.monotonic()) > 0:
            if slowly and not writer.is_closing():
                writer.write(b"a")
            try:
                async with asyncio.timeout(min(left, 1.0) if slowly else left):
                    if not await reader.read(1):
                        return "closed"
            except TimeoutError:
                continue
        return "held"
    except OSError:
        return "closed"
    finally:
        writer.transport.abort()


# -- ZeroMQ ------------------------------------------------------------------------------------------------------------

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def _greeting(mechanism: bytes) -> bytes:
    return _SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


ZMTP: dict[str, bytes] = {
    "ZMTP: a greeting": _greeting(b"NULL"),
    "ZMTP: a session without keys": _greeting(b"NULL") + _READY + b"\x00\x05hello",
    "ZMTP: a frame of 900 MiB": _greeting(b"NULL") + _READY + struct.pack(">BQ", 2, 900 * MIB) + bytes(4 * MIB),
    "ZMTP: a handshake of 900 MiB": _greeting(b"CURVE") + struct.pack(">BQ", 6, 900 * MIB) + bytes(4 * MIB),
    "ZMTP: a false CURVE hello": _greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
    "ZMTP: PLAIN": _greeting(b"PLAIN") + b"\x04\x10\x05HELLO\x04user\x04pass",
    "ZMTP: an old release": _SIGNATURE + b"\x01\x05\x00\x00" + struct.pack(">BQ", 2, 900 * MIB),
}


async def send_small(context: zmq.asyncio.Context, port: int, *, keys: bool, seconds: float) -> str:
    """Send small messages from a DEALER without keys, or with keys of its own."""
    with context.socket(zmq.DEALER) as dealer:
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, SMALL_MESSAGES), (zmq.RECONNECT_IVL, 500)):
            dealer.setsockopt(option, value)
        if keys:
            public, secret = zmq.curve_keypair()
            dealer.curve_publickey, dealer.curve_secretkey = public, secret
            dealer.curve_serverkey, _ = zmq.curve_keypair()
        dealer.connect(f"tcp://{HOST}:{port}")
        with suppress(zmq.Again):
            for _ in range(SMALL_MESSAGES):
                await dealer.send(b"x" * 20, zmq.NOBLOCK)
        return "other bytes" if await dealer.poll(1000 * seconds) else "silence"  # HTTP's 400, say


# -- all of it ---------------------------------------------------------------------------------------------------------


class Attack:
    """Run all attacks on some ports at once."""

    def __init__(self, ports: list[int], *, seconds: float) -> None:
        self.ports = ports
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self.tally = Tally()

    async def run(self) -> None:
        with zmq.asyncio.Context() as context:
            async with asyncio.TaskGroup() as tasks:
                for port in self.ports:
                    for name, work, count in self._staying(context, port):
                        for _ in range(count):
                            tasks.create_task(self._note(name, work))
                    tasks.create_task(self._in_turn(port))

    def _staying(
        self, context: zmq.asyncio.Context, port: int
    ) -> Iterator[tuple[str, Callable[[], Awaitable[str]], int]]:
        seconds = self.seconds
        yield "idle connections", partial(hold, port, seconds, slowly=False), IDLE
        yield "slow requests", partial(hold, port, seconds, slowly=True), SLOW
        yield "2,000 requests, answers unread", partial(unread, port, seconds), 1
        for keys, name in ((False, "no keys"), (True, "other keys")):
            small = partial(send_small, context, port, keys=keys, seconds=seconds)
            yield f"ZeroMQ: {SMALL_MESSAGES:,} messages, {name}", small, 1

    async def _note(self, name: str, work: Callable[[], Awaitable[str]]) -> None:
        self.tally.add(name, await work())

    async def _in_turn(self, port: int) -> None:
        """Repeat the short attacks on one port, in a random order that depends on the port."""
        raw, well_formed = [("", "", name, data) for name, data in {**MALFORMED, **ZMTP}.items()], [*requests()]
        for kind in (raw, well_formed):
            random.Random(port).shuffle(kind)
        while True:
            for attack, method, path, data in (*raw, *well_formed):
                if time.monotonic() >= self.until:
                    return
                outcome = await exchange(port, data)
                self.tally.add(attack or path, outcome)
                if method and outcome.startswith("2") and not (method in ("GET", "HEAD") and path in OPEN):
                    self.tally.breaches.append(f"{method} {path} ({attack}) at port {port}: {outcome}")
                await asyncio.sleep(PAUSE_S)  # the rate of the attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("ports", type=int, nargs="+", metavar="PORT")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the victim may hang up
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = Attack(options.ports, seconds=options.seconds)
    asyncio.run(attack.run())
    json.dump({"attacks": attack.tally.found, "breaches": attack.tally.breaches[:20]}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
