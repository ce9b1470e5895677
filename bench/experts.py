"""The choice of experts: its cost in the client, and in a decoding step of the embedded engine.

Run: python bench/experts.py [--full]. An answer of 1,024 tokens (32,768 with --full) of a model with 48 layers and 8 of
128 experts ends with an event that has all of its experts, in pieces of 64 KB as a socket gives them: the event loop
finds its end and its parts, and a thread decodes and checks them. Against the same answer without experts, whose chunks
of 16 tokens are read by the same parser. A step: 24 rows of a Qwen3-MoE with and without kept experts, in alternating
rounds. All figures are medians of CPU time. Ceilings: the answer, and the step, without experts.
"""

from __future__ import annotations

import base64
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from engine import PROMPT_TOKENS, prompts
from result import Report, parser

from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from dora.engine.api import AskedRouting
from dora.engine.sglang import routing
from dora.engine.sglang.stream import StreamParser
from dora.routing import RoutingShape

SHAPE: Final = RoutingShape(num_layers=48, layers=(*range(48),), num_experts=128, top_k=8)
PIECE: Final = 2**16  # bytes of a read from a socket
CHUNK: Final = 16  # tokens
ROUNDS: Final = 9
ROWS: Final = 24
STEPS: Final = 5  # of a round
#: Name -> hidden size, layers, experts, experts of a token, width of an expert.
MODELS: Final = {"0.5 M": (64, 4, 8, 2, 64), "27 M": (256, 8, 32, 4, 128)}


def event(meta: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode({"meta_info": meta}) + b"\n\n"


def answer(tokens: int, text: str | None) -> list[bytes]:
    """The bytes of an answer as they are read, with the JSON string of its experts or without."""
    ids = [(-0.51234567, 1_000 + at, None) for at in range(CHUNK)]
    totals = range(CHUNK, tokens + 1, CHUNK)
    chunks = [event({"output_token_logprobs": ids, "completion_tokens": total}) for total in totals]
    end = {"completion_tokens": tokens, "output_token_logprobs": [], "finish_reason": {"type": "length"}}
    last = event(end if text is None else {**end, "routed_experts": text})
    return [*chunks, *(last[begin : begin + PIECE] for begin in range(0, len(last), PIECE))]


def read(pieces: list[bytes], limit: int) -> msgspec.Raw | None:
    stream = StreamParser("http://server", lambda token_ids, logprobs: None, max_event_bytes=limit)
    for piece in pieces:
        stream.feed(piece)
    stream.close()
    return stream.routed


def measure_answer(report: Report, tokens: int) -> None:
    rng = np.random.default_rng(0)
    some = np.argsort(rng.random((64, SHAPE.num_layers, SHAPE.num_experts)), axis=-1)[..., : SHAPE.top_k]
    text = base64.b64encode(np.tile(some, (tokens // 64, 1, 1)).astype("<i4").tobytes()).decode()
    asked, limit = AskedRouting(SHAPE, 0), 2**20 + len(text)
    with_experts, without = answer(tokens, text), answer(tokens, None)
    spent: dict[str, list[float]] = {"plain": [], "loop": [], "thread": []}
    for _ in range(ROUNDS):
        begun = time.process_time()
        read(without, limit)
        plain = time.process_time()
        raw = read(with_experts, limit)
        loop = time.process_time()
        assert raw is not None
        routing.read_chosen(raw, asked, rows=tokens, source="http://server")
        spent["plain"].append(plain - begun)
        spent["loop"].append(loop - plain)
        spent["thread"].append(time.process_time() - loop)
    plain, loop, thread = (statistics.median(spent[kind]) * 1e3 for kind in ("plain", "loop", "thread"))
    what = f"{tokens:,} tokens, {len(text) / 1e6:.1f} MB of experts"
    report.row(f"{what}: on the event loop", loop, "ms", against="without experts", ratio=loop / plain)
    report.row(f"{what}: the same for each MB of experts", (loop - plain) / len(text) * 1e6, "ms", bar="figure <= 4")
    report.row(
        f"{what}: decoded and checked in a thread, for each MB", thread / len(text) * 1e6, "ms", bar="figure <= 6"
    )
    report.row(
        f"{what}: kept for each token", SHAPE.row_bytes, "bytes", against="as sent", ratio=tokens * 384 / len(text)
    )


def make_model(folder: Path, size: tuple[int, int, int, int, int]) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden, layers, experts, top_k, width = size
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=width,
        max_position_embeddings=4096,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def measure_step(report: Report, name: str) -> None:
    spent: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), MODELS[name])
        decoders = {
            keeps: CausalDecoder(
                Path(scratch),
                slots=ROWS,
                kv_tokens=2**17,
                device="cpu",
                dtype="float32",
                threads=1,
                returns_experts=keeps,
            )
            for keeps in spent
        }
    for decoder in decoders.values():
        decoder.join([Joiner(token_ids=ids, namespace=str(n), seed=n) for n, ids in enumerate(prompts(ROWS))])
    for _ in range(ROUNDS):
        for keeps, decoder in decoders.items():
            begun = time.process_time()
            for _ in range(STEPS):
                decoder.step()
            spent[keeps].append((time.process_time() - begun) / STEPS)
    ratio = statistics.median(kept / plain for kept, plain in zip(spent[True], spent[False], strict=True))
    figure = statistics.median(spent[True]) * 1e3
    report.row(
        f"embedded engine, {name} parameters, a step that keeps experts",
        figure,
        "ms",
        against="a step that keeps none",
        ratio=ratio,
        bar="ratio <= 1.2",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    sizes = f"48 layers, 8 of 128 experts; Qwen3-MoE, fp32, 1 thread, {ROWS} rows after {PROMPT_TOKENS} tokens"
    report = Report(__doc__, full=options.full, sizes=sizes)
    for tokens in (1_024, 32_768) if options.full else (1_024,):
        measure_answer(report, tokens)
    for name in MODELS:
        measure_step(report, name)
    report.print()


if __name__ == "__main__":
    main()
