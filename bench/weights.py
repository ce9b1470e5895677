"""Weights into two servers: the distributed and the disk transport beside a plain gloo broadcast and a file copy.

Run: python bench/weights.py [--engine sglang|embedded] [--rounds 5]. A random model of 119 M parameters in float32 (476
MB) goes into two servers on this machine, both at the same time. Each round measures all ways, one after the other; the
medians of the rounds are given, and ratios of the same run.
Ceiling: torch's gloo broadcast of the same tensors, bucket by bucket, from one bare process to two; `gloo` into memory
that is there already, `gloo, new` into new memory, as every receiver of a version must. `buckets` is from
the first bucket's call to the last one's answer, copies into the model included; `update` adds the rendezvous and its
end, `push` also pause, flushes, read-back and the comparison of log-probs. CPU seconds are those of all processes that
take part. All processes keep the memory that they free (glibc's settings below), as allocators of GPUs do: a page that
is new costs more than its bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
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

import psutil
import torch
import torch.distributed as dist
from safetensors import safe_open

from dora.engine.client import EngineClient, PushEndpoint
from dora.weights.distributed import BUCKET_BYTES, Distributed
from dora.weights.push import Disk, PushTarget, Transport, push
from dora.weights.sender import plan_buckets
from dora.weights.senders import Senders

SERVERS = 2
PUSH_S = 300.0
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
    for number in range(2 * rounds):
        dist.barrier()
        if rank == 0:
            sys.stdin.readline()
        begun = time.perf_counter()
        for bucket in buckets:
            tensors = [tensor for _, tensor in bucket]
            if rank and number % 2:
                tensors = [torch.empty_like(tensor) for tensor in tensors]
            for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
                work.wait()
        dist.barrier()
        if rank == 0:
            print(time.perf_counter() - begun, flush=True)


class Bare:
    """The bare processes; a round of them when asked."""

    def __init__(self, stack: ExitStack, folder: Path, *, rounds: int) -> None:
        port = _free_port()
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

    def broadcast(self) -> float:
        first = self._ranks[0]
        first.stdin.write("\n")
        first.stdin.flush()
        return float(first.stdout.readline())


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


# --- pushes


@dataclass(frozen=True)
class Watched(PushEndpoint):
    """A server of which is noted when it was given buckets."""

    times: list[float] = field(default_factory=list)

    async def receive(self, group: str, **bucket: Any) -> None:
        self.times.append(time.perf_counter())
        await super().receive(group, **bucket)
        self.times.append(time.perf_counter())


@dataclass
class Timed:
    """A transport that notes how long its part takes."""

    transport: Transport
    updates_s: list[float] = field(default_factory=list)

    async def update(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
        begun = time.perf_counter()
        await self.transport.update(server, folder, label, timeout_s=timeout_s)
        self.updates_s.append(time.perf_counter() - begun)

    async def verify(self, server: PushTarget, folder: Path, *, timeout_s: float) -> None:
        await self.transport.verify(server, folder, timeout_s=timeout_s)


async def push_to_all(client: EngineClient, urls: Sequence[str], folder: Path, transport: Transport) -> list[float]:
    """Until the last push has ended; returns the seconds of the slowest update, and of all buckets if there are any."""
    timed = Timed(transport)
    watched = [Watched(client, url) for url in urls]
    async with asyncio.TaskGroup() as pushes:
        for server in watched:
            pushes.create_task(push(server, folder=folder, label="bench", timeout_s=PUSH_S, transport=timed))
    times = [moment for server in watched for moment in server.times]
    return [max(timed.updates_s), *([max(times) - min(times)] if times else [])]


def cpu_s() -> float:
    """Of this process and all that it started."""
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


class Measured:
    """Wall and CPU seconds by name; the first round, which warms up, is left out."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    async def run(self, name: str, what: Awaitable[Any], *, parts: Sequence[str] = ()) -> None:
        """`parts` names the seconds that `what` returns."""
        cpu, begun = cpu_s(), time.perf_counter()
        parts_s = await what
        self.wall.setdefault(name, []).append(time.perf_counter() - begun)
        self.cpu.setdefault(name, []).append(cpu_s() - cpu)
        for part, value in zip(parts, parts_s if parts else (), strict=True):
            self.wall.setdefault(part, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.wall[name][1:])


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
            for number in range(rounds + 1):
                version = versions[number % 2]
                await measured.run("gloo", asyncio.to_thread(plain.broadcast))
                await measured.run("gloo, new", asyncio.to_thread(plain.broadcast))
                await measured.run("push", push_to_all(client, urls, version, distributed), parts=["update", "buckets"])
                await measured.run("disk push", push_to_all(client, urls, version, Disk()), parts=["disk update"])
                await measured.run("copy", asyncio.to_thread(_copy, version, root / "copy"))
        await senders.close()
    return measured


def _copy(folder: Path, to: Path) -> None:
    shutil.copytree(folder, to, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where versions lie; a temporary folder without it")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        rank, port, rounds, folder = options.bare.split(",", 3)
        return bare(int(rank), int(port), int(rounds), Path(folder))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        num_bytes = max(make_model(root / f"v{seed}", seed=seed) for seed in (1, 2))
        load = os.getloadavg()[0]
        measured = asyncio.run(measure(options.engine, rounds=options.rounds, root=root))
    print(f"{platform.machine()}, {psutil.cpu_count()} CPUs, load {load:.1f}, torch {torch.__version__}")
    print(f"{num_bytes / 1e6:.0f} MB into {SERVERS} servers ({options.engine}) at once, {options.rounds} rounds")
    report(measured, num_bytes=num_bytes)
    return None


def report(measured: Measured, *, num_bytes: int) -> None:
    for name in ("gloo", "gloo, new", "buckets", "update", "push", "disk update", "disk push", "copy"):
        median = measured.median(name)
        spread = f"{min(measured.wall[name][1:]):.2f}-{max(measured.wall[name][1:]):.2f}"
        ratio = f"{measured.median('gloo') / median:5.2f} of gloo, {measured.median('gloo, new') / median:5.2f} of new"
        cpu = f"; {statistics.median(measured.cpu[name][1:]):.2f} CPU s" if name in measured.cpu else ""
        print(f"{name:<12}{median:6.2f} s ({spread}) {num_bytes / median / 1e6:6.0f} MB/s, {ratio}{cpu}")


if __name__ == "__main__":
    main()
