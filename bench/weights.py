"""A version into the store and into two servers, by disk and by process group, beside a file copy and bare broadcast.

Run: python bench/weights.py [--full] [--engine sglang|embedded]. A random model of 119 M parameters in float32 (476 MB)
is written as the trainer publishes it, and is loaded into two servers on this machine at the same time: embedded
engines, or real SGLang with --full. Each round measures all ways in turn; figures are medians of the rounds, and ratios
are within a round.

Ceiling of the store and of disk pushes: copying the version's files to new files on the same file system, with the same
fsync of every file and of the folder. The store also computes a checksum of every byte; a push also pauses, flushes,
reads back and compares log-probs. Ceiling of the process group: torch's gloo broadcast of the same tensors, bucket by
bucket, from one bare process to two, into new memory, which every receiver of a version needs. `buckets` is the time
from the first bucket's call to the last one's answer, copies into the model included; `update` adds the rendezvous and
its end. All processes keep the memory that they free (glibc's settings below), as GPU allocators do: a new page costs
more than its bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clients.steps import one_rank
from result import Report, number, parser
from safetensors import safe_open

from dora.core.ids import VersionId
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.distributed import BUCKET_BYTES, Distributed
from dora.engine.sglang.push import Disk, Transfer, push
from dora.engine.sglang.sender import plan_buckets
from dora.engine.sglang.senders import Senders
from dora.engine.sglang.target import PushTarget
from dora.node.ports import free_port
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.weights.store import VersionStore
from tests.trainer.publishing import make_publisher

SERVERS = 2
PUSH_S = 300.0
NEEDED_BYTES = 4 << 30
#: What, its name below, its ceiling's, the ceiling in words, the bar.
ROWS = (
    ("store: a version published", "store", "copy", "copy and fsync of its files", "ratio >= 0.7"),
    ("disk: whole push into both servers", "disk push", "copy", "copy and fsync of its files", "ratio >= 0.7"),
    ("disk: the update alone", "disk update", "copy", "copy and fsync of its files", ""),
    ("process group: update of both servers", "update", "gloo, new", "gloo broadcast into new memory", "ratio >= 0.7"),
    ("process group: buckets alone", "buckets", "gloo, new", "gloo broadcast into new memory", ""),
    ("process group: whole push", "push", "gloo, new", "gloo broadcast into new memory", ""),
    ("process group: update of both servers", "update", "gloo", "gloo broadcast into memory held before", ""),
)
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
ENV = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
LAUNCHER = Path(__file__).parents[1] / "launch" / "sglang-cpu" / "serve.py"


def make_model(folder: Path, *, seed: int) -> int:
    """Returns the bytes of its weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=512,
        intermediate_size=16_384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@contextmanager
def servers(kind: str, model: Path) -> Iterator[list[str]]:
    """Their URLs."""
    shared = ["--slots", "2", "--kv-tokens", "2048"]
    one = [
        sys.executable,
        "-m",
        "dora",
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        "--skip-tokenizer-init",
        *shared,
    ]
    both = [sys.executable, str(LAUNCHER), str(model), "--servers", str(SERVERS), *shared]
    with ExitStack() as stack:
        urls = []
        for command in [both] if kind == "sglang" else [one] * SERVERS:
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV))
            stack.callback(process.terminate)
            assert process.stdout is not None
            for _ in range(SERVERS if kind == "sglang" else 1):
                urls.append(process.stdout.readline().split()[1])
        yield urls


# --- the ceiling: this file again, as a bare process


def bare(rank: int, port: int, rounds: int, folder: Path) -> None:
    """One rank of plain broadcasts, into held and new memory in turn; rank 0 prints the seconds of each."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=1 + SERVERS)
    with ExitStack() as files:
        opened = [files.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        mapped = [(name, file.get_tensor(name)) for file in opened for name in file.offset_keys()]
        buckets = plan_buckets([(name, tensor.clone()) for name, tensor in mapped], bucket_bytes=BUCKET_BYTES)
    for i in range(2 * rounds):
        dist.barrier()
        if rank == 0:
            sys.stdin.readline()
        begun = time.perf_counter()
        for bucket in buckets:
            tensors = [tensor for _, tensor in bucket]
            if rank and i % 2:
                tensors = [torch.empty_like(tensor) for tensor in tensors]
            for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
                work.wait()
        dist.barrier()
        if rank == 0:
            print(time.perf_counter() - begun, flush=True)


class Bare:
    """The bare processes; a round of them when asked."""

    def __init__(self, stack: ExitStack, folder: Path, *, rounds: int) -> None:
        port = free_port()
        self._ranks = [  # a round is two broadcasts
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--bare", f"{rank},{port},{rounds},{folder}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=ENV,
                )
            )
            for rank in range(1 + SERVERS)
        ]
        for rank in self._ranks:  # one that waits for the others would be waited for
            stack.callback(rank.kill)

    def broadcast(self) -> float:
        first = self._ranks[0]
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        return float(first.stdout.readline())


# --- pushes


@dataclass(frozen=True)
class Watched(PushTarget):
    """A server of which is noted when it was given buckets."""

    times: list[float] = field(default_factory=list)

    async def receive(self, group: str, **bucket: Any) -> None:
        self.times.append(time.perf_counter())
        await super().receive(group, **bucket)
        self.times.append(time.perf_counter())


@dataclass
class Timed:
    """A transfer that notes how long its part takes."""

    transfer: Transfer
    updates_s: list[float] = field(default_factory=list)

    async def update(self, server: PushTarget, folder: Path, label: str, *, live: bool, timeout_s: float) -> None:
        begun = time.perf_counter()
        await self.transfer.update(server, folder, label, live=live, timeout_s=timeout_s)
        self.updates_s.append(time.perf_counter() - begun)

    async def verify(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        await self.transfer.verify(server, folder, label, timeout_s=timeout_s)


async def push_to_all(client: EngineClient, urls: Sequence[str], folder: Path, transfer: Transfer) -> list[float]:
    """Until the last push has ended; returns the seconds of the slowest update, and of all buckets if there are any."""
    timed = Timed(transfer)
    watched = [Watched(client, url) for url in urls]
    async with asyncio.TaskGroup() as pushes:
        for server in watched:
            pushes.create_task(push(server, folder=folder, label="bench", timeout_s=PUSH_S, transfer=timed))
    times = [moment for server in watched for moment in server.times]
    return [max(timed.updates_s), *([max(times) - min(times)] if times else [])]


class Measured:
    """Wall seconds by name; the first round, which warms up, is left out."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}

    async def run(self, name: str, what: Awaitable[Any], *, parts: Sequence[str] = ()) -> None:
        """`parts` names the seconds that `what` returns."""
        begun = time.perf_counter()
        parts_s = await what
        self.wall.setdefault(name, []).append(time.perf_counter() - begun)
        for part, value in zip(parts, parts_s if parts else (), strict=True):
            self.wall.setdefault(part, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.wall[name][1:])

    def ratio(self, name: str, *, of: str) -> float:
        """Of the ceiling's seconds to those of `name`."""
        return statistics.median(c / s for s, c in zip(self.wall[name][1:], self.wall[of][1:], strict=True))


