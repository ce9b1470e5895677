"""Embedded engine: a decoding step with three adapters beside a step of the model alone.

Run: python bench/adapter_steps.py [--full]. 24 rows in turn of three adapters, or of none; all linear modules are
adapted, and there are places for eight adapters. Figures and ratios are medians of rounds, of the CPU time of a step;
rounds of the two kinds alternate, so that a ratio holds on a busy machine. The full profile has a larger model too.
Ceiling: the same engine without adapters.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from engine import PROMPT_TOKENS, prompts
from result import Report, parser

from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from dora.embedded.scheduler import AdapterRoom

ROWS: Final = 24
ADAPTERS: Final = 3
PLACES: Final = 8
RANKS: Final = (8, 32)
ROUNDS: Final = 25
STEPS: Final = 10  # of a round
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Name -> hidden size, size of the dense blocks, layers, heads of 32 or more.
MODELS: Final = {"0.8 M": (128, 384, 4, 4), "40 M": (512, 2_048, 9, 8)}


def make_model(folder: Path, size: tuple[int, int, int, int]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, inner, layers, heads = size
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def decoder_of(folder: Path, room: AdapterRoom | None, *, adapters: int) -> CausalDecoder:
    """A decoder with all rows; those of adapters have one of `adapters` in turn."""
    decoder = CausalDecoder(
        folder, slots=ROWS, kv_tokens=2**17, device="cpu", dtype="float32", threads=1, adapters=room
    )
    if decoder.adapters is not None:
        for place in range(adapters):
            decoder.adapters.draw(place)
    decoder.join(
        [
            Joiner(token_ids=ids, namespace=str(n), seed=n, adapter=n % adapters if adapters else None)
            for n, ids in enumerate(prompts(ROWS))
        ]
    )
    return decoder


def timed(kinds: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """CPU seconds of a call of each, by round."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, call in kinds.items():
            begun = time.process_time()
            for _ in range(STEPS):
                call()
            found[name].append((time.process_time() - begun) / STEPS)
    return found


def measure(report: Report, folder: Path, name: str) -> None:
    for rank in RANKS:
        room = AdapterRoom(PLACES, rank, TARGETS)
        steps = {
            "base": decoder_of(folder, None, adapters=0).step,
            "adapters": decoder_of(folder, room, adapters=ADAPTERS).step,
            "none": decoder_of(folder, room, adapters=0).step,
        }
        found = timed(steps)
        for kind, what, bar in (
            ("adapters", f"rows of {ADAPTERS} adapters", "ratio <= 1.5"),
            ("none", "rows without, beside places for adapters", ""),
        ):
            ratio = statistics.median(mine / base for mine, base in zip(found[kind], found["base"], strict=True))
            figure = statistics.median(found[kind]) * 1e3
            report.row(f"{name}, rank {rank}, {what}", figure, "ms", against="the model alone", ratio=ratio, bar=bar)


def main() -> None:
    options = parser(__doc__).parse_args()
    models = {name: MODELS[name] for name in (MODELS if options.full else [*MODELS][:1])}
    sizes = f"Qwen3 of {' and '.join(models)} parameters, fp32, 1 thread, {ROWS} rows after {PROMPT_TOKENS} tokens"
    report = Report(__doc__, full=options.full, sizes=sizes)
    for name, size in models.items():
        with tempfile.TemporaryDirectory() as scratch:
            make_model(Path(scratch), size)
            measure(report, Path(scratch), name)
    report.print()


if __name__ == "__main__":
    main()
