"""One request inside the engine: its parameters, its tokens so far, and the event that announces new ones.

The batcher writes a `Generation` (its decoder thread during a burst, the event loop between bursts); the HTTP handler
that awaits `news` reads it. Invariant: the handler reads only the first `published` tokens. Only the event loop changes
that number, so the handler never sees a token that the decoder thread is still writing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, TypedDict

#: Finish reasons in SGLang's shape.
ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL: dict[str, Any] = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
NOT_FINITE: dict[str, Any] = {"type": "abort", "status_code": 500, "message": "The model gave log-probs that are NaN."}


class VersionSpan(TypedDict):
    """Output tokens [start, end) were sampled under this weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters, under SGLang's names."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    min_p: float = 0.0
    seed: int = 0  # sampling_seed, or drawn by the server
    stop_ids: frozenset[int] = frozenset()  # stop_token_ids and end-of-sequence ids; empty under ignore_eos


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """One load of an adapter. Names and places are used again, numbers are not."""

    number: int  # from 1
    name: str
    path: str
    place: int


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    namespace: str = ""  # of the client in the prefix cache: extra_key and cache_salt
    adapter: LoadedAdapter | None = None
    logprob_start: int | None = None  # first prompt token to return a log-prob of; None for no prompt log-probs
    experts_from: int | None = None  # first token to return the experts of; None for no experts

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] | None = None
    labels: list[tuple[str, int]] = field(default_factory=list)  # (weight version, first output index), ascending
    experts: bytes | None = None  # as `Decoder.experts` returns them; None while alive, and of a queued request
    finish_reason: dict[str, Any] | None = None  # None while alive
    cached_tokens: int | None = None  # None until first prefilled
    num_retractions: int = 0
    num_steps: int | None = None  # decoding steps so far, where drafts are made
    num_drafted: int = 0
    order: int = 0  # of admission; the youngest is retracted first

    published: int = 0  # output tokens that handlers may read
    done: bool = False  # the finish reason may be read
    news: asyncio.Event = field(default_factory=asyncio.Event)

    received_at: float = field(default_factory=time.time)  # wall clock, as all times below; 0.0 is not yet
    queued_at: float = 0.0
    admitted_at: float = 0.0
    prefilled_at: float = 0.0
    finished_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Length of prompt + output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def cache_key(self) -> str:
        """Its namespace in the prefix cache, which no other load of an adapter shares."""
        return f"{0 if self.adapter is None else self.adapter.number}\0{self.namespace}"

    def relabel(self, version: str) -> None:
        """Note that all later tokens come from `version`."""
        self.labels.append((version, len(self.output_ids)))

    def spans(self) -> list[VersionSpan]:
        """The spans of versions: half-open, contiguous, in order; one empty span for a request without tokens."""
        ends = [start for _, start in self.labels[1:]] + [len(self.output_ids)]
        spans: list[VersionSpan] = [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.labels, ends, strict=True)
        ]
        return [span for span in spans if span["end"] > span["start"]] or spans[-1:]

    async def next_news(self) -> None:
        """Wait for the next publication. There is no time limit: nothing is published during a pause."""
        await self.news.wait()
        self.news.clear()
