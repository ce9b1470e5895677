"""Continuous batching: requests join and leave the decoder's rows between steps.

The model runs in bursts of steps on one decoder thread. A burst owns all state here until it returns; everything else
touches that state only between bursts, so there is no lock. Invariants: `rows` is dense and in the decoder's row order;
every generation is in exactly one of `waiting` and `rows` until its finish reason is set; `used_tokens` is the sum of
the rows' tokens and never above `kv_tokens`.

A burst ends when a request has finished, when a handler asks for it, or when tokens are due for publication. An idle
server publishes its first token at once. A busy one sends at most about 500 chunks per second in all, because a chunk
costs as much as several tokens of a small model.

With `min_step_s` a step begins at least that long after the one before, or after the work of an idle server has come,
as on a GPU whose steps take that long. The decoder thread waits before it computes, so that a wait may end at any time:
no token is made yet. Requests and orders that come meanwhile are handled at once, and the step still begins when it is
due.

With drafts (`drafts.py`), a step may give a row several tokens: those that would have been sampled one by one. All are
of the same weights, as these change between bursts only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from dora.embedded.drafts import DraftLengths, Drafts
from dora.embedded.generation import ABORTED, ABORTED_WAITING, NOT_FINITE, QUEUE_FULL, Generation
from dora.embedded.scheduler import Model, Scheduler

PUBLISH_S_PER_ROW = 0.002
MIN_PUBLISH_S = 0.04
HEADROOM_TOKENS = 8  # free KV required per running row at admission, so that the new row is not retracted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """A request that joins, as the decoder sees it."""

    token_ids: Sequence[int]
    namespace: str
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    min_p: float = 0.0
    logprob_start: int | None = None
    adapter: int | None = None  # its place; the namespace is that of its load
    banned_ids: tuple[int, ...] = ()  # never sampled at an index (in prompt + output) below `ban_until`
    ban_until: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    joiner: int  # index in the argument of `join`
    cached_tokens: int
    prompt_logprobs: list[float | None] | None


class Decoder(Model, Protocol):
    """Rows of running requests. New rows are appended, in the order in which `join` lists them. When a row leaves, the
    last row takes its place. Tokens come from `step` alone."""

    def join(self, joiners: Sequence[Joiner]) -> list[Joined]: ...  # prefills what is not cached
    def step(self) -> tuple[list[int], list[float]]: ...  # one token and log-prob per row
    @property
    def can_verify(self) -> bool: ...
    def verify(self, drafts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        """Return, for each row, the tokens of its draft that are sampled, the token after them, and all log-probs. At
        least one draft has a token; the tokens and log-probs are those that single steps would give."""
        ...

    def experts(self, row: int, *, begin: int, end: int) -> bytes:
        """Return the experts chosen for these tokens, but not for the last one, as SGLang does: little-endian int32
        [tokens, layers of the model, top_k], zeros for layers without experts. For a decoder that keeps them."""
        ...

    def leave(self, row: int) -> None: ...


def waves(generations: Sequence[Generation]) -> list[list[Generation]]:
    """Group requests for prefill. The lengths in a wave are within a factor of two, which bounds padding. Of siblings,
    one comes first, and the others come in a later wave, in which they find the prompt in the prefix cache."""
    leaders: list[Generation] = []
    followers: list[Generation] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for generation in generations:
        key = (generation.cache_key, (*generation.prompt_ids, *generation.output_ids))
        (followers if key in seen else leaders).append(generation)
        seen.add(key)
    result: list[list[Generation]] = []
    limit = 0
    for generation in sorted(leaders, key=lambda g: g.num_tokens):
        if generation.num_tokens > limit:
            result.append([])
            limit = 2 * generation.num_tokens
        result[-1].append(generation)
    return [*result, followers] if followers else result


class Batcher(Scheduler):
    def __init__(
        self,
        decoder: Decoder,
        *,
        min_step_s: float = 0.0,
        draft_tokens: int = 0,
        step_clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        """`draft_tokens`: drafted for a row in a step, at most. `step_clock`: by which the decoder thread measures what
        drafts cost. `options` are those of `Scheduler`."""
        super().__init__(decoder, **options)
        is_drafting = draft_tokens > 0 and decoder.can_verify
        self._drafts = Drafts(budget_tokens=self.kv_tokens) if is_drafting else None
        self._lengths = DraftLengths(draft_tokens)
        self._step_clock = step_clock
        self.decoder = decoder
        self._min_step_s = min_step_s
        self._step_at = 0.0  # monotonic; no step begins before
        self._published_at = 0.0
        self._admissions = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decoder")

    def close(self) -> None:
        """End the decoder thread after the current burst, if any."""
        self._floor_wanted.set()
        self._thread.shutdown()

    def hold(self, *, retract: bool) -> None:
        self.holding = True
        if not retract:
            return
        for place, generation in enumerate(sorted(self.rows, key=lambda g: g.order)):
            self._retract(generation, place=place)

    # --- the loop

    async def run(self) -> None:
        while True:
            await self._wake.wait()  # set by submit, abort and between_steps
            self._wake.clear()
            while await self._turn():
                pass

    async def _turn(self) -> bool:
        """Run orders, aborts and one burst, and publish; return whether the model has more to do."""
        self._floor_wanted.clear()
        await self._run_orders()
        self._apply_aborts()
        if not self.holding and (self.rows or self.waiting):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._burst)
            self._stepped.set()
        self._publish()
        return not self.holding and bool(self.rows or self.waiting)

    async def _run_on_thread(self, order: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._thread, order)

    def _apply_aborts(self) -> None:
        """End waiting requests at once and running ones at the next step, which a pause in place delays."""
        for rid in list(self._aborting):
            generation = self.live.get(rid)
            if generation is None or generation.finish_reason is not None:
                self._aborting.discard(rid)
            elif generation in self.waiting:
                self.waiting.remove(generation)
                self._finish(generation, ABORTED_WAITING)
            elif not self.holding:
                self._end(generation, ABORTED)

    def _publish(self) -> None:
        """Publish finished requests now, and the tokens of all others when they are due."""
        self._publish_finished()
        if not self.live:
            self._published_at = 0.0
        if time.monotonic() >= self._due_at():
            self._published_at = time.monotonic()
            for generation in self.rows:
                generation.published = len(generation.output_ids)
                generation.news.set()

    def _due_at(self) -> float:
        return self._published_at + max(MIN_PUBLISH_S, PUBLISH_S_PER_ROW * len(self.rows))

    # --- a burst, on the decoder thread

    def _burst(self) -> None:
        if not self.rows:
            self._step_at = time.monotonic() + self._min_step_s
        self._admit()
        while self.rows and self._step_is_due():
            self._step()
            self._output_at = time.monotonic()
            if self._finished or self._floor_wanted.is_set() or self._output_at >= self._due_at():
                return

    def _step_is_due(self) -> bool:
        """Wait until the next step may begin; return False if before that the burst is to end."""
        if not self._min_step_s:
            return True
        left = self._step_at - time.monotonic()
        if left > 0 and (self._finished or self._floor_wanted.wait(left)):
            return False
        self._step_at = time.monotonic() + self._min_step_s
        return True

    def _admit(self) -> None:
        joining: list[Generation] = []
        used = self.used_tokens
        while self.waiting and len(self.rows) + len(joining) < self.slots:
            need = self.waiting[0].num_tokens
            running = len(self.rows) + len(joining)
            if running and used + need + HEADROOM_TOKENS * (running + 1) > self.kv_tokens:
                break
            joining.append(self.waiting.popleft())
            used += need
        for wave in waves(joining):
            self._join(wave)

    def _join(self, wave: list[Generation]) -> None:
        now = time.time()
        for generation in wave:
            self._admissions += 1
            generation.order = self._admissions
            generation.admitted_at = generation.admitted_at or now
        joined = self.decoder.join([_joiner(generation) for generation in wave])
        now = time.time()
        for outcome in joined:
            generation = wave[outcome.joiner]
            self.rows.append(generation)
            self.used_tokens += generation.num_tokens
            if generation.cached_tokens is None:
                generation.cached_tokens, generation.prefilled_at = outcome.cached_tokens, now
                generation.prompt_logprobs = outcome.prompt_logprobs
            self.metrics.prefilled(len(generation.prompt_ids), outcome.cached_tokens)
        for generation in [one for one in wave if one.sampling.max_new_tokens == 0]:
            self._end(generation, {"type": "length", "length": 0})

    def _step(self) -> None:
        while self.used_tokens + len(self.rows) > self.kv_tokens:
            self._retract(max(self.rows, key=lambda g: g.order))
        if self.model.adapters is not None:
            self.metrics.adapter_steps[len({g.adapter.number for g in self.rows if g.adapter is not None})] += 1
        if self._drafts is None:
            self._take_one_each(*self.decoder.step())
        else:
            self._step_with_drafts(self._drafts)

    def _step_with_drafts(self, drafts: Drafts) -> None:
        begun, rows, made = self._step_clock(), len(self.rows), self.metrics.generated_tokens
        most = self._lengths.length(rows)
        drafted = [self._draft(drafts, generation, most) if most else () for generation in self.rows]
        total = sum(map(len, drafted))
        if not total or self.used_tokens + rows + total > self.kv_tokens:
            drafted, total = [()] * rows, 0
        for generation, draft in zip(self.rows, drafted, strict=True):
            generation.num_steps = (generation.num_steps or 0) + 1
            generation.num_drafted += len(draft)
        self.metrics.drafted_steps += rows
        self.metrics.drafted_tokens += total
        if total:
            self._take_several(self.decoder.verify(drafted))
        else:
            self._take_one_each(*self.decoder.step())
        seconds = max(self._step_clock() - begun, self._min_step_s)
        self._lengths.took(rows, most, seconds=seconds, tokens=self.metrics.generated_tokens - made)

    def _draft(self, drafts: Drafts, generation: Generation, most: int) -> Sequence[int]:
        """Return a draft that ends before the last token that the request may have."""
        left = generation.sampling.max_new_tokens - len(generation.output_ids)
        return drafts.draft(generation, most)[: left - 1]

    def _take_one_each(self, tokens: list[int], logprobs: list[float]) -> None:
        ended = [row for row, found in enumerate(zip(tokens, logprobs, strict=True)) if self._ends(row, *found)]
        self._let_go(ended)

    def _take_several(self, found: list[tuple[list[int], list[float]]]) -> None:
        """Append the tokens of each row up to the one that ends it."""
        ended = []
        for row, pairs in enumerate(found):
            if any(self._ends(row, token, logprob) for token, logprob in zip(*pairs, strict=True)):
                ended.append(row)
        self._let_go(ended)

    def _ends(self, row: int, token: int, logprob: float) -> bool:
        """Append a token to a row, unless it was not sampled; return whether the row ends with it."""
        generation = self.rows[row]
        if math.isnan(logprob):
            self._finish(generation, NOT_FINITE)
            return True
        generation.output_ids.append(token)
        generation.output_logprobs.append(logprob)
        self.used_tokens += 1
        self.metrics.generated_tokens += 1
        sampling = generation.sampling
        if len(generation.output_ids) >= sampling.max_new_tokens:
            self._finish(generation, {"type": "length", "length": sampling.max_new_tokens})
        elif token in sampling.stop_ids:
            self._finish(generation, {"type": "stop", "matched": token})
        else:
            return False
        return True

    def _finish(self, generation: Generation, reason: dict[str, object]) -> None:
        super()._finish(generation, reason)
        if self._drafts is not None:
            self._drafts.end(generation)

    def _let_go(self, ended: list[int]) -> None:
        for row in reversed(ended):
            self._leave(row)

    # --- one row

    def _end(self, generation: Generation, reason: dict[str, object]) -> None:
        self._leave(self.rows.index(generation))
        self._finish(generation, reason)

    def _leave(self, row: int) -> None:
        generation = self.rows[row]
        self.used_tokens -= generation.num_tokens
        if generation.experts_from is not None:
            end = generation.num_tokens - 1
            generation.experts = self.decoder.experts(row, begin=min(generation.experts_from, end), end=end)
        self.decoder.leave(row)
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def _retract(self, generation: Generation, *, place: int = 0) -> None:
        """Put a running request back into the queue; if the queue is full, the request ends, as in SGLang."""
        self._leave(self.rows.index(generation))
        generation.num_retractions += 1
        generation.experts = None
        if self._queue_is_full():
            self._finish(generation, QUEUE_FULL)
        else:
            self.waiting.insert(place, generation)


def _joiner(generation: Generation) -> Joiner:
    sampling = generation.sampling
    return Joiner(
        token_ids=generation.prompt_ids + generation.output_ids,
        namespace=generation.cache_key,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        logprob_start=generation.logprob_start if generation.prompt_logprobs is None else None,
        adapter=None if generation.adapter is None else generation.adapter.place,
        banned_ids=tuple(sampling.stop_ids) if sampling.min_new_tokens else (),
        ban_until=len(generation.prompt_ids) + sampling.min_new_tokens,
    )
