"""Embedded engine: throughput at 64 concurrent requests against transformers' own continuous batching, and latencies.

Run: python bench/engine.py [--requests 64] [--new-tokens 128] [--threads 1]. One measurement runs at a time. Each gives
tokens per second and, independent of what else the machine does, per CPU second of the process that generates.
Ceiling: the same model's bare decode step at this batch (the decoder without batching, HTTP or client). The peer is
`generate_batch` of transformers with a persistent manager, warmed up by a whole run of the same work, log-probs on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

PROMPT_TOKENS = 20
SIBLINGS = 8
STARTS = 5
rids = itertools.count()
VOCAB = 64
SERVE = """
import sys
from pathlib import Path
import torch
sys.stderr.write("torch is imported\\n")
from dora.embedded.server import ServeOptions, run_server
folder, requests, threads = sys.argv[1:]
run_server(ServeOptions(model_path=Path(folder), slots=int(requests), threads=int(threads),
                        skip_tokenizer_init=True, incremental_streaming_output=True))
"""


def make_model(folder: Path) -> int:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Stopwatch:
    """Wall and CPU seconds of this process, or of another one."""

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process or psutil.Process()
        self._begun = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), sum(self._process.cpu_times()[:2])

    def rates(self, tokens: int) -> tuple[float, float]:
        """Tokens per second and per CPU second since the start."""
        wall, cpu = self._now()
        return tokens / (wall - self._begun[0]), tokens / (cpu - self._begun[1])


def bare_steps(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """The decode step alone."""
    from dora.embedded.batcher import Joiner
    from dora.embedded.decoder import CausalDecoder

    decoder = CausalDecoder(
        folder, slots=args.requests, kv_tokens=2**20, device="cpu", dtype="float32", threads=args.threads
    )
    decoder.join([Joiner(token_ids=ids, namespace="", seed=i) for i, ids in enumerate(prompts(args.requests))])
    watch = Stopwatch()
    for _ in range(args.new_tokens - 1):
        decoder.step()
    return watch.rates(args.requests * (args.new_tokens - 1))


def peer(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """transformers' continuous batching, second run of a persistent manager."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    generation = GenerationConfig(
        max_new_tokens=args.new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=2, temperature=1.0
    )
    batching = ContinuousBatchingConfig(return_logprobs=True)
    for _ in range(2):
        watch = Stopwatch()
        outputs = model.generate_batch(
            inputs=prompts(args.requests),
            generation_config=generation,
            continuous_batching_config=batching,
            progress_bar=False,
            persistent_manager=True,
        )
        rates = watch.rates(sum(len(output.generated_tokens) for output in outputs.values()))
    return rates


async def call(session: aiohttp.ClientSession, ids: list[int], new_tokens: int, *, stream: bool) -> tuple[float, int]:
    """(seconds to the first byte of the answer's body, tokens)."""
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
    rid = f"{next(rids):08}"
    body = {"rid": rid, "input_ids": ids, "sampling_params": sampling, "stream": stream, "return_logprob": True}
    begun, first, tokens = time.perf_counter(), 0.0, 0
    async with session.post("/generate", json=body) as answer:
        if not stream:
            whole = json.loads(await answer.read())
            return time.perf_counter() - begun, len(whole["output_ids"])
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                tokens += len(json.loads(line[6:])["output_ids"])
    return first, tokens


async def over_http(url: str, pid: int, args: argparse.Namespace) -> tuple[float, float]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await call(session, [5] * PROMPT_TOKENS, 8, stream=True)
        firsts = [(await call(session, ids, 4, stream=True))[0] for ids in prompts(20)]
        firsts.sort()
        print(f"first token, idle server, streamed: median {firsts[10] * 1e3:.1f} ms, worst {firsts[-1] * 1e3:.1f} ms")
        for stream in (False, True, True):
            watch = Stopwatch(psutil.Process(pid))
            work = [call(session, ids, args.new_tokens, stream=stream) for ids in prompts(args.requests)]
            tokens = sum(count for _, count in await asyncio.gather(*work))
            rates = watch.rates(tokens)
            show(f"over HTTP, {'streamed' if stream else 'unary'}", rates)
        await short_answers(session, pid)
    return rates