async def measure(kind: str, *, rounds: int, root: Path) -> Measured:
    measured = Measured()
    versions = [root / "v1", root / "v2"]
    senders = Senders([sys.executable, "-m", "dora", "send"], env=ENV, log=root / "sender.log")
    distributed = Distributed(senders, otherwise=Disk(), dtype="float32", use_nccl=False)
    with ExitStack() as stack:
        urls = stack.enter_context(servers(kind, versions[0]))
        plain = Bare(stack, versions[0], rounds=rounds + 1)
        async with EngineClient(max_connections=4) as client:
            for version in versions:  # what is computed once per version is not measured
                await push_to_all(client, urls, version, distributed)
            for i in range(rounds + 1):
                version = versions[i % 2]
                await measured.run("gloo", asyncio.to_thread(plain.broadcast))
                await measured.run("gloo, new", asyncio.to_thread(plain.broadcast))
                await measured.run("push", push_to_all(client, urls, version, distributed), parts=["update", "buckets"])
                await measured.run("disk push", push_to_all(client, urls, version, Disk()), parts=["disk update"])
                await measured.run("copy", asyncio.to_thread(_copy, version, root / f"copy-{i}"))
                shutil.rmtree(root / f"copy-{i}")
        await senders.close()
    return measured


def measure_store(measured: Measured, *, rounds: int, root: Path) -> None:
    """Versions published one after the other, each released before the next."""
    store = VersionStore(memory_root=root / "store", durable_root=root / "durable")
    with one_rank("cpu"):
        policy = Policy(root / "v1", mesh=make_mesh("cpu"), dtype=torch.float32)
        publisher = make_publisher(policy, root / "v1", store)
        for version in map(VersionId, range(rounds + 1)):
            begun = time.perf_counter()
            publisher.publish(version, chain=f"bench-{version}")
            publisher.wait()
            measured.wall.setdefault("store", []).append(time.perf_counter() - begun)
            store.release(version)
        publisher.close()


def _copy(folder: Path, to: Path) -> None:
    """To new files, flushed as the store flushes its own."""
    shutil.copytree(folder, to)
    for path in (*to.iterdir(), to):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _memory_folder() -> str | None:
    """Where live versions lie by default, if it has room; None: a temporary folder on disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > NEEDED_BYTES else None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", choices=["sglang", "embedded"], help="sglang in full, else embedded")
    arguments.add_argument("--folder", type=Path, default=_memory_folder(), help="where versions lie")
    arguments.add_argument("--bare", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.bare:
        rank, port, rounds, folder = options.bare.split(",", 3)
        return bare(int(rank), int(port), int(rounds), Path(folder))
    kind = options.engine or ("sglang" if options.full else "embedded")
    rounds = 5 if options.full else 3
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        num_bytes = max(make_model(root / f"v{seed}", seed=seed) for seed in (1, 2))
        sizes = f"{num_bytes / 1e6:.0f} MB in {options.folder or tempfile.gettempdir()}, {SERVERS} servers ({kind})"
        report = Report(__doc__, full=options.full, sizes=f"{sizes}, {rounds} rounds")
        measured = asyncio.run(measure(kind, rounds=rounds, root=root))
        measure_store(measured, rounds=rounds, root=root)
    for what, name, of, ceiling, bar in ROWS:
        report.row(
            what,
            num_bytes / measured.median(name) / 1e6,
            "MB/s",
            against=f"{ceiling}, {number(num_bytes / measured.median(of) / 1e6)} MB/s",
            ratio=measured.ratio(name, of=of),
            bar=bar,
        )
    report.print()
    return None


if __name__ == "__main__":
    main()
