"""Compiled decoder layers beside the same layers as they are: tokens/s, and how long the start and the first pass take.

The start loads the model and checks its forward pass, as compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

from clients.steps import timed
from result import Row

from on_gpu.cases import Case, Place
from on_gpu.models import Repeated, answers_of, order_for, trainer_of

HOW = {False: "as they are", True: "compiled"}


def cases(part: str, *, tiny: bool) -> list[Case]:
    model, tokens = ("tiny", 512) if tiny else ("1.7B", 8_192)
    return [
        Case(f"{model}, {tokens:,} tokens, layers {how}", partial(measure, model, tokens, compiled), limit_s=240.0)
        for compiled, how in HOW.items()
    ]


def measure(model: str, tokens: int, compiled: bool, place: Place) -> Iterator[Row]:
    answers, what = answers_of(model, tokens), f"{model}, {tokens:,} tokens, layers"
    begun = time.perf_counter()
    order = order_for(model, place, tokens=tokens, compile=compiled)
    with trainer_of(model, order, layout=None) as trainer:
        start_s = time.perf_counter() - begun
        micro_batch = Repeated(trainer, answers)
        first_s = timed(micro_batch)
        seconds = statistics.median(timed(micro_batch) for _ in range(place.repeats))
        rows = ("speed", tokens / seconds, "tokens/s"), ("start", start_s, "s"), ("first micro-batch", first_s, "s")
        for name, figure, unit in rows:
            eager = f"{what} {HOW[False]}: {name}"
            yield place.beside(f"{what} {HOW[compiled]}: {name}", figure, unit, eager, called=HOW[False])
