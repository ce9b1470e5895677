"""The waits for the queue of a GPU where ranks meet, in a model that stays gathered during an update.

A rank that is about to meet the others first waits for what it has queued, so that `slowest_rank` is the wait for the
others alone. A single rank never waits for another, so its steps with and without these waits show what they cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

from clients.steps import Reports, WatchedTrainer, timed
from result import Row, number

from dora.transport.messages import RankSpans
from on_gpu.cases import Case, Place
from on_gpu.models import Repeated, answers_of, order_for, trainer_of

WAVES = 4
WITHOUT = "a step without waits for the queue"


class TimedTrainer(WatchedTrainer):
    """Adds up the time of the waits."""

    waits_s = 0.0

    def _await_ranks(self) -> None:
        begun = time.perf_counter()
        super()._await_ranks()
        self.waits_s += time.perf_counter() - begun


class UnwaitingTrainer(WatchedTrainer):
    """Waits for nothing: its rank is alone."""

    def _await_ranks(self) -> None:
        """Do nothing."""


def cases(part: str, *, tiny: bool) -> list[Case]:
    model, tokens = ("tiny", 256) if tiny else ("0.1B", 8_192)
    return [
        Case(WITHOUT, partial(measure, model, tokens, UnwaitingTrainer)),
        Case("a step", partial(measure, model, tokens, TimedTrainer)),
    ]


def measure(model: str, tokens: int, kind: type[WatchedTrainer], place: Place) -> Iterator[Row]:
    reports, what = Reports(), f"{model}, {WAVES} micro-batches of {tokens:,} tokens"
    with trainer_of(model, order_for(model, place, tokens=tokens), reports=reports, kind=kind) as trainer:
        micro_batch = Repeated(trainer, answers_of(model, tokens))

        def step() -> None:
            reports.sent.clear()
            for wave in range(WAVES):
                micro_batch(closes=wave + 1 == WAVES)

        step()
        step_s = statistics.median(timed(step) for _ in range(place.repeats))
        trainer._publisher.close()
        if not isinstance(trainer, TimedTrainer):
            yield Row(f"{what}: {WITHOUT}", step_s, "s")
            return
        without = f"{what}: {WITHOUT}"
        yield place.beside(f"{what}: a step", step_s, "s", without, called="without the waits", bar="ratio <= 1.05")
        waits_s = trainer.waits_s / (place.repeats + 1)
        spans = [span for _, message in reports.sent if isinstance(message, RankSpans) for span in message.spans]
        slowest_s = sum(span_s for activity, span_s in spans if activity == "slowest_rank")
        for name, part_s in (("the waits for the queue", waits_s), ("`slowest_rank`", slowest_s)):
            yield Row(f"{what}: {name} in a step", part_s, "s", f"the step, {number(step_s)} s", part_s / step_s)
