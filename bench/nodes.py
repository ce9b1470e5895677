"""200 nodes of one controller: how long they take to join, what they cost it, and how long its event loop waits.

Run: python bench/nodes.py [--full]. The controller's side of the node protocol runs in one process, with a real socket,
relay and store; the sessions of the nodes run in four others, and hold each version as soon as a source is named to
them (tests/cluster/sessions.py). Once all have joined, versions follow one another: each is named to all nodes, held by
all, and released. `--full` has 1,000 sessions. Bars: all join in 3 s, the process takes at most 200 MB at its peak, and
99 % of the loop's waits are at most 50 ms too long, also while versions change.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from result import Report, number, parser

from dora import files
from dora.config.load import load
from dora.core.ids import VersionId
from dora.node.cluster import Cluster, ClusterSettings
from dora.weights.store import VersionStore

TOKEN = "bench"
PROCESSES = 4
VERSIONS = 8
FILES = 24  # of a version: a 32B has 14, a large MoE some hundred
WAIT_S = 0.005  # of the loop
LIMIT_S = 120.0


class Lag:
    """How much longer than asked for a short wait of the event loop takes, again and again."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def measure(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(WAIT_S)
            self.seconds.append(time.perf_counter() - begun - WAIT_S)

    def take_p99_ms(self) -> float:
        """99th percentile since the last call."""
        taken, self.seconds = self.seconds, []
        return 1000 * statistics.quantiles(taken, n=100)[98]


@contextmanager
def sessions(address: str, count: int) -> Iterator[None]:
    each = count // PROCESSES
    command = [sys.executable, "-m", "tests.cluster.sessions", address, TOKEN]
    started = [subprocess.Popen([*command, str(i * each), str(each)]) for i in range(PROCESSES)]
    try:
        yield
    finally:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def publish(store: VersionStore, version: VersionId) -> None:
    staged = store.stage(version)
    for index in range(FILES):
        (staged / f"model-{index:05d}.safetensors").write_bytes(bytes([version % 256]) * 1000)
    store.seal(version, staged, chain="bench")


async def churn(cluster: Cluster, store: VersionStore) -> float:
    """Have all nodes hold one version after another; return the median seconds that one took."""
    taken = []
    for version in map(VersionId, range(1, VERSIONS + 1)):
        publish(store, version)
        begun = time.perf_counter()
        cluster.spread.hold(store.manifest(version))
        await cluster.changes.until(partial(is_held, cluster, version))
        taken.append(time.perf_counter() - begun)
        cluster.spread.release(version)
    return statistics.median(taken)


def is_held(cluster: Cluster, version: VersionId) -> bool:
    return all(place.report is not None and version in place.report.versions for place in cluster.places)


async def measure(report: Report, count: int, folder: Path) -> None:
    memory = folder / "memory"
    memory.mkdir()
    store = VersionStore(memory_root=memory, durable_root=memory)
    job = [f"nodes.expected={count}", "nodes.train=0", "nodes.servers=8", "nodes.address=tcp://127.0.0.1:0"]
    config = load(None, job, environ={"DORA_TOKEN": TOKEN})
    told: list[str] = []
    settings = ClusterSettings(
        run_id="bench",
        term=1,
        token=TOKEN,
        live_bytes=1,
        model=folder,
        known={},
        removed=(),
        save=lambda known: files.replace(folder / "nodes", msgspec.json.encode(known)),
        tell=told.append,
        connects=lambda _: True,
    )
    before_mb = peak_mb()
    async with Cluster.listening(config, settings, store=store, checkpoints=folder) as cluster:
        [address] = re.findall(r"tcp://(\S+)", told[0])
        lag = Lag()
        with sessions(address, count):
            await cluster.changes.until(lambda: any(place.identity is not None for place in cluster.places))
            measuring = asyncio.create_task(lag.measure())
            begun = time.perf_counter()
            async with asyncio.timeout(LIMIT_S):
                await cluster.changes.until(lambda: all(place.report is not None for place in cluster.places))
                joined_s = time.perf_counter() - begun
                report.row(f"{count} nodes join", joined_s, "s", bar="figure <= 3")
                report.row("event loop while they join, p99 of its lag", lag.take_p99_ms(), "ms", bar="figure <= 50")
                await asyncio.sleep(5)
                report.row("event loop at rest, p99 of its lag", lag.take_p99_ms(), "ms", bar="figure <= 50")
                version_s = await churn(cluster, store)
            report.row("a version is held by all", version_s, "s", against=f"{FILES} files")
            report.row("event loop while versions change, p99 of its lag", lag.take_p99_ms(), "ms", bar="figure <= 50")
            report.row("memory at its peak", peak_mb(), "MB", against=f"{number(before_mb)} MB before",
                       bar="figure <= 200")  # fmt: skip
            await cluster.end("measured")
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    options = parser(__doc__).parse_args()
    count = 1000 if options.full else 200
    report = Report(__doc__, full=options.full, sizes=f"{count} sessions in {PROCESSES} processes")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(measure(report, count, Path(folder)))
    report.print()


if __name__ == "__main__":
    main()
