"""What training needs in memory: log-probs without logits, and activation checkpointing.

Run: python bench/memory.py [--full]. One process on one thread, float32, the memory counted by storage as in
dora/trainer/live_bytes.py: the scratch memory of kernels is not in it. Weights and gradients are never counted, because
they do not grow with answers. The figures are:

  error     of the log-probs that are computed in tiles, 2,048 tokens and 150,000 words, with a scale and a soft cap,
            and of their gradients, against the plain form.
  peak      of forward and backward of these log-probs at 2,048 tokens; and, counted without computing anything (on
            torch's meta device, where the figure for 2,048 is the same), at 4,096 and 16,384.
  answers   12 Qwen3 layers of hidden size 640 (97 M parameters with 32,000 words). The peak of forward and backward of
            one answer without checkpointing and with plain logits, and how much longer an answer may be with
            checkpointing `full` and log-probs in tiles: measured at the length of the bar, and from there on by the
            straight line through the peaks of this length and half of it.
  adapter   of rank 32 in place of all weights, the same model in bfloat16: weights, gradients and moments (two for each
            trained value); and the peak of forward and backward with checkpointing `full`.
  time      of the same two at equal length, CPU seconds, the faster of two rounds in turns; and of `selective`.
Ceiling: the plain form of the same model, in the same run.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result import Report, parser
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from dora.learning.learner import OneRank
from dora.trainer import attention
from dora.trainer.checkpointing import Mode, apply_checkpointing
from dora.trainer.forecast import trial_row
from dora.trainer.live_bytes import LiveBytes, activation_bytes
from dora.trainer.logprobs import Finish, TiledLogProbs, logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, decoder_layers
from dora.trainer.packing import Row, make_row
from dora.transport.messages import LoraSettings

WORDS = 150_000
HIDDEN = 64  # of the head alone
FINISH, TEMPERATURE = Finish(scale=0.5, cap=30.0), 0.7
LORA = LoraSettings(
    rank=32, alpha=32.0, rslora=False, seed=0,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
MIB = 2**20
CPU = torch.device("cpu")


def head_inputs(tokens: int, *, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    weight = (0.3 * torch.randn(WORDS, HIDDEN, device=device)).requires_grad_()
    return hidden, weight, torch.randint(WORDS, (tokens,), device=device)


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    chosen, _ = TiledLogProbs.apply(hidden, weight, None, targets, FINISH, TEMPERATURE, False)
    return chosen


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = torch.tanh(hidden @ weight.T * FINISH.scale / FINISH.cap) * FINISH.cap / TEMPERATURE
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def run_head(form: Callable[..., Tensor], *, tokens: int, device: str = "cpu") -> tuple[list[Tensor], int]:
    """Log-probs and gradients of hidden states and weight, and the peak."""
    hidden, weight, targets = head_inputs(tokens, device=device)
    with LiveBytes() as live:
        values = form(hidden, weight, targets)
        values.sum().backward()
        gradients = [x.grad for x in (hidden, weight) if x.grad is not None]
        return [values.detach(), *gradients], live.peak(without=gradients)


def measure_head(report: Report) -> None:
    (values, *gradients), peak = run_head(tiled, tokens=2_048)
    (expected, *wanted), whole = run_head(plain, tokens=2_048)
    size = f"2,048 x {WORDS:,}"
    report.row(
        f"{size}, scale and cap: log-probs, error", float((values - expected).abs().max()), "", bar="figure <= 1e-5"
    )
    worst = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(gradients, wanted, strict=True))
    report.row("the same: gradients, error relative to the largest", worst, "", bar="figure <= 1e-5")
    report.row("the same: peak", peak / MIB, "MiB", against=f"plain form, {whole / MIB:,.0f} MiB", ratio=peak / whole)
    assert run_head(tiled, tokens=2_048, device="meta")[1] == peak
    short, long = (run_head(tiled, tokens=tokens, device="meta")[1] for tokens in (4_096, 16_384))
    report.row(
        f"peak of log-probs, 16,384 x {WORDS:,}", long / MIB, "MiB",
        against=f"4,096 tokens, {short / MIB:.1f} MiB", ratio=long / short, bar="ratio <= 1.05",
    )  # fmt: skip


# ---- a model of 12 layers -------------------------------------------------------------------------------------------


class Policy12:
    """Log-probs of one answer, with a form of checkpointing and of the head."""

    def __init__(self, *, words: int, mode: Mode, tiles: bool) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=words, hidden_size=640, intermediate_size=1792, num_hidden_layers=12, num_attention_heads=10,
            num_key_value_heads=5, head_dim=64, tie_word_embeddings=False,
        )  # fmt: skip
        self.model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
        apply_checkpointing(decoder_layers(self.model), mode)
        self.words, self.tiles = words, tiles

    def total(self, tokens: int) -> Tensor:
        ids = np.random.default_rng(0).integers(0, self.words, tokens)
        row = make_row(ids, lengths=np.array([tokens]), trained=np.arange(1, tokens), device=CPU)
        return (logprobs(self.model, row, temperature=TEMPERATURE)[0] if self.tiles else self._plain(row)).sum()

    def _plain(self, row: Row) -> Tensor:
        output = self.model(input_ids=row.tokens_BT, use_cache=False)
        log_softmax = (output.logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        return log_softmax.gather(1, row.targets_P[:, None])[:, 0]

    def peak(self, tokens: int) -> int:
        self.model.zero_grad()
        self.total(2)  # what the head does to logits is measured once
        with LiveBytes() as live:
            self.total(tokens).backward()
            return live.peak(without=[p.grad for p in self.model.parameters()])

    def cpu_s(self, tokens: int) -> float:
        self.model.zero_grad()
        begun = time.process_time()
        self.total(tokens).backward()
        return time.process_time() - begun


def measure_answers(report: Report, *, words: int, base: int, times: int) -> None:
    """How many times longer an answer may be than one of `base` tokens; the bar is `times`."""
    before = Policy12(words=words, mode="none", tiles=False)
    room = before.peak(base)
    del before
    gc.collect()
    after = Policy12(words=words, mode="full", tiles=True)
    tokens = times * base
    half, last = after.peak(tokens // 2), after.peak(tokens)
    longest = tokens + (room - last) / (last - half) * (tokens / 2)
    report.row(
        f"{words:,} words: longest answer in {room / MIB:.0f} MiB", longest, "tokens",
        against=f"{base} tokens without checkpointing, plain logits", ratio=longest / base, bar=f"ratio >= {times}",
    )  # fmt: skip
    report.row(f"{words:,} words: peak at {tokens:,} tokens", last / MIB, "MiB",
               against=f"{room / MIB:.0f} MiB, as above", ratio=last / room, bar="ratio <= 1")  # fmt: skip


def measure_adapter(report: Report, *, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder, OneRank():
        Policy12(words=32_000, mode="none", tiles=True).model.save_pretrained(folder)
        full, adapter = (held_by_rank(Path(folder), lora=lora, tokens=tokens) for lora in (None, LORA))
    figures = ("weights, gradients, moments", f"peak at {tokens} tokens")
    for figure, mine, whole in zip(figures, adapter, full, strict=True):
        what, against = f"an adapter of rank {LORA.rank}: {figure}", f"all weights, {whole / MIB:,.0f} MiB"
        report.row(what, mine / MIB, "MiB", against=against, ratio=mine / whole)


def held_by_rank(folder: Path, *, lora: LoraSettings | None, tokens: int) -> tuple[int, int]:
    """Return the bytes of weights, gradients and moments, and the peak of a forward and backward pass beside them."""
    policy = Policy(folder, mesh=make_mesh("cpu"), dtype=torch.bfloat16, activation_checkpointing="full", lora=lora)
    row = trial_row(tokens, longest=tokens)
    policy.prepare(closes_update=True)
    with LiveBytes() as live:
        logprobs(policy.model, row, temperature=TEMPERATURE)[0].sum().backward()
        peak = live.peak(without=policy.gradients().values())
    trained, shards, gradients = (
        sum(tensor.nbytes for tensor in of.values()) for of in (policy.trained(), policy.shards(), policy.gradients())
    )
    return shards + gradients + 2 * trained, peak


def measure_time(report: Report, *, words: int, tokens: int) -> None:
    before = Policy12(words=words, mode="none", tiles=False)
    forms: dict[str, Policy12] = {
        "log-probs in tiles": Policy12(words=words, mode="none", tiles=True),
        "the same and `selective`": Policy12(words=words, mode="selective", tiles=True),
        "the same and `full`": Policy12(words=words, mode="full", tiles=True),
    }
    best = fastest([before, *forms.values()], tokens=tokens)
    kept = activation_bytes(partial(before.total, tokens)) / tokens / 1024
    for (what, form), seconds in zip(forms.items(), best[1:], strict=True):
        per_token = activation_bytes(partial(form.total, tokens)) / tokens / 1024
        report.row(
            f"{words:,} words, {tokens} tokens, {what}: time", seconds, "s",
            against=f"no checkpointing, plain logits, {best[0]:.2f} s", ratio=seconds / best[0],
            bar="ratio <= 1.4" if form.tiles and what.endswith("`full`") else "",
        )  # fmt: skip
        report.row(
            f"{words:,} words, {tokens} tokens, {what}: kept for backward", per_token, "KiB a token",
            against=f"as above, {kept:,.0f} KiB", ratio=per_token / kept,
        )  # fmt: skip


def fastest(forms: list[Policy12], *, tokens: int, rounds: int = 2) -> list[float]:
    for form in forms:
        form.cpu_s(tokens)
    taken = [[form.cpu_s(tokens) for form in forms] for _ in range(rounds)]
    return [min(seconds) for seconds in zip(*taken, strict=True)]


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    scale = 2 if options.full else 1
    report = Report(__doc__, full=options.full, sizes=f"answers of {128 * scale} tokens to {768 * scale}")
    steps: list[Callable[[], None]] = [
        lambda: measure_head(report),
        lambda: measure_answers(report, words=32_000, base=256 * scale, times=3),
        lambda: measure_answers(report, words=WORDS, base=128 * scale, times=6),
        lambda: measure_adapter(report, tokens=512 * scale),
        lambda: measure_time(report, words=32_000, tokens=256 * scale),
    ]
    for step in steps:
        step()
        gc.collect()
    report.print()


if __name__ == "__main__":
    main()
