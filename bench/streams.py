"""Client streams: the controller's path of answers (HTTP, parse, tokens kept, journal, core) against bare readers.

The controller is the real one, of a rollout-only run (clients/controller.py): Controller, core, effects, EngineClient,
journal and token log on disk; only graders, fleet and observer do nothing. The server (servers/streams.py) is a
separate process whose chunks, in SGLang's exact form, are rendered before the start. The streams begin together, and
the server stays at most half a round ahead, so that each chunk is a separate read, as with a server that decodes step
by step. The peers, each in its own process, are two bare readers on uvloop and the same controller with httpx
(`aiter_lines`, `json.loads`). One reader counts bytes in its protocol's callback, the least that any client can do
(converting the JSON of 16 tokens to Python's numbers takes as long again); the other awaits asyncio's streams. Ratios
compare tokens per CPU second of the client process, which other work on the machine affects least. The next row has the
ratio by the wall clock, with the CPU share of both sides; the side that is closer to a whole core is the bottleneck.
Answers have 512 tokens, as in regime A of docs/SIMULATION.md (median 465, mean 587), so that opening a stream counts as
much as there; --full adds 4,096. The last part holds 10,000 streams open at the pace of a fleet of 40 unsynchronized
instances, 16 tokens every 0.5 s. RLIMIT_NOFILE is raised to its hard limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from importlib.util import find_spec

import msgspec
import psutil
import uvloop
from clients.readers import Found, read_callbacks, read_streams
from result import FOLDER, Report, parser
from servers.streams import GROUP_SIZE, PROMPT_TOKENS, Case

READERS = {"callbacks": read_callbacks, "reader": read_streams}


def measure_client(kind: str, port: int, case: Case) -> Found:
    """One measurement, in this process."""
    if kind in READERS:
        return uvloop.run(READERS[kind](port, case))
    from clients.controller import run_controller  # a reader starts without it

    return uvloop.run(run_controller(port, case, over_httpx=kind == "httpx"))


def measured(kind: str, case: Case) -> Found:
    """A server and a client, each in a process of its own."""
    text = msgspec.json.encode(case).decode()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}
    serve = [sys.executable, str(FOLDER / "servers" / "streams.py"), text]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            before = psutil.Process(server.pid).cpu_times()
            command = [sys.executable, __file__, "--client", kind, port, text]
            done = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True)
            found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)
            after = psutil.Process(server.pid).cpu_times()
            found.server_cpu_s = after.user + after.system - before.user - before.system
        finally:
            server.kill()
    return found


def best(kind: str, case: Case) -> Found:
    """The run of two with less CPU: other work on the machine only adds. httpx, which takes long, has one."""
    return min((measured(kind, case) for _ in range(1 if kind == "httpx" else 2)), key=lambda found: found.cpu_s)


NAMES = {
    "callbacks": "a bare uvloop reader that counts bytes in its callback",
    "reader": "a bare uvloop reader of asyncio's streams",
    "httpx": "the same controller over httpx",
}
BARS = {("callbacks", 256): 0.5, ("callbacks", 1000): 0.5, ("httpx", 256): 2.5, ("httpx", 1000): 8.0}


def compare(report: Report, case: Case, *, peers: list[str], barred: bool) -> None:
    """Rows of one case: the controller against each peer, in one go."""
    ours = best("controller", case)
    tokens = case.streams * case.tokens
    for peer in peers:
        theirs = best(peer, case)
        bar = BARS.get((peer, case.streams), 0.0) if barred else 0.0
        report.row(
            str(case),
            tokens / ours.cpu_s,
            "tokens per CPU second",
            against=NAMES[peer],
            ratio=theirs.cpu_s / ours.cpu_s,
            bar=f"ratio >= {bar:g}" if bar else "",
        )
        report.row(
            f"the same by the clock; client {ours.cpu_s / ours.wall_s:.0%} of a core, server "
            f"{ours.server_cpu_s / ours.wall_s:.0%} (there {theirs.cpu_s / theirs.wall_s:.0%} and "
            f"{theirs.server_cpu_s / theirs.wall_s:.0%})",
            tokens / ours.wall_s,
            "tokens/s",
            against=NAMES[peer],
            ratio=theirs.wall_s / ours.wall_s,
        )


def hold_open(report: Report, num_streams: int, *, seconds: float) -> None:
    case = Case(num_streams, "incremental", 16, int(seconds / 0.5) * 16, 0.5)
    found = measured("controller", case)
    what = f"{num_streams:,} streams held open for {found.wall_s:.0f} s at 32 tokens/s each"
    report.row(f"{what}: event-loop lag, 99th percentile", found.lag_p99_ms, "ms", bar="figure <= 50")
    report.row(f"{what}: memory of the process", found.kb_per_stream, "KB a stream", bar="figure <= 100")
    report.row(f"{what}: CPU", found.cpu_s / found.wall_s, "of a core")


def measure(report: Report, *, full: bool) -> None:
    peers = ["callbacks", "reader", "httpx"]
    if find_spec("httpx") is None:
        peers.remove("httpx")
        report.skip("against httpx", "httpx is not installed; pip install 'dora-rl[bench]'")
    for streams in (256, 1000):
        compare(report, Case(streams, "incremental", 16, 512), peers=peers, barred=True)
        if full:
            compare(report, Case(streams, "incremental", 16, 4096), peers=peers, barred=False)
    others = [("incremental", 1, 128), ("incremental", 64, 4096)]
    others += [("cumulative", 1, 128), ("cumulative", 16, 512), ("cumulative", 64, 1024)]
    for streams in (256, 1000, 10_000) if full else (256,):
        for form, per_chunk, tokens in others:
            case = Case(streams, form, per_chunk, tokens)
            compare(report, case, peers=peers if full and streams < 10_000 else ["callbacks"], barred=False)
    if full:  # httpx looks through all its connections at each opening and closing: hours
        compare(report, Case(10_000, "incremental", 16, 512), peers=["callbacks", "reader"], barred=False)
    hold_open(report, 10_000, seconds=30.0 if full else 10.0)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    arguments = parser(__doc__)
    arguments.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.client:
        kind, port, case = options.client
        found = measure_client(kind, int(port), msgspec.json.decode(case, type=Case))
        print(msgspec.json.encode(found).decode())
        return
    report = Report(__doc__, full=options.full, sizes=f"Prompts of {PROMPT_TOKENS} tokens, groups of {GROUP_SIZE}")
    measure(report, full=options.full)
    report.print()


if __name__ == "__main__":
    main()
