"""Durability: how long a wave waits for the disk, and what that costs the trainer of the default job.

Run: python bench/durability.py [--full] [--folder DIR]. It uses the journal and the token store of a run, with the real
`Commits`, in a new folder on the disk that is given with the sizes. Ten times a second the event of a wave is
journaled, and the time until `durable` returns is measured (p50 and p99): on an idle disk, beside a process that
repeatedly writes and fsyncs 100 MB, and both again while 400 answers per second are journaled, each with 200 tokens in
chunks of 16 with log-probs, two facts and two orders. A tick requests a commit every second, as in a run. Ceiling: a
bare `write` of 4 KiB and `fdatasync`, in turn for each file that a commit syncs (the journal; with answers, the token
store before it), at the same rate, beside the same neighbor.

The last rows are whole runs of the default job, 12 steps: one unchanged, and one in which `os.fdatasync` and `os.fsync`
do nothing in the controller and in the ranks. The two alternate, as does the order within a pair, once each (--full:
three times). Idle is the share of all steps but the first in which the trainer had nothing to do. The row has the means
and every single run, because on a shared machine runs differ by more than the disk costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from result import FOLDER, Report, number, parser

from dora import files
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, StepId, TrajectoryId, VersionId
from dora.journal.commits import Commits
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter

WAVE_S = 0.1
TICK_S = 1.0
ANSWERS_PER_S = 400
TOKENS = 200
CHUNK = 16
NEIGHBOR_BYTES = 100_000_000
STEPS = 12
RUN_S = 400.0
SYNC, NO_SYNC = "--sync", "--no-sync"  #: before the words of a `dora` command


class Found(NamedTuple):
    """Of one measurement."""

    delays_s: list[float]
    syncs_per_s: float
    commits_per_s: float
    bytes_per_s: float
    answers_per_s: float


def in_ms(delays_s: list[float], *, percentile: int) -> float:
    return 1e3 * statistics.quantiles(delays_s, n=100, method="inclusive")[percentile - 1]


class Book:
    """A journal and a token store, and what a run writes into them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.journal = JournalWriter(folder / "journal.msgpack")
        self.tokens = TokenWriter(folder / "tokens.bin")
        self.commits = Commits(journal=self.journal, tokens=self.tokens)
        self.begun = time.monotonic()
        self.delays_s: list[float] = []
        self.answers = 0

    def now(self) -> float:
        return time.monotonic() - self.begun

    def wave(self, index: int) -> int:
        order = cmd.TrainMicroBatch(StepId(index), 0, last=False, ranks=((TrajectoryId(index),) * 16,) * 2)
        return self.journal.handled(ev.MicroBatchTrained(self.now(), StepId(index), 0), [order])

    def answer(self, number: int) -> None:
        trajectory, now = TrajectoryId(number), self.now()
        tokens, logprobs = array("i", range(CHUNK)), array("f", [-0.5] * CHUNK)
        for start in range(0, TOKENS, CHUNK):
            size = min(CHUNK, TOKENS - start)
            self.tokens.append(number, 1, tokens[:size], logprobs[:size], start=start)
        finished = ev.GenerationFinished(now, trajectory, 1, TOKENS, False, ((3, 0, TOKENS),))
        after = cmd.Generate(TrajectoryId(number + 64), 1, InstanceId(number % 8), VersionId(3), 0)
        self.journal.handled(finished, [cmd.GradeTrajectory(trajectory, 1), after])
        self.journal.handled(ev.TrajectoryGraded(now, trajectory, 1, 1.0), [])

    async def measure(self, seconds: float, *, answers_per_s: int) -> Found:
        syncs = 0

        def count(operation: files.Operation) -> None:
            nonlocal syncs
            syncs += operation.kind == "sync"

        with files.observed(count):
            loops = [
                asyncio.create_task(work) for work in (self.commits.run(), self._tick(), self._answer(answers_per_s))
            ]
            await self._waves(seconds)
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        took_s = self.now()
        size = sum(path.stat().st_size for path in self.folder.iterdir())
        commits = self.commits.num_syncs / took_s
        return Found(self.delays_s, syncs / took_s, commits, size / took_s, self.answers / took_s)

    async def _waves(self, seconds: float) -> None:
        """At a fixed rate, however late the ones before are."""
        waiting = []
        for index in range(int(seconds / WAVE_S)):
            await asyncio.sleep(max(0.0, index * WAVE_S - self.now()))
            waiting.append(asyncio.create_task(self._one(self.wave(index))))
        await asyncio.gather(*waiting)

    async def _one(self, position: int) -> None:
        begun = time.perf_counter()
        await self.commits.durable(position)
        self.delays_s.append(time.perf_counter() - begun)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.commits.soon()

    async def _answer(self, per_s: int) -> None:
        while per_s:
            while self.answers < self.now() * per_s:
                self.answer(self.answers)
                self.answers += 1
            await asyncio.sleep(1 / per_s)


def bare(folder: Path, seconds: float, *, num_files: int) -> list[float]:
    """Time the writing and syncing of files, one after the other; return the seconds of each."""
    delays_s, begun = [], time.monotonic()
    with ExitStack() as stack:
        opened = [stack.enter_context((folder / f"bare-{n}").open("ab", buffering=0)) for n in range(num_files)]
        for index in range(int(seconds / WAVE_S)):
            time.sleep(max(0.0, begun + index * WAVE_S - time.monotonic()))
            before = time.perf_counter()
            for file in opened:
                file.write(bytes(4096))
                os.fdatasync(file.fileno())
            delays_s.append(time.perf_counter() - before)
    return delays_s


