"""Prompts computed once: forward and backward with shared prompts beside the same answers each with its own.

Run: python bench/shared_prompts.py [--full] [--rounds N]. A random Qwen3 on one thread in float32, with a small
vocabulary, since the head saves nothing; one group of 8 answers of 240 tokens on average, after prompts of 100 to 4,000
tokens, all in one pass each way. The two ways take turns, and a figure is the median over the rounds of the ratio of
their CPU seconds within a round (one round for the longest prompt); their gradients must agree, or the script fails.

Each row is compared with what the lengths predict for this model: the number of floating-point operations of layers (6
for each weight and token), attention (14 for each score and element of a head: scores are computed again) and head (8
for each word, element and trained token), without sharing over with sharing. The ratio is the measured one over this.
"""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np
import torch
from result import Report, parser
from transformers import Qwen3Config, Qwen3ForCausalLM

from dora.trainer import attention
from dora.trainer.logprobs import logprobs
from dora.trainer.packing import SHARE_ABOVE, Layout, Row, make_row

VOCAB = 1_024
GROUP_SIZE = 8
ANSWER_TOKENS = 240
PROMPTS = (100, 500, 1_000, 4_000)
SHARED = Layout(share_above=SHARE_ABOVE["on"])
AGREE = 1e-4


def make_model(*, hidden: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        head_dim=64,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation(attention.NAME)
    return model


def answer_lengths() -> list[int]:
    """From half to one and a half times the mean."""
    return [round(ANSWER_TOKENS * (0.5 + i / (GROUP_SIZE - 1))) for i in range(GROUP_SIZE)]


def row_of(prompt: int, layout: Layout) -> Row:
    rng = np.random.default_rng(prompt)
    start = rng.integers(0, VOCAB, prompt)
    sequences = [np.concatenate([start, rng.integers(0, VOCAB, length)]) for length in answer_lengths()]
    trained = np.concatenate([np.arange(len(tokens)) >= prompt for tokens in sequences]).nonzero()[0]
    lengths = [len(tokens) for tokens in sequences]
    return make_row(
        np.concatenate(sequences), lengths=lengths, trained=trained, layout=layout, device=torch.device("cpu")
    )


def train(model: Qwen3ForCausalLM, row: Row) -> tuple[float, torch.Tensor]:
    """CPU seconds of forward and backward, and the gradient."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    begun = time.process_time()
    logprobs(model, row, temperature=1.0)[0].mean().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - begun, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def operations(model: Qwen3ForCausalLM, prompt: int, *, shared: bool) -> int:
    """Floating-point operations of forward and backward, by the lengths alone."""
    config = model.config
    answers = answer_lengths()
    copies = 1 if shared else GROUP_SIZE
    tokens = copies * prompt + sum(answers)
    scores = (copies * prompt**2 + sum(2 * prompt * length + length**2 for length in answers)) // 2
    weights: int = sum(parameter.numel() for parameter in model.model.layers.parameters())
    width: int = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    head: int = VOCAB * config.hidden_size
    return 6 * weights * tokens + 14 * width * scores + 8 * head * sum(answers)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, help="2, or 5 with --full")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    hidden, layers = (512, 4) if options.full else (256, 2)
    rounds = options.rounds or (5 if options.full else 2)
    model = make_model(hidden=hidden, layers=layers)
    weights = sum(parameter.numel() for parameter in model.parameters())
    shape = f"Qwen3, {weights / 1e6:.1f} M, {layers} layers of {hidden}"
    sizes = f"{shape}; {GROUP_SIZE} answers of {ANSWER_TOKENS} tokens on average; {rounds} rounds"
    report = Report(__doc__, full=options.full, sizes=sizes)
    for layout in (Layout(), SHARED):
        train(model, row_of(64, layout))  # warms up
    for prompt in PROMPTS:
        alone, shared = (row_of(prompt, layout) for layout in (Layout(), SHARED))
        ratios, seconds = [], []
        for _ in range(rounds if prompt < PROMPTS[-1] else 1):
            (alone_s, expected), (shared_s, found) = train(model, alone), train(model, shared)
            if not float((found - expected).norm()) <= AGREE * float(expected.norm()):
                raise SystemExit(f"prompt of {prompt:,}: the gradients differ")
            ratios.append(alone_s / shared_s)
            seconds.append(shared_s)
        speedup = statistics.median(ratios)
        tokens = alone.tokens_BT.numel() / shared.tokens_BT.numel()
        predicted = operations(model, prompt, shared=False) / operations(model, prompt, shared=True)
        report.row(
            f"prompt of {prompt:,}: one group, {statistics.median(seconds):.2g} CPU s",
            speedup,
            "times faster",
            against=f"{predicted:.2f} times fewer operations, {tokens:.2f} times fewer tokens",
            ratio=speedup / predicted,
            bar="ratio >= 0.85",
        )
    report.print()


if __name__ == "__main__":
    main()
