"""Episodes: what a turn costs the controller beside a single-turn answer, and what many waiting episodes cost.

The controller is that of bench/streams.py, with the renderer of Qwen3, the real pool and one real host (a process)
whose tool answers after a fixed time, so that there are 200 calls a second. Single-turn answers have as many tokens,
the same prompt and the same rate; their graders do nothing. The controller has one core; server (servers/turns.py) and
host have the others. Turns are counted from the end of the first round to the beginning of the last, so that neither
the burst at the start, in which episodes are set up, nor the end counts. Cost is CPU time of the controller's process,
threads included, less that of the idle process with its probe: three runs of each kind in turns, and the least of each,
as other work on the machine only adds. The lag of the event loop by the clock is, on a loaded machine, mostly that of
the machine; the bar is on its own part, the time by which a wait of 10 ms ended late and for which the loop was at
work. Memory is what the process has grown by when all 1,000 episodes have a call under way, less the tokens of their
records.
Ceiling: the single-turn answer. A turn has all of its work, the stream, the journal and the core, and the call besides.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from clients.episodes import Load, Measured, run_load, tokenizer_in, turn_of
from result import FOLDER, Report, parser
from servers.turns import Pace

STREAMS, RATE, PER_CHUNK, PAIRS = 1_000, 200.0, 16, 3


def measured(load: Load, *, every_s: float, spread_s: float) -> Measured:
    """A server and a client, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        turn = turn_of(tokenizer_in(Path(folder)), load.turn_tokens)
    pace = msgspec.json.encode(Pace(turn, PER_CHUNK, every_s, load.streams, spread_s)).decode()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{FOLDER.parent}:{FOLDER}"}
    serve = [sys.executable, str(FOLDER / "servers" / "turns.py"), pace]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(server.pid, cores[1:] or cores)
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            command = [sys.executable, __file__, "--client", port, msgspec.json.encode(load).decode()]
            done = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True)
            return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)
        finally:
            server.kill()


def cost(found: Measured) -> float:
    """CPU of one turn or answer, ms."""
    return 1e3 * found.cpu_s / found.turns


def compare(report: Report, *, turn_tokens: int, rounds: int) -> None:
    """Rows of turns of one length: several pairs in turns, and the least cost of each, as other work only adds."""
    streams, chunks = STREAMS // 2, turn_tokens // PER_CHUNK
    cycle_s = streams / RATE
    every_s = min(0.1, cycle_s / 2 / chunks)
    load = Load(streams, rounds, turn_tokens, call_s=cycle_s - every_s * chunks)
    alone = Load(streams, rounds, turn_tokens)
    pairs = [
        (
            measured(alone, every_s=cycle_s / chunks, spread_s=cycle_s),
            measured(load, every_s=every_s, spread_s=cycle_s),
        )
        for _ in range(PAIRS)
    ]
    answer_ms, turn_ms = (min(map(cost, runs)) for runs in zip(*pairs, strict=True))
    ratios = sorted(cost(turns) / cost(answers) for answers, turns in pairs)
    what = f"turns of {turn_tokens} tokens"
    report.row(f"{what}: CPU of a turn with its call", turn_ms, "ms", against=f"single-turn answer, {answer_ms:.2f} ms",
               ratio=turn_ms / answer_ms, bar="ratio <= 2")  # fmt: skip
    report.row(
        f"{what}: the same, pair by pair", median(ratios), "median", against=f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
    answers_s, turns_s = (median(one.turns / one.wall_s for one in runs) for runs in zip(*pairs, strict=True))
    report.row(f"{what}: calls", turns_s, "a second", against=f"answers, {answers_s:.0f} a second",
               ratio=turns_s / answers_s)  # fmt: skip


def measure_waiting(report: Report) -> None:
    cycle_s = STREAMS / RATE
    found = measured(Load(STREAMS, 3, 64, call_s=cycle_s - 0.4), every_s=0.1, spread_s=cycle_s)
    what = f"{STREAMS:,} episodes at {found.turns / found.wall_s:.0f} calls a second: event-loop lag p99"
    report.row(f"{what}, the loop's own", found.lag.own, "ms", bar="figure <= 50")
    report.row(f"{what}, by the clock", found.lag.by_clock, "ms", against=f"idle loop, {found.idle.by_clock:.1f} ms")
    waiting = measured(Load(STREAMS, 3, 64, call_s=2 * cycle_s), every_s=0.1, spread_s=0.0)
    what = f"{STREAMS:,} waiting episodes: memory beside their tokens ({waiting.kb_tokens:.1f} KB)"
    report.row(what, waiting.kb_waiting - waiting.kb_tokens, "KB each", bar="figure <= 64")


def measure(report: Report, *, full: bool) -> None:
    for turn_tokens in (64, 512) if full else (64,):
        compare(report, turn_tokens=turn_tokens, rounds=6 if full else 4)
    measure_waiting(report)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.client:
        port, load = options.client
        found = uvloop.run(run_load(int(port), msgspec.json.decode(load, type=Load)))
        print(msgspec.json.encode(found).decode())
        return
    report = Report(__doc__, full=options.full, sizes=f"{PAIRS} pairs of {STREAMS // 2} streams; {STREAMS:,} episodes")
    measure(report, full=options.full)
    report.print()


if __name__ == "__main__":
    main()