def write_and_sync(path: Path) -> None:
    """The neighbor: a process that does nothing else until it is ended."""
    data = bytes(1_000_000)
    while True:
        with path.open("wb") as file:
            for _ in range(NEIGHBOR_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def neighbor(folder: Path, *, busy: bool) -> Iterator[None]:
    if not busy:
        yield
        return
    process = subprocess.Popen([sys.executable, __file__, "--neighbor", str(folder / "neighbor")])
    try:
        time.sleep(2.0)  # until it writes
        yield
    finally:
        process.kill()
        process.wait()


def measure_delays(report: Report, folder: Path, *, seconds: float) -> None:
    for disk, busy in (("idle disk", False), ("beside fsyncs of 100 MB", True)):
        for load, answers_per_s in (("waves alone", 0), (f"{ANSWERS_PER_S} answers/s", ANSWERS_PER_S)):
            with neighbor(folder, busy=busy):
                num_files = 2 if answers_per_s else 1
                ceiling = bare(folder, seconds, num_files=num_files)
                book = Book(folder / f"book-{busy}-{answers_per_s}")
                found = asyncio.run(book.measure(seconds, answers_per_s=answers_per_s))
            for percentile, bar in ((50, "" if busy else "figure <= 5"), (99, "")):
                took, least = (in_ms(delays, percentile=percentile) for delays in (found.delays_s, ceiling))
                report.row(
                    f"{disk}, {load}: a wave may leave, p{percentile}",
                    took,
                    "ms",
                    against=f"{num_files} bare sync(s), {number(least)} ms",
                    ratio=took / least,
                    bar=bar,
                )
            against = f"{found.commits_per_s:.1f} commits, {found.bytes_per_s / 1e6:.2f} MB, "
            against += f"{found.answers_per_s:.0f} answers a second"
            report.row(f"{disk}, {load}: syncs", found.syncs_per_s, "a second", against=against)


# --- whole runs


def run_dora(mode: str, words: list[str]) -> None:
    """`dora` with these words, in this process; NO_SYNC: the disk is always ready."""
    if mode == NO_SYNC:
        os.fdatasync = os.fsync = lambda descriptor: None  # type: ignore[assignment]
    sys.argv = ["dora", *words]
    runpy.run_module("dora", run_name="__main__")


class Run(NamedTuple):
    """Of the default job, its first step left out."""

    idle_percent: float
    step_s: float


def run_job(folder: Path, *, durable: bool) -> Run:
    mode = SYNC if durable else NO_SYNC
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    ranks = json.dumps([*torchrun, __file__, mode, "train"])
    command = [sys.executable, __file__, mode, "run"]
    for setting in (
        *(f"run.folder={folder}", f"run.steps={STEPS}", "run.seed=1", "status.port=0"),
        f"trainer.command={ranks}",
    ):
        command += ["--set", setting]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=False, cwd=folder, start_new_session=True
    )
    if done.returncode:
        raise SystemExit(f"dora run failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    [metrics] = folder.glob("*/metrics.jsonl")
    steps = [row for row in map(msgspec.json.decode, metrics.read_text().splitlines()) if row["kind"] == "step"][1:]
    total_s = sum(step["duration_s"] for step in steps)
    return Run(100 * sum(step["idle_s"] for step in steps) / total_s, total_s / len(steps))


def measure_runs(report: Report, folder: Path, *, rounds: int) -> None:
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for index in range(rounds):
        for durable in (True, False) if index % 2 == 0 else (False, True):
            home = folder / f"run-{index}-{durable}"
            home.mkdir()
            runs[durable].append(run_job(home, durable=durable))
            print(f"  {'durable' if durable else 'no syncs'}: {runs[durable][-1]}", flush=True)
    held, free = ([statistics.mean(values) for values in zip(*runs[durable], strict=True)] for durable in (True, False))
    spread = "; ".join(
        f"{name} {', '.join(f'{run.idle_percent:.1f}' for run in runs[durable])} %"
        for name, durable in (("durable", True), ("no syncs", False))
    )
    report.row("default job: trainer idle", held[0], "%", against=f"no syncs, {free[0]:.1f} %", ratio=held[0] / free[0])
    report.row("default job: idle for the disk", held[0] - free[0], "points", against=spread, bar="figure <= 3")
    report.row("default job: step", held[1], "s", against=f"no syncs, {free[1]:.2f} s", ratio=held[1] / free[1])


def file_system(folder: Path) -> str:
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    found = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return f"{found.fstype} on {found.device}" if found else "an unknown file system"


def main() -> None:
    if sys.argv[1:2] in ([SYNC], [NO_SYNC]):
        run_dora(sys.argv[1], sys.argv[2:])
        return
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, default=FOLDER.parent / "runs", help="where to write (default: runs)")
    arguments.add_argument("--neighbor", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--only", choices=("delays", "runs"), help="leave the other part out")
    options = arguments.parse_args()
    if options.neighbor:
        write_and_sync(options.neighbor)
    seconds, rounds = (10.0, 3) if options.full else (6.0, 1)
    options.folder.mkdir(parents=True, exist_ok=True)
    where = file_system(options.folder.resolve())
    sizes = f"{where}; {seconds / WAVE_S:.0f} waves a row; {rounds} run(s) of {STEPS} steps each way"
    report = Report(__doc__, full=options.full, sizes=sizes)
    with tempfile.TemporaryDirectory(prefix="durability-", dir=options.folder) as folder:
        if options.only != "runs":
            measure_delays(report, Path(folder), seconds=seconds)
        if options.only != "delays":
            measure_runs(report, Path(folder), rounds=rounds)
    report.print()


if __name__ == "__main__":
    main()
