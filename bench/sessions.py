"""Sessions: what a turn of an agent that drives itself costs, and what many open sessions cost.

The server is that of a host (dora/environments/sessions.py), in a process of its own; its owner answers each request at
once, so that only HTTP, parsing and the comparison of the history count. The client is another process. A conversation
has messages of 400 characters, about 100 tokens each, as many as its size says, and grows by two a turn. Cost is CPU
time of the server's process, threads included, for each turn. The controller's part is `Episode.rewrite` with the same
history, whose turns were sampled: finding the row that it extends, and the tokens that follow. Many sessions: 10,000
that have had a turn and are between requests, and beside them 2,000 whose request waits; memory is what the process has
grown by, lag is the time by which a wait of 10 ms ends late while 2,000 requests come.
Ceiling: a request without a history.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import aiohttp
import psutil
import uvloop
from result import Report, parser

from dora.environments.api import Turn
from dora.environments.episode import Episode
from dora.environments.renderer import open_renderer
from dora.environments.sessions import Session, SessionEnded, SessionServer
from dora.seed.policy import path as seed_path
from dora.tasks.tokenizer import load_tokenizer

#: Characters of a message, about 100 tokens.
LENGTH = 400
TURNS, BETWEEN, OPEN = 200, 10_000, 2_000
TEXT = ("the quick brown fox " * 20)[:LENGTH]


async def own(session: Session, *, answers: bool) -> None:
    """Take the requests of a session; answer all of them, or only the first."""
    try:
        while True:
            await session.next_request()
            session.answer(Turn(TEXT, num_tokens=100, num_prompt_tokens=100))
            if not answers:
                await session.next_request()
                return
    except SessionEnded:
        pass


async def serve(count: int, *, answers: bool) -> None:
    """Open sessions, print their addresses and keys, and answer a line of stdin with what the process took so far."""
    async with SessionServer().running() as server:
        sessions = [server.open() for _ in range(count)]
        owners = [asyncio.create_task(own(session, answers=answers)) for session in sessions]
        print(json.dumps([(session.url, session.key) for session in sessions]), flush=True)
        found: list[float] = []
        lag = asyncio.create_task(late(found))
        while await asyncio.to_thread(sys.stdin.readline):
            process = psutil.Process()
            cpu_s = sum(process.cpu_times()[:2])
            worst = sorted(found)[len(found) * 99 // 100] if found else 0.0
            print(json.dumps({"cpu_s": cpu_s, "bytes": process.memory_info().rss, "lag_ms": worst * 1e3}), flush=True)
            found.clear()
        lag.cancel()
        for owner in owners:
            owner.cancel()


async def late(found: list[float]) -> None:
    while True:
        begun = time.monotonic()
        await asyncio.sleep(0.01)
        found.append(time.monotonic() - begun - 0.01)


class Server:
    """The process of the sessions."""

    def __init__(self, count: int, *, answers: bool = True) -> None:
        command = [sys.executable, __file__, "--serve", str(count), *(["--answers"] if answers else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.sessions: list[tuple[str, str]] = json.loads(self.process.stdout.readline())

    def took(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def history(num_tokens: int) -> list[dict[str, Any]]:
    pairs = max(0, num_tokens // 200)
    turn = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
    return [*turn * pairs, {"role": "user", "content": "and now?"}]


async def ask(http: aiohttp.ClientSession, url: str, key: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


async def turns(server: Server, num_tokens: int) -> float:
    """Return the CPU of a turn at this size, ms."""
    [(url, key)] = server.sessions
    async with aiohttp.ClientSession() as http:
        bodies = [json.dumps({"messages": history(num_tokens), "user": str(n)}).encode() for n in range(TURNS + 20)]
        for body in bodies[:20]:
            await ask(http, url, key, body)
        before = server.took()
        for body in bodies[20:]:
            await ask(http, url, key, body)
        return 1e3 * (server.took()["cpu_s"] - before["cpu_s"]) / TURNS


def rewrite_ms(num_tokens: int) -> float:
    """Return what the controller needs for a turn whose history has this size, ms of one core."""
    tokenizer = load_tokenizer(seed_path("seed-tools"))
    renderer = open_renderer(tokenizer)
    sampled = [*tokenizer.encode("x" * 99, special_tokens=False), *tokenizer.encode("<|im_end|>", special_tokens=False)]
    messages = [{"role": "user", "content": "x" * 92}]
    episode = Episode(renderer, messages, max_tokens=10 * num_tokens)
    spent, count = 0.0, 0
    while len(episode.context()) < num_tokens or count < 20:
        episode.append(sampled, [0.0] * len(sampled))
        turn = episode.end_turn("stop")
        messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": "x" * 92}]
        begun = time.thread_time()
        episode.rewrite(messages)
        if len(episode.context()) > 0.9 * num_tokens:
            spent, count = spent + time.thread_time() - begun, count + 1
    assert not episode.forks
    return 1e3 * spent / count


async def many(report: Report) -> None:
    server = Server(BETWEEN + OPEN, answers=False)
    body = json.dumps({"messages": history(200)}).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        empty = server.took()["bytes"]
        for start in range(0, BETWEEN + OPEN, 200):
            await asyncio.gather(*(ask(http, *one, body) for one in server.sessions[start : start + 200]))
        between = server.took()
        report.row(f"{BETWEEN + OPEN:,} sessions between requests: memory", (between["bytes"] - empty) / 1e3 /
                   (BETWEEN + OPEN), "KB each", bar="figure <= 64")  # fmt: skip
        second = json.dumps({"messages": history(200), "user": "again"}).encode()
        waiting = [asyncio.create_task(ask(http, *one, second)) for one in server.sessions[:OPEN]]
        await asyncio.sleep(4.0)
        opened = server.took()
        report.row(f"{OPEN:,} requests that wait: memory", (opened["bytes"] - between["bytes"]) / 1e3 / OPEN, "KB each",
                   bar="figure <= 128")  # fmt: skip
        report.row(f"{OPEN:,} requests at once: event-loop lag p99, by the clock", opened["lag_ms"], "ms",
                   bar="figure <= 50")  # fmt: skip
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    server.close()


def measure(report: Report) -> None:
    server = Server(1)
    alone = uvloop.run(turns(server, 0))
    for num_tokens, most in ((2_000, 1.5), (32_000, 6.0)):
        spent = uvloop.run(turns(server, num_tokens))
        report.row(f"a turn after {num_tokens:,} tokens: CPU of the session", spent, "ms", against=f"no history, "
                   f"{alone:.2f} ms", ratio=spent / alone, bar=f"figure <= {most}")  # fmt: skip
        report.row(f"a turn after {num_tokens:,} tokens: CPU of the controller's rewrite", rewrite_ms(num_tokens), "ms",
                   bar=f"figure <= {most}")  # fmt: skip
    server.close()
    uvloop.run(many(report))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, answers=options.answers))
        return
    report = Report(__doc__, full=options.full, sizes=f"{TURNS} turns; {BETWEEN:,} and {OPEN:,} sessions")
    measure(report)
    report.print()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
