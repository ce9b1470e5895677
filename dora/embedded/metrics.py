"""Counters of the engine and their Prometheus text, under SGLang's names where it has them; gauges are read from the
batcher."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from dora.embedded.generation import Generation

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, *, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterable[str]:
        total = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {total}"


class EngineMetrics:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.drafted_tokens = 0
        self.drafted_steps = 0  # of each request, where drafts are made
        self.requests = 0
        self.aborted_requests = 0
        self.adapter_steps: Counter[int] = Counter()  # decoding steps by number of different adapters in the batch
        self.weight_load_s = 0.0  # duration of the last load from disk
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.e2e_request_latency = Histogram()
        self.queue_time = Histogram()
        self._rate = 0.0
        self._rate_from = (time.monotonic(), 0)  # when, and generated_tokens then

    def prefilled(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def finished(self, generation: Generation) -> None:
        self.requests += 1
        self.aborted_requests += generation.finish_reason is not None and generation.finish_reason["type"] == "abort"
        self.e2e_request_latency.add(generation.finished_at - generation.received_at)
        if generation.prefilled_at:
            self.queue_time.add(max(0.0, generation.admitted_at - generation.queued_at))
            self.time_to_first_token.add(generation.prefilled_at - generation.received_at)
            if later := len(generation.output_ids) - 1:
                decode_s = generation.finished_at - generation.prefilled_at
                self.inter_token_latency.add(max(0.0, decode_s) / max(1, later), times=max(0, later))

    def gen_throughput(self) -> float:
        """Tokens per second since the last reading that is at least a second old."""
        now = time.monotonic()
        since, tokens = self._rate_from
        if now - since >= 1.0:
            self._rate = (self.generated_tokens - tokens) / (now - since)
            self._rate_from = (now, self.generated_tokens)
        return round(self._rate, 2)

    def text(self, gauges: Mapping[str, float], *, model_name: str) -> str:
        labels = f'engine_type="unified",model_name="{model_name}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        counters = {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated_tokens,
            "cached_tokens_total": self.cached_tokens,
            "num_requests_total": self.requests,
            "num_aborted_requests_total": self.aborted_requests,
        }
        lines: list[str] = []
        for kind, values in (("counter", counters), ("gauge", gauges)):
            for name, value in values.items():
                lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{labels}}} {float(value)}"]
        lines += ["# TYPE sglang:weight_load_duration_seconds gauge"]
        lines += [f'sglang:weight_load_duration_seconds{{{labels},source="disk"}} {self.weight_load_s}']
        for name, histogram in (
            ("time_to_first_token_seconds", self.time_to_first_token),
            ("inter_token_latency_seconds", self.inter_token_latency),
            ("e2e_request_latency_seconds", self.e2e_request_latency),
            ("queue_time_seconds", self.queue_time),
        ):
            lines += [f"# TYPE sglang:{name} histogram", *histogram.lines(f"sglang:{name}", labels)]
        if self.adapter_steps:
            lines += ["# TYPE dora:decode_steps_total counter"]
            counts = sorted(self.adapter_steps.items())
            lines += [f'dora:decode_steps_total{{{labels},adapters="{n}"}} {float(steps)}' for n, steps in counts]
        return "\n".join(lines) + "\n"
