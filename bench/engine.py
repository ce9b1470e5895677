"""Embedded engine: 64 requests at once beside transformers' continuous batching and real SGLang on the CPU; latencies.

Run: python bench/engine.py [--full]. The measurements run one at a time. Figures are tokens per CPU second of all
generating processes, which do not depend on other work of the machine; wall-clock figures are printed too. Ceiling: the
bare decoding step of the same model at this batch (the decoder without batching, HTTP or client). The peers are
`generate_batch` of transformers with a persistent manager, warmed up by a whole run of the same work, with log-probs;
and, with DORA_SGLANG=1 or --full, one real SGLang server (launch/sglang-cpu) with the same requests, streamed, over
HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
from result import Report, number, parser

PROMPT_TOKENS = 20
SIBLINGS = 8
NEW_TOKENS = 128
REQUESTS = 64
THREADS = 1
STARTS = 3
SGLANG = Path(__file__).parents[1] / "launch" / "sglang-cpu"
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
    """Wall and CPU seconds of this process, or of another one and all that it has started."""

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process or psutil.Process()
        self._begun = self._now()

    def _now(self) -> tuple[float, float]:
        family = (self._process, *self._process.children(recursive=True))
        return time.perf_counter(), sum(sum(one.cpu_times()[:2]) for one in family)

    def rates(self, tokens: int) -> tuple[float, float]:
        """Tokens per second and per CPU second since the start."""
        wall, cpu = self._now()
        return tokens / (wall - self._begun[0]), tokens / (cpu - self._begun[1])


def bare_steps(folder: Path) -> tuple[float, float]:
    """The decode step alone."""
    from dora.embedded.batcher import Joiner
    from dora.embedded.decoder import CausalDecoder

    decoder = CausalDecoder(folder, slots=REQUESTS, kv_tokens=2**20, device="cpu", dtype="float32", threads=THREADS)
    decoder.join([Joiner(token_ids=ids, namespace="", seed=i) for i, ids in enumerate(prompts(REQUESTS))])
    watch = Stopwatch()
    for _ in range(NEW_TOKENS - 1):
        decoder.step()
    return watch.rates(REQUESTS * (NEW_TOKENS - 1))


def peer(folder: Path) -> tuple[float, float]:
    """transformers' continuous batching, second run of a persistent manager."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    generation = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, eos_token_id=-1, pad_token_id=2, temperature=1.0
    )
    # A block holds 256 tokens, so each request needs one. Left to itself, the cache takes 90 % of the machine's memory.
    batching = ContinuousBatchingConfig(return_logprobs=True, num_blocks=REQUESTS)
    for _ in range(2):
        watch = Stopwatch()
        outputs = model.generate_batch(
            inputs=prompts(REQUESTS),
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


async def over_http(url: str, pid: int) -> tuple[float, float]:
    """Rates of the second streamed run; the first of each kind warms up."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        for stream in (False, True, True):
            watch = Stopwatch(psutil.Process(pid))
            work = [call(session, ids, NEW_TOKENS, stream=stream) for ids in prompts(REQUESTS)]
            tokens = sum(count for _, count in await asyncio.gather(*work))
            rates = watch.rates(tokens)
            show(f"over HTTP, {'streamed' if stream else 'unary'}", rates)
    return rates


async def first_tokens(url: str) -> list[float]:
    """Sorted seconds to the first token of an idle server."""
    async with aiohttp.ClientSession(url) as session:
        await call(session, [5] * PROMPT_TOKENS, 8, stream=True)
        return sorted([(await call(session, ids, 4, stream=True))[0] for ids in prompts(20)])


async def group_answers(url: str, pid: int) -> tuple[float, float]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        return await short_answers(session, pid)


async def short_answers(session: aiohttp.ClientSession, pid: int) -> tuple[float, float]:
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
    rates = watch.rates(tokens)
    show(f"over HTTP, streamed, 24 at once, groups of {SIBLINGS}, {tokens / len(lengths):.0f} tokens a piece", rates)
    return rates


def show(what: str, rates: tuple[float, float]) -> None:
    print(f"  {what}: {rates[0]:.0f} tokens/s, {rates[1]:.0f} per CPU second", file=sys.stderr)


def measured(kind: str, folder: Path) -> tuple[float, float]:
    """One measurement in a process of its own: its two rates."""
    command = [sys.executable, __file__, "--only", kind, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    per_s, per_cpu_s = done.stdout.splitlines()[-1].split()
    rates = float(per_s), float(per_cpu_s)
    show(kind, rates)
    return rates


def started(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    """A server, its URL, and the seconds from torch's import to its first line."""
    command = [sys.executable, "-c", SERVE, str(folder), str(REQUESTS), str(THREADS)]
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


def why_no_sglang(*, full: bool) -> str:
    """Empty if it is to be measured."""
    sys.path.insert(0, str(SGLANG))
    from build import environment_folder

    if not full and os.environ.get("DORA_SGLANG") != "1":
        return "with DORA_SGLANG=1 or --full"
    return "" if (environment_folder() / "complete").exists() else "no environment: python launch/sglang-cpu/build.py"


def sglang(folder: Path) -> tuple[float, float]:
    """The streamed rates of one real server."""
    sizes = ["--slots", str(REQUESTS), "--kv-tokens", str(2 * REQUESTS * (PROMPT_TOKENS + NEW_TOKENS))]
    command = [sys.executable, str(SGLANG / "serve.py"), str(folder), *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[1]
            return asyncio.run(over_http(url, server.pid))
        finally:
            server.terminate()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=["bare", "peer"], help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.only:
        print(*(bare_steps if options.only == "bare" else peer)(options.folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parameters = make_model(folder)
        sizes = f"Qwen3 with {parameters / 1e6:.1f} M parameters, fp32, {REQUESTS} requests of {NEW_TOKENS} tokens"
        report = Report(__doc__, full=options.full, sizes=f"{sizes}, {THREADS} thread")
        server, url = measure_starts(report, folder)
        firsts = asyncio.run(first_tokens(url))
        report.row("first token, idle server, median", firsts[len(firsts) // 2] * 1e3, "ms", bar="figure <= 50")
        report.row("first token, idle server, slowest of 20", firsts[-1] * 1e3, "ms")
        ours = asyncio.run(over_http(url, server.pid))[1]
        groups = asyncio.run(group_answers(url, server.pid))[1]
        stopped(server)
        compare(report, folder, ours, full=options.full)
        report.row(f"24 at once, groups of {SIBLINGS}, mostly short answers", groups, "tokens per CPU second")
    report.print()


def measure_starts(report: Report, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The last of the servers started, and its URL."""
    starts = [started(folder) for _ in range(STARTS)]
    for server, _, _ in starts[:-1]:
        stopped(server)
    seconds = sorted(start_s for _, _, start_s in starts)
    what = f"start, from torch's import to serving, median of {STARTS}"
    report.row(what, seconds[STARTS // 2], "s", against=f"fastest {number(seconds[0])} s", bar="figure <= 3")
    return starts[-1][:2]


def compare(report: Report, folder: Path, ours: float, *, full: bool) -> None:
    """`ours` and each other way: tokens per CPU second."""
    reason = why_no_sglang(full=full)
    rates = {"bare decode steps": measured("bare", folder)[1], "transformers": measured("peer", folder)[1]}
    if not reason:
        rates["real SGLang on the CPU"] = sglang(folder)[1]
    for peer_name, rate in rates.items():
        report.row(
            f"over HTTP, streamed, beside {peer_name}",
            ours,
            "tokens per CPU second",
            against=f"{peer_name}, {number(rate)}",
            ratio=ours / rate,
            bar="ratio >= 2" if peer_name == "transformers" else "",
        )
    if reason:
        report.skip("over HTTP, streamed, beside real SGLang on the CPU", reason)


if __name__ == "__main__":
    main()