async def short_answers(session: aiohttp.ClientSession, pid: int) -> None:
    """Reinforcement learning's usual diet: groups of siblings, mostly short answers, a long tail, slots refilled."""
    rng = random.Random(1)
    lengths = [min(300, max(1, round(rng.lognormvariate(1.8, 1.0)))) for _ in range(SIBLINGS * 75)]
    slots = asyncio.Semaphore(24)

    async def one(index: int) -> int:
        async with slots:
            ids = [3 + (index // SIBLINGS + k) % (VOCAB - 3) for k in range(PROMPT_TOKENS)]
            return (await call(session, ids, lengths[index], stream=True))[1]

    watch = Stopwatch(psutil.Process(pid))
    tokens = sum(await asyncio.gather(*(one(index) for index in range(len(lengths)))))
    mean = tokens / len(lengths)
    show(f"over HTTP, streamed, 24 at once, groups of {SIBLINGS}, {mean:.0f} tokens a piece", watch.rates(tokens))


def show(what: str, rates: tuple[float, float]) -> None:
    print(f"{what}: {rates[0]:.0f} tokens/s, {rates[1]:.0f} per CPU second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["bare", "peer", "http"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only == "bare":
        print(*bare_steps(args.folder, args))
    elif args.only == "peer":
        print(*peer(args.folder, args))
    elif args.only == "http":
        url, pid = args.url.split()
        print(*asyncio.run(over_http(url, int(pid), args)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            report(Path(scratch), args)


def measured(kind: str, folder: Path, args: argparse.Namespace, *extra: str) -> tuple[float, float]:
    """Runs one measurement in a process of its own; its last line holds the two rates."""
    sizes = ["--requests", str(args.requests), "--new-tokens", str(args.new_tokens), "--threads", str(args.threads)]
    command = [sys.executable, __file__, "--only", kind, "--folder", str(folder), *sizes, *extra]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for line in lines[:-1]:
        print(line)
    per_s, per_cpu_s = lines[-1].split()
    return float(per_s), float(per_cpu_s)


def started(folder: Path, args: argparse.Namespace) -> tuple[subprocess.Popen[str], str, float]:
    """A server, its URL, and the seconds from torch's import to its first line."""
    command = [sys.executable, "-c", SERVE, str(folder), str(args.requests), str(args.threads)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stderr is not None
    server.stderr.readline()
    imported = time.perf_counter()
    url = server.stdout.readline().split()[1]
    return server, url, time.perf_counter() - imported


def stopped(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.communicate()


def report(folder: Path, args: argparse.Namespace) -> None:
    parameters = make_model(folder)
    cores = len(os.sched_getaffinity(0))
    print(
        f"hardware: {platform.machine()}, {cores} cores, load before {os.getloadavg()[0]:.1f}; threads {args.threads}"
    )
    print(
        f"sizes: Qwen3 with {parameters} parameters, fp32; {args.requests} requests at once, {PROMPT_TOKENS} prompt "
        f"tokens, {args.new_tokens} new tokens each, temperature 1, log-probs"
    )
    starts = [started(folder, args) for _ in range(STARTS)]
    for server, _, _ in starts[:-1]:
        stopped(server)
    server, url, _ = starts[-1]
    after_torch = sorted(start_s for _, _, start_s in starts)
    print(
        f"start, from torch's import to serving, {STARTS} times: fastest {after_torch[0]:.2f} s, "
        f"median {after_torch[STARTS // 2]:.2f} s, slowest {after_torch[-1]:.2f} s"
    )
    http = measured("http", folder, args, "--url", f"{url} {server.pid}")
    stopped(server)
    ceiling = measured("bare", folder, args)
    other = measured("peer", folder, args)
    show("ceiling, bare decode steps", ceiling)
    show("transformers' continuous batching", other)
    for unit, ours, most, theirs in zip(("second", "CPU second"), http, ceiling, other, strict=True):
        print(f"per {unit}: engine over HTTP is {ours / most:.2f} of the ceiling, {ours / theirs:.1f} x transformers")
    print(f"peak memory of the largest child: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
