"""Micro-batches of the trainer beside plain transformers: tokens/s, memory, MFU in two definitions.

One micro-batch of 8,192, 16,384 or 32,768 tokens in answers of 1,024 on average, lengths log-normal as in
bench/training.py. The trainer's side is `Trainer.train`, with float32 weights and bfloat16 as compute type. Plain
transformers has everything in bfloat16: packed rows with flash attention if it is installed, else rows of similar
length, padded on the right, with SDPA. Both have AdamW, unless float32 weights, gradients and moments (16 bytes a
parameter) need more than 80 % of the memory: then neither has an optimizer. Both keep everything for the backward pass
if that fits; else the trainer checkpoints layers, selectively or in full, and transformers in full: each row says so.

MFU = 6 (layer weights x tokens + head weights x trained tokens) + 6 x layers x heads x head size x Σ length²
floating-point operations a second (scores that causal attention masks are not counted; with all scores, 12 in place of
the second 6), over the bfloat16 peak of the GPU's datasheet, or over the measured peak where the GPU is not known. It
is that of forward and backward; the rest of a step does not depend on its tokens, and has a row of its own. The memory
that `dora check` forecasts stands beside that of a micro-batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from clients.steps import (
    Answers,
    accumulate,
    accumulate_packed,
    by_length,
    make_adamw,
    timed,
    update,
)
from result import Row, number

from dora.trainer.attention_gpu import kernels_present
from dora.trainer.checkpointing import MODES, Mode
from dora.trainer.forecast import Outline
from on_gpu.cases import Case, Place, count_peak, first_that_fits, peak_of
from on_gpu.models import DTYPE, SHAPES, Repeated, answers_of, config_of, has_moments, order_for, trainer_of
from on_gpu.roofline import ROOFLINE, peak_tflops

BARS = {("1.7B", 16_384): "figure >= 45", ("8B", 16_384): "figure >= 40"}  # MFU in percent
PLAIN = ", plain transformers"
PLAIN_MODES: tuple[Mode, ...] = ("none", "full")


def cases(part: str, *, tiny: bool) -> list[Case]:
    model, sizes = ("tiny", (512, 1_024)) if tiny else (part.removeprefix("training-"), (16_384, 32_768, 8_192))
    made = [ROOFLINE]
    for tokens in sizes:
        ours = partial(measure_ours, forecasts=tokens == sizes[0])
        for side, measure, modes in ((PLAIN, measure_plain, PLAIN_MODES), ("", ours, MODES)):
            what = f"{model}, {tokens:,} tokens{side}"
            made.append(Case(what, partial(in_memory, measure, modes, model, tokens, what)))
    return made


def in_memory(
    measure: Callable[..., Iterable[Row]], modes: Sequence[Mode], model: str, tokens: int, what: str, place: Place
) -> list[Row]:
    """Measure one side under the first mode of checkpointing with which memory suffices."""
    answers = answers_of(model, tokens)
    return first_that_fits(modes, lambda mode: measure(model, answers, place, what=what, mode=mode), what=what)


def measure_plain(model_name: str, answers: Answers, place: Place, *, what: str, mode: Mode) -> Iterator[Row]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available

    flash = place.device == "cuda" and is_flash_attn_2_available()
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(
            config_of(model_name),
            dtype=getattr(torch, DTYPE),
            attn_implementation="flash_attention_2" if flash else "sdpa",
        )
    model.train()  # under eval, checkpointing would silently do nothing; there is no dropout
    if mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = make_adamw(model) if has_moments(model_name, place.device) else None
    everyone = list(range(len(answers)))

    def micro_batch() -> None:
        if flash:
            accumulate_packed(model, answers, everyone)
            return
        for batch in by_length(answers, budget=sum(answers.lengths)):
            accumulate(model, answers, batch)

    micro_batch()
    if optimizer is not None:
        update(model, optimizer)
    count_peak(place.device)
    seconds = statistics.median(timed(micro_batch) for _ in range(place.repeats))
    how = describe("flash attention, packed" if flash else "SDPA, padded", mode, moments=optimizer is not None)
    yield from rows_of(model_name, answers, place, what=what, how=how, seconds=seconds)
    if optimizer is not None:
        yield Row(f"{what}: clip and update", timed(partial(update, model, optimizer)), "s")


def measure_ours(
    model: str, answers: Answers, place: Place, *, what: str, mode: Mode, forecasts: bool
) -> Iterator[Row]:
    tokens, moments = sum(answers.lengths), has_moments(model, place.device)
    kernel = next(name for name, is_present in kernels_present(place.device).items() if is_present)
    order = order_for(model, place, tokens=tokens, mode=mode)
    with trainer_of(model, order) as trainer:
        micro_batch = Repeated(trainer, answers)
        micro_batch()
        count_peak(place.device)
        seconds = statistics.median(timed(micro_batch) for _ in range(place.repeats))
        peak_gb = peak_of(place.device) / 1e9
        how = describe(f"packed, {kernel}", mode, moments=moments)
        yield from rows_of(model, answers, place, what=what, how=how, seconds=seconds)
        if moments:
            micro_batch(closes=True)
            name = ": clip and update"
            yield place.beside(f"{what}{name}", trainer.update_s, "s", f"{what}{PLAIN}{name}", called=PLAIN[2:])
        if forecasts:
            outline = Outline(Path(order.model_path), dtype=getattr(torch, DTYPE), checkpointing=mode)
            forecast = outline.forecast(tokens=tokens, longest=max(answers.lengths), ranks=1, is_trial=not moments)
            forecast_gb = forecast.total / 1e9
            title = f"{what}: memory as `dora check` forecasts it"
            yield Row(title, forecast_gb, "GB", f"measured, {number(peak_gb)} GB", forecast_gb / peak_gb)


def rows_of(model: str, answers: Answers, place: Place, *, what: str, how: str, seconds: float) -> Iterator[Row]:
    """Yield tokens/s, memory and MFU of micro-batches that took `seconds` each; `what`: PLAIN at its end, or not."""
    tokens = sum(answers.lengths)
    peak_gb = peak_of(place.device) / 1e9
    yield place.beside(f"{what} ({how})", tokens / seconds, "tokens/s", f"{what}{PLAIN} (", called=PLAIN[2:])
    yield place.beside(f"{what}: peak memory", peak_gb, "GB", f"{what}{PLAIN}: peak memory", called=PLAIN[2:])
    measured, top, origin = peak_tflops(place)
    for causal, scores in ((True, "causal scores"), (False, "all scores")):
        tflops = SHAPES[model].flops(answers, causal=causal) / seconds / 1e12
        yield Row(
            f"{what}: MFU, {scores} counted",
            100 * tflops / top,
            f"% of the {origin} peak",
            f"measured products, {number(measured)} TFLOP/s",
            tflops / measured,
            BARS.get((model, tokens), "") if causal and not what.endswith(PLAIN) else "",
        )


def describe(attention: str, mode: Mode, *, moments: bool) -> str:
    parts = [attention, "" if mode == "none" else f"checkpointing {mode}", "" if moments else "without an optimizer"]
    return ", ".join(filter(None, parts))
